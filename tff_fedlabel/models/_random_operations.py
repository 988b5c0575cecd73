"""Finds the layers of a traced model that draw random numbers from a state TensorFlow keeps.

Such numbers do not depend on the seed of a run: with every call, TFF's runtimes draw new ones or
start the sequence again. Keras' own random layers are given stateless generators (`_stateless.py`),
so the draws found here come from `tf.random.*` or `tf.image.random_*` in a layer.
"""

import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tff_fedlabel.models._stateless import modules_of

# Operations of tf.random.Generator are not listed: they read a variable, which is refused already.
_STATEFUL = frozenset(
    {
        "AllCandidateSampler",
        "FixedUnigramCandidateSampler",
        "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "Multinomial",
        "NonDeterministicInts",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "TruncatedNormal",
        "UniformCandidateSampler",
    }
)


def warn_of_stateful_draws(
    model: tf.keras.Model, forwards: Sequence[Any], *, stacklevel: int
) -> None:
    """Warns, in one line, if a forward pass would not draw the same numbers again.

    Args:
      model: The Keras model; the warning gives the names of its layers.
      forwards: Concrete functions of it.
      stacklevel: As `warnings.warn` takes it, counted from the caller.
    """
    names = {layer.name for layer in modules_of(model) if hasattr(layer, "name")}
    found = {}
    for forward in forwards:
        for path, operation in _operations(forward.graph.as_graph_def()):
            if operation in _STATEFUL:
                found.setdefault(_layer(path, names), operation)
    if not found:
        return
    layers = ", ".join(f"{layer!r} ({operation})" for layer, operation in found.items())
    warnings.warn(
        f"The Keras model draws random numbers that no seed repeats in {layers}: runs will differ. "
        "Use tf.random.stateless_* with a seed, or Keras' layers such as GaussianNoise.",
        stacklevel=stacklevel + 1,
    )


def _operations(graph_def: Any) -> Iterator[tuple[str, str]]:
    """Yields (path, type) of every operation that is run, those in functions and loops included."""
    library = {
        function.signature.name: function.node_def for function in graph_def.library.function
    }
    waiting = [("", graph_def.node)]
    while waiting:
        scope, nodes = waiting.pop()
        for node in nodes:
            path = f"{scope}{node.name}"
            yield path, node.op
            called = [node.op, *_functions_in(node)]
            waiting += [(f"{path}/", library[name]) for name in called if name in library]


def _functions_in(node: Any) -> Iterator[str]:
    for attribute in node.attr.values():
        yield attribute.func.name
        for function in attribute.list.func:
            yield function.name


def _layer(path: str, names: Collection[str]) -> str:
    """The innermost part of an operation's path that names a layer, or the whole path."""
    for part in reversed(path.split("/")):
        # A layer that is called again gets a scope with a number.
        for name in (part, re.sub(r"_\d+$", "", part)):
            if name in names:
                return name
    return path
