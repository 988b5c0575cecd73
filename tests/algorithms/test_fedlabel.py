"""Whole FedLabel rounds through TFF against float64 NumPy."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_client, to_tff
from numpy_reference import CLASSES, Reference
from weights import TOLERANCE, assert_weights_close, assert_weights_equal

from tff_fedlabel.algorithms import FedAvgConfig, FedLabelConfig, build_fedlabel
from tff_fedlabel.augmentation import step_seed

sgd = tff.learning.optimizers.build_sgdm
pytestmark = pytest.mark.usefixtures("device_runtime")


def build(weights, client_optimizer=None, tail=None, **config):
    config.setdefault("strong_augment", None)
    return build_fedlabel(
        build_model(weights),
        client_optimizer or sgd(0.3),
        FedLabelConfig(**config),
        **(tail or {}),
    )


def run(process, cohorts, hidden=None):
    """Runs one round per cohort; returns the weights and the metrics of the last round."""
    state = process.initialize()
    for cohort in cohorts:
        output = process.next(state, [to_tff(client, hidden) for client in cohort])
        state = output.state
    weights = process.get_model_weights(state).trainable
    return [np.asarray(w) for w in weights], output.metrics["client_work"]["train"]


def check_rounds(reference, cohorts, weights=None, **build_arguments):
    weights = initial_weights() if weights is None else weights
    actual, metrics = run(build(weights, **build_arguments), cohorts)
    expected = [np.asarray(np.float32(w), np.float64) for w in weights]
    for cohort in cohorts:
        expected, used = reference.round(expected, cohort)
    assert_weights_close(actual, expected)
    assert metrics["images_used"] == sum(used)
    # The reference itself moved, or the comparison would say nothing.
    assert max(np.abs(e - w).max() for e, w in zip(expected, weights, strict=True)) > 1e-2
    return metrics


COHORT = [random_client(1), random_client(2, labeled=3, unlabeled=9), random_client(3, 8, 5)]
TWO_ROUNDS = [COHORT, [random_client(4), random_client(5, 5, 20)]]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"consistency_weight": 0.0},
        {"consistency_weight": 3.0},
        {"confidence": "entropy"},
        {"confidence_input": "logits"},
        {"selection": "local"},
        {"selection": "global"},
        {"proximal_strength": 0.7},
        {"threshold": 0.0},
        {"threshold": 0.8},
    ],
    ids=str,
)
def test_rounds_equal_numpy(config):
    check_rounds(Reference(**config), TWO_ROUNDS, **config)


@pytest.mark.parametrize("loop", list(tff.learning.LoopImplementation))
@pytest.mark.parametrize("skip", [True, False])
def test_loops_and_skipping_do_not_change_the_result(loop, skip):
    metrics = check_rounds(
        Reference(threshold=0.6),
        TWO_ROUNDS,
        threshold=0.6,
        skip_discarded=skip,
        tail={"loop_implementation": loop},
    )
    assert 0 < metrics["kept_fraction"] < 1


def negative(images, *, seed):
    del seed
    return 1.0 - images


@pytest.mark.parametrize("pseudo_label_view", ["original", "augmented"])
@pytest.mark.parametrize("consistency_view", ["original", "augmented"])
def test_views(pseudo_label_view, consistency_view):
    views = {"pseudo_label_view": pseudo_label_view, "consistency_view": consistency_view}
    check_rounds(
        Reference(augment=lambda x, step: 1.0 - x, **views),
        TWO_ROUNDS,
        strong_augment=negative,
        **views,
    )


def test_augmentation_is_told_seed_round_and_step():
    """What is added depends on the seed, so another one would move the student elsewhere."""

    def shifted(images, *, seed):
        return images + tf.cast(seed[0] % 7 - seed[1] % 5, tf.float32) / 50

    actual, _ = run(build(initial_weights(), strong_augment=shifted, seed=2), TWO_ROUNDS)
    expected = [np.float64(np.float32(w)) for w in initial_weights()]
    shifts = []
    for round_num, cohort in enumerate(TWO_ROUNDS):

        def augment(x, step, round_num=round_num):
            seed = np.asarray(step_seed(2, round_num, step))
            shifts.append((seed[0] % 7 - seed[1] % 5) / 50)
            return x + shifts[-1]

        expected, _ = Reference(augment=augment).round(expected, cohort)
    assert len(set(shifts)) > 3
    assert_weights_close(actual, expected)


def test_each_phase_starts_with_fresh_optimizer_state():
    check_rounds(
        Reference(lr=0.1, lr_momentum=0.9), TWO_ROUNDS, client_optimizer=sgd(0.1, momentum=0.9)
    )


def test_nothing_above_the_threshold():
    metrics = check_rounds(Reference(threshold=1.0), [COHORT], threshold=1.0)
    assert metrics["kept_fraction"] == 0.0
    assert metrics["images_used"] == 11 + 3 + 8


@pytest.mark.parametrize("labeled,unlabeled", [(0, 9), (9, 0), (0, 0)])
def test_clients_without_one_part(labeled, unlabeled):
    check_rounds(Reference(), [[random_client(7, labeled, unlabeled), *COHORT]])


def test_only_unlabeled_images():
    check_rounds(Reference(threshold=0.4), [[random_client(8, 0, 12)]], threshold=0.4)


@pytest.mark.parametrize("aggregator", ["default", "mean", "clipping", "dp"])
@pytest.mark.parametrize("weighting", list(tff.learning.ClientWeighting))
def test_cohort_that_used_nothing_changes_nothing(aggregator, weighting):
    """Also after the server optimizer has gathered momentum, and for stateful aggregators."""
    factory = {
        "default": lambda: None,
        "mean": tff.aggregators.MeanFactory,
        "clipping": lambda: tff.learning.robust_aggregator(),
        "dp": lambda: tff.aggregators.as_weighted_aggregator(
            tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(0.5, 3.0, 1.0)
        ),
    }[aggregator]()
    if aggregator == "dp" and weighting is tff.learning.ClientWeighting.NUM_EXAMPLES:
        pytest.skip("differential privacy weighs all clients alike")
    process = build(
        initial_weights(),
        threshold=1.0,
        tail={
            "server_optimizer": sgd(1.0, momentum=0.9),
            "model_aggregator": factory,
            "client_weighting": weighting,
        },
    )
    before = process.next(process.initialize(), [to_tff(c) for c in COHORT]).state
    nothing = [random_client(9, 0, 0), random_client(10, 0, 7)]
    output = process.next(before, [to_tff(c) for c in nothing])
    after = output.state
    assert output.metrics["client_work"]["train"]["images_used"] == 0.0
    for kept in ("global_model_weights", "finalizer", "aggregator"):
        old = tf.nest.flatten(getattr(before, kept))
        new = tf.nest.flatten(getattr(after, kept))
        assert len(old) == len(new)
        for o, n in zip(old, new, strict=True):
            np.testing.assert_array_equal(o, n)
    assert after.client_work["round_num"] == before.client_work["round_num"] + 1


def test_client_with_nan_update_counts_for_nothing():
    broken = random_client(11)
    broken[0][0][0][0, 0, 0, 0] = np.nan
    weights = initial_weights()
    actual, metrics = run(build(weights), [[broken, *COHORT]])
    expected, used = Reference().round([np.float64(np.float32(w)) for w in weights], COHORT)
    assert_weights_close(actual, expected)
    assert metrics["rejected_clients"] == 1.0
    assert metrics["images_used"] == sum(used)
    assert np.isfinite(metrics["labeled_loss"])


def test_client_whose_weighted_update_overflows_counts_for_nothing():
    """Its update is finite, but r_k times it is not: added up it would void everybody's."""
    huge = random_client(11, 8, 0)
    for x, _ in huge[0]:
        x *= 1e38
    weights = initial_weights()
    actual, metrics = run(build(weights), [[huge, *COHORT]])
    expected, used = Reference().round([np.float64(np.float32(w)) for w in weights], COHORT)
    assert_weights_close(actual, expected)
    assert metrics["rejected_clients"] == 1.0
    assert metrics["images_used"] == sum(used)


