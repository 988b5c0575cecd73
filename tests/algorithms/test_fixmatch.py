"""Whole rounds of FedAvg-FixMatch and FedProx-FixMatch through TFF against float64 NumPy."""

import dataclasses

import numpy as np
import paired_rounds as rounds
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import random_client, to_tff
from numpy_reference import CLASSES
from paired_rounds import COHORT, VIEWS, build, check_rounds, run

from tff_fedlabel.algorithms import (
    FedAvgFixMatchConfig,
    FedProxFixMatchConfig,
    build_fedavg_fixmatch,
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


@pytest.mark.parametrize(
    "config",
    [{}, {"include_labeled": False}, {"unlabeled_weight": 2.5}, {"skip_discarded": False}],
    ids=str,
)
def test_rounds_equal_numpy(config):
    known = {name: value for name, value in config.items() if name != "skip_discarded"}
    metrics = check_rounds(
        reference(**known), build(NAME, threshold=0.6, tail={"diagnose": True}, **config)
    )
    assert 0.1 < metrics["kept_fraction"] < 0.9
    assert 0 < metrics["pseudo_label_accuracy"] < 1


def test_without_augmentation():
    same = lambda x, *when: x  # noqa: E731
    process = build(NAME, threshold=0.6, strong_augment=None, weak_augment=None)
    check_rounds(reference(strong=same, weak=same), process)


def test_the_views_matter():
    """Each of the two views, left out, would have moved the weights elsewhere."""
    expected, _ = reference().rounds([COHORT], rounds.start())
    for left_out in VIEWS:
        other, _ = reference(**{left_out: lambda x, *when: x}).rounds([COHORT], rounds.start())
        assert max(np.abs(a - b).max() for a, b in zip(expected, other, strict=True)) > 1e-3


def test_fedprox():
    process = build("fedprox_fixmatch", threshold=0.6, proximal_strength=0.7)
    check_rounds(reference(proximal_strength=0.7), process)


def test_the_other_loop():
    loop = tff.learning.LoopImplementation.DATASET_REDUCE
    check_rounds(reference(), build(NAME, threshold=0.6, tail={"loop_implementation": loop}))


@pytest.mark.parametrize("client", [(0, 9), (9, 0)])
def test_clients_alone_without_one_part(client):
    check_rounds(reference(), build(NAME, threshold=0.6), [[random_client(7, *client)]])


def test_a_cohort_with_nothing_changes_nothing():
    actual, metrics = run(build(NAME, threshold=0.6), [[random_client(4, 0, 0)]])
    for a, b in zip(actual, rounds.start(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert metrics["images_used"] == metrics["unlabeled_loss"] == 0.0


def test_a_client_with_a_nan_counts_for_nothing():
    rounds.check_broken_clients(build(NAME, threshold=0.6))


@pytest.mark.parametrize("skip", [True, False])
def test_a_discarded_image_that_is_not_finite_does_no_harm(skip):
    process = build(NAME, threshold=0.6, tail={"diagnose": True}, skip_discarded=skip)
    with np.errstate(invalid="ignore"):
        check_rounds(reference(), process, [rounds.spoiled_cohort()])


def test_hidden_labels_cannot_change_the_update():
    tail = {"diagnose": True}
    rounds.check_hidden_labels(build(NAME, threshold=0.6), build(NAME, threshold=0.6, tail=tail))


def test_views_have_seeds_of_their_own():
    weak, strong = rounds.shifted(40), rounds.shifted(50)
    process = build(NAME, threshold=0.6, seed=2, strong_augment=strong, weak_augment=weak)
    rounds.check_seeds(reference(), process, 2)


def test_a_probability_equal_to_the_threshold_is_kept():
    """With logits (0, 0, -inf-like) the largest probability is exactly one half."""
    weights = [np.zeros((4, CLASSES)), np.array([0.0, 0.0, -200.0])]
    client = random_client(13, 0, 8)
    above = float(np.nextafter(np.float32(0.5), np.float32(1)))
    _, at = run(build(NAME, threshold=0.5), [[client]], weights=weights)
    _, higher = run(build(NAME, threshold=above), [[client]], weights=weights)
    assert at["images_used"] == 8.0
    assert higher["images_used"] == 0.0


def test_the_models_own_metrics_pass_over_steps_without_labels():
    """A metric that would be spoiled by a batch of 0 images: the sum of the batches' means."""

    def update(state, labels, batch_output, sample_weight=None):
        label = tf.cast(labels, tf.float32)
        return [state[0] + tf.reduce_mean(label), state[1] + batch_output.loss]

    model = rounds.strict_model(
        (lambda: [0.0, 0.0], update, lambda state: {"labels": state[0], "losses": state[1]})
    )
    config = FedAvgFixMatchConfig(strong_augment=None, weak_augment=None)
    process = build_fedavg_fixmatch(model, rounds.sgd(1e-6), config)
    output = process.next(process.initialize(), [to_tff(client) for client in COHORT])
    metrics = output.metrics["client_work"]["train"]
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
