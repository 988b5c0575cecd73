"""Turns the update of one client, written as a `tf.function`, into a TFF learning process.

The one file that knows `tff.learning.templates`. Every method gives `build_learning_process` a
`ClientUpdate`; what is the same for all of them lives here: the round number that travels with
the weights, what happens to an update that is not finite, the weighting by r_k, a cohort in which
nobody had anything to say, and the metrics.
"""

import collections
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import augmentation

_OUR_AUGMENTATIONS = (augmentation.RandAugment, augmentation.WeakAugment)


class ClientOutput(NamedTuple):
    """What a client computed.

    Attributes:
      delta: Its weights after the round minus the weights it received (Delta w_k), a tuple.
      num_images: float32 scalar, r_k: the images that took part in the update.
      model_metrics: The state of the model's own metrics over the labelled batches.
      metrics: `OrderedDict` name -> `[total]` or `[numerator, denominator]`, float32 scalars that
        are summed over the clients; a pair is then divided (0 / 0 is reported as 0).
    """

    delta: Any
    num_images: tf.Tensor
    model_metrics: Any
    metrics: collections.OrderedDict


class ClientInput(NamedTuple):
    """What a client receives.

    Attributes:
      weights: Tuple of trainable weights, the global model w.
      non_trainable: The model's other weights; no method changes them.
      labeled: Batches `OrderedDict(x=, y=)`.
      unlabeled: Batches `OrderedDict(x=)`.
      round_num: int32 scalar, 0 in the first round.
      hparams: The client optimizer's hyper-parameters.
    """

    weights: Any
    non_trainable: Any
    labeled: tf.data.Dataset
    unlabeled: tf.data.Dataset
    round_num: tf.Tensor
    hparams: Any


def build_learning_process(
    model: tff.learning.models.FunctionalModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    client_update: Callable[[ClientInput], ClientOutput],
    *,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
    client_weighting: tff.learning.ClientWeighting = tff.learning.ClientWeighting.NUM_EXAMPLES,
    model_distributor: tff.learning.templates.DistributionProcess | None = None,
    model_aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    metrics_aggregator: Callable[..., Any] | None = None,
    loop_implementation: tff.learning.LoopImplementation,
    diagnose: bool = False,
) -> tff.learning.templates.LearningProcess:
    """Composes distributor, client work, aggregator and finalizer into a learning process.

    With model weights W, model inputs x and labels y as `model.input_spec` has them, the type of
    `next` is

    `(<state@SERVER, {<labeled=<x=,y=>*, unlabeled=<x=>*>}@CLIENTS> -> <state=, metrics=>@SERVER)`

    (`unlabeled=<x=,y=>*` with `diagnose`). A client's update counts with its r_k
    (`ClientWeighting.NUM_EXAMPLES`) or, with `UNIFORM`, with 1 if its r_k is not 0. An update that
    holds a NaN or an infinity is set to zero, its r_k with it, and `rejected_clients` counts it.
    Where the r_k of a cohort sum to 0, the global weights, the server optimizer and the aggregator
    stay as they were (and the finalizer's `update_non_finite` reads 1).

    Args:
      model: The model to train; its output is logits `[batch, num_classes]`.
      client_optimizer: The optimizer of the local steps.
      client_update: The method itself, traced once inside a `tf.function`.
      server_optimizer: Applies the aggregated update; SGD with learning rate 1 by default.
      client_weighting: How updates are weighted.
      model_distributor: As in `tff.learning.algorithms.build_weighted_fed_avg`.
      model_aggregator: Any weighted factory of `tff.aggregators`; by default the weighted mean. An
        unweighted one made weighted by `tff.aggregators.as_weighted_aggregator` ignores weights,
        so clients that count for nothing still count in its denominator.
      metrics_aggregator: As in TFF; `tff.learning.metrics.sum_then_finalize` by default.
      loop_implementation: Checked here, used by `client_update`.
      diagnose: Whether unlabelled elements carry their hidden label y (metrics only).

    Returns:
      The process. Its metrics lie under `metrics["client_work"]["train"]`.

    Raises:
      ValueError: An argument is not of the kind named above.
    """
    _check_arguments(model, client_optimizer, server_optimizer, client_weighting, model_aggregator)
    if not isinstance(loop_implementation, tff.learning.LoopImplementation):
        raise ValueError(
            "loop_implementation must be a tff.learning.LoopImplementation, got "
            f"{loop_implementation!r}."
        )
    initial_weights_fn = _initial_weights(model)
    weights_type = initial_weights_fn.type_signature.result
    if model_distributor is None:
        model_distributor = tff.learning.templates.build_broadcast_process(weights_type)
    if model_aggregator is None:
        model_aggregator = tff.aggregators.MeanFactory(no_nan_division=True)
    if server_optimizer is None:
        server_optimizer = tff.learning.optimizers.build_sgdm(learning_rate=1.0)

    client_work = _build_client_work(
        model,
        client_optimizer,
        client_update,
        weights_type,
        client_weighting,
        metrics_aggregator or tff.learning.metrics.sum_then_finalize,
        diagnose,
    )
    aggregator = _EmptyCohortGuard(model_aggregator).create(
        weights_type.trainable, tff.TensorType(tf.float32.as_numpy_dtype)
    )
    # The finalizer keeps weights and optimizer state when the aggregate is not finite; the guard
    # above says "nobody contributed" that way.
    finalizer = tff.learning.templates.build_apply_optimizer_finalizer(
        server_optimizer, weights_type
    )
    return tff.learning.templates.compose_learning_process(
        initial_weights_fn, model_distributor, client_work, aggregator, finalizer
    )


