"""Secure aggregation: what goes beside an aggregator that has it must be summed securely too.

With a secure aggregator the server is to see sums over the clients only. So whatever else clients
send, their metrics and whether they took part, goes through TFF's secure sums as well.
"""

import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel.algorithms import _method

# Bounds of a client's unfinalized metric. A power of two, unlike TFF's own default of 2**20 - 1,
# makes the 32-bit steps between the bounds divide 1, so that counts come out exactly.
_MOST = 2**20


def sum_metrics(finalize) -> tff.Computation:
    """A `metrics_aggregator`: sums securely, then finalizes.

    Each client's unfinalized metrics are clipped to [-2**20, 2**20]; floats are rounded to steps of
    2**-11. `secure_sum_measurements` in the result counts the clients that were clipped.
    """

    @tff.federated_computation
    def aggregate(metrics):
        specs = tff.types.type_to_tf_tensor_specs(metrics.type_signature.member)
        ranges = tf.nest.map_structure(_range, specs)
        aggregator = tff.learning.metrics.secure_sum_then_finalize(
            finalize, metric_value_ranges=ranges
        )
        return aggregator(metrics)

    return aggregate


def _range(spec: tf.TensorSpec) -> tuple[float, float] | tuple[int, int]:
    kind = float if spec.dtype.is_floating else int
    return kind(0 if spec.dtype.is_unsigned else -_MOST), kind(_MOST)


def is_secure(comp: tff.framework.ConcreteComputation) -> bool:
    """Whether a computation aggregates by secure intrinsics, and by no others."""
    kinds = set()

    def visit(block):
        if isinstance(block, tff.framework.Intrinsic) and tff.types.contains(
            block.type_signature.parameter, lambda t: isinstance(t, tff.TensorType)
        ):
            kind = block.intrinsic_def().aggregation_kind
            kinds.add(kind and kind.name)  # None for an intrinsic that does not aggregate
        return block, False

    tff.framework.transform_postorder(comp.to_building_block(), visit)
    return "SECURE" in kinds and "DEFAULT" not in kinds


def check_method(method: _method.Method) -> None:
    """Raises `ValueError` if a method's clients send what a secure sum cannot take.

    A method with its own aggregation takes no `model_aggregator` at all.
    """
    if method.server_state is not None:
        reason = (
            "what its clients send for the state at the server has no bounds, and secure sums need "
            "them"
        )
    elif method.initial_memory is not None:
        reason = "each client's memory leaves the client as it is"
    else:
        return
    raise ValueError(
        f"model_aggregator must be a plain one: {method.name} cannot be aggregated securely, since "
        f"{reason}."
    )


def count_contributors(weight: tff.Value) -> tff.Value:
    """How many clients have a weight above 0; to be called inside a `tff.federated_computation`.

    Args:
      weight: `float32@CLIENTS`.

    Returns:
      `float32@SERVER`.
    """

    @tff.tensorflow.computation
    def contributes(weight):
        return tf.cast(weight > 0, tf.int32)

    @tff.tensorflow.computation
    def as_float(count):
        return tf.cast(count, tf.float32)

    flags = tff.federated_map(contributes, weight)
    return tff.federated_map(as_float, tff.federated_secure_sum_bitwidth(flags, 1))
