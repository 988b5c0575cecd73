"""Whole FedLabel rounds through TFF against float64 NumPy."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from fedlabel_rounds import COHORT, TWO_ROUNDS, build, check_rounds, negative, run, start
from linear_model import random_client, to_tff
from numpy_reference import CLASSES, Reference
from weights import TOLERANCE, assert_weights_close, assert_weights_equal

from tff_fedlabel.augmentation import step_seed

pytestmark = pytest.mark.usefixtures("device_runtime")


REDUCE = tff.learning.LoopImplementation.DATASET_REDUCE
IN_NEGATIVE = {"strong_augment": "negative"}


# A process takes seconds to build and compile, so options that do not depend on each other share
# one; each loop comes with and without skipping, and so do the two views in all their values.
@pytest.mark.parametrize(
    "config,loop",
    [
        ({}, None),
        (
            {
                **IN_NEGATIVE,
                "proximal_strength": 0.7,
                "threshold": 0.8,
                "confidence_input": "logits",
            },
            REDUCE,
        ),
        ({"skip_discarded": False, "consistency_weight": 3.0, "confidence": "entropy"}, None),
        ({"skip_discarded": False, "consistency_weight": 0.0}, REDUCE),
        ({**IN_NEGATIVE, "selection": "local", "pseudo_label_view": "augmented"}, None),
        ({**IN_NEGATIVE, "selection": "global", "consistency_view": "augmented"}, None),
        (
            {
                **IN_NEGATIVE,
                "threshold": 0.0,
                "pseudo_label_view": "augmented",
                "consistency_view": "augmented",
            },
            None,
        ),
    ],
    ids=str,
)
def test_rounds_equal_numpy(config, loop):
    options = {name: value for name, value in config.items() if name != "skip_discarded"}
    if options.pop("strong_augment", None):
        config = {**config, "strong_augment": negative}
        options["augment"] = lambda x, step: 1.0 - x
    reference = Reference(**options)
    expected = numpy_rounds(reference)
    for name in options:
        without = dataclasses.replace(reference, **{name: getattr(Reference, name)})
        off = [np.abs(a - b).max() for a, b in zip(numpy_rounds(without), expected, strict=True)]
        assert max(off) > 10 * TOLERANCE, f"{name} would not be missed"
    tail = {} if loop is None else {"tail": {"loop_implementation": loop}}
    metrics = check_rounds(reference, TWO_ROUNDS, **config, **tail)
    assert 0 < metrics["kept_fraction"] <= (1 if config.get("threshold") == 0.0 else 1 - 1e-6)


def numpy_rounds(reference):
    weights = start()
    for cohort in TWO_ROUNDS:
        weights, _ = reference.round(weights, cohort)
    return weights


def test_augmentation_is_told_seed_round_and_step():
    """What is added depends on the seed, so another one would move the student elsewhere."""

    def shifted(images, *, seed):
        return images + tf.cast(seed[0] % 7 - seed[1] % 5, tf.float32) / 50

    actual, _ = run(build(strong_augment=shifted, seed=2), TWO_ROUNDS)
    expected = start()
    shifts = []
    for round_num, cohort in enumerate(TWO_ROUNDS):

        def augment(x, step, round_num=round_num):
            seed = np.asarray(step_seed(2, round_num, step))
            shifts.append((seed[0] % 7 - seed[1] % 5) / 50)
            return x + shifts[-1]

        expected, _ = Reference(augment=augment).round(expected, cohort)
    assert len(set(shifts)) > 3
    assert_weights_close(actual, expected)


# Of the two tests that follow.
WITH_MOMENTUM = {
    "learning_rate": 0.1,
    "momentum": 0.9,
    "tail": {"client_weighting": tff.learning.ClientWeighting.UNIFORM},
}


def test_each_phase_starts_with_fresh_optimizer_state():
    # One client a round, which gets the whole weight whatever the weighting.
    check_rounds(Reference(lr=0.1, lr_momentum=0.9), [COHORT[:1], COHORT[1:2]], **WITH_MOMENTUM)


def test_uniform_weighting_is_the_mean_of_the_contributing_clients():
    weights = start()
    nobody = random_client(14, 0, 0)
    actual, _ = run(build(**WITH_MOMENTUM), [[*COHORT, nobody]])
    reference = Reference(lr=0.1, lr_momentum=0.9)
    deltas = [reference.client(weights, *client)[0] for client in COHORT]
    for i, a in enumerate(actual):
        expected = weights[i] + np.mean([d[i] for d in deltas], axis=0)
        np.testing.assert_allclose(a, expected, atol=TOLERANCE, rtol=0)


def test_hidden_labels_cannot_change_the_update():
    process = build(tail={"diagnose": True})
    rng = np.random.default_rng(0)
    results = [
        run(process, TWO_ROUNDS, hidden)
        for hidden in (lambda n: np.zeros(n), lambda n: rng.integers(CLASSES, size=n))
    ]
    plain, plain_metrics = run(build(), TWO_ROUNDS)
    for weights, _ in results:
        assert_weights_equal(weights, plain)
    assert results[0][1]["pseudo_label_accuracy"] != results[1][1]["pseudo_label_accuracy"]
    assert "pseudo_label_accuracy" not in plain_metrics


def test_metrics_count_what_happened():
    client = random_client(15, 6, 13)
    weights = start()
    process = build(tail={"diagnose": True})
    _, metrics = run(process, [[client]], hidden=lambda n: np.zeros(n))

    reference = Reference()
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
        correct += mask and label == 0
        ratios += [ratio * (np.argmax(other) == label)] * int(mask)
    assert 0 < correct < kept < images and 0 < chose_local < images and 0 < agrees < images
    assert metrics["kept_fraction"] == pytest.approx(kept / images)
    assert metrics["local_fraction"] == pytest.approx(chose_local / images)
    assert metrics["agreement_fraction"] == pytest.approx(agrees / images)
    assert metrics["pseudo_label_accuracy"] == pytest.approx(correct / kept)
    assert metrics["consistency_weight"] == pytest.approx(np.mean(ratios), abs=1e-5)
    assert metrics["images_used"] == used + kept


def test_learning_rate_can_be_scheduled_through_hparams():
    process = build()
    state = process.initialize()
    hparams = process.get_hparams(state)
    assert hparams["client_work"]["learning_rate"] == pytest.approx(0.3)
    hparams["client_work"]["learning_rate"] = 0.05
    state = process.set_hparams(state, hparams)
    output = process.next(state, [to_tff(c) for c in COHORT])
    expected, _ = Reference(lr=0.05).round(start(), COHORT)
    assert_weights_close(process.get_model_weights(output.state).trainable, expected)
