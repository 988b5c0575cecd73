"""Whole rounds of FedAvg-UDA and FedProx-UDA through TFF against float64 NumPy."""

import numpy as np
import paired_rounds as rounds
import pytest
import tensorflow as tf
from linear_model import random_client
from numpy_reference import CLASSES, softmax
from paired_rounds import COHORT, TWO_ROUNDS, VIEWS, check_rounds, run
from weights import assert_weights_close

from tff_fedlabel.algorithms import FedAvgUdaConfig, FedProxUdaConfig, uda

pytestmark = pytest.mark.usefixtures("device_runtime")

NAME = "fedavg_uda"


def reference(threshold=0.6, temperature=0.4, **fields):
    """1[max p(x) > beta] KL(softmax(z(x) / T) || p(strong x)) of the paper's section 3."""
    return rounds.Reference(
        passes=lambda largest: largest > threshold,
        target=lambda z: softmax(z / temperature),
        distance=lambda t, p: np.sum(t * np.log(t / p)),
        **{**VIEWS, **fields},
    )


def build(**config):
    """Built with hidden labels, so that one process serves most tests."""
    return rounds.build(NAME, threshold=0.6, tail={"diagnose": True}, **config)


def test_rounds_equal_numpy():
    metrics = check_rounds(reference(), build())
    assert 0.1 < metrics["kept_fraction"] < 0.9
    assert 0 < metrics["pseudo_label_accuracy"] < 1


def test_fedprox_without_sharpening_and_with_all_images_computed():
    """An image with a NaN does not pass and does no harm, though it is computed."""
    config = {"proximal_strength": 0.7, "unlabeled_weight": 2.5}
    process = rounds.build(
        "fedprox_uda", threshold=0.6, temperature=1.0, skip_discarded=False, **config
    )
    check_rounds(reference(temperature=1.0, **config), process)
    with np.errstate(invalid="ignore"):
        cohorts = [rounds.spoiled_cohort()]
        check_rounds(reference(temperature=1.0, **config), process, cohorts)


ALPHA = {
    "linear": lambda t: t,
    "log": lambda t: 1 - np.exp(-5 * t),
    "exp": lambda t: np.exp(-5 * (1 - t)),
}


def eta(schedule, progress):
    return ALPHA[schedule](progress) * (1 - 1 / CLASSES) + 1 / CLASSES


def test_training_signal_annealing():
    """From 1/3 over 2/3 to 1, and no further: all of the last round's labelled images count."""
    left_out = [[], [], [], []]

    def keep(round_num, right):
        left_out[round_num].append(right > eta("linear", min(round_num / 2, 1)))
        return not left_out[round_num][-1]

    process = build(tsa="linear", tsa_rounds=2)
    check_rounds(reference(keep=keep), process, [COHORT, *TWO_ROUNDS, COHORT])
    assert 1 > np.mean(left_out[0]) > np.mean(left_out[1]) > 0
    assert not any(left_out[2] + left_out[3])


def test_annealing_with_labelled_images_apart():
    """Also where a step's labelled images are all left out: it then has no labelled loss."""
    process = build(tsa="exp", tsa_rounds=4, include_labeled=False)

    def known(keep):
        return reference(keep=keep, include_labeled=False)

    check_rounds(known(lambda r, right: right <= eta("exp", r / 4)), process)
    labeled, unlabeled = random_client(9, 8, 5)
    cohort = [([(x, np.zeros_like(y)) for x, y in labeled], unlabeled)]
    sure = [np.zeros((4, CLASSES)), np.array([3.0, 0.0, 0.0])]
    actual, metrics = run(process, [cohort], rounds.hidden_labels, sure)
    assert metrics["labeled_loss"] == 0.0 and metrics["images_used"] == 5.0
    expected, used = known(lambda r, right: False).rounds([cohort], sure)
    assert used == 5
    assert_weights_close(actual, expected)


def test_annealing_that_the_run_does_not_finish_is_said():
    for method in (uda.FEDAVG, uda.FEDPROX):
        config = method.config_class(tsa="log", tsa_rounds=20)
        assert method.advice(config, 20) is None
        assert method.advice(config, 19).startswith("tsa_rounds is 20, and this run ends after 19")
        assert method.advice(method.config_class(tsa_rounds=20), 3) is None


@pytest.mark.parametrize("schedule", ALPHA)
@pytest.mark.parametrize("round_num", [0, 1, 3, 4, 9])
def test_which_labelled_images_annealing_keeps(schedule, round_num):
    logits = np.linspace(-4, 6, 41)[:, None] * np.eye(CLASSES)[1]
    config = FedAvgUdaConfig(tsa=schedule, tsa_rounds=4)
    for labels in (np.ones(41, np.int32), np.ones((41, 1), np.int32)):
        kept = uda.not_learned_yet(
            config, tf.constant(round_num), tf.constant(logits, tf.float32), tf.constant(labels)
        )
        expected = softmax(logits)[:, 1] <= eta(schedule, min(round_num / 4, 1))
        np.testing.assert_array_equal(kept, expected)
        assert expected[0]


@pytest.mark.parametrize("client", [(0, 9), (9, 0)])
def test_clients_alone_without_one_part(client):
    check_rounds(reference(), build(), [[random_client(7, *client)]])


def test_a_client_with_a_nan_counts_for_nothing():
    rounds.check_broken_clients(build())


def test_a_discarded_image_that_is_not_finite_does_no_harm():
    with np.errstate(invalid="ignore"):
        check_rounds(reference(), build(), [rounds.spoiled_cohort()])


def test_hidden_labels_cannot_change_the_update():
    rounds.check_hidden_labels(rounds.build(NAME, threshold=0.6), build())


def test_the_mask_sees_the_unsharpened_prediction_and_is_strict():
    """The first largest probability is one half, sharpened or not; the second .576, .858 if so."""
    logits = tf.constant([[0.0, 0.0, -200.0], [1.0, 0.0, 0.0]] * 9)
    below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    for threshold, expected in ((0.5, [False, True]), (below, [True, True]), (0.6, [False] * 2)):
        mask, target = uda.sharpened(FedAvgUdaConfig(threshold=threshold), logits)
        np.testing.assert_array_equal(mask, expected * 9)
        assert softmax(target.numpy()).max() == pytest.approx(0.858, abs=1e-3)


def test_defaults_are_the_authors():
    config = FedProxUdaConfig()
    assert (config.threshold, config.temperature, config.unlabeled_weight) == (0.8, 0.4, 1.0)
    assert (config.tsa, config.include_labeled) == ("none", True)
    assert not hasattr(FedAvgUdaConfig(), "proximal_strength")


@pytest.mark.parametrize(
    "field,value",
    [
        ("threshold", -0.1),
        ("temperature", 0.0),
        ("temperature", 1e-38),
        ("unlabeled_weight", float("inf")),
        ("tsa", "cosine"),
        ("tsa_rounds", 0),
        ("include_labeled", None),
        ("strong_augment", 1),
        ("weak_augment", "flip"),
        ("proximal_strength", float("nan")),
    ],
)
def test_bad_configuration_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"^{field} "):
        FedProxUdaConfig(**{field: value})


def test_annealing_needs_its_length():
    with pytest.raises(ValueError, match="^tsa_rounds must be given with tsa='exp'"):
        FedAvgUdaConfig(tsa="exp")
