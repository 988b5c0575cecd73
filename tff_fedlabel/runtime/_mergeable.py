"""Divides a computation over several workers, using TFF's mergeable form.

TFF splits a computation with one layer of aggregation into three: one computes the partial
aggregate of some of the clients, one merges two partial aggregates, and one uses the full
aggregate. The results are merged in the clients' order, so a round is reproducible bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow_federated as tff

from tff_fedlabel.runtime._runtime_errors import ComputationError
from tff_fedlabel.runtime._tff_types import has_client_lists, is_client_list, leaves, map_leaves


class NotMergeableError(ComputationError, ValueError):
    """The computation cannot be divided over several workers. The message is one line."""


class Plan:
    """A computation, prepared for several workers.

    Args:
      comp: The computation.
      compiler: Compiles a computation to what a worker understands, and caches it.
      divide: Whether there are several workers.

    Attributes:
      whole: The computation, if it is run by one worker; else None.
      up_to_merge, merge, after_merge: Its three parts if it is run by several.

    Raises:
      NotMergeableError: It has clients but cannot be divided.
    """

    def __init__(self, comp: tff.Computation, compiler: Callable, divide: bool):
        self.whole = self.up_to_merge = self.merge = self.after_merge = None
        self._parameter = comp.type_signature.parameter
        self._result = comp.type_signature.result
        if not divide or not has_client_lists(self._parameter):
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

        Values of clients must be lists.

        Raises:
          ValueError: The lists differ in length.
        """
        lists = [v for t, v in leaves(self._parameter, argument) if is_client_list(t)]
        sizes = [len(values) for values in lists]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"the arguments have different numbers of clients: {sorted(set(sizes))}"
            )
        parts = max(1, min(workers, sizes[0]))
        bounds = [sizes[0] * i // parts for i in range(parts + 1)]
        return [
            self._slice_clients(argument, a, b) for a, b in zip(bounds, bounds[1:], strict=False)
        ]

    def _slice_clients(self, argument: Any, first: int, end: int) -> Any:
        """The argument with a range of the clients."""
        return map_leaves(
            lambda t, v: v[first:end] if is_client_list(t) else v, self._parameter, argument
        )

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
          One for each part if the result holds values of clients. Otherwise one without clients:
          the result depends on the aggregate alone, and the data need not be sent again.
        """
        if not has_client_lists(self._result):
            parts = [self._slice_clients(parts[0], 0, 0)]
        return [tff.structure.Struct.unnamed(part, merged) for part in parts]

    def join(self, results: list[Any]) -> Any:
        """The computation's result, from those of `after_merge`."""
        if len(results) == 1:
            return results[0]
        joined = map_leaves(_joined, self._result, *results)
        return tff.types.type_to_py_container(joined, self._result)


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


def _joined(leaf: tff.Type, first: Any, *others: Any) -> Any:
    """The clients of all results; for a leaf without clients the first, as all are equal."""
    return sum(others, first) if is_client_list(leaf) else first
