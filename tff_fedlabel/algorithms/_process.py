"""Turns a `Method` into a TFF learning process.

The only file that uses `tff.learning.templates`. It holds what all methods share: the round number
that is broadcast with the weights, the handling of updates that are not finite, the weighting by
r_k, cohorts without any weight, and the metrics.
"""

import collections
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel._autograph import as_written
from tff_fedlabel.algorithms import (
    _builder_arguments,
    _guards,
    _method,
    _secure,
    _stacking,
    every_client,
)

_FLOAT = tff.TensorType(tf.float32.as_numpy_dtype)


def build_learning_process(
    method: _method.Method,
    setup: _method.Setup,
    server_data: Any,
    *,
    server_optimizer,
    client_weighting,
    model_distributor,
    model_aggregator,
    metrics_aggregator,
) -> tff.learning.templates.LearningProcess:
    """Composes distributor, client work, aggregator and finalizer into a learning process.

    Args:
      method, setup: What to build.
      server_data: `OrderedDict(x=, y=)` of arrays for `method.server_training`, or None.
      server_optimizer, client_weighting, model_distributor, model_aggregator, metrics_aggregator:
        The builder's arguments, already checked.
    """
    initial_weights_fn = _initial_weights(method, setup)
    weights_type = initial_weights_fn.type_signature.result
    if model_distributor is None:
        model_distributor = tff.learning.templates.build_broadcast_process(weights_type)
    if server_optimizer is None:
        server_optimizer = tff.learning.optimizers.build_sgdm(
            learning_rate=1.0, momentum=method.server_momentum
        )
    aggregation, secure = None, False
    if method.aggregate is None:
        if model_aggregator is None:
            model_aggregator = tff.aggregators.MeanFactory(no_nan_division=True)
        aggregation = model_aggregator.create(weights_type.trainable, _FLOAT)
        secure = _secure.is_secure(aggregation.next)
        if secure:
            _secure.check_method(method)
    if metrics_aggregator is None:
        metrics_aggregator = (
            _secure.sum_metrics if secure else tff.learning.metrics.sum_then_finalize
        )
    client_work = _build_client_work(
        method, setup, weights_type, client_weighting, metrics_aggregator
    )
    if method.aggregate is not None:
        sent_type = client_work.next.type_signature.result.result.member.update
        aggregation = _own_aggregation(method, setup).create(sent_type, _FLOAT)
    if isinstance(model_aggregator, every_client.EveryClient):
        aggregator = aggregation
    else:
        aggregator = _guards.guard_empty_cohorts(aggregation, secure)
    # The finalizer keeps weights and optimizer state when the aggregate is not finite; that is how
    # the guard above signals that no client contributed.
    finalizer = tff.learning.templates.build_apply_optimizer_finalizer(
        server_optimizer, weights_type
    )
    if method.server_training is not None:
        finalizer = _train_at_server(finalizer, method, setup, server_data, weights_type)
    return tff.learning.templates.compose_learning_process(
        initial_weights_fn, model_distributor, client_work, aggregator, finalizer
    )


def _initial_weights(method, setup):
    @tff.tensorflow.computation
    def initial_weights():
        trainable, non_trainable = setup.model.initial_weights
        if method.initial_weights is not None:
            trainable = method.initial_weights(setup)
        return tff.learning.models.ModelWeights(
            tuple(tf.convert_to_tensor(w) for w in trainable),
            tuple(tf.convert_to_tensor(w) for w in non_trainable),
        )

    return initial_weights


def _own_aggregation(method, setup):
    """The method's own aggregation of the results of `_client_result`."""

    def combine(values, weights, round_num):
        update, sent = values
        clients = _method.Clients(tuple(-u for u in update), weights, sent, round_num)
        return tuple(-d for d in method.aggregate(setup, clients))

    return _stacking.StackedAggregationFactory(combine)


