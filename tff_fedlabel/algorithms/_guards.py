"""Protects a round from updates that are not finite and from cohorts without weight."""

import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel._autograph import as_written
from tff_fedlabel.algorithms import _secure

# This many weighted client updates, each of the largest allowed size, add up without overflow.
_MOST_CLIENTS = 2.0**20


def is_finite(delta, num_examples) -> tf.Tensor:
    """Whether an update is finite, and stays so when weighted and summed over a cohort; bool [].

    An overflow there would spoil the other clients' contributions to the sum, and so would a
    negative number of images, which is not finite here, either.
    """

    def by_element():
        finite = tf.math.is_finite(num_examples) & (num_examples >= 0)
        for d in delta:
            # A comparison with a NaN is false.
            weighted = tf.abs(d * tf.cast(num_examples, d.dtype))
            finite &= tf.reduce_all(weighted <= tf.constant(_largest(d.dtype), d.dtype))
        return finite

    # One pass without a copy is nearly always enough: no element is larger than the square root of
    # a finite sum of squares, so its product with a small number of images is bounded.
    bounded = num_examples >= 0
    for d in delta:
        root = float(d.dtype.max) ** 0.5
        limit = min(0.5 * _largest(d.dtype) / root, float(num_examples.dtype.max))
        bounded &= tf.math.is_finite(tf.nn.l2_loss(d))
        bounded &= num_examples <= tf.constant(limit, num_examples.dtype)
    return tf.cond(bounded, lambda: True, by_element)


def _largest(dtype: tf.DType) -> float:
    """The largest allowed element of a weighted update."""
    largest = float(dtype.max)
    # float16's range is too small to leave headroom.
    return largest / _MOST_CLIENTS if largest > 1e30 else largest


@as_written
def all_finite(structure) -> tf.Tensor:
    """Whether every float in a structure of tensors is finite; bool []."""
    finite = tf.constant(True)
    for value in tf.nest.flatten(structure):
        if value.dtype.is_floating:
            finite &= tf.reduce_all(tf.math.is_finite(value))
    return finite


def guard_empty_cohorts(
    inner: tff.templates.AggregationProcess, secure: bool
) -> tff.templates.AggregationProcess:
    """Makes any weighted aggregation safe for a cohort whose weights sum to 0.

    For such a cohort the result is NaN, on which the finalizer keeps the weights and its optimizer
    state, and the inner aggregation keeps its state.

    Args:
      inner: The aggregation.
      secure: Whether the server may see only how many clients have a weight above 0, by a secure
        sum; otherwise it sees the sum of the weights in the clear.
    """
    state_type, value_type, weight_type = inner.next.type_signature.parameter
    result_type = inner.next.type_signature.result.result.member
    old_if_empty = keep_if_empty(state_type.member)

    @tff.tensorflow.computation(tff.TensorType(tf.float32.as_numpy_dtype), result_type)
    def nan_if_empty(total, result):
        return tf.nest.map_structure(
            lambda r: tf.where(total > 0, r, tf.constant(float("nan"), r.dtype)), result
        )

    @tff.federated_computation(state_type, value_type, weight_type)
    def next_fn(state, value, weight):
        total = _secure.count_contributors(weight) if secure else tff.federated_sum(weight)
        output = inner.next(state, value, weight)
        new_state = output.state
        if old_if_empty is not None:
            new_state = tff.federated_map(old_if_empty, (total, output.state, state))
        return tff.templates.MeasuredProcessOutput(
            new_state,
            tff.federated_map(nan_if_empty, (total, output.result)),
            output.measurements,
        )

    return tff.templates.AggregationProcess(inner.initialize, next_fn)


def keep_if_empty(state_type: tff.Type) -> tff.Computation | None:
    """`(<total=float32, new=state, old=state> -> state)`: the old one where the total is 0.

    None if the state contains no tensor.
    """
    if not tff.types.count(state_type, lambda t: isinstance(t, tff.TensorType)):
        return None

    @tff.tensorflow.computation(tff.TensorType(tf.float32.as_numpy_dtype), state_type, state_type)
    def keep(total, new, old):
        return tf.nest.map_structure(lambda n, o: tf.where(total > 0, n, o), new, old)

    return keep


@as_written
def spoiled(new, old) -> tf.Tensor:
    """Whether a float of a structure ceased to be finite, or became a NaN; bool [].

    A state may hold infinities from the start, such as a best loss so far.
    """
    bad = tf.constant(False)
    for n, o in zip(tf.nest.flatten(new), tf.nest.flatten(old), strict=True):
        if n.dtype.is_floating:
            worse = tf.math.is_finite(o) & ~tf.math.is_finite(n)
            worse |= tf.math.is_nan(n) & ~tf.math.is_nan(o)
            bad |= tf.reduce_any(worse)
    return bad
