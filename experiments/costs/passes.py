"""Forward and backward passes of a client, counted as operations that its graph executed.

The graph of a method's client work is run with TensorFlow's trace, which lists every operation that
was executed, those in loops as often as they ran. The product in the model's last layer, whose
shape no other has, stands for the whole model: its execution is a forward pass, that of the
gradient of its weights a backward pass. (The first layers will not do: some methods freeze them.)
What steps take is the difference between two numbers of steps, so the method may be any.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import tensorflow as tf
from benchmarks import harness

from costs.subject import CLASSES, Before, Size, Subject

_SHAPE, _BATCH = (8, 8, 1), 4
# Also as TensorFlow fuses it or leaves it to another library; but none of batches of matrices.
_PRODUCT = re.compile(r"^(?!.*Batch).*MatMul$")


class Count(NamedTuple):
    """What was executed.

    Attributes:
      forward: Forward passes.
      backward: Backward passes.
      images: Images in the forward passes, in batches.
    """

    forward: float
    backward: float
    images: float

    def minus(self, other: Count) -> Count:
        return Count(*(a - b for a, b in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True)
class Passes:
    """The passes of a client in a round.

    Attributes:
      step: Those of one labelled and one unlabelled step together.
      labeled: Those of one labelled step.
      once: Those of a round that do not depend on the steps.
    """

    step: Count
    labeled: Count
    once: Count

    def __str__(self) -> str:
        """As the paper writes it: a pass that is only forward is P, forward and backward is B."""
        return _in_symbols(self.step)


def _in_symbols(count: Count) -> str:
    only_forward = count.forward - count.backward
    parts = [(only_forward, "P"), (count.backward, "B")]
    return " + ".join(f"{number:g}{symbol}" for number, symbol in parts if number) or "0"


def count(name: str, round_num: int) -> Passes:
    """Counts the passes of a method.

    Args:
      name: The method.
      round_num: The round; see `subject.Size`.
    """
    subject = Subject(name, Size(_BATCH, 1, 1, shape=_SHAPE, round_num=round_num))
    with harness.runners("device") as (runner,):
        before = subject.before(runner)
    executed = {
        steps: _executed(subject.with_steps(*steps), before) for steps in ((1, 1), (2, 1), (2, 2))
    }
    one, more_labeled, two = executed.values()
    step = two.minus(one)
    return Passes(step, more_labeled.minus(one), one.minus(step))


def _executed(subject: Subject, before: Before) -> Count:
    metadata = tf.compat.v1.RunMetadata()
    with tf.Graph().as_default() as graph, tf.device("/CPU:0"):
        fetches = tf.nest.flatten(_client_work(subject, before.state, before.memories))
        config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        # What is the same twice must not be computed once.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        traced = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        with tf.compat.v1.Session(graph=graph, config=config) as session:
            session.run(fetches, options=traced, run_metadata=metadata)
    kernel = tuple(subject.setup.model.initial_weights[0][-2].shape)
    forward = backward = images = 0
    for operation, shape in _operations(metadata):
        if not _PRODUCT.search(operation) or len(shape) != 2 or shape[1] != CLASSES:
            continue
        if shape == kernel:
            backward += 1
        elif shape[0]:  # Of an empty batch nothing is computed.
            forward, images = forward + 1, images + shape[0]
    return Count(forward, backward, images / _BATCH)


def _client_work(subject: Subject, state, memories) -> Any:
    """What a client sends, as tensors of the current graph."""
    method, setup = subject.method, subject.setup
    weights = tuple(state.global_model_weights.trainable)
    specs = tuple(tf.TensorSpec(w.shape, w.dtype) for w in weights)

    def constants(values):
        return tf.nest.map_structure(tf.constant, values)

    @tf.function
    def work():
        client = subject.client(
            subject.client_data(memories),
            constants(weights),
            constants(state.client_work.get("method", ())),
            setup.optimizer.get_hparams(setup.optimizer.initialize(specs)),
        )
        output = method.client_update(setup, client)
        return output.delta, output.num_examples, output.sent, output.memory

    return work()


def _operations(metadata):
    """(kind, shape of the first result) of each operation that was executed."""
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            # "name = Kind(inputs)"
            found = re.search(r"= *(\w+)\(", node.timeline_label)
            if found and node.output:
                shape = node.output[0].tensor_description.shape
                yield found[1], tuple(dim.size for dim in shape.dim)
