"""FedLabel rounds whose clients have next to nothing, or numbers that are none."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from fedlabel_rounds import COHORT, build, check_rounds, run, sgd, start
from linear_model import build_model, initial_weights, random_client, to_tff
from numpy_reference import CLASSES, Reference
from weights import assert_weights_close, assert_weights_equal

from tff_fedlabel.algorithms import FedLabelConfig, build_fedavg, build_fedlabel

NUM_EXAMPLES = tff.learning.ClientWeighting.NUM_EXAMPLES
UNIFORM = tff.learning.ClientWeighting.UNIFORM
pytestmark = pytest.mark.usefixtures("device_runtime")


def test_nothing_above_the_threshold():
    metrics = check_rounds(Reference(threshold=1.0), [COHORT], threshold=1.0)
    assert metrics["kept_fraction"] == 0.0
    assert metrics["images_used"] == 11 + 3 + 8


@pytest.mark.parametrize("labeled,unlabeled", [(0, 9), (9, 0), (0, 0)])
def test_clients_without_one_part(labeled, unlabeled):
    check_rounds(Reference(), [[random_client(7, labeled, unlabeled), *COHORT]])


def test_only_unlabeled_images():
    check_rounds(Reference(), [[random_client(8, 0, 12)]])


@pytest.mark.parametrize(
    "aggregator,weighting",
    [
        # A client that used nothing has the weight 0 whatever the weighting, and before any
        # aggregator gets it.
        ("default", NUM_EXAMPLES),
        ("default", UNIFORM),
        ("mean", UNIFORM),
        ("clipping", NUM_EXAMPLES),
        ("dp", UNIFORM),  # Differential privacy weighs all clients alike.
    ],
)
def test_cohort_that_used_nothing_changes_nothing(aggregator, weighting):
    """Also after the server optimizer has gathered momentum, and for stateful aggregators.

    The server's side is the same for all methods, and FedAvg is quicker to compile.
    """
    first = (aggregator, weighting) == ("default", NUM_EXAMPLES)
    factory = {
        "default": lambda: None,
        "mean": tff.aggregators.MeanFactory,
        "clipping": lambda: tff.learning.robust_aggregator(),
        "dp": lambda: tff.aggregators.as_weighted_aggregator(
            tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(0.5, 3.0, 1.0)
        ),
    }[aggregator]()
    fedlabel = FedLabelConfig(threshold=1.0, strong_augment=None)
    build, *config = (build_fedlabel, fedlabel) if first else (build_fedavg,)
    process = build(
        build_model(initial_weights()),
        sgd(0.3),
        *config,
        server_optimizer=sgd(1.0, momentum=0.9),
        model_aggregator=factory,
        client_weighting=weighting,
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
    actual, metrics = run(build(), [[broken, *COHORT]])
    expected, used = Reference().round(start(), COHORT)
    assert_weights_close(actual, expected)
    assert metrics["rejected_clients"] == 1.0
    assert metrics["images_used"] == sum(used)
    assert np.isfinite(metrics["labeled_loss"])


def test_client_whose_weighted_update_overflows_counts_for_nothing():
    """Its update is finite, but r_k times it is not: added up it would void everybody's."""
    huge = random_client(11, 8, 0)
    for x, _ in huge[0]:
        x *= 1e38
    actual, metrics = run(build(), [[huge, *COHORT]])
    expected, used = Reference().round(start(), COHORT)
    assert_weights_close(actual, expected)
    assert metrics["rejected_clients"] == 1.0
    assert metrics["images_used"] == sum(used)


def test_clients_whose_updates_overflow_in_the_sum_count_for_nothing():
    """Each update is finite, also weighted, but the sum of them is not."""
    huge = random_client(11, 8, 0)
    for x, _ in huge[0]:
        x *= 5e37
    alone, _ = Reference().client(start(), huge[0], [])
    largest = max(np.abs(8 * d).max() for d in alone)
    assert largest < np.finfo(np.float32).max < 16 * largest
    actual, metrics = run(build(), [[*[huge] * 16, *COHORT]])
    expected, used = Reference().round(start(), COHORT)
    assert_weights_close(actual, expected)
    assert metrics["rejected_clients"] == 16.0
    assert metrics["images_used"] == sum(used)


@pytest.mark.parametrize("skip", [True, False])
def test_discarded_image_that_is_not_finite_does_no_harm(skip):
    """Its prediction is a NaN, so no label is kept; the others count as without it, but for 1/b."""
    client = random_client(12, 8, 8)
    client[1][0][2] = np.nan
    actual, metrics = run(build(skip_discarded=skip), [[client]])
    expected, used = Reference().round(start(), [client])
    assert_weights_close(actual, expected)
    assert metrics["rejected_clients"] == 0.0
    assert metrics["images_used"] == sum(used)


def test_cohort_of_only_nan_clients_changes_nothing():
    broken = random_client(11)
    broken[0][0][0][0, 0, 0, 0] = np.inf
    actual, metrics = run(build(), [[broken]])
    assert_weights_equal(actual, start())
    assert metrics["rejected_clients"] == 1.0


def test_flat_experts_keep_no_consistency():
    """Zero weights make both experts flat; above beta = 0 the label is class 0, the ratio 0."""
    zeros = [np.zeros_like(w) for w in initial_weights()]
    client = random_client(12, 0, 8)
    metrics = check_rounds(Reference(threshold=0.0), [[client]], weights=zeros, threshold=0.0)
    assert metrics["consistency_weight"] == 0.0
    assert metrics["agreement_fraction"] == 1.0


def test_probability_equal_to_the_threshold_is_not_kept():
    """With logits (0, 0, -inf-like) the largest probability is exactly one half."""
    weights = [np.zeros((4, CLASSES)), np.array([0.0, 0.0, -200.0])]
    client = random_client(13, 0, 8)
    just_below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    _, at = run(build(threshold=0.5), [[client]], weights=weights)
    _, below = run(build(threshold=just_below), [[client]], weights=weights)
    assert at["images_used"] == 0.0
    assert below["images_used"] == 8.0
