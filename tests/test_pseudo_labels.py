"""Pseudo-label selection against the paper's equations, written in NumPy float64."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

from tff_fedlabel import pseudo_labels

BATCH, CLASSES = 200, 7


def softmax(logits):
    exponentials = np.exp(np.float64(logits) - np.max(logits, axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def entropy_confidence(probabilities):
    p = np.where(probabilities > 0, probabilities, 1.0)
    return 1 + (p * np.log(p)).sum(axis=-1) / np.log(probabilities.shape[-1])


def variance_confidence(scores):
    return ((scores - scores.mean(axis=-1, keepdims=True)) ** 2).mean(axis=-1)


def margin(scores):
    """A user's own confidence: the distance of the two largest scores."""
    ordered = np.sort(scores, axis=-1)
    return ordered[:, -1] - ordered[:, -2]


def tf_margin(scores):
    top = tf.math.top_k(scores, k=2).values
    return top[:, 0] - top[:, 1]


def reference(global_logits, local_logits, h, on_logits, threshold, selection):
    """Eqs. pseul0, pseul and loc-glob2, one image at a time."""
    h_global = h(np.float64(global_logits) if on_logits else softmax(global_logits))
    h_local = h(np.float64(local_logits) if on_logits else softmax(local_logits))
    rows = []
    for i in range(len(global_logits)):
        local = {"local": True, "global": False, "adaptive": h_local[i] >= h_global[i]}[selection]
        selected, other = (local_logits, global_logits) if local else (global_logits, local_logits)
        h_selected, h_other = (h_local, h_global) if local else (h_global, h_local)
        label = selected[i].argmax()
        rows.append(
            (
                label,
                softmax(selected)[i].max() > threshold,
                other[i],
                other[i].argmax() == label,
                min(h_other[i] / h_selected[i], 1.0),
                local,
            )
        )
    return [np.array(column) for column in zip(*rows, strict=True)]


def experts(seed=0, scale=2.0):
    rng = np.random.default_rng(seed)
    return [np.float32(rng.normal(scale=scale, size=(BATCH, CLASSES))) for _ in range(2)]


CONFIDENCES = {
    "variance": ("variance", variance_confidence, "probabilities"),
    "entropy": ("entropy", entropy_confidence, "probabilities"),
    "callable": (tf_margin, margin, "probabilities"),
    "variance of logits": ("variance", variance_confidence, "logits"),
    "callable on logits": (tf_margin, margin, "logits"),
}


@pytest.mark.parametrize("name", CONFIDENCES)
@pytest.mark.parametrize("selection", ["adaptive", "local", "global"])
@pytest.mark.parametrize("in_graph", [False, True])
def test_select_follows_the_equations(name, selection, in_graph):
    confidence, h, confidence_input = CONFIDENCES[name]
    global_logits, local_logits = experts()
    expected = reference(
        global_logits, local_logits, h, confidence_input == "logits", 0.6, selection
    )

    def run(a, b):
        return pseudo_labels.select(
            a,
            b,
            confidence=confidence,
            confidence_input=confidence_input,
            threshold=0.6,
            selection=selection,
        )

    found = (tf.function(run) if in_graph else run)(
        tf.constant(global_logits), tf.constant(local_logits)
    )
    names = ("labels", "mask", "discarded_logits", "agrees", "confidence_ratio", "chose_local")
    assert found._fields == names
    for field, want in zip(names, expected, strict=True):
        got = getattr(found, field).numpy()
        if want.dtype.kind == "f":
            np.testing.assert_allclose(got, want, atol=2e-5, err_msg=field)
        else:
            np.testing.assert_array_equal(got, want, err_msg=field)
    # The draw reaches both values of every decision, or the comparison would say little.
    for field in ("mask", "agrees"):
        assert 0.1 < getattr(found, field).numpy().mean() < 0.9
    if selection == "adaptive":
        assert 0.3 < found.chose_local.numpy().mean() < 0.7
    else:
        assert (found.confidence_ratio.numpy() == 1).any()  # Clamped: the surer one discarded.


def test_the_defaults_are_the_papers():
    parameters = inspect.signature(pseudo_labels.select).parameters
    assert parameters["confidence"].default == "variance"
    assert parameters["confidence_input"].default == "probabilities"
    assert parameters["selection"].default == "adaptive"
    assert parameters["threshold"].default is inspect.Parameter.empty
    keyword_only = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert keyword_only == ["confidence", "confidence_input", "threshold", "selection"]