def _check_model(model) -> None:
    if not isinstance(model, tff.learning.models.FunctionalModel):
        raise ValueError(
            "model must be a tff.learning.models.FunctionalModel, got "
            f"{type(model).__name__}; tff_fedlabel.models.functional_model makes one from Keras."
        )


def _check_arguments(
    model, client_optimizer, server_optimizer, client_weighting, model_aggregator
) -> None:
    _check_model(model)
    for name, optimizer in (
        ("client_optimizer", client_optimizer),
        ("server_optimizer", server_optimizer),
    ):
        is_optimizer = isinstance(optimizer, tff.learning.optimizers.Optimizer)
        if not is_optimizer and not (name == "server_optimizer" and optimizer is None):
            raise ValueError(
                f"{name} must be a tff.learning.optimizers.Optimizer (for example "
                f"tff.learning.optimizers.build_sgdm(0.1)), got {type(optimizer).__name__}."
            )
    if not isinstance(client_weighting, tff.learning.ClientWeighting):
        raise ValueError(
            f"client_weighting must be a tff.learning.ClientWeighting, got {client_weighting!r}."
        )
    if model_aggregator is not None and not isinstance(
        model_aggregator, tff.aggregators.WeightedAggregationFactory
    ):
        raise ValueError(
            "model_aggregator must be a tff.aggregators.WeightedAggregationFactory, got "
            f"{type(model_aggregator).__name__}; tff.aggregators.as_weighted_aggregator turns an "
            "unweighted factory into one (which then weighs all clients alike)."
        )


def input_specs(model: tff.learning.models.FunctionalModel) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """The specs of x and y, from an `input_spec` that is a mapping or a pair."""
    spec = model.input_spec
    if isinstance(spec, collections.abc.Mapping):
        return spec["x"], spec["y"]
    return tuple(spec)


def check_config(config, config_class: type) -> None:
    """Raises `ValueError` unless `config` is the method's own."""
    if not isinstance(config, config_class):
        raise ValueError(f"config must be a {config_class.__name__}, got {config!r}.")


def check_seed(seed) -> None:
    """Raises `ValueError` unless `seed` is an int of 32 bits, 0 or more."""
    is_int = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    if not is_int or not 0 <= seed < 2**31:
        raise ValueError(f"seed must be an int in [0, 2**31), got {seed!r}.")


