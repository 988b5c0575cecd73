"""Predicates on TFF types, and the traversal of types together with their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow_federated as tff


def is_at(type_spec: tff.Type, placement) -> bool:
    """Whether a type is a federated type with a placement."""
    return isinstance(type_spec, tff.FederatedType) and type_spec.placement is placement


def is_client_list(type_spec: tff.Type) -> bool:
    """Whether a value of a type is a list with an element for each client."""
    return is_at(type_spec, tff.CLIENTS) and not type_spec.all_equal


def has_clients(type_spec: tff.Type) -> bool:
    """Whether something in a type is placed at the clients."""
    return tff.types.contains(type_spec, lambda t: is_at(t, tff.CLIENTS))


def has_client_lists(type_spec: tff.Type | None) -> bool:
    """Whether a value of a type, which may be None, contains a list of clients."""
    return type_spec is not None and tff.types.contains(type_spec, is_client_list)


def map_leaves(function: Callable[..., Any], type_spec: tff.Type, *values: Any) -> Any:
    """Applies a function to the leaves of a type and of values of it.

    Args:
      function: `(leaf type, *values there) -> result`. A leaf is anything that is not a struct: a
        tensor, a sequence, or a federated type, whose member may be a struct. Leaves are visited
        in order.
      type_spec: The type.
      *values: Structures that fit it, in any container that TFF knows.

    Returns:
      What the function returned, in a `tff.structure.Struct` for each struct of the type.

    Raises:
      TypeError: A value does not have the elements of the type.
    """
    if not isinstance(type_spec, tff.StructType):
        return function(type_spec, *values)
    columns = [_elements(value, type_spec) for value in values]
    return tff.structure.Struct(
        (name, map_leaves(function, element, *(column[i] for column in columns)))
        for i, (name, element) in enumerate(tff.structure.iter_elements(type_spec))
    )


def _elements(value, type_spec: tff.StructType) -> list:
    elements = tff.structure.to_elements(tff.structure.from_container(value))
    if len(elements) != len(type_spec):
        raise TypeError(f"a structure of {len(elements)} elements does not match type {type_spec}")
    for (name, _), (expected, _) in zip(
        elements, tff.structure.iter_elements(type_spec), strict=True
    ):
        if name not in (None, expected):
            raise TypeError(f"an element is named {name!r} where {type_spec} has {expected!r}")
    return [element for _, element in elements]


def leaves(type_spec: tff.Type, *values: Any) -> list:
    """The leaves that `map_leaves` visits: types, or, with values, tuples of a type and values."""
    found = []
    map_leaves(lambda *leaf: found.append(leaf if values else leaf[0]), type_spec, *values)
    return found


def clients_of(values: Any) -> Sequence:
    """The values of the clients, with one entry for each.

    Raises:
      TypeError: They are not a sequence.
    """
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(
            "values of clients must come as a list, or another sequence, with one entry for each "
            f"client, got {type(values).__name__}"
        )
    return values


def with_lists(value: Any, type_spec: tff.Type | None) -> Any:
    """An argument with its values of clients as lists, whatever sequences they were."""
    if not has_client_lists(type_spec):
        return value
    return map_leaves(
        lambda leaf, v: list(clients_of(v)) if is_client_list(leaf) else v, type_spec, value
    )