def test_shapes_and_types():
    found = pseudo_labels.select(*experts(), threshold=0.5)
    assert found.labels.dtype.is_integer and found.labels.shape == (BATCH,)
    for name in ("mask", "agrees", "chose_local"):
        assert getattr(found, name).dtype == tf.bool and getattr(found, name).shape == (BATCH,)
    assert found.confidence_ratio.dtype == tf.float32 and found.confidence_ratio.shape == (BATCH,)
    assert found.discarded_logits.dtype == tf.float32
    assert found.discarded_logits.shape == (BATCH, CLASSES)
    empty = pseudo_labels.select(*(e[:0] for e in experts()), threshold=0.5)
    assert [tensor.shape[0] for tensor in empty] == [0] * 6


@pytest.mark.parametrize("which", ["local", "global"])
def test_a_probability_equal_to_the_threshold_is_not_kept(which):
    # Two classes with equal logits have probabilities of exactly 1/2, four of exactly 1/4.
    for classes, threshold in ((2, 0.5), (4, 0.25)):
        flat = np.zeros((1, classes), np.float32)
        surer = flat.copy()
        surer[0, 0] = 1e-3
        for logits, below, kept in ((flat, 0.0, False), (flat, 1e-6, True), (surer, 0.0, True)):
            found = pseudo_labels.select(
                logits, logits, threshold=threshold - below, selection=which
            )
            assert bool(found.mask[0]) is kept
    certain = np.float32([[1000.0, 0.0]])  # A probability of exactly 1 is not above 1.
    assert not pseudo_labels.select(certain, certain, threshold=1.0, selection=which).mask[0]
    assert pseudo_labels.select(certain, certain, threshold=0.999, selection=which).mask[0]


def test_threshold_zero_keeps_everything_and_applies_to_the_selected_expert_only():
    global_logits, local_logits = experts()
    assert pseudo_labels.select(global_logits, local_logits, threshold=0.0).mask.numpy().all()
    sure, unsure = np.float32([[5.0, 0, 0]]), np.float32([[0.1, 0, 0]])
    for selection, kept in (("adaptive", True), ("global", True), ("local", False)):
        found = pseudo_labels.select(sure, unsure, threshold=0.9, selection=selection)
        assert bool(found.mask[0]) is kept


@pytest.mark.parametrize("confidence", ["variance", "entropy"])
def test_equal_confidence_chooses_the_local_expert(confidence):
    # Two mirrored outputs, equally sure of other labels, and two flat ones.
    global_logits, local_logits = np.float32([[3, 0], [2, 2]]), np.float32([[0, 3], [2, 2]])
    found = pseudo_labels.select(global_logits, local_logits, confidence=confidence, threshold=0.5)
    np.testing.assert_array_equal(found.chose_local, [True, True])
    np.testing.assert_array_equal(found.labels, [1, 0])
    np.testing.assert_array_equal(found.discarded_logits, global_logits)
    np.testing.assert_array_equal(found.agrees, [False, True])
    np.testing.assert_allclose(found.confidence_ratio, [1, 0], atol=1e-6)


@pytest.mark.parametrize("confidence", ["variance", "entropy"])
@pytest.mark.parametrize("selection", ["adaptive", "local", "global"])
@pytest.mark.parametrize("classes", [2, 3, 7, 10, 62, 100])
@pytest.mark.parametrize("level", [0.0, 0.1, -3.3, 1e4])
def test_flat_experts_have_ratio_zero(confidence, selection, classes, level):
    flat = np.full((3, classes), level, np.float32)
    found = pseudo_labels.select(
        flat, flat, confidence=confidence, threshold=0.0, selection=selection
    )
    np.testing.assert_array_equal(found.confidence_ratio, np.zeros(3))


def test_a_flat_selected_expert_gives_ratio_zero_also_where_the_other_is_sure():
    flat, sure = np.zeros((1, 3), np.float32), np.float32([[4.0, 0, 0]])
    chosen_flat = pseudo_labels.select(sure, flat, threshold=0.0, selection="local")
    assert float(chosen_flat.confidence_ratio[0]) == 0.0
    chosen_sure = pseudo_labels.select(sure, flat, threshold=0.0, selection="global")
    assert float(chosen_sure.confidence_ratio[0]) == 0.0


