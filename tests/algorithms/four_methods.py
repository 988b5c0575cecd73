"""Four small methods, each with one thing that the published ones do without so far."""

import collections
import dataclasses

import tensorflow as tf

from tff_fedlabel import algorithms
from tff_fedlabel.algorithms import local_training


@dataclasses.dataclass(frozen=True)
class SmallConfig:
    """A parameter.

    Attributes:
      strength: How strong the method's own part is.
      seed: Unused.
    """

    strength: float = 0.5
    seed: int = 0


def supervised(setup, client, **more):
    """FedAvg's client, and what else it gives."""
    step = local_training.labeled_step(setup, client)
    local = local_training.run(setup, client.hparams, step, client.weights, client.labeled)
    delta = tuple(w - w0 for w, w0 in zip(local.weights, client.weights, strict=True))
    delta = more.pop("change", lambda d: d)(delta)
    more = {name: make(local) for name, make in more.items()}
    return algorithms.ClientOutput(
        delta, local.num_examples, local.model_metrics, local.metrics, **more
    )


def slowed_update(setup, client):
    """The server keeps a factor that falls with the images seen; clients scale their update."""
    factor = client.server_state["factor"]
    return supervised(
        setup,
        client,
        change=lambda delta: tuple(factor * d for d in delta),
        sent=lambda local: {"images": local.num_examples},
    )


AT_SERVER = algorithms.Method(
    "small_server_state",
    SmallConfig,
    slowed_update,
    reads_unlabeled=False,
    server_state=lambda setup: {"factor": tf.constant(1.0)},
    server_update=lambda setup, state, sent: {
        "factor": state["factor"] / (1.0 + setup.config.strength * sent["images"] / 100.0)
    },
    advice=lambda config, rounds: f"a strength of {config.strength} is little in {rounds} rounds",
)


def remembering_update(setup, client):
    """A client adds a part of its last update, as momentum of its own, and counts its rounds."""
    strength, last = setup.config.strength, client.memory["delta"]
    output = supervised(
        setup,
        client,
        change=lambda delta: tuple(d + strength * m for d, m in zip(delta, last)),  # noqa: B905 (traced)
    )
    helped = client.helpers.reduce(0.0, lambda total, memory: total + memory["rounds"])
    metrics = collections.OrderedDict(output.metrics, helpers_rounds=(helped,))
    memory = {"delta": output.delta, "rounds": client.memory["rounds"] + 1.0}
    return output._replace(memory=memory, metrics=metrics)


WITH_MEMORY = algorithms.Method(
    "small_memory",
    SmallConfig,
    remembering_update,
    reads_unlabeled=False,
    initial_memory=lambda setup: {
        "delta": tuple(tf.zeros_like(w) for w in setup.model.initial_weights[0]),
        "rounds": 0.0,
    },
    choose_helpers=lambda memories, client, round_num: [c for c in memories if c != client][:2],
)


def train_at_server(setup, server):
    """One step on all labelled images of the server."""
    step = local_training.labeled_step(setup, algorithms.Client(server.weights, server.non_trainable, None, None, server.round_num, server.hparams))  # fmt: skip  # noqa: E501
    data = tf.data.Dataset.from_tensors(server.data)
    return local_training.run(setup, server.hparams, step, server.weights, data).weights


LABELS_AT_SERVER = algorithms.Method(
    "small_labels_at_server",
    SmallConfig,
    supervised,
    reads_unlabeled=False,
    server_training=train_at_server,
)


def trimmed_mean(setup, clients):
    """The mean of the clients without the one that moved furthest."""
    moved = tf.add_n([tf.reduce_sum(tf.reshape(d, [tf.shape(d)[0], -1]) ** 2, 1) for d in clients.delta])  # fmt: skip  # noqa: E501
    furthest = tf.one_hot(tf.argmax(moved), tf.size(moved))
    weights = clients.weights * (1.0 - furthest) * clients.sent["trust"]
    share = tf.math.divide_no_nan(weights, tf.reduce_sum(weights))
    return tuple(tf.tensordot(share, d, 1) for d in clients.delta)


OWN_AGGREGATION = algorithms.Method(
    "small_aggregation",
    SmallConfig,
    lambda setup, client: supervised(
        setup, client, sent=lambda local: {"trust": 1.0 + local.num_examples}
    ),
    reads_unlabeled=False,
    aggregate=trimmed_mean,
)

ALL = (AT_SERVER, WITH_MEMORY, LABELS_AT_SERVER, OWN_AGGREGATION)