def test_clients_whose_updates_overflow_in_the_sum_count_for_nothing():
    """Each update is finite, also weighted, but the sum of them is not."""
    huge = random_client(11, 8, 0)
    for x, _ in huge[0]:
        x *= 5e37
    weights = initial_weights()
    alone, _ = Reference().client([np.float64(np.float32(w)) for w in weights], huge[0], [])
    largest = max(np.abs(8 * d).max() for d in alone)
    assert largest < np.finfo(np.float32).max < 16 * largest
    actual, metrics = run(build(weights), [[*[huge] * 16, *COHORT]])
    expected, used = Reference().round([np.float64(np.float32(w)) for w in weights], COHORT)
    assert_weights_close(actual, expected)
    assert metrics["rejected_clients"] == 16.0
    assert metrics["images_used"] == sum(used)


@pytest.mark.parametrize("skip", [True, False])
def test_discarded_image_that_is_not_finite_does_no_harm(skip):
    """Its prediction is a NaN, so no label is kept; the others count as without it, but for 1/b."""
    client = random_client(12, 8, 8)
    client[1][0][2] = np.nan
    weights = initial_weights()
    actual, metrics = run(build(weights, skip_discarded=skip), [[client]])
    expected, used = Reference().round([np.float64(np.float32(w)) for w in weights], [client])
    assert_weights_close(actual, expected)
    assert metrics["rejected_clients"] == 0.0
    assert metrics["images_used"] == sum(used)


