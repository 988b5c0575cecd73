"""A method whose costs are measured, set up so that it does all of its work."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from benchmarks import harness

from tff_fedlabel import algorithms, models
from tff_fedlabel.training import STRONG_AUGMENTS
from tff_fedlabel.training import memory as client_memory

CLASSES = 10
# Logits this much larger have the softmax near 0 and 1: the model is sure of every image, so that
# thresholds let all images pass, whatever a method calls them.
_SURE = 1000.0
# So small a step that the model stays as it is.
_LEARNING_RATE = 1e-9
# Clients that have taken part before the one whose costs are measured.
_OTHERS = 4
# Rounds before the one that is measured, after which the server knows what methods measure.
_ROUNDS_BEFORE = 2


@dataclasses.dataclass(frozen=True)
class Size:
    """How much work there is.

    Attributes:
      batch_size: Images in a batch.
      labeled_steps, unlabeled_steps: tau and tau'.
      shape: Of an image.
      width: Of the model.
      round_num: The round that is measured; late, for methods that begin with other phases.
    """

    batch_size: int
    labeled_steps: int
    unlabeled_steps: int
    shape: tuple[int, int, int] = (28, 28, 1)
    width: int = 4
    round_num: int = 100


class Before(NamedTuple):
    """What there is when the measured round begins.

    Attributes:
      process: The method's process.
      state: Its state.
      memories: The memories of the clients; None for a method without.
    """

    process: tff.learning.templates.LearningProcess
    state: Any
    memories: client_memory.ClientMemory | None


class Subject:
    """A method, built.

    Args:
      name: The method.
      size: How much work there is.

    Attributes:
      method: The `Method`.
      setup: What its functions get.
    """

    def __init__(self, name: str, size: Size):
        self.method, self.size = algorithms.METHODS[name], size
        keras_model = models.build_keras("cnn", size.shape, CLASSES, width=size.width)
        last = keras_model.layers[-1]
        last.kernel.assign(_SURE * last.kernel)
        model = models.functional_model(keras_model, input_shape=size.shape)
        optimizer = tff.learning.optimizers.build_sgdm(_LEARNING_RATE)
        fields = {field.name for field in dataclasses.fields(self.method.config_class)}
        chosen = {"strong_augment": STRONG_AUGMENTS["single"]} if "strong_augment" in fields else {}
        config = self.method.config_class(**chosen)
        loop = tff.learning.LoopImplementation.DATASET_ITERATOR
        self.setup = algorithms.Setup(model, optimizer, config, loop)

    def with_steps(self, labeled: int, unlabeled: int) -> Subject:
        """The same with other numbers of steps."""
        other = copy.copy(self)
        other.size = dataclasses.replace(
            self.size, labeled_steps=labeled, unlabeled_steps=unlabeled
        )
        return other

    def process(self) -> tff.learning.templates.LearningProcess:
        """The method's learning process."""
        tail = {}
        if self.method.server_training is not None:
            tail["server_data"] = self.server_data()
        setup = self.setup
        return self.method(setup.model, setup.optimizer, setup.config, **tail)

    def server_data(self) -> collections.OrderedDict:
        """The labelled images at the server, for a method that trains there."""
        return self._images(self.size.batch_size, labeled=True)

    def initial_memory(self) -> Any:
        """The memory of a client that has not taken part yet; None for a method without."""
        setup = self.setup
        return algorithms.initial_memory(self.method, setup.model, setup.optimizer, setup.config)

    def before(self, runner: harness.Runner) -> Before:
        """What there is when the measured round begins: some rounds have gone before it."""
        process, size = self.process(), self.size
        memories = _memories(self.method, self.initial_memory())
        state = runner.call(process.initialize)
        work = collections.OrderedDict(state.client_work)
        work["round_num"] = np.int32(max(size.round_num - _ROUNDS_BEFORE, 0))
        state = state._replace(client_work=work)
        for _ in range(min(_ROUNDS_BEFORE, size.round_num)):
            data = [self.client_data(memories, client) for client in range(1, _OTHERS + 1)]
            output = runner.call(process.next, state, data)
            state = output.state
            if memories is not None:
                memories.update(output.metrics["client_work"]["memory"])
        return Before(process, state, memories)

    def client_data(
        self, memories: client_memory.ClientMemory | None, client: int = 1
    ) -> collections.OrderedDict:
        """What one client gives to the process, with its memory and its helpers.

        Args:
          memories: Those of `before`.
          client: Its number.
        """
        size = self.size
        data = collections.OrderedDict(
            labeled=self._batches(size.labeled_steps, labeled=True),
            unlabeled=self._batches(size.unlabeled_steps, labeled=False),
        )
        return data if memories is None else memories.attach(data, client, size.round_num)

    def client(
        self, data: collections.OrderedDict, weights: Any, server_state: Any, hparams: Any
    ) -> algorithms.Client:
        """What `Method.client_update` gets in the measured round; to be called inside a graph.

        Args:
          data: As `client_data` gives it.
          weights: The trainable weights.
          server_state: The method's state at the server.
          hparams: The hyper-parameters of the client optimizer.
        """
        client = algorithms.Client(
            weights=weights,
            non_trainable=tuple(self.setup.model.initial_weights[1]),
            labeled=data["labeled"],
            unlabeled=data["unlabeled"],
            round_num=tf.constant(self.size.round_num),
            hparams=hparams,
            server_state=server_state,
            helpers=data.get("helpers"),
        )
        if "memory" in data:
            client = client._replace(memory=data["memory"].get_single_element()["value"])
        return client

    def _batches(self, steps: int, labeled: bool) -> tf.data.Dataset:
        images = self._images(steps * self.size.batch_size, labeled)
        return tf.data.Dataset.from_tensor_slices(images).batch(self.size.batch_size)

    def _images(self, number: int, labeled: bool) -> collections.OrderedDict:
        rng = np.random.default_rng(0)
        x = rng.integers(0, 256, (number, *self.size.shape), dtype=np.uint8)
        images = collections.OrderedDict(x=x)
        if labeled:
            images["y"] = rng.integers(0, CLASSES, number).astype(np.int32)
        return images


def num_helpers(method: algorithms.Method, initial_memory: Any) -> int:
    """How many helpers a client gets where others have left their memories."""
    memories = _memories(method, initial_memory)
    return 0 if method.choose_helpers is None else len(memories.helpers(0, 0))


def _memories(method, initial) -> client_memory.ClientMemory | None:
    if initial is None:
        return None
    memories = client_memory.ClientMemory(initial, method.choose_helpers, method.name)
    stacked = tf.nest.map_structure(lambda a: np.stack([a] * _OTHERS), initial)
    clients = np.arange(1, _OTHERS + 1, dtype=np.int32)
    memories.update(collections.OrderedDict(client=clients, value=stacked))
    return memories
