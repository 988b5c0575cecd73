"""FedAvg and FedProx against TFF's own FedAvg and against float64 NumPy."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_client, to_tff
from numpy_reference import Reference
from weights import assert_weights_close, assert_weights_equal

from tff_fedlabel.algorithms import (
    FedProxConfig,
    Setup,
    _guards,
    _local_training,
    build_fedavg,
    build_fedprox,
)

sgd = tff.learning.optimizers.build_sgdm
pytestmark = pytest.mark.usefixtures("device_runtime")

COHORTS = [
    [random_client(1), random_client(2, labeled=3), random_client(3, labeled=0)],
    [random_client(4), random_client(5, labeled=7)],
]


def train(process, client_data):
    state = process.initialize()
    for cohort in client_data:
        output = process.next(state, cohort)
        state = output.state
    weights = process.get_model_weights(state).trainable
    return [np.asarray(w) for w in weights], output.metrics["client_work"]["train"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedavg_is_tffs_own_on_the_labeled_part(momentum):
    def optimizers():
        return sgd(0.2, momentum=momentum), sgd(1.0, momentum=momentum)

    client, server = optimizers()
    ours, metrics = train(
        build_fedavg(build_model(initial_weights()), client, server_optimizer=server),
        [[to_tff(c) for c in cohort] for cohort in COHORTS],
    )
    client, server = optimizers()
    theirs, _ = train(
        tff.learning.algorithms.build_weighted_fed_avg(
            build_model(initial_weights()), client, server
        ),
        [[to_tff(c)["labeled"] for c in cohort] for cohort in COHORTS],
    )
    assert_weights_close(ours, theirs, atol=1e-6)
    assert metrics["images_used"] == 11 + 7
    assert "kept_fraction" not in metrics


def test_fedprox_equals_numpy():
    process = build_fedprox(
        build_model(initial_weights()), sgd(0.3), FedProxConfig(proximal_strength=0.7)
    )
    actual, _ = train(process, [[to_tff(c) for c in cohort] for cohort in COHORTS])
    reference = Reference(proximal_strength=0.7)
    expected = [np.float64(np.float32(w)) for w in initial_weights()]
    for cohort in COHORTS:
        expected, _ = reference.round(expected, [(labeled, []) for labeled, _ in cohort])
    assert_weights_close(actual, expected)


def test_unlabeled_images_are_never_read():
    """Not even a NaN among them matters."""
    broken = [
        (labeled, [np.full_like(u, np.nan) for u in batches]) for labeled, batches in COHORTS[0]
    ]
    process = build_fedavg(build_model(initial_weights()), sgd(0.2))
    plain, _ = train(process, [[to_tff(c) for c in COHORTS[0]]])
    spoiled, metrics = train(process, [[to_tff(c) for c in broken]])
    assert_weights_equal(plain, spoiled)
    assert metrics["rejected_clients"] == 0.0


@pytest.mark.parametrize("strength", [-0.1, float("inf"), None])
def test_bad_proximal_strength_is_named(strength):
    with pytest.raises(ValueError, match="^proximal_strength "):
        FedProxConfig(proximal_strength=strength)


@pytest.mark.parametrize("loop", list(tff.learning.LoopImplementation))
def test_clients_read_without_tuning(loop):
    wanted = tf.data.Options()
    wanted.autotune.enabled = False
    wanted.experimental_optimization.apply_default_optimizations = False
    wanted.threading.private_threadpool_size = 1

    def options_in(graph_def):
        functions = (function.node_def for function in graph_def.library.function)
        nodes = itertools.chain(graph_def.node, *functions)
        return [n.attr["serialized_options"].s for n in nodes if n.op == "OptionsDataset"]

    @tf.function
    def expected():
        return tf.data.Dataset.range(1).with_options(wanted).reduce(np.int64(0), lambda a, b: a + b)

    @tf.function
    def train(dataset):
        def step(weights, batch, step_num):
            return _local_training.Step(
                (batch * weights[0],), tf.constant(2.0), {"steps": (tf.cast(step_num, tf.float32),)}
            )

        setup = Setup(build_model(initial_weights()), sgd(0.5), None, loop)
        weights = (tf.constant(1.0),)
        return _local_training.run(setup, {"learning_rate": 0.5}, step, weights, dataset)

    dataset = tf.data.Dataset.from_tensor_slices([1.0, 0.5])
    found = options_in(train.get_concrete_function(dataset).graph.as_graph_def())
    assert found == options_in(expected.get_concrete_function().graph.as_graph_def())
    assert len(found) == 1
    trained = train(dataset)
    assert trained.weights[0] == 0.5 * 0.75  # 1 - .5 * 1, then .5 - .5 * .5 * .5
    assert trained.num_examples == 4.0 and trained.metrics["steps"] == (0.0 + 1.0,)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    "largest, num_images",
    [(0.5, 50), (0, 0), (0.9, 1), (0.9, 0), (0.9, 2), (1e-3, 50), (np.nan, 50), (np.inf, 50)]
    + [(0.9 / 2**20, 1), (0.9 / 2**20, 2), (0.2 / 2**20, 4), (1e-12, 500)]
    + [(-np.inf, 0), (0.1, np.nan), (0, np.inf), (0.1, np.inf)],
)
def test_updates_that_are_not_finite(dtype, largest, num_images):
    """`largest` is a part of the largest number of the dtype."""
    delta = np.zeros([3, 2], dtype), np.linspace(-1, 1, 5).astype(dtype)
    delta[0][1, 1] = dtype(largest) * np.finfo(dtype).max
    # float16 leaves no room for a sum over clients; the others do for 2**20 of them.
    largest_allowed = np.finfo(dtype).max / (1 if dtype == np.float16 else 2**20)
    with np.errstate(all="ignore"):
        expected = all((np.abs(d * dtype(num_images)) <= largest_allowed).all() for d in delta)
    found = tf.function(_guards.is_finite)(delta, np.float32(num_images))
    assert found.numpy() == (expected and np.isfinite(num_images))
