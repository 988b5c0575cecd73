"""Whole rounds under Keras' mixed precision policies against the same rounds in float32."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import algorithms, augmentation, models
from tff_fedlabel.algorithms import METHODS
from tff_fedlabel.models import _stateless
from tff_fedlabel.training.memory import ClientMemory

L = tf.keras.layers
SHAPE = (8, 8, 1)
CLASSES = 3
# How far the weights may be off after the rounds, as a part of how far they moved. That holds as
# long as FedLabel makes the same choices: with the seeds below, no two experts are nearly as sure.
TOLERANCES = {"mixed_bfloat16": 0.02, "mixed_float16": 0.002}
# One of each client update: FedProx and its kin are those of other methods with a proximal term,
# which FedLabel has here, too. FixMatch differs from UDA in what it makes of the logits, which are
# in float32 under every policy. FedAvg's client is the labelled half of FedLabel's, step for step.
KINDS = {method.client_update: name for name, method in sorted(METHODS.items(), reverse=True)}
ALGORITHMS = sorted({*KINDS.values()} - {"fedavg", "fedavg_fixmatch"})


def small_cnn(gradient_factor=1.0):
    """A small smooth network, with the same weights under every policy.

    The factor stands before the gradients of the logits, and not before the logits.
    """
    initializers = iter(tf.keras.initializers.GlorotUniform(seed) for seed in range(2))
    # Each weight and each layer makes every graph larger, and tracing takes most of the time here.
    layers = [
        L.InputLayer(SHAPE),
        L.Conv2D(
            4,
            3,
            strides=2,
            activation="swish",
            use_bias=False,
            kernel_initializer=next(initializers),
        ),
        L.Flatten(),
        L.Dense(CLASSES, kernel_initializer=next(initializers)),
    ]
    if gradient_factor != 1.0:
        layers.append(
            L.Lambda(lambda x: tf.stop_gradient(x) + gradient_factor * (x - tf.stop_gradient(x)))
        )
    return tf.keras.Sequential(layers)


def client(seed, broken=False):
    """12 labelled and 12 unlabelled images of three patterns, in batches of 4."""
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(0).normal(size=(CLASSES, *SHAPE))
    y = rng.integers(0, CLASSES, 24).astype(np.int32)
    x = np.float32(patterns[y] + rng.normal(size=(24, *SHAPE)))
    if broken:
        x[0] = np.nan
    labeled, unlabeled = collections.OrderedDict(x=x[:12], y=y[:12]), {"x": x[12:]}
    return collections.OrderedDict(
        labeled=tf.data.Dataset.from_tensor_slices(labeled).batch(4),
        unlabeled=tf.data.Dataset.from_tensor_slices(collections.OrderedDict(unlabeled)).batch(4),
    )


class SpiedMean(tff.aggregators.WeightedAggregationFactory):
    """The weighted mean; remembers the type of the updates."""

    def create(self, value_type, weight_type):
        self.value_type = value_type
        return tff.aggregators.MeanFactory(no_nan_division=True).create(value_type, weight_type)


def model_of(policy, gradient_factor=1.0):
    before = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        return models.functional_model(
            functools.partial(small_cnn, gradient_factor), input_shape=SHAPE, input_dtype=tf.float32
        )
    finally:
        tf.keras.mixed_precision.set_global_policy(before)


model_once = functools.cache(model_of)


def build(policy, algorithm, learning_rate=0.1, gradient_factor=1.0):
    """Returns the process, the first weights, the type of the updates, and how memory begins."""
    # Models with another factor are made anew: a test changes how they are made.
    same = gradient_factor == 1.0
    model = model_once(policy) if same else model_of(policy, gradient_factor)
    # The proximal term is no part of what is scaled, so it must not grow with the learning rate.
    options = {"strong_augment": None, "weak_augment": None, "threshold": 0.0}
    options["proximal_strength"] = 0.02 / learning_rate
    # FedTriNet uses pseudo-labels in the last of three rounds.
    options |= {"warmup_rounds": 1, "ramp_start": 0, "ramp_end": 1}
    # FedMatch's own weights of the losses suit smaller learning rates.
    options |= {"lambda_s": 1.0, "lambda_l2": 0.1, "h_interval": 1}
    method = METHODS[algorithm]
    config_class = method.config_class
    known = config_class.__dataclass_fields__
    aggregator = SpiedMean()
    parts = (
        model,
        tff.learning.optimizers.build_sgdm(learning_rate),
        config_class(**{k: v for k, v in options.items() if k in known}),
    )
    tail = {} if method.aggregate else {"model_aggregator": aggregator}
    if method.server_training:
        tail["server_data"] = next(iter(client(14)["labeled"].unbatch().batch(12)))
    process = method(*parts, **tail)
    memory = algorithms.initial_memory(method, *parts)
    memory = memory and (memory, method.choose_helpers)
    value_type = () if method.aggregate else aggregator.value_type
    return process, model.initial_weights[0], value_type, memory


build_once = functools.cache(build)


@pytest.fixture(scope="module")
def in_float32(device_runtime):
    """Of a method and a number of rounds: what `train` gives in float32, once."""

    @functools.cache
    def trained(algorithm, rounds=3):
        return train(device_runtime, build_once("float32", algorithm), rounds=rounds)

    return trained


def train(where, built, *, rounds=3, broken=False):
    """Trains on two clients; returns how far the weights moved, and each round's metrics."""
    process, first_weights, value_type, initial_memory = built
    memory = None if initial_memory is None else ClientMemory(*initial_memory)
    metrics = []
    with where.installed():
        state = process.initialize()
        for round_num in range(rounds):
            cohort = [client(35), client(36)] + [client(13, broken=True)] * broken
            if memory is not None:
                cohort = [memory.attach(c, n, round_num) for n, c in enumerate(cohort)]
            output = process.next(state, cohort)
            state = output.state
            if memory is not None:
                memory.update(output.metrics["client_work"]["memory"])
            metrics.append(output.metrics["client_work"]["train"])
            metrics[-1].update(output.metrics["finalizer"].get("server_training", {}))
        weights = process.get_model_weights(state).trainable
    assert {part.dtype.type for part in value_type} <= {np.float32}
    assert {np.asarray(w).dtype.type for w in weights} == {np.float32}
    moved = [np.asarray(w) - w0 for w, w0 in zip(weights, first_weights, strict=True)]
    return np.concatenate([m.reshape(-1) for m in moved]), metrics


