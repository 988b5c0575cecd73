"""Which expert labels an image, whether the label is kept, and what the other expert adds.

Pure tensor functions, one for each step of section 3.1 of Cho, Joshi and Dimitriadis, "Local or
Global: Selective Knowledge Assimilation for Federated Learning with Limited Labels" (ICCV 2023):
the binary selection (eq. pseul0), the threshold (eq. pseul) and the weight and divergence of the
global-local consistency term (eqs. loc-glob1, loc-glob2). They work eagerly and in graphs, and
never look at a true label.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tff_fedlabel import _validation
from tff_fedlabel._autograph import as_written, given
from tff_fedlabel._lazy import tf

Confidence = str | Callable[["tf.Tensor"], "tf.Tensor"]

CONFIDENCES = ("variance", "entropy")
CONFIDENCE_INPUTS = ("probabilities", "logits")
SELECTIONS = ("adaptive", "local", "global")

# How far from 0 float32 rounding can leave the entropy confidence of a perfectly flat output.
_ENTROPY_ROUNDING = 1e-6


class Selection(NamedTuple):
    """What `select` decides for every image of a batch.

    Attributes:
      labels: int64 `[batch]`, the selected expert's largest class (the pseudo-label, eq. pseul).
      mask: bool `[batch]`, whether that class's probability exceeds the threshold.
      discarded_logits: float `[batch, classes]`, logits of the expert that was not selected.
      agrees: bool `[batch]`, whether the discarded expert predicts the same class.
      confidence_ratio: float `[batch]` in [0, 1], `h(discarded) / h(selected)` (eq. loc-glob2).
      chose_local: bool `[batch]`, whether the local expert was selected.
    """

    labels: tf.Tensor
    mask: tf.Tensor
    discarded_logits: tf.Tensor
    agrees: tf.Tensor
    confidence_ratio: tf.Tensor
    chose_local: tf.Tensor


def variance(scores: tf.Tensor) -> tf.Tensor:
    """Variance over the classes, the paper's confidence h (higher is surer).

    Args:
      scores: Float `[batch, classes]`, probabilities or logits.

    Returns:
      Float `[batch]`, the population variance of each row; exactly 0 for a flat row.
    """
    # Measured from the row's maximum, so that a flat row is not left with the rounding of a mean.
    return tf.math.reduce_variance(scores - tf.reduce_max(scores, axis=-1, keepdims=True), axis=-1)


def entropy(probabilities: tf.Tensor) -> tf.Tensor:
    """Confidence `1 - H / log(classes)`, with H the entropy: 1 for a sure row, 0 for a flat one.

    Args:
      probabilities: Float `[batch, classes]`, rows that sum to 1.

    Returns:
      Float `[batch]` in [0, 1].
    """
    num_classes = tf.cast(tf.shape(probabilities)[-1], probabilities.dtype)
    row_entropy = -tf.reduce_sum(tf.math.xlogy(probabilities, probabilities), axis=-1)
    confidence = 1.0 - row_entropy / tf.math.log(num_classes)
    confidence = tf.where(confidence < _ENTROPY_ROUNDING, tf.zeros_like(confidence), confidence)
    return tf.minimum(confidence, 1.0)


def softmax(logits: tf.Tensor) -> tf.Tensor:
    """The softmax of each row, exact enough to be compared with a threshold.

    Args:
      logits: Float `[batch, classes]`.

    Returns:
      Float `[batch, classes]`, rows that sum to 1.
    """
    # In some rows of a batch tf.nn.softmax's vectorised kernel gets the last bit wrong, so that two
    # equal logits get less than one half: enough to decide a comparison with the threshold.
    exponentials = tf.exp(logits - tf.reduce_max(logits, axis=-1, keepdims=True))
    return exponentials / tf.reduce_sum(exponentials, axis=-1, keepdims=True)


def check_options(confidence: Any, confidence_input: Any, threshold: Any, selection: Any) -> float:
    """Returns the threshold as Python's own number if `select` could work with the four.

    Raises:
      ValueError: naming the first option that is not what `select` says; a `TypeError` as well
        where it is of the wrong type.
    """
    if not callable(confidence):
        wanted = f"a callable or one of {', '.join(CONFIDENCES)}"
        _validation.check_type("confidence", confidence, str, wanted)
        _validation.check_name("confidence", confidence, CONFIDENCES)
    _validation.check_name("confidence_input", confidence_input, CONFIDENCE_INPUTS)
    if confidence == "entropy" and confidence_input == "logits":
        raise ValueError(
            "confidence_input='logits' does not go with confidence='entropy': the entropy of "
            "logits is undefined. Use confidence_input='probabilities'."
        )
    threshold = _validation.check_number("threshold", threshold, 0.0, 1.0)
    _validation.check_name("selection", selection, SELECTIONS)
    return threshold


@as_written
def select(
    global_logits: tf.Tensor,
    local_logits: tf.Tensor,
    *,
    confidence: Confidence = "variance",
    confidence_input: str = "probabilities",
    threshold: float,
    selection: str = "adaptive",
) -> Selection:
    """Lets the surer of two frozen experts label each image (eqs. pseul0 and pseul).

    Args:
      global_logits: Float `[batch, classes]`, the received global model on the images.
      local_logits: Float `[batch, classes]`, the model after its labelled steps, same images.
      confidence: h: "variance", "entropy", or a callable `[batch, classes] -> [batch]` whose
        values are not negative and higher where the expert is surer.
      confidence_input: What h sees, "probabilities" (softmax) or "logits" (not with "entropy").
      threshold: beta in [0, 1]. A label is kept where the selected expert's largest probability
        is strictly greater.
      selection: "adaptive" (a tie goes to the local expert), or "local" or "global", which always
        take that expert (the paper's Table 1).

    Returns:
      A `Selection`. Its `confidence_ratio` is 0 where the selected expert has no confidence at all
      (two flat outputs carry no knowledge) and at most 1, as eq. loc-glob2 states.

    Raises:
      ValueError: An option is out of its range.
    """
    threshold = check_options(confidence, confidence_input, threshold, selection)
    global_logits = tf.convert_to_tensor(global_logits)
    local_logits = tf.convert_to_tensor(local_logits)
    global_probabilities = softmax(global_logits)
    local_probabilities = softmax(local_logits)

    named = {"variance": variance, "entropy": entropy}
    h = given(confidence) if callable(confidence) else named[confidence]
    if confidence_input == "probabilities":
        global_confidence, local_confidence = h(global_probabilities), h(local_probabilities)
    else:
        global_confidence, local_confidence = h(global_logits), h(local_logits)

    if selection == "adaptive":
        chose_local = local_confidence >= global_confidence
    else:
        chose_local = tf.fill(tf.shape(local_logits)[:1], selection == "local")

    by_row = chose_local[:, tf.newaxis]
    selected_probabilities = tf.where(by_row, local_probabilities, global_probabilities)
    selected_logits = tf.where(by_row, local_logits, global_logits)
    discarded_logits = tf.where(by_row, global_logits, local_logits)
    selected_confidence = tf.where(chose_local, local_confidence, global_confidence)
    discarded_confidence = tf.where(chose_local, global_confidence, local_confidence)

    # From the logits: two large logits can round to the same probability.
    labels = tf.argmax(selected_logits, axis=-1)
    ratio = tf.math.divide_no_nan(discarded_confidence, selected_confidence)
    ratio = tf.where(selected_confidence > 0, tf.clip_by_value(ratio, 0.0, 1.0), 0.0)
    return Selection(
        labels=labels,
        mask=tf.reduce_max(selected_probabilities, axis=-1) > threshold,
        discarded_logits=discarded_logits,
        agrees=tf.equal(tf.argmax(discarded_logits, axis=-1), labels),
        confidence_ratio=ratio,
        chose_local=chose_local,
    )


def kl_divergence(logits: tf.Tensor, target_logits: tf.Tensor) -> tf.Tensor:
    """`KL(softmax(logits) || softmax(target_logits))` of each row (eq. loc-glob1).

    Args:
      logits: Float `[batch, classes]`, the student, the first argument of the paper's KL.
      target_logits: Float `[batch, classes]`, the discarded expert.

    Returns:
      Float `[batch]`, in nats, finite for any finite logits.
    """
    log_p = tf.nn.log_softmax(logits)
    log_q = tf.nn.log_softmax(target_logits)
    return tf.reduce_sum(tf.exp(log_p) * (log_p - log_q), axis=-1)