@pytest.mark.parametrize("confidence", ["variance", "entropy"])
@pytest.mark.parametrize("selection", ["adaptive", "local", "global"])
def test_extreme_logits_stay_finite(confidence, selection):
    rng = np.random.default_rng(0)
    extreme = [np.float32(rng.choice([-1e4, 0.0, 1e4], size=(BATCH, CLASSES))) for _ in range(2)]
    found = pseudo_labels.select(
        *extreme, confidence=confidence, threshold=0.5, selection=selection
    )
    ratio = found.confidence_ratio.numpy()
    assert np.isfinite(ratio).all() and (ratio >= 0).all() and (ratio <= 1).all()
    selected = np.where(found.chose_local.numpy()[:, np.newaxis], extreme[1], extreme[0])
    np.testing.assert_array_equal(found.labels, selected.argmax(axis=1))
    np.testing.assert_array_equal(found.mask, softmax(selected).max(axis=1) > 0.5)


def test_variance_and_entropy_values():
    scores = np.random.default_rng(0).normal(size=(BATCH, CLASSES))
    probabilities = softmax(3 * scores)
    np.testing.assert_allclose(
        pseudo_labels.variance(tf.constant(scores, tf.float32)), scores.var(axis=1), rtol=1e-4
    )
    np.testing.assert_allclose(
        pseudo_labels.entropy(tf.constant(probabilities, tf.float32)),
        entropy_confidence(probabilities),
        atol=1e-6,
    )
    certain = tf.constant([[0.0, 1.0, 0.0]])
    assert float(pseudo_labels.entropy(certain)[0]) == 1.0
    assert float(pseudo_labels.variance(certain)[0]) == pytest.approx(2 / 9)


def test_kl_divergence_is_student_against_target():
    student, target = experts(seed=3)
    p, q = softmax(student), softmax(target)
    expected = (p * np.log(p / q)).sum(axis=1)
    found = pseudo_labels.kl_divergence(student, target).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    reverse = (q * np.log(q / p)).sum(axis=1)
    assert np.abs(expected - reverse).max() > 0.1  # Swapped arguments would have been noticed.
    np.testing.assert_allclose(pseudo_labels.kl_divergence(student, student), 0, atol=1e-6)


def test_kl_divergence_gradient_is_finite_and_right():
    student, target = experts(seed=4)
    p, log_ratio = softmax(student), np.log(softmax(student) / softmax(target))
    expected = p * (log_ratio - (p * log_ratio).sum(axis=1, keepdims=True))
    logits = tf.constant(student)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        total = tf.reduce_sum(pseudo_labels.kl_divergence(logits, target))
    np.testing.assert_allclose(tape.gradient(total, logits), expected, atol=2e-5)

    rng = np.random.default_rng(0)
    extreme = [tf.constant(rng.choice([-1e4, 0, 1e4], size=(50, 5)), tf.float32) for _ in range(2)]
    with tf.GradientTape() as tape:
        tape.watch(extreme[0])
        values = pseudo_labels.kl_divergence(*extreme)
    assert np.isfinite(values).all()
    assert (values.numpy() >= 0).all()
    assert np.isfinite(tape.gradient(values, extreme[0])).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": 1.5}, "threshold.*1.5"),
        ({"threshold": -0.1}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"threshold": "0.5"}, "threshold"),
        ({"threshold": None}, "threshold"),
        ({"threshold": True}, "threshold"),
        ({"threshold": 0.5, "confidence": "varience"}, "confidence.*varience"),
        (
            {"threshold": 0.5, "confidence": 3},
            "a callable or one of variance.*3",
        ),
        ({"threshold": 0.5, "confidence": "variances"}, r"did you mean variance\?"),
        ({"threshold": 0.5, "confidence_input": None}, "confidence_input.*None"),
        ({"threshold": 0.5, "confidence_input": "softmax"}, "confidence_input.*softmax"),
        ({"threshold": 0.5, "confidence": "entropy", "confidence_input": "logits"}, "entropy"),
        ({"threshold": 0.5, "selection": "both"}, "selection.*both"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, words):
    with pytest.raises(ValueError, match=words) as error:
        pseudo_labels.select(*experts(), **options)
    assert len(str(error.value).splitlines()) == 1


def test_a_threshold_of_numpy_is_one_of_python():
    for value, expected in ((np.float32(0.25), 0.25), (np.int64(1), 1.0)):
        found = pseudo_labels.check_options("variance", "logits", value, "local")
        assert type(found) is type(expected) and found == expected
    global_logits, local_logits = experts()
    ours = pseudo_labels.select(global_logits, local_logits, threshold=np.float64(0.6))
    np.testing.assert_array_equal(
        ours.mask, pseudo_labels.select(global_logits, local_logits, threshold=0.6).mask
    )