def check_images(model, augment, name: str) -> tf.TensorSpec:
    """Returns the spec of x; raises `ValueError` if `augment` could not work on such inputs."""
    _check_model(model)
    x_spec, _ = input_specs(model)
    if augment is None:
        return x_spec
    if not isinstance(x_spec, tf.TensorSpec) or not (
        x_spec.dtype == tf.uint8 or x_spec.dtype.is_floating
    ):
        raise ValueError(
            f"{name} needs uint8 images or float images in [0, 1] but the model takes {x_spec}. "
            f"Set {name}=None for other inputs."
        )
    is_image = x_spec.shape.rank == 4 and x_spec.shape[-1] in (1, 3)
    if isinstance(augment, _OUR_AUGMENTATIONS) and not is_image:
        raise ValueError(
            f"{name} needs images [batch, height, width, 1 or 3] but the model takes "
            f"{x_spec.shape}. Set {name}=None, or to a function of yours, for other inputs."
        )
    return x_spec


def _initial_weights(model):
    @tff.tensorflow.computation
    def initial_weights():
        trainable, non_trainable = model.initial_weights
        return tff.learning.models.ModelWeights(
            tuple(tf.convert_to_tensor(w) for w in trainable),
            tuple(tf.convert_to_tensor(w) for w in non_trainable),
        )

    return initial_weights


def _is_finite(delta, num_images):
    """Whether an update is finite, also when weighted; bool [].

    What overflows in the weighting would spoil the others' share of the sum.
    """

    def by_element():
        finite = tf.math.is_finite(num_images)
        for d in delta:
            # A NaN or an infinity is one in the product, too.
            finite &= tf.reduce_all(tf.math.is_finite(d * tf.cast(num_images, d.dtype)))
        return finite

    # One pass without a copy tells it nearly always: no element is larger than the square root of
    # a finite sum of squares, and the product of two such roots is finite.
    bounded = tf.math.is_finite(num_images)
    for d in delta:
        limit = min(0.5 * float(d.dtype.max) ** 0.5, float(num_images.dtype.max))
        bounded &= tf.math.is_finite(tf.nn.l2_loss(d))
        bounded &= tf.abs(num_images) <= tf.constant(limit, num_images.dtype)
    return tf.cond(bounded, lambda: True, by_element)


