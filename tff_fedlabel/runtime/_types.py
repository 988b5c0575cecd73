"""Questions about TFF types."""

from __future__ import annotations

import tensorflow_federated as tff


def is_at(type_spec: tff.Type, placement) -> bool:
    """Whether a type is a federated one of a placement."""
    return isinstance(type_spec, tff.FederatedType) and type_spec.placement is placement


def is_client_list(type_spec: tff.Type) -> bool:
    """Whether a value of a type is a list with an element for each client."""
    return is_at(type_spec, tff.CLIENTS) and not type_spec.all_equal


def has_clients(type_spec: tff.Type) -> bool:
    """Whether something in a type is placed at the clients."""
    return tff.types.contains(type_spec, lambda t: is_at(t, tff.CLIENTS))


def without_placement(type_spec: tff.Type) -> tff.Type:
    """The type with the members of its federated types in their places."""
    if isinstance(type_spec, tff.FederatedType):
        return type_spec.member
    if isinstance(type_spec, tff.types.StructWithPythonType):
        return tff.types.StructWithPythonType(
            [(n, without_placement(t)) for n, t in tff.structure.iter_elements(type_spec)],
            type_spec.python_container,
        )
    if isinstance(type_spec, tff.StructType):
        return tff.StructType(
            [(n, without_placement(t)) for n, t in tff.structure.iter_elements(type_spec)]
        )
    return type_spec
