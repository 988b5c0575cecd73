"""Divides a computation over several workers, by way of TFF's mergeable form.

TFF splits a computation with one layer of aggregation in three: what is done with some of the
clients up to their partial aggregate, what merges two partial aggregates, and what is done with the
whole. The results are merged in the clients' order, so a round repeats itself bit for bit.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow_federated as tff

from tff_fedlabel.runtime._errors import ComputationError
from tff_fedlabel.runtime._types import is_client_list

_members = tff.structure.iter_elements


class NotMergeableError(ComputationError, ValueError):
    """The computation cannot be divided over several workers. The message is one line."""


class Plan:
    """A computation, made ready for several workers.

    Args:
      comp: The computation.
      compiler: Turns a computation into what a worker understands, and remembers it.
      divide: Whether there are several workers.

    Attributes:
      whole: The computation, where it is run by one worker; else None.
      up_to_merge, merge, after_merge: Its three parts where it is run by several.

    Raises:
      NotMergeableError: It has clients but cannot be divided.
    """

    def __init__(self, comp: tff.Computation, compiler: Callable, divide: bool):
        self.whole = self.up_to_merge = self.merge = self.after_merge = None
        self._parameter = comp.type_signature.parameter
        self._result = comp.type_signature.result
        if not divide or not _has_client_values(self._parameter):
            self.whole = comp
            compiler(comp)
            return
        form = _mergeable_form(comp)
        self.up_to_merge, self.merge = form.up_to_merge, form.merge
        self.after_merge = form.after_merge
        for part in (self.up_to_merge, self.merge, self.after_merge):
            compiler(part)

    def divide(self, argument: Any, workers: int) -> list[Any]:
        """The arguments of `up_to_merge`: at most `workers`, and at least one.

        Raises:
          TypeError: A value of clients is not a list.
          ValueError: The lists differ in length.
        """
        sizes: list[int] = []
        _map_client_values(lambda values: sizes.append(_length(values)), argument, self._parameter)
        if len(set(sizes)) > 1:
            raise ValueError(
                f"the arguments are of different numbers of clients: {sorted(set(sizes))}"
            )
        parts = max(1, min(workers, sizes[0]))
        bounds = [sizes[0] * i // parts for i in range(parts + 1)]
        return [
            _map_client_values(lambda v, a=a, b=b: v[a:b], argument, self._parameter)
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]

    @staticmethod
    def merge_argument(first: Any, second: Any) -> Any:
        """The argument of `merge`."""
        return tff.structure.Struct.unnamed(first, second)

    def after_arguments(self, parts: list[Any], merged: Any) -> list[Any]:
        """The arguments of `after_merge`.

        Args:
          parts: What `divide` returned.
          merged: The merged aggregate.

        Returns:
          One for each part where the result holds values of clients. Elsewhere one without any
          client: the result depends on the aggregate alone, and the data need not travel again.
        """
        if not _has_client_values(self._result):
            parts = [_map_client_values(lambda values: values[:0], parts[0], self._parameter)]
        return [tff.structure.Struct.unnamed(part, merged) for part in parts]

    def join(self, results: list[Any]) -> Any:
        """The computation's result, from those of `after_merge`."""
        return _join(self._result, results)


def _mergeable_form(comp: tff.Computation) -> tff.framework.MergeableCompForm:
    try:
        return tff.backends.native.compile_to_mergeable_comp_form(comp)
    except Exception as error:
        text = " ".join(str(error).split())
        secure = sorted(set(re.findall(r"federated_secure_\w+", text)))
        if secure:
            why = f"secure aggregation ({', '.join(secure)}) has no partial results to merge"
        elif "aggregate dependent on another" in text:
            why = "one of its aggregations depends on the result of another"
        else:
            why = f"TFF says: {type(error).__name__}: {text[:300]}"
        raise NotMergeableError(
            f"the computation cannot be divided over several workers: {why}; use another runtime, "
            "a single worker, or another aggregator"
        ) from error


def _has_client_values(type_spec: tff.Type | None) -> bool:
    return type_spec is not None and tff.types.contains(type_spec, is_client_list)


def _length(values: Any) -> int:
    if not isinstance(values, list | tuple):
        raise TypeError(
            f"values of clients must come as a list with one entry for each, got "
            f"{type(values).__name__}"
        )
    return len(values)


def _map_client_values(function: Callable, value: Any, type_spec: tff.Type) -> Any:
    if isinstance(type_spec, tff.StructType):
        members = tff.structure.from_container(value)
        return tff.structure.Struct(
            (name, _map_client_values(function, member, member_type))
            for member, (name, member_type) in zip(members, _members(type_spec), strict=True)
        )
    return function(value) if is_client_list(type_spec) else value


def _join(type_spec: tff.Type, results: list[Any]) -> Any:
    first = results[0]
    if len(results) == 1 or not _has_client_values(type_spec):
        return first
    if is_client_list(type_spec):
        return functools.reduce(lambda a, b: [*a, *b], results)
    columns = zip(*(tff.structure.from_container(result) for result in results), strict=True)
    members = [
        _join(member_type, list(column))
        for (_, member_type), column in zip(_members(type_spec), columns, strict=True)
    ]
    if isinstance(first, Mapping):
        return collections.OrderedDict(zip(first, members, strict=True))
    if isinstance(first, tff.structure.Struct):
        names = (name for name, _ in _members(type_spec))
        return tff.structure.Struct(zip(names, members, strict=True))
    if type(first) in (list, tuple):
        return type(first)(members)
    return type(first)(*members)  # a named tuple or a class made by attrs
