"""Whole rounds of FedAvg-UDA and FedProx-UDA through TFF against float64 NumPy."""

import numpy as np
import paired_rounds as rounds
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import random_client
from numpy_reference import CLASSES, softmax
from paired_rounds import COHORT, TWO_ROUNDS, VIEWS, build, check_rounds, run

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


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"temperature": 1.0},
        {"include_labeled": False},
        {"unlabeled_weight": 2.5},
        {"skip_discarded": False},
    ],
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
    """The sharpened target alone draws the prediction."""
    same = lambda x, *when: x  # noqa: E731
    process = build(NAME, threshold=0.6, strong_augment=None, weak_augment=None)
    check_rounds(reference(strong=same, weak=same), process)


def test_fedprox():
    process = build("fedprox_uda", threshold=0.6, proximal_strength=0.7)
    check_rounds(reference(proximal_strength=0.7), process)


ALPHA = {
    "linear": lambda t: t,
    "log": lambda t: 1 - np.exp(-5 * t),
    "exp": lambda t: np.exp(-5 * (1 - t)),
}


@pytest.mark.parametrize("include_labeled", [True, False])
@pytest.mark.parametrize("schedule", ALPHA)
def test_training_signal_annealing(schedule, include_labeled):
    """The second of three rounds; every third image would be kept at eta = 1 / 3."""
    left_out = []

    def keep(round_num, right):
        eta = ALPHA[schedule](round_num / 3) * (1 - 1 / CLASSES) + 1 / CLASSES
        left_out.append(right > eta)
        return right <= eta

    config = {"tsa": schedule, "tsa_rounds": 3, "include_labeled": include_labeled}
    process = build(NAME, threshold=0.6, **config)
    check_rounds(reference(keep=keep, include_labeled=include_labeled), process)
    assert 0 < np.mean(left_out) < 1


def test_annealing_lets_everything_in_at_its_end():
    """Rounds beyond `tsa_rounds` count as the last: with "linear", eta is 1."""
    rounds_of = [*TWO_ROUNDS, COHORT]
    process = build(NAME, threshold=0.6, tsa="linear", tsa_rounds=1)
    check_rounds(reference(keep=lambda round_num, right: right <= 1 / 3 or round_num), process)
    check_rounds(
        reference(keep=lambda round_num, right: right <= 1 / 3 or round_num), process, rounds_of
    )


def test_a_step_whose_labelled_images_are_all_left_out_has_no_labelled_loss():
    """The first round of the linear schedule, with a model that knows all labels too well."""
    labeled, unlabeled = random_client(9, 8, 5)
    labeled = [(x, np.zeros_like(y)) for x, y in labeled]
    weights = [np.zeros((4, CLASSES)), np.array([3.0, 0.0, 0.0])]
    process = build(NAME, threshold=0.6, tsa="linear", tsa_rounds=3, include_labeled=False)
    actual, metrics = run(process, [[(labeled, unlabeled)]], weights=weights)
    assert metrics["labeled_loss"] == 0.0 and metrics["images_used"] == 5.0
    keep = lambda round_num, right: False  # noqa: E731
    expected, _ = reference(keep=keep, include_labeled=False).rounds(
        [[(labeled, unlabeled)]], weights
    )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=2e-5)


def test_schedules():
    """What the paper says of them: all end at 1, linear at once proportional."""
    for name, alpha in uda.SCHEDULES.items():
        for t in (0.0, 0.25, 1.0):
            found = float(alpha(tf.constant(t)))
            assert found == pytest.approx(ALPHA[name](t), abs=1e-6)


def test_the_other_loop():
    loop = tff.learning.LoopImplementation.DATASET_REDUCE
    check_rounds(reference(), build(NAME, threshold=0.6, tail={"loop_implementation": loop}))


@pytest.mark.parametrize("client", [(0, 9), (9, 0)])
def test_clients_alone_without_one_part(client):
    check_rounds(reference(), build(NAME, threshold=0.6), [[random_client(7, *client)]])


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


def test_the_mask_sees_the_unsharpened_prediction_and_is_strict():
    """With logits (0, 0, -inf-like) the largest probability is one half, sharpened or not; with
    (1, 0, 0) it is .576, and .858 sharpened."""
    half = [np.zeros((4, CLASSES)), np.array([0.0, 0.0, -200.0])]
    below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    client = random_client(13, 0, 8)
    _, at = run(build(NAME, threshold=0.5), [[client]], weights=half)
    _, lower = run(build(NAME, threshold=below), [[client]], weights=half)
    assert (at["images_used"], lower["images_used"]) == (0.0, 8.0)
    unsure = [np.zeros((4, CLASSES)), np.array([1.0, 0.0, 0.0])]
    _, metrics = run(build(NAME, threshold=0.6), [[client]], weights=unsure)
    assert metrics["images_used"] == 0.0


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