def test_cohort_of_only_nan_clients_changes_nothing():
    broken = random_client(11)
    broken[0][0][0][0, 0, 0, 0] = np.inf
    weights = initial_weights()
    actual, metrics = run(build(weights), [[broken]])
    assert_weights_equal(actual, [np.float32(w) for w in weights])
    assert metrics["rejected_clients"] == 1.0


def test_flat_experts_keep_no_consistency():
    """Zero weights make both experts flat; above beta = .2 the label is class 0, the ratio 0."""
    zeros = [np.zeros_like(w) for w in initial_weights()]
    client = random_client(12, 0, 8)
    metrics = check_rounds(
        Reference(threshold=0.2, consistency_weight=5.0),
        [[client]],
        weights=zeros,
        threshold=0.2,
        consistency_weight=5.0,
    )
    assert metrics["consistency_weight"] == 0.0
    assert metrics["agreement_fraction"] == 1.0


def test_probability_equal_to_the_threshold_is_not_kept():
    """With logits (0, 0, -inf-like) the largest probability is exactly one half."""
    weights = [np.zeros((4, CLASSES)), np.array([0.0, 0.0, -200.0])]
    client = random_client(13, 0, 8)
    just_below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    _, at = run(build(weights, threshold=0.5), [[client]])
    _, below = run(build(weights, threshold=just_below), [[client]])
    assert at["images_used"] == 0.0
    assert below["images_used"] == 8.0


def test_uniform_weighting_is_the_mean_of_the_contributing_clients():
    weights = [np.float64(np.float32(w)) for w in initial_weights()]
    nobody = random_client(14, 0, 0)
    actual, _ = run(
        build(weights, tail={"client_weighting": tff.learning.ClientWeighting.UNIFORM}),
        [[*COHORT, nobody]],
    )
    deltas = [Reference().client(weights, *client)[0] for client in COHORT]
    for i, a in enumerate(actual):
        expected = weights[i] + np.mean([d[i] for d in deltas], axis=0)
        np.testing.assert_allclose(a, expected, atol=TOLERANCE, rtol=0)


def test_hidden_labels_cannot_change_the_update():
    process = build(initial_weights(), tail={"diagnose": True})
    rng = np.random.default_rng(0)
    results = [
        run(process, TWO_ROUNDS, hidden)
        for hidden in (lambda n: np.zeros(n), lambda n: rng.integers(CLASSES, size=n))
    ]
    plain, plain_metrics = run(build(initial_weights()), TWO_ROUNDS)
    for weights, _ in results:
        assert_weights_equal(weights, plain)
    assert results[0][1]["pseudo_label_accuracy"] != results[1][1]["pseudo_label_accuracy"]
    assert "pseudo_label_accuracy" not in plain_metrics