def _build_client_work(method, setup, weights_type, weighting, metrics_aggregator):
    initial_state = _initial_state(method, setup)
    state_type = initial_state.type_signature.result
    data_type = _data_type(method, setup)

    @tff.tensorflow.computation(state_type, weights_type, data_type)
    @tf.function
    def client_update(state, weights, data):
        client = _method.Client(
            weights=tuple(weights.trainable),
            non_trainable=tuple(weights.non_trainable),
            labeled=data["labeled"],
            unlabeled=data["unlabeled"],
            round_num=state["round_num"],
            hparams=state["optimizer"],
            server_state=state.get("method", ()),
            helpers=data.get("helpers"),
        )
        if method.initial_memory is None:
            return _client_result(method, weighting, method.client_update(setup, client), ())
        remembered = data["memory"].get_single_element()
        client = client._replace(memory=remembered["value"])
        output = method.client_update(setup, client)
        return _client_result(method, weighting, output, remembered)

    @tf.function
    def finalize_metrics(totals):
        finalized = collections.OrderedDict(setup.model.finalize_metrics(totals["model"]))
        return collections.OrderedDict(finalized, **_finalized(totals["method"]))

    next_state = _build_next_state(method, setup, state_type, client_update.type_signature.result)

    @tff.federated_computation
    def init_fn():
        return tff.federated_eval(initial_state, tff.SERVER)

    @tff.federated_computation(
        init_fn.type_signature.result,
        tff.FederatedType(weights_type, tff.CLIENTS),
        tff.FederatedType(data_type, tff.CLIENTS),
    )
    def next_fn(state, weights, client_data):
        outputs = tff.federated_map(
            client_update, (tff.federated_broadcast(state), weights, client_data)
        )
        measurements = collections.OrderedDict(
            train=metrics_aggregator(finalize_metrics)(outputs.metrics)
        )
        if method.initial_memory is not None:
            measurements["memory"] = _stacking.stack(outputs.memory)
        new_state, more = next_state(state, outputs)
        return tff.templates.MeasuredProcessOutput(
            new_state, outputs.result, tff.federated_zip(measurements | more)
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


def _finalized(metrics):
    """Metrics as they are reported; 0 / 0 is 0."""
    return collections.OrderedDict(
        (name, tf.math.divide_no_nan(*values) if len(values) == 2 else values[0])
        for name, values in metrics.items()
    )


def _initial_state(method, setup):
    @tff.tensorflow.computation
    def initial_state():
        trainable, _ = setup.model.initial_weights
        specs = tuple(tf.TensorSpec(w.shape, w.dtype) for w in trainable)
        state = collections.OrderedDict(
            round_num=tf.constant(0, tf.int32),
            optimizer=setup.optimizer.get_hparams(setup.optimizer.initialize(specs)),
        )
        if method.server_state is not None:
            state["method"] = method.server_state(setup)
        return state

    return initial_state


def _data_type(method, setup) -> tff.Type:
    """The type of what one client receives besides the weights and the state."""
    x_spec, y_spec = _builder_arguments.input_specs(setup.model)
    labeled = collections.OrderedDict(x=x_spec, y=y_spec)
    elements = collections.OrderedDict(
        labeled=labeled,
        unlabeled=labeled if setup.diagnose else collections.OrderedDict(x=x_spec),
    )
    memory = initial_memory(method, setup)
    if memory is not None:
        spec = tf.nest.map_structure(lambda m: tf.TensorSpec(m.shape, m.dtype), memory)
        client = tf.TensorSpec([], tf.int32)
        elements["memory"] = collections.OrderedDict(client=client, value=spec)
        if method.choose_helpers is not None:
            elements["helpers"] = spec
    return tff.to_type(
        collections.OrderedDict(
            (name, tff.SequenceType(tff.types.tensorflow_to_type(element)))
            for name, element in elements.items()
        )
    )


def initial_memory(method: _method.Method, setup: _method.Setup) -> Any:
    """The memory of a client that has not taken part yet, NumPy arrays; None without memory."""
    if method.initial_memory is None:
        return None
    with tf.init_scope():
        memory = method.initial_memory(setup)
        return tf.nest.map_structure(lambda m: tf.convert_to_tensor(m).numpy(), memory)


@as_written
def _client_result(method, weighting, output: _method.ClientOutput, remembered):
    """What a client sends; its work is left out if it is not finite."""
    finite = _guards.is_finite(output.delta, output.num_examples)
    finite &= _guards.all_finite((output.sent, output.memory))

    def if_finite(structure):
        zeros = tf.nest.map_structure(tf.zeros_like, structure)
        return tf.nest.map_structure(lambda a, b: tf.where(finite, a, b), structure, zeros)

    # TFF's convention: the aggregate is subtracted from the server's weights.
    update = tuple(-d for d in output.delta)
    # tf.cond rather than tf.where: it copies nothing if the update is finite.
    update = tf.cond(finite, lambda: update, lambda: tuple(tf.zeros_like(u) for u in update))
    sent, num_examples = if_finite((output.sent, output.num_examples))
    if weighting is tff.learning.ClientWeighting.UNIFORM:
        update_weight = tf.cast(num_examples > 0, tf.float32)
    else:
        update_weight = num_examples
    # Lists, since TFF's secure sum of metrics takes no tuples.
    totals = collections.OrderedDict(
        (name, list(values)) for name, values in if_finite(output.metrics).items()
    )
    totals["images_used"] = [num_examples]
    totals["rejected_clients"] = [1.0 - tf.cast(finite, tf.float32)]
    result = collections.OrderedDict(
        result=tff.learning.templates.ClientResult(
            update if method.aggregate is None else (update, sent), update_weight
        ),
        metrics=collections.OrderedDict(
            model=if_finite(output.model_metrics),
            method=totals,
        ),
    )
    if method.server_state is not None:
        result["sent"] = sent
    if method.initial_memory is not None:
        # A client that is left out keeps its previous memory.
        value = tf.nest.map_structure(
            lambda new, old: tf.where(finite, new, old), output.memory, remembered["value"]
        )
        result["memory"] = collections.OrderedDict(client=remembered["client"], value=value)
    return result


def _build_next_state(method, setup, state_type, output_type):
    """`(state@SERVER, {output of client_update}@CLIENTS) -> (state@SERVER, measurements)`."""

    @tff.tensorflow.computation(state_type)
    def next_round(state):
        return collections.OrderedDict(state, round_num=state["round_num"] + 1)

    if method.server_state is None:
        return lambda state, outputs: (tff.federated_map(next_round, state), {})

    method_type, sent_type = state_type["method"], output_type["sent"]

    @tff.tensorflow.computation(method_type, sent_type)
    @tf.function
    def update(state, sent):
        new = method.server_update(setup, state, sent)
        spoiled = _guards.spoiled(new, state)
        kept = tf.nest.map_structure(lambda n, o: tf.where(spoiled, o, n), new, state)
        return kept, tf.cast(spoiled, tf.int32)

    keep_if_empty = _guards.keep_if_empty(method_type)

    @tff.tensorflow.computation(state_type, method_type)
    def with_method_state(state, method_state):
        return collections.OrderedDict(state, method=method_state)

    def next_state(state, outputs):
        old = state["method"]
        new, spoiled = tff.federated_map(update, (old, tff.federated_sum(outputs.sent)))
        total = tff.federated_sum(outputs.result.update_weight)
        new = tff.federated_map(keep_if_empty, (total, new, old))
        state = tff.federated_map(with_method_state, (tff.federated_map(next_round, state), new))
        return state, {"server_state_non_finite": spoiled}

    return next_state


def _train_at_server(finalizer, method, setup, data, weights_type):
    """`finalizer`, followed by the method's training at the server."""
    optimizer = setup.optimizer

    @tff.tensorflow.computation
    def initial_training():
        specs = tuple(tf.TensorSpec(w.shape, w.dtype) for w in setup.model.initial_weights[0])
        hparams = optimizer.get_hparams(optimizer.initialize(specs))
        return collections.OrderedDict(round_num=tf.constant(0), optimizer=hparams)

    training_type = initial_training.type_signature.result

    @tff.tensorflow.computation(training_type, weights_type)
    @tf.function
    def train(state, weights):
        server = _method.Server(
            weights=tuple(weights.trainable),
            non_trainable=tuple(weights.non_trainable),
            data=tf.nest.map_structure(tf.constant, data),
            round_num=state["round_num"],
            hparams=state["optimizer"],
        )
        output = method.server_training(setup, server)
        finite = _guards.all_finite(output.weights)
        trained = tuple(
            tf.where(finite, n, old) for n, old in zip(output.weights, server.weights, strict=True)
        )
        next_state = collections.OrderedDict(state, round_num=state["round_num"] + 1)
        new_weights = tff.learning.models.ModelWeights(trained, server.non_trainable)
        measured = collections.OrderedDict(server_training_non_finite=1 - tf.cast(finite, tf.int32))
        if output.metrics:
            of_model = output.model_metrics
            of_model = {} if of_model is None else setup.model.finalize_metrics(of_model)
            measured["server_training"] = _finalized(output.metrics) | of_model
        return next_state, new_weights, measured

    @tff.tensorflow.computation(
        finalizer.next.type_signature.result.measurements.member, train.type_signature.result[2]
    )
    def measure(measurements, of_training):
        return collections.OrderedDict(measurements, **of_training)

    @tff.federated_computation
    def init_fn():
        training = tff.federated_eval(initial_training, tff.SERVER)
        return tff.federated_zip(
            collections.OrderedDict(finalizer=finalizer.initialize(), training=training)
        )

    @tff.federated_computation(
        init_fn.type_signature.result, *finalizer.next.type_signature.parameter[1:]
    )
    def next_fn(state, weights, update):
        output = finalizer.next(state["finalizer"], weights, update)
        training, trained, measured = tff.federated_map(train, (state["training"], output.result))
        return tff.templates.MeasuredProcessOutput(
            tff.federated_zip(collections.OrderedDict(finalizer=output.state, training=training)),
            trained,
            tff.federated_map(measure, (output.measurements, measured)),
        )

    state_type = init_fn.type_signature.result.member

    @tff.tensorflow.computation(state_type)
    def get_hparams(state):
        return collections.OrderedDict(
            finalizer=finalizer.get_hparams(state["finalizer"]),
            training=state["training"]["optimizer"],
        )

    @tff.tensorflow.computation(state_type, get_hparams.type_signature.result)
    def set_hparams(state, hparams):
        training = collections.OrderedDict(state["training"], optimizer=hparams["training"])
        return collections.OrderedDict(
            finalizer=finalizer.set_hparams(state["finalizer"], hparams["finalizer"]),
            training=training,
        )

    return tff.learning.templates.FinalizerProcess(
        init_fn, next_fn, get_hparams_fn=get_hparams, set_hparams_fn=set_hparams
    )
