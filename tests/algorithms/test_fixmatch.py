"""Whole rounds of FedAvg-FixMatch and FedProx-FixMatch through TFF against float64 NumPy."""

import dataclasses

import numpy as np
import paired_rounds as rounds
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import random_client
from numpy_reference import CLASSES
from paired_rounds import COHORT, VIEWS, check_rounds, run

from tff_fedlabel.algorithms import (
    FedAvgFixMatchConfig,
    FedProxFixMatchConfig,
    build_fedavg_fixmatch,
    fixmatch,
)
from tff_fedlabel.augmentation import RandAugment, WeakAugment

pytestmark = pytest.mark.usefixtures("device_runtime")

NAME = "fedavg_fixmatch"


def reference(threshold=0.6, **fields):
    """1[max q >= tau] CE(argmax q, p(A(u))) of the paper's equation 4."""
    return rounds.Reference(
        passes=lambda largest: largest >= threshold,
        target=lambda z: np.eye(CLASSES)[np.argmax(z)],
        distance=lambda t, p: -np.log(p[np.argmax(t)]),
        **{**VIEWS, **fields},
    )


def build(**config):
    """Built with hidden labels, so that one process serves most tests."""
    return rounds.build(NAME, threshold=0.6, tail={"diagnose": True}, **config)


def test_rounds_equal_numpy():
    metrics = check_rounds(reference(), build())
    assert 0.1 < metrics["kept_fraction"] < 0.9
    assert 0 < metrics["pseudo_label_accuracy"] < 1


def test_the_views_matter():
    """Each of the two, left out, would have moved the weights elsewhere."""
    expected, _ = reference().rounds([COHORT], rounds.start())
    for left_out in VIEWS:
        other, _ = reference(**{left_out: lambda x, *when: x}).rounds([COHORT], rounds.start())
        assert max(np.abs(a - b).max() for a, b in zip(expected, other, strict=True)) > 1e-3


def test_labelled_images_apart_another_weight_and_the_other_loop():
    loop = {"loop_implementation": tff.learning.LoopImplementation.DATASET_REDUCE}
    config = {"include_labeled": False, "unlabeled_weight": 2.5}
    check_rounds(reference(**config), rounds.build(NAME, threshold=0.6, tail=loop, **config))


def test_fedprox_with_all_images_computed():
    """An image with a NaN is in no pseudo-label and does no harm, though it is computed."""
    config = {"threshold": 0.6, "proximal_strength": 0.7, "skip_discarded": False}
    process = rounds.build("fedprox_fixmatch", **config)
    check_rounds(reference(proximal_strength=0.7), process)
    with np.errstate(invalid="ignore"):
        check_rounds(reference(proximal_strength=0.7), process, [rounds.spoiled_cohort()])


@pytest.mark.parametrize("client", [(0, 9), (9, 0)])
def test_clients_alone_without_one_part(client):
    check_rounds(reference(), build(), [[random_client(7, *client)]])


def test_a_cohort_with_nothing_changes_nothing():
    actual, metrics = run(build(), [[random_client(4, 0, 0)]], rounds.hidden_labels)
    for a, b in zip(actual, rounds.start(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert metrics["images_used"] == metrics["unlabeled_loss"] == 0.0


def test_a_client_with_a_nan_counts_for_nothing():
    rounds.check_broken_clients(build())


def test_a_discarded_image_that_is_not_finite_does_no_harm():
    with np.errstate(invalid="ignore"):
        check_rounds(reference(), build(), [rounds.spoiled_cohort()])


def test_hidden_labels_cannot_change_the_update():
    rounds.check_hidden_labels(rounds.build(NAME, threshold=0.6), build())


def test_views_have_seeds_of_their_own():
    weak, strong = rounds.shifted(40), rounds.shifted(50)
    process = rounds.build(NAME, threshold=0.6, seed=2, strong_augment=strong, weak_augment=weak)
    rounds.check_seeds(reference(), process, 2)


def test_a_probability_equal_to_the_threshold_is_kept():
    logits = tf.constant([[0.0, 0.0, -200.0], [0.0, 3.0, -200.0]] * 9)
    above = float(np.nextafter(np.float32(0.5), np.float32(1)))
    for threshold, expected in ((0.5, [True, True]), (above, [False, True])):
        mask, labels = fixmatch.pseudo_label(FedAvgFixMatchConfig(threshold=threshold), logits)
        np.testing.assert_array_equal(mask, expected * 9)
        np.testing.assert_array_equal(labels, [0, 1] * 9)


def test_without_augmentation_and_a_model_with_metrics():
    """The metric would be spoiled by a batch of 0 images: the sum of the batches' mean labels."""

    def update(state, labels, batch_output, sample_weight=None):
        label = tf.cast(labels, tf.float32)
        return [state[0] + tf.reduce_mean(label), state[1] + batch_output.loss]

    model = rounds.strict_model(
        (lambda: [0.0, 0.0], update, lambda state: {"labels": state[0], "losses": state[1]})
    )
    config = FedAvgFixMatchConfig(threshold=0.6, strong_augment=None, weak_augment=None)
    process = build_fedavg_fixmatch(model, rounds.sgd(0.3), config)
    same = lambda x, *when: x  # noqa: E731
    metrics = check_rounds(reference(strong=same, weak=same), process, [COHORT])
    means = [y.mean() for labeled, _ in COHORT for _, y in labeled]
    assert metrics["labels"] == pytest.approx(sum(means), rel=1e-5)
    assert np.isfinite(metrics["losses"]) and metrics["losses"] > 0


def test_defaults_are_the_papers():
    config = FedProxFixMatchConfig()
    assert (config.threshold, config.unlabeled_weight, config.include_labeled) == (0.95, 1.0, True)
    assert config.weak_augment == WeakAugment(flip=True, max_shift=4)
    assert isinstance(config.strong_augment, RandAugment) and config.strong_augment.num_ops == 2
    assert not hasattr(FedAvgFixMatchConfig(), "proximal_strength")


@pytest.mark.parametrize(
    "field,value",
    [
        ("threshold", 1.5),
        ("unlabeled_weight", 0.0),
        ("include_labeled", 1),
        ("strong_augment", "randaugment"),
        ("weak_augment", 3),
        ("skip_discarded", None),
        ("seed", -1),
        ("proximal_strength", -1.0),
    ],
)
def test_bad_configuration_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"^{field} "):
        FedProxFixMatchConfig(**{field: value})


def test_configurations_are_checked_and_plain():
    config = dataclasses.replace(FedProxFixMatchConfig(), threshold=np.float32(0.5))
    assert type(config.threshold) is float