def test_metrics_count_what_happened():
    client = random_client(15, 6, 13)
    weights = [np.float64(np.float32(w)) for w in initial_weights()]
    process = build(initial_weights(), threshold=0.6, tail={"diagnose": True})
    _, metrics = run(process, [[client]], hidden=lambda n: np.ones(n))

    reference = Reference(threshold=0.6)
    local, images = weights, 0
    delta, used = reference.client(weights, client[0], [])
    local = [w + d for w, d in zip(weights, delta, strict=True)]
    kept = chose_local = agrees = correct = 0
    ratios = []
    for x in np.concatenate(client[1]):
        logits = [x.reshape(-1) @ w[0] + w[1] for w in (weights, local)]
        label, mask, other, ratio = reference.choose(*logits)
        images += 1
        kept += mask
        chose_local += reference.h(logits[1]) >= reference.h(logits[0])
        agrees += np.argmax(other) == label
        correct += mask and label == 1
        ratios += [ratio * (np.argmax(other) == label)] * int(mask)
    assert metrics["kept_fraction"] == pytest.approx(kept / images)
    assert metrics["local_fraction"] == pytest.approx(chose_local / images)
    assert metrics["agreement_fraction"] == pytest.approx(agrees / images)
    assert metrics["pseudo_label_accuracy"] == pytest.approx(correct / kept)
    assert metrics["consistency_weight"] == pytest.approx(np.mean(ratios), abs=1e-5)
    assert metrics["images_used"] == used + kept


def test_learning_rate_can_be_scheduled_through_hparams():
    process = build(initial_weights())
    state = process.initialize()
    hparams = process.get_hparams(state)
    assert hparams["client_work"]["learning_rate"] == pytest.approx(0.3)
    hparams["client_work"]["learning_rate"] = 0.05
    state = process.set_hparams(state, hparams)
    output = process.next(state, [to_tff(c) for c in COHORT])
    expected, _ = Reference(lr=0.05).round(
        [np.float64(np.float32(w)) for w in initial_weights()], COHORT
    )
    assert_weights_close(process.get_model_weights(output.state).trainable, expected)


@pytest.mark.parametrize(
    "field,value",
    [
        ("threshold", 1.5),
        ("threshold", "high"),
        ("consistency_weight", -1.0),
        ("proximal_strength", float("nan")),
        ("confidence", "certainty"),
        ("confidence_input", "features"),
        ("selection", "both"),
        ("pseudo_label_view", "weak"),
        ("consistency_view", "weak"),
        ("strong_augment", "randaugment"),
        ("seed", -1),
        ("seed", 1.5),
    ],
)
def test_bad_configuration_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"^{field} "):
        FedLabelConfig(**{field: value})


def test_entropy_of_logits_is_refused():
    with pytest.raises(ValueError, match="confidence_input='logits'"):
        FedLabelConfig(confidence="entropy", confidence_input="logits")


def test_wrong_arguments_are_named():
    model, config = build_model(initial_weights()), FedLabelConfig(strong_augment=None)
    with pytest.raises(ValueError, match="^model must be"):
        build_fedlabel(lambda: None, sgd(0.1), config)
    with pytest.raises(ValueError, match="^client_optimizer must be"):
        build_fedlabel(model, tf.keras.optimizers.SGD(), config)
    with pytest.raises(ValueError, match="^config must be a FedLabelConfig"):
        build_fedlabel(model, sgd(0.1), FedAvgConfig())
    with pytest.raises(ValueError, match="^loop_implementation must be"):
        build_fedlabel(model, sgd(0.1), config, loop_implementation="iterator")
    with pytest.raises(ValueError, match="^model_aggregator must be"):
        build_fedlabel(
            model, sgd(0.1), config, model_aggregator=tff.aggregators.UnweightedMeanFactory()
        )


def flat_model(dtype):
    """Flat features, an input_spec that is a pair, logits of `dtype`."""
    kernel, bias = (w.astype(dtype.as_numpy_dtype) for w in initial_weights())

    @tf.function
    def predict(model_weights, x, training=True):
        del training
        kernel, bias = model_weights[0]
        return tf.cast(x, dtype) @ kernel + bias

    def loss(output, label, sample_weight=None):
        del sample_weight
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=output)
        )

    return tff.learning.models.FunctionalModel(
        initial_weights=((kernel, bias), ()),
        predict_on_batch_fn=predict,
        loss_fn=loss,
        input_spec=(tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int32)),
    )


