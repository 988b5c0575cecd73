"""TFF's context for `tff.program` code, fixed for clients whose data is a struct.

`tff.program.NativeFederatedContext` of TFF 0.87 traverses the list of clients as if it were one
client: of clients with `OrderedDict(labeled=, unlabeled=)` it keeps the first two and silently
drops the others. Here a holder carries the list past that traversal.
"""

from __future__ import annotations

import asyncio

import tensorflow_federated as tff

from tff_fedlabel.runtime._contexts import AsyncContext
from tff_fedlabel.runtime._tff_types import has_client_lists, is_client_list, leaves, map_leaves


class FederatedContext(tff.program.NativeFederatedContext):
    """A `tff.program.NativeFederatedContext` for any client data.

    Args:
      context: The context that computes. If it has ended, a call fails at once rather than when
        its result is awaited.
    """

    def __init__(self, context: AsyncContext):
        super().__init__(_Unpacking(context))
        self._check = context.check

    def invoke(self, comp, arg):
        self._check()
        return super().invoke(comp, _replaced(arg, comp.type_signature.parameter, _hold))


class _Unpacking(tff.framework.AsyncContext):
    """Restores the lists of clients before it computes."""

    def __init__(self, context: AsyncContext):
        self._inner = context

    async def invoke(self, comp, arg):
        if asyncio.iscoroutine(arg):
            arg = await arg
        parameter = comp.type_signature.parameter
        return await self._inner.invoke(comp, _replaced(arg, parameter, _release))


def _replaced(value, type_spec: tff.Type | None, replace):
    """`value` with `replace` applied to what is placed at the clients."""
    if not has_client_lists(type_spec):
        return value
    return map_leaves(
        lambda leaf, v: replace(v, leaf.member) if is_client_list(leaf) else v, type_spec, value
    )


class _Holder:
    def __init__(self, clients):
        self.clients = clients


def _hold(clients, member: tff.Type):
    """Holds all clients in a structure that TFF can traverse as the type of one client."""
    if not leaves(member):
        return clients  # there is no leaf to hold them, and no data to lose
    holder = _Holder(clients)
    return map_leaves(lambda _: holder, member)


def _release(held, member: tff.Type):
    # The first leaf, which need not be in the first member: that may be an empty struct.
    return leaves(member, held)[0][1].clients if leaves(member) else held
