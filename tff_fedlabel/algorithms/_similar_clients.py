"""FedMatch's helpers: what a client remembers for others, and whose memories it receives.

A client is described by what its model answers to one fixed random image. Its helpers are the
clients with the nearest answers. Between two refreshes they stay what they were at the last one,
models included, so a memory holds two snapshots: that of the client's last round, and that of its
last round before the refresh. This doubles what TFF moves: a helper's memory holds two psi, where
the method itself needs one.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from tff_fedlabel._autograph import as_written
from tff_fedlabel._lazy import tf
from tff_fedlabel.algorithms import _method

# Mean and standard deviation of the pixels of the fixed image, from 0 to 255, before truncation.
_MEAN = _DEVIATION = 125.0
# Where a model takes images of any size.
_SIDE = 32


def fixed_image(setup: _method.Setup) -> Any:
    """A batch of one image of truncated Gaussian noise, in the structure and dtypes of x.

    Its pixels are drawn from N(125, 125 ** 2), truncated to 0..255, by the configuration's seed:
    as whole numbers for integer inputs, as their 255th part for floating-point ones. Integers that
    have no such range (int8, tokens) are 0.
    """
    # Imported late because it imports TensorFlow Federated.
    from tff_fedlabel.algorithms import _builder_arguments

    rng = np.random.default_rng(setup.config.seed)
    x_spec, _ = _builder_arguments.input_specs(setup.model)
    return tf.nest.map_structure(lambda spec: tf.constant(_noise(rng, spec)), x_spec)


def _noise(rng, spec):
    shape = (1, *(_SIDE if side is None else side for side in spec.shape[1:]))
    pixels = rng.normal(_MEAN, _DEVIATION, shape)
    while True:
        outside = (pixels < 0) | (pixels > 255)
        if not outside.any():
            break
        pixels[outside] = rng.normal(_MEAN, _DEVIATION, outside.sum())
    if spec.dtype.is_floating:
        return (pixels / 255.0).astype(spec.dtype.as_numpy_dtype)
    if spec.dtype == tf.uint8:
        return np.round(pixels).astype(np.uint8)
    return np.zeros(shape, spec.dtype.as_numpy_dtype)


def embedding(setup: _method.Setup, weights: Any, non_trainable: Any) -> tf.Tensor:
    """The class probabilities that a model gives the fixed image, float32 [classes]."""
    logits = setup.model.predict_on_batch(
        (weights, non_trainable), fixed_image(setup), training=False
    )
    return tf.nn.softmax(tf.cast(logits, tf.float32))[0]


def initial_memory(setup: _method.Setup) -> collections.OrderedDict:
    """The memory of a client that has not taken part yet: it helps nobody, and has no helpers."""
    trainable, non_trainable = setup.model.initial_weights

    def embed():
        weights = tuple(tf.convert_to_tensor(w) for w in trainable)
        return embedding(setup, weights, tuple(tf.convert_to_tensor(w) for w in non_trainable))

    # As a graph, as in the process itself.
    answer = tf.function(embed, autograph=False).get_concrete_function()()
    nothing = collections.OrderedDict(
        round_num=np.int32(-1),
        psi=tuple(np.zeros(w.shape, w.dtype) for w in trainable),
        embedding=np.zeros(answer.shape, np.float32),
    )
    return collections.OrderedDict(_settings(setup), last=nothing, before_refresh=nothing)


def _settings(setup):
    """What `choose_helpers`, which sees memories only, needs of the configuration."""
    config = setup.config
    return collections.OrderedDict(
        num_helpers=np.int32(config.num_helpers),
        h_interval=np.int32(config.h_interval),
        helpers_at_refresh_only=np.int32(config.helpers_at_refresh_only),
    )


@as_written
def remember(
    setup: _method.Setup, client: _method.Client, psi: Any, weights: Any, took_part: tf.Tensor
) -> Any:
    """A client's memory after a round.

    Args:
      setup, client: As in `Method.client_update`.
      psi, weights: What the client ended the round with.
      took_part: bool [], whether it used an image; otherwise its memory stays as it was.
    """
    last = client.memory["last"]
    now = collections.OrderedDict(
        round_num=client.round_num,
        psi=psi,
        embedding=embedding(setup, weights, client.non_trainable),
    )
    refreshed = _last_refresh(client.round_num, setup.config.h_interval)
    move = took_part & (last["round_num"] < refreshed)
    return collections.OrderedDict(
        _settings(setup),
        last=_choose(took_part, now, last),
        before_refresh=_choose(move, last, client.memory["before_refresh"]),
    )


def _choose(condition, one, other):
    return tf.nest.map_structure(lambda a, b: tf.where(condition, a, b), one, other)


def choose_helpers(memories: Any, client: int, round_num: int) -> list[int]:
    """The clients whose models answered the fixed image most like this client's.

    Measured by the Euclidean distance at the last refresh, among the others that had taken part by
    then; of two at the same distance the one with the lower number. None for a client that had
    not, or before the first refresh.
    """
    if client not in memories:
        return []
    own = memories[client]
    refreshed = _last_refresh(round_num, int(own["h_interval"]))
    if own["helpers_at_refresh_only"] and round_num != refreshed:
        return []
    answers = {}
    for number, memory in memories.items():
        seen = memory["last" if memory["last"]["round_num"] < refreshed else "before_refresh"]
        if 0 <= seen["round_num"] < refreshed:
            answers[number] = seen["embedding"]
    if client not in answers:
        return []
    answer = answers.pop(client)
    distances = {number: np.linalg.norm(other - answer) for number, other in answers.items()}
    return sorted(distances, key=lambda n: (distances[n], n))[: int(own["num_helpers"])]


@as_written
def helpers(setup: _method.Setup, client: _method.Client) -> tuple[Any, tf.Tensor]:
    """The helpers' psi of the last refresh.

    Returns:
      Their psi: a tuple like the weights with a leading [num_helpers], filled up with zeros; and
      how many there are, int32 [].
    """
    most = setup.config.num_helpers
    if most == 0:
        nobody = tuple(tf.zeros([0, *w.shape], w.dtype) for w in client.weights)
        return nobody, tf.constant(0)
    refreshed = _last_refresh(client.round_num, setup.config.h_interval)

    def psi_of(memory):
        last, earlier = memory["last"], memory["before_refresh"]
        return _choose(last["round_num"] < refreshed, last["psi"], earlier["psi"])

    psi = client.helpers.map(lambda memory: (1, psi_of(memory)))
    nobody = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), psi.element_spec)
    filled = psi.concatenate(tf.data.Dataset.from_tensors(nobody).repeat()).take(most)
    there, rows = filled.batch(most, drop_remainder=True).get_single_element()
    return tuple(rows), tf.reduce_sum(there)


def _last_refresh(round_num, h_interval):
    """The round, from 0, in which the helpers were last refreshed; -1 before the first time.

    Round `h_interval` is the first, counted from 1, and then every `h_interval`-th.
    """
    return (round_num + 1) // h_interval * h_interval - 1
