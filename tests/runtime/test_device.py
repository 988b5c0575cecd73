"""The device runtime against TFF's C++ worker, and what it refuses."""

import asyncio
import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from device_rounds import SGD, assert_same, build_ours, in_context, rounds

from tff_fedlabel import runtime

SPEC = collections.OrderedDict(
    x=tf.TensorSpec([None, 4], tf.float32), y=tf.TensorSpec([None], tf.int32)
)


@pytest.mark.parametrize("name", ["fedlabel", "fedavg", "fedprox"])
def test_our_processes_give_the_workers_weights(name, local, here, clients):
    process = build_ours(name)
    assert_same(rounds(here, process, clients), rounds(local, process, clients))


def model_fn():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input([4]),
            tf.keras.layers.Dense(
                3, kernel_initializer=tf.keras.initializers.GlorotUniform(seed=3)
            ),
        ]
    )
    return tff.learning.models.from_keras_model(
        model,
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        input_spec=SPEC,
        metrics=[tf.keras.metrics.SparseCategoricalAccuracy()],
    )


def keras_clients(number=5):
    rng = np.random.default_rng(0)
    sizes = [12, 3, 7, 12, 1][:number]
    return [
        tf.data.Dataset.from_tensor_slices(
            collections.OrderedDict(
                x=rng.normal(size=(n, 4)).astype(np.float32),
                y=rng.integers(3, size=n).astype(np.int32),
            )
        ).batch(5)
        for n in sizes
    ]


LEARNING = tff.learning
TFFS_OWN = {
    "fed_avg": lambda: LEARNING.algorithms.build_weighted_fed_avg(model_fn, SGD),
    "fed_eval": lambda: LEARNING.algorithms.build_fed_eval(model_fn),
    "zeroing, clipping": lambda: LEARNING.algorithms.build_weighted_fed_avg(
        model_fn, SGD, model_aggregator=LEARNING.robust_aggregator()
    ),
    "compression": lambda: LEARNING.algorithms.build_weighted_fed_avg(
        model_fn, SGD, model_aggregator=LEARNING.compression_aggregator()
    ),
}


@pytest.mark.parametrize("name", TFFS_OWN)
def test_tffs_own_processes_with_keras_variables(name, local, here):
    """Their graphs own variables, and several clients are computed at once."""
    process = TFFS_OWN[name]()
    found = rounds(here, process, keras_clients(), 2)
    assert_same(found, rounds(local, process, keras_clients(), 2))


def test_differential_privacy_adds_its_noise(here):
    process = LEARNING.algorithms.build_unweighted_fed_avg(
        model_fn, SGD, model_aggregator=LEARNING.dp_aggregator(0.4, clients_per_round=5)
    )
    # Without it, the same round would give the same again.
    once, again = (rounds(here, process, keras_clients(), 1)[0] for _ in range(2))
    assert np.abs(once.trainable[0] - again.trainable[0]).max() > 0.01


def test_what_cannot_run_is_refused_by_name(here):
    secure = LEARNING.algorithms.build_weighted_fed_avg(
        model_fn,
        SGD,
        model_aggregator=LEARNING.secure_aggregator(zeroing=False, clipping=False),
    )

    @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
    def at_clients(x):
        return tff.federated_map(tff.tensorflow.computation(lambda v: v + 1), x)

    @tff.federated_computation
    def nobody():
        return tff.federated_sum(tff.federated_value(1, tff.CLIENTS))

    with in_context(here):
        state = secure.initialize()
        with pytest.raises(runtime.UnsupportedComputationError, match="federated_secure_sum"):
            secure.next(state, keras_clients())
        with pytest.raises(runtime.UnsupportedComputationError, match="values of clients"):
            at_clients([1, 2])
        with pytest.raises(runtime.UnsupportedComputationError, match="number of clients"):
            nobody()


def test_other_federated_computations(here):
    @tff.federated_computation(
        tff.FederatedType(np.float32, tff.CLIENTS), tff.FederatedType(np.float32, tff.SERVER)
    )
    def statistics(values, offset):
        at_clients = tff.federated_broadcast(offset)
        add = tff.tensorflow.computation(lambda a, b: a + b)
        shifted = tff.federated_map(add, (values, at_clients))
        return collections.OrderedDict(
            mean=tff.federated_mean(shifted), sum=tff.federated_sum(values), offset=offset
        )

    with in_context(here):
        assert statistics([1.0, 2.0, 6.0], 10.0) == {"mean": 13.0, "sum": 9.0, "offset": 10.0}
        assert statistics([4.0], 0.0)["mean"] == 4.0
        with pytest.raises(TypeError, match="does not match type float32"):
            statistics([np.zeros(3, np.float32)], 0.0)


def test_empty_cohort_keeps_the_weights(here):
    process = build_ours("fedavg")
    with in_context(here):
        state = process.initialize()
        after = process.next(state, []).state
        assert_same(process.get_model_weights(after), process.get_model_weights(state), rtol=0)


def test_train_model_runs_in_it(clients, tmp_path):
    process = build_ours("fedavg")
    element = process.next.type_signature.parameter[1].member

    class Iterator(tff.program.FederatedDataSourceIterator):
        federated_type = tff.FederatedType(element, tff.CLIENTS)

        @classmethod
        def from_bytes(cls, data):
            return cls()

        def to_bytes(self):
            return b""

        def select(self, k=None):
            return clients[:k]

    class Source(tff.program.FederatedDataSource):
        federated_type = Iterator.federated_type

        def iterator(self):
            return Iterator()

    class Keep(tff.program.ReleaseManager):
        def __init__(self):
            self.released = {}

        async def release(self, value, key):
            self.released[key] = await tff.program.materialize_value(value)

    weights, metrics = Keep(), Keep()

    with runtime.use("device", asynchronous=True):
        asyncio.run(
            tff.learning.programs.train_model(
                train_process=process,
                train_data_source=Source(),
                train_per_round_clients=5,
                train_total_rounds=3,
                program_state_manager=tff.program.FileProgramStateManager(str(tmp_path)),
                model_output_manager=weights,
                train_metrics_manager=metrics,
                evaluation_manager=None,
                evaluation_periodicity=1,
            )
        )
    with runtime.use("device"):
        expected = process.initialize()
        for _ in range(3):
            expected = process.next(expected, clients).state
        expected = process.get_model_weights(expected)
    (last,) = list(weights.released.values())[-1:]
    assert_same(last.global_model_weights.trainable, expected.trainable, rtol=0)
    assert {1, 2, 3} <= set(metrics.released)


def test_errors(here):
    @tff.tensorflow.computation(np.int32)
    def fail(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 3, message="too much")]):
            return tf.identity(x)

    with in_context(here):
        assert fail(1) == 1
        with pytest.raises(runtime.ComputationError, match="too much"):
            fail(5)
    with runtime.use("device"):
        context = tff.framework.get_context_stack().current
    with pytest.raises(runtime.ComputationError, match="has ended"):
        context.invoke(fail, 1)


@pytest.mark.parametrize(
    "options",
    [{"max_concurrent_clients": 0}, {"max_concurrent_clients": True}, {"require_gpu": 1}],
)
def test_bad_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        runtime.use("device", **options)
