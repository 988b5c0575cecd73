"""TFF's context for `tff.program` code, mended for clients whose data is a struct.

`tff.program.NativeFederatedContext` of TFF 0.87 walks through the list of clients as if it were one
client: of clients with `OrderedDict(labeled=, unlabeled=)` it keeps the first two and drops the
others without a word. Here the list travels past that walk in a holder.
"""

from __future__ import annotations

import asyncio
from typing import Any

import tensorflow_federated as tff

from tff_fedlabel.runtime._types import has_clients, is_client_list


class FederatedContext(tff.program.NativeFederatedContext):
    """A `tff.program.NativeFederatedContext` for any client data.

    Args:
      context: The `tff.framework.AsyncContext` that computes.
    """

    def __init__(self, context: tff.framework.AsyncContext):
        super().__init__(_Unpacking(context))

    def invoke(self, comp, arg):
        parameter = comp.type_signature.parameter
        return super().invoke(comp, _replaced(arg, parameter, _hold))


class _Unpacking(tff.framework.AsyncContext):
    """Gives the clients back before it computes."""

    def __init__(self, context: tff.framework.AsyncContext):
        self._context = context

    async def invoke(self, comp, arg):
        if asyncio.iscoroutine(arg):
            arg = await arg
        parameter = comp.type_signature.parameter
        return await self._context.invoke(comp, _replaced(arg, parameter, _release))


def _replaced(value, type_spec: tff.Type | None, replace) -> Any:
    """`value` with `replace` applied to what is placed at the clients."""
    if type_spec is None:
        return value
    if is_client_list(type_spec):
        return replace(value, type_spec.member)
    if not isinstance(type_spec, tff.StructType) or not has_clients(type_spec):
        return value
    values = tff.structure.to_elements(tff.structure.from_container(value))
    types = tff.structure.iter_elements(type_spec)
    return tff.structure.Struct(
        [(n, _replaced(v, t, replace)) for (n, v), (_, t) in zip(values, types, strict=True)]
    )


class _Holder:
    def __init__(self, clients):
        self.clients = clients


def _has_leaves(member: tff.Type) -> bool:
    return tff.types.contains(member, lambda t: not isinstance(t, tff.StructType))


def _hold(clients, member: tff.Type):
    """Something that TFF walks through by the type of one client, and that keeps them all."""
    if not _has_leaves(member):
        return clients
    holder = _Holder(clients)

    def build(type_spec):
        if isinstance(type_spec, tff.StructType):
            return tff.structure.Struct(
                [(n, build(t)) for n, t in tff.structure.iter_elements(type_spec)]
            )
        return holder

    return build(member)


def _release(held, member: tff.Type):
    if not _has_leaves(member):
        return held
    while isinstance(held, tff.structure.Struct):
        held = held[0]
    return held.clients