def flat_data(client):
    return tf.nest.map_structure(
        lambda d: d.map(lambda e: {**e, "x": tf.reshape(e["x"], [-1, 4])}), to_tff(client)
    )


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_flat_inputs_other_dtypes_and_an_augmentation_of_ones_own(dtype):
    process = build_fedlabel(flat_model(dtype), sgd(0.3), FedLabelConfig(strong_augment=negative))
    state = process.initialize()
    output = process.next(state, [flat_data(c) for c in COHORT])
    weights = [np.float64(w.astype(dtype.as_numpy_dtype)) for w in initial_weights()]
    expected, _ = Reference(augment=lambda x, step: 1.0 - x).round(weights, COHORT)
    actual = process.get_model_weights(output.state).trainable
    assert_weights_close(actual, expected)


def test_randaugment_is_refused_for_inputs_that_are_no_images():
    with pytest.raises(ValueError, match="^strong_augment"):
        build_fedlabel(flat_model(tf.float32), sgd(0.3))


def test_labels_of_a_column_are_labels():
    """Hidden labels of shape [batch, 1], as Keras data sets have them."""
    process = build(initial_weights(), threshold=0.3, tail={"diagnose": True})
    _, metrics = run(process, [COHORT], hidden=np.ones)
    model = build_model(initial_weights())
    in_columns = tff.learning.models.FunctionalModel(
        initial_weights=model.initial_weights,
        predict_on_batch_fn=model.predict_on_batch,
        loss_fn=lambda output, label, sample_weight=None: model.loss(
            output=output, label=tf.reshape(label, [-1])
        ),
        input_spec={"x": model.input_spec["x"], "y": tf.TensorSpec([None, 1], tf.int32)},
    )
    process = build_fedlabel(
        in_columns, sgd(0.3), FedLabelConfig(strong_augment=None, threshold=0.3), diagnose=True
    )

    def with_columns(client):
        data = to_tff(client, np.ones)
        return tf.nest.map_structure(
            lambda d: d.map(lambda e: {**e, "y": e["y"][:, tf.newaxis]}), data
        )

    output = process.next(process.initialize(), [with_columns(c) for c in COHORT])
    found = output.metrics["client_work"]["train"]["pseudo_label_accuracy"]
    assert 0 < found == metrics["pseudo_label_accuracy"]


@pytest.mark.parametrize("skip", [True, False])
def test_inputs_of_several_tensors(skip):
    """The features in two parts of a dictionary: the same as in one."""
    one = build_model(initial_weights())

    def joined(x):
        return tf.concat([x["first"], x["second"]], axis=1)

    def predict(weights, x, training=True):
        return one.predict_on_batch(weights, joined(x), training=training)

    half = tf.TensorSpec([None, 1, 2, 1], tf.float32)
    model = tff.learning.models.FunctionalModel(
        initial_weights=one.initial_weights,
        predict_on_batch_fn=tf.function(predict),
        loss_fn=one.loss,
        input_spec={
            "x": {"first": half, "second": half},
            "y": tf.TensorSpec([None], tf.int32),
        },
    )

    def in_two(element):
        x = element["x"]
        return {**element, "x": {"first": x[:, :1], "second": x[:, 1:]}}

    config = FedLabelConfig(strong_augment=None, skip_discarded=skip)
    process = build_fedlabel(model, sgd(0.3), config)
    data = [tf.nest.map_structure(lambda d: d.map(in_two), to_tff(c)) for c in COHORT]
    output = process.next(process.initialize(), data)
    expected, _ = Reference().round([np.float64(np.float32(w)) for w in initial_weights()], COHORT)
    assert_weights_close(process.get_model_weights(output.state).trainable, expected)
    with pytest.raises(ValueError, match="strong_augment needs a model whose input is one tensor"):
        build_fedlabel(model, sgd(0.3))
