"""An aggregation that stacks what the clients sent, so that the server sees single clients."""

import tensorflow as tf
import tensorflow_federated as tff


def stack(value: tff.Value) -> tff.Value:
    """Stacks a client-placed value; to be called inside a `tff.federated_computation`.

    It is a `tff.federated_aggregate`, so it works wherever sums over clients do: in the map-reduce
    form, and split over several workers, whose parts are merged in the clients' order.

    Args:
      value: `{T}@CLIENTS`, T a structure of tensors of known shapes.

    Returns:
      The structure at the server, with a leading [n] in each tensor: the rows of n clients.
    """
    member = value.type_signature.member
    specs = tff.types.type_to_tf_tensor_specs(member)
    stacked = tff.types.tensorflow_to_type(
        tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), specs)
    )

    @tff.tensorflow.computation
    def zero():
        # Not a static length: the accumulator's type leaves it open.
        none = tf.compat.v1.placeholder_with_default(0, [])
        return tf.nest.map_structure(lambda s: tf.zeros([none, *s.shape], s.dtype), specs)

    @tff.tensorflow.computation(stacked, member)
    def accumulate(rows, row):
        return tf.nest.map_structure(
            lambda all_rows, one: tf.concat([all_rows, one[tf.newaxis]], axis=0), rows, row
        )

    @tff.tensorflow.computation(stacked, stacked)
    def merge(first, second):
        return tf.nest.map_structure(lambda a, b: tf.concat([a, b], axis=0), first, second)

    @tff.tensorflow.computation(stacked)
    def report(rows):
        return rows

    return tff.federated_aggregate(value, zero(), accumulate, merge, report)


class StackedAggregationFactory(tff.aggregators.WeightedAggregationFactory):
    """A weighted aggregation that sees each client's value.

    Args:
      combine: `(values, weights, round_num) -> result`, applied to what `stack` returns; traced
        once.
    """

    def __init__(self, combine):
        self._combine = combine

    def create(self, value_type, weight_type):
        round_type = tff.TensorType(tf.int32.as_numpy_dtype)

        @tff.tensorflow.computation
        def first_round():
            return tf.constant(0)

        @tff.tensorflow.computation(round_type)
        def next_round(round_num):
            return round_num + 1

        @tff.federated_computation
        def init_fn():
            return tff.federated_eval(first_round, tff.SERVER)

        @tff.federated_computation(
            init_fn.type_signature.result,
            tff.FederatedType(value_type, tff.CLIENTS),
            tff.FederatedType(weight_type, tff.CLIENTS),
        )
        def next_fn(round_num, value, weight):
            rows = stack(tff.federated_zip((value, weight)))

            @tff.tensorflow.computation(rows.type_signature.member, round_type)
            @tf.function
            def combine(rows, round_num):
                values, weights = rows
                return self._combine(values, weights, round_num)

            return tff.templates.MeasuredProcessOutput(
                tff.federated_map(next_round, round_num),
                tff.federated_map(combine, (rows, round_num)),
                tff.federated_value((), tff.SERVER),
            )

        return tff.templates.AggregationProcess(init_fn, next_fn)