def _build_client_work(
    model, optimizer, client_update, weights_type, weighting, metrics_aggregator, diagnose
):
    x_spec, y_spec = input_specs(model)
    labeled_spec = collections.OrderedDict(x=x_spec, y=y_spec)
    unlabeled_spec = labeled_spec if diagnose else collections.OrderedDict(x=x_spec)
    data_type = tff.to_type(
        collections.OrderedDict(
            labeled=tff.SequenceType(tff.types.tensorflow_to_type(labeled_spec)),
            unlabeled=tff.SequenceType(tff.types.tensorflow_to_type(unlabeled_spec)),
        )
    )

    @tff.tensorflow.computation
    def initial_state():
        trainable, _ = model.initial_weights
        specs = tuple(tf.TensorSpec(w.shape, w.dtype) for w in trainable)
        return collections.OrderedDict(
            round_num=tf.constant(0, tf.int32),
            optimizer=optimizer.get_hparams(optimizer.initialize(specs)),
        )

    state_type = initial_state.type_signature.result

    @tff.tensorflow.computation(state_type, weights_type, data_type)
    @tf.function
    def client_update_computation(state, weights, data):
        output = client_update(
            ClientInput(
                weights=tuple(weights.trainable),
                non_trainable=tuple(weights.non_trainable),
                labeled=data["labeled"],
                unlabeled=data["unlabeled"],
                round_num=state["round_num"],
                hparams=state["optimizer"],
            )
        )
        finite = _is_finite(output.delta, output.num_images)

        def if_finite(value):
            return tf.where(finite, value, tf.zeros_like(value))

        # TFF aggregates what is to be subtracted from the server's weights.
        update = tuple(-d for d in output.delta)
        update = tf.cond(
            finite, lambda: update, lambda: tf.nest.map_structure(tf.zeros_like, update)
        )
        num_images = if_finite(output.num_images)
        if weighting is tff.learning.ClientWeighting.UNIFORM:
            update_weight = tf.cast(num_images > 0, tf.float32)
        else:
            update_weight = num_images
        metrics = collections.OrderedDict(
            model=tf.nest.map_structure(if_finite, output.model_metrics),
            method=collections.OrderedDict(
                [*tf.nest.map_structure(if_finite, output.metrics).items()]
                + [
                    ("images_used", [num_images]),
                    ("rejected_clients", [1.0 - tf.cast(finite, tf.float32)]),
                ]
            ),
        )
        return tff.learning.templates.ClientResult(update, update_weight), metrics

    @tf.function
    def finalize_metrics(totals):
        finalized = collections.OrderedDict(model.finalize_metrics(totals["model"]))
        for name, values in totals["method"].items():
            finalized[name] = tf.math.divide_no_nan(*values) if len(values) == 2 else values[0]
        return finalized

    @tff.tensorflow.computation(state_type)
    def next_state(state):
        return collections.OrderedDict(state, round_num=state["round_num"] + 1)

    @tff.federated_computation
    def init_fn():
        return tff.federated_eval(initial_state, tff.SERVER)

    @tff.federated_computation(
        init_fn.type_signature.result,
        tff.FederatedType(weights_type, tff.CLIENTS),
        tff.FederatedType(data_type, tff.CLIENTS),
    )
    def next_fn(state, weights, client_data):
        result, totals = tff.federated_map(
            client_update_computation, (tff.federated_broadcast(state), weights, client_data)
        )
        train_metrics = metrics_aggregator(finalize_metrics)(totals)
        measurements = tff.federated_zip(collections.OrderedDict(train=train_metrics))
        return tff.templates.MeasuredProcessOutput(
            tff.federated_map(next_state, state), result, measurements
        )

    @tff.tensorflow.computation(state_type)
    def get_hparams(state):
        return state["optimizer"]

    @tff.tensorflow.computation(state_type, get_hparams.type_signature.result)
    def set_hparams(state, hparams):
        return collections.OrderedDict(state, optimizer=hparams)

    return tff.learning.templates.ClientWorkProcess(
        init_fn, next_fn, get_hparams_fn=get_hparams, set_hparams_fn=set_hparams
    )


class _EmptyCohortGuard(tff.aggregators.WeightedAggregationFactory):
    """Makes any weighted factory safe for a cohort whose weights sum to 0.

    Then the result is NaN, which the finalizer turns into "keep everything", and the inner
    aggregator keeps its state. The sum of the weights reaches the server in the clear, also under
    a secure aggregator.
    """

    def __init__(self, inner: tff.aggregators.WeightedAggregationFactory):
        self._inner = inner

    def create(self, value_type, weight_type):
        inner = self._inner.create(value_type, weight_type)
        state_type = inner.initialize.type_signature.result.member
        result_type = inner.next.type_signature.result.result.member

        @tff.tensorflow.computation(tff.TensorType(tf.float32.as_numpy_dtype), result_type)
        def nan_if_empty(total, result):
            return tf.nest.map_structure(
                lambda r: tf.where(total > 0, r, tf.constant(float("nan"), r.dtype)), result
            )

        @tff.tensorflow.computation(
            tff.TensorType(tf.float32.as_numpy_dtype), state_type, state_type
        )
        def old_if_empty(total, new, old):
            return tf.nest.map_structure(lambda n, o: tf.where(total > 0, n, o), new, old)

        has_state = bool(tff.types.count(state_type, lambda t: isinstance(t, tff.TensorType)))

        @tff.federated_computation(
            inner.initialize.type_signature.result,
            tff.FederatedType(value_type, tff.CLIENTS),
            tff.FederatedType(weight_type, tff.CLIENTS),
        )
        def next_fn(state, value, weight):
            total = tff.federated_sum(weight)
            output = inner.next(state, value, weight)
            new_state = output.state
            if has_state:
                new_state = tff.federated_map(old_if_empty, (total, output.state, state))
            return tff.templates.MeasuredProcessOutput(
                new_state,
                tff.federated_map(nan_if_empty, (total, output.result)),
                output.measurements,
            )

        return tff.templates.AggregationProcess(inner.initialize, next_fn)