def distance(moved, expected):
    return np.linalg.norm(moved - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("algorithm", "where", "policy"),
    # A method does not know the policy, which is the model's; float16 is the harder one. TFF's
    # worker, of TensorFlow 2.14, has operations in 16 bits, too.
    [
        *((algorithm, "device_runtime", "mixed_float16") for algorithm in ALGORITHMS),
        ("fedlabel", "device_runtime", "mixed_bfloat16"),
        *(("fedlabel", "local_runtime", policy) for policy in TOLERANCES),
    ],
)
def test_every_algorithm_trains_as_in_float32(algorithm, where, policy, in_float32, request):
    other = request.getfixturevalue(where)
    moved, metrics = train(other, build_once(policy, algorithm))
    expected, expected_metrics = in_float32(algorithm)
    assert 0 < distance(moved, expected) < TOLERANCES[policy]
    losses = [m["labeled_loss"] for m in metrics]
    assert losses[-1] < 0.7 * losses[0]
    assert losses == pytest.approx([m["labeled_loss"] for m in expected_metrics], rel=0.02)
    assert sum(m["rejected_clients"] for m in metrics) == 0


def test_what_vanishes_in_float16_trains_with_loss_scaling(monkeypatch, device_runtime, in_float32):
    """With FedLabel, whose weights are off if its labelled or its unlabelled steps vanish."""
    # In float32 powers of two change no digit, so the step is that of the usual rate.
    expected, _ = in_float32("fedlabel", rounds=1)
    options = {"learning_rate": 0.1 * 2.0**20, "gradient_factor": 2.0**-20}
    moved, _ = train(device_runtime, build("mixed_float16", "fedlabel", **options), rounds=1)
    assert distance(moved, expected) < 0.01
    monkeypatch.setattr(_stateless, "with_loss_scaling", lambda function: function)
    unscaled, _ = train(device_runtime, build("mixed_float16", "fedlabel", **options), rounds=1)
    assert distance(unscaled, expected) > 0.1


def test_a_client_with_a_nan_counts_for_nothing_in_float16(device_runtime):
    built = build_once("mixed_float16", "fedlabel")
    expected, _ = train(device_runtime, built, rounds=1)
    moved, (metrics,) = train(device_runtime, built, rounds=1, broken=True)
    assert metrics["rejected_clients"] == 1
    np.testing.assert_array_equal(moved, expected)


def augmented(images):
    """What all operations and both augmentations make of images."""
    results = [augmentation.apply_operation(name, images, 11.0) for name in augmentation.OPERATIONS]
    for augment in (augmentation.RandAugment(), augmentation.WeakAugment()):
        results.append(augment(images, seed=(1, 2)))
    return results


def test_augmentation_does_not_heed_the_policy():
    bytes_ = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3))
    images = augmentation.to_float(tf.cast(bytes_, tf.uint8))
    expected = augmented(images)
    for policy in TOLERANCES:
        tf.keras.mixed_precision.set_global_policy(policy)
        try:
            found = augmented(images)
        finally:
            tf.keras.mixed_precision.set_global_policy("float32")
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == tf.float32
            np.testing.assert_array_equal(ours, theirs)
