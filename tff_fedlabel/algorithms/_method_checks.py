"""Checks of what a method's functions return, made while a process is built from them.

TensorFlow repeats an error inside a traced function with many lines about the tracing. So `Checked`
remembers the error of a check and raises it by itself at the end.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_fedlabel.algorithms import _method, _reserved_names


class Checked:
    """A context that gives a method whose functions are checked, and inside which it is built.

    Args:
      method, setup: What is built.

    Raises:
      MethodError: A function returned what it must not.
    """

    def __init__(self, method: _method.Method, setup: _method.Setup):
        self._method, self._setup = method, setup
        self._error = None

    def __enter__(self) -> _method.Method:
        """The method, with functions that return what `Method` and `ClientOutput` promise."""
        wrappers = {
            "client_update": self._client_update,
            "initial_weights": self._initial_weights,
            "server_state": self._server_state,
            "server_update": self._server_update,
            "aggregate": self._aggregate,
            "initial_memory": self._initial_memory,
            "server_training": self._server_training,
        }
        functions = {field: getattr(self._method, field) for field in wrappers}
        checked = {
            field: wrappers[field](function, f"{field} of {self._method.name}")
            for field, function in functions.items()
            if function is not None
        }
        if self._method.initial_weights is not None:
            _check_finite(self._setup, self._method.name, checked["initial_weights"])
        return dataclasses.replace(self._method, **checked)

    def __exit__(self, kind, error, traceback):
        if error is not None and self._error is not None:
            raise self._error from None

    def _checking(self, check: Callable[..., Any]) -> Callable[..., Any]:
        """`check`, which is not made a graph, and whose error is remembered."""

        @tf.autograph.experimental.do_not_convert
        def run(*args):
            try:
                return check(*args)
            except _method.MethodError as error:
                self._error = error
                raise

        return run

    # Below, the functions of the method are called from functions that do become graphs.

    def _client_update(self, function, label):
        method = self._method
        check = self._checking(check_output)

        def client_update(setup, client):
            return check(label, method, setup, client, function(setup, client))

        return client_update

    def _initial_weights(self, function, label):
        check = self._checking(weights)
        return lambda setup: check(label, function(setup), setup.model.initial_weights[0])

    def _server_state(self, function, label):
        check = self._checking(state)
        return lambda setup: check(label, function(setup))

    def _server_update(self, function, label):
        check = self._checking(fit)

        def server_update(setup, state, sent):
            return check(label, function(setup, state, sent), state, "server_state")

        return server_update

    def _aggregate(self, function, label):
        @self._checking
        def check(delta, clients):
            return weights(label, delta, [_Row(d) for d in clients.delta])

        def aggregate(setup, clients):
            return check(function(setup, clients), clients)

        return aggregate

    def _initial_memory(self, function, label):
        check = self._checking(memory)
        return lambda setup: check(label, function(setup))

    def _server_training(self, function, label):
        check = self._checking(server_output)

        def server_training(setup, server):
            return check(label, setup, server, function(setup, server))

        return server_training


class _Row:
    """Shape and dtype of one client's row of a stacked tensor."""

    def __init__(self, stacked):
        self.shape, self.dtype = stacked.shape[1:], stacked.dtype


def _check_finite(setup, method_name, initial_weights) -> None:
    """Raises `MethodError` if initial weights hold a NaN or an infinity."""
    with tf.init_scope():
        # As a graph, as in the process itself.
        values = tf.function(lambda: initial_weights(setup), autograph=False)()
    for number, value in enumerate(values):
        if not np.isfinite(np.asarray(value, np.float64)).all():
            raise _method.MethodError(
                f"initial_weights of {method_name} has a NaN or an infinity in weight {number}."
            )


def state(label: str, value: Any) -> Any:
    """What `server_state` returned, a structure of one tensor or more.

    Raises:
      MethodError: It is something else.
    """
    if not tf.nest.flatten(value):
        raise _method.MethodError(
            f"{label} must return a structure of at least one tensor, got {_kind(value)}."
        )
    return tensors(label, value)


def check_output(label, method, setup, client, output) -> _method.ClientOutput:
    """What `client_update` returned, with tensors of the types that `ClientOutput` promises.

    Raises:
      MethodError: It is something else.
    """
    if not isinstance(output, _method.ClientOutput):
        raise _method.MethodError(
            f"{label} must return a tff_fedlabel.algorithms.ClientOutput, got {_kind(output)}."
        )
    sent = tensors(f"sent of {label}", output.sent)
    if method.server_update is not None or method.aggregate is not None:
        for path, value in _leaves(sent):
            if not (value.dtype.is_floating or value.dtype.is_integer):
                raise _method.MethodError(
                    f"sent{path} of {label} must be a tensor of numbers, got {_spec(value)}."
                )
    memory = output.memory
    if method.initial_memory is not None:
        memory = fit(f"memory of {label}", memory, client.memory, "initial_memory")
    of_model = setup.model.initialize_metrics_state()
    return output._replace(
        delta=weights(f"delta of {label}", output.delta, client.weights),
        num_examples=_scalar(f"num_examples of {label}", output.num_examples),
        model_metrics=fit(
            f"model_metrics of {label}",
            output.model_metrics,
            of_model,
            "the model's initialize_metrics_state",
        ),
        metrics=_metrics(label, output.metrics, of_model if isinstance(of_model, Mapping) else ()),
        sent=sent,
        memory=memory,
    )


def server_output(label, setup, server, output) -> _method.ServerOutput:
    """What `server_training` returned, with tensors of the types that `ServerOutput` promises.

    Raises:
      MethodError: It is something else.
    """
    if not isinstance(output, _method.ServerOutput):
        output = _method.ServerOutput(output, collections.OrderedDict())
    of_model = setup.model.initialize_metrics_state()
    model_metrics = output.model_metrics
    if model_metrics is not None:
        what = "the model's initialize_metrics_state"
        model_metrics = fit(f"model_metrics of {label}", model_metrics, of_model, what)
    return _method.ServerOutput(
        weights(label, output.weights, server.weights),
        _metrics(label, output.metrics, of_model if isinstance(of_model, Mapping) else ()),
        model_metrics,
    )


def _metrics(label, metrics, of_model):
    if not isinstance(metrics, Mapping):
        raise _method.MethodError(
            f"metrics of {label} must be an OrderedDict of (total,) or (numerator, denominator), "
            f"got {_kind(metrics)}."
        )
    checked = collections.OrderedDict()
    for name, values in metrics.items():
        metric = f"metric {name!r} of {label}"
        if not isinstance(name, str) or not name:
            raise _method.MethodError(f"{metric} must have a text as its name.")
        if name in _reserved_names.METRICS or name in of_model:
            owner = "trainer" if name in _reserved_names.METRICS else "model"
            raise _method.MethodError(
                f"{metric} must have another name: the {owner} has a metric of that name."
            )
        if not isinstance(values, tuple | list) or len(values) not in (1, 2):
            raise _method.MethodError(
                f"{metric} must be (total,) or (numerator, denominator), got {_kind(values)}."
            )
        checked[name] = tuple(_scalar(metric, value) for value in values)
    return checked


def weights(label: str, values: Any, expected: Sequence[Any]) -> tuple[tf.Tensor, ...]:
    """A tuple of tensors with the shapes and dtypes of `expected`.

    Raises:
      MethodError: The values differ in number, shape or dtype; the message begins with the label.
    """
    if not isinstance(values, tuple | list) or len(values) != len(expected):
        raise _method.MethodError(
            f"{label} must be a tuple of {len(expected)} tensors, one for each trainable weight, "
            f"got {_kind(values)}."
        )
    return tuple(
        _tensor(label, value, like, f" for weight {number}", f"that of weight {number}")
        for number, (value, like) in enumerate(zip(values, expected, strict=True))
    )


def tensors(label: str, structure: Any) -> Any:
    """The structure with a tensor in place of each value.

    Raises:
      MethodError: A value is no number, truth value, text or array of them.
    """
    return tf.nest.map_structure(lambda value: _convert(label, value), structure)


def memory(label: str, value: Any) -> Any:
    """What `initial_memory` returned, as NumPy arrays of numbers or truth values.

    Raises:
      MethodError: It is something else.
    """
    checked = tensors(label, value)
    for path, tensor in _leaves(checked):
        if tensor.dtype == tf.string or not hasattr(tensor, "numpy"):
            raise _method.MethodError(
                f"{label} must return numbers or truth values of known shapes, got "
                f"{_spec(tensor)}{_at(path)}."
            )
    return tf.nest.map_structure(lambda tensor: np.asarray(tensor.numpy()), checked)


def fit(label: str, value: Any, expected: Any, source: str, path: str = "") -> Any:
    """`value` in the structure, shapes and dtypes of `expected`, which `source` returned.

    Mappings fit in any order, and a list fits where a tuple is expected.

    Raises:
      MethodError: It does not fit; the message has the path to the difference.
    """
    if isinstance(expected, Mapping):
        if not isinstance(value, Mapping) or set(value) != set(expected):
            _refuse_structure(label, value, expected, source, path)
        return collections.OrderedDict(
            (name, fit(label, value[name], part, source, f"{path}[{name!r}]"))
            for name, part in expected.items()
        )
    if isinstance(expected, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(expected):
            _refuse_structure(label, value, expected, source, path)
        parts = [
            fit(label, v, e, source, f"{path}[{number}]")
            for number, (v, e) in enumerate(zip(value, expected, strict=True))
        ]
        if hasattr(expected, "_fields"):
            return type(expected)(*parts)
        return type(expected)(parts)
    return _tensor(label, value, expected, _at(path), f"as in {source}")


def _refuse_structure(label, value, expected, source, path):
    raise _method.MethodError(
        f"{label} must have the structure of {source}, {_kind(expected)}, got "
        f"{_kind(value)}{_at(path)}."
    )


def _scalar(label: str, value: Any) -> tf.Tensor:
    """float32 []."""
    tensor = _convert(label, value)
    real = tensor.dtype.is_floating or tensor.dtype.is_integer
    if not real or not tensor.shape.is_compatible_with([]):
        raise _method.MethodError(f"{label} must be a float32 scalar, got {_spec(tensor)}.")
    return tf.ensure_shape(tf.cast(tensor, tf.float32), [])


def _tensor(label, value, expected, where, origin) -> tf.Tensor:
    """`value` as a tensor of the shape and dtype of `expected`."""
    shape, dtype = tf.TensorShape(expected.shape), tf.as_dtype(expected.dtype)
    tensor = _convert(label, value, dtype, where)
    if not tensor.shape.is_compatible_with(shape):
        raise _method.MethodError(
            f"{label} has shape {_shape(tensor.shape)}{where}, expected {_shape(shape)}, {origin}."
        )
    if tensor.dtype != dtype:
        raise _method.MethodError(
            f"{label} has dtype {tensor.dtype.name}{where}, expected {dtype.name}, {origin}."
        )
    # TFF needs the static shapes, which some operations lose.
    return tf.ensure_shape(tensor, shape)


def _convert(label, value, dtype=None, where="") -> tf.Tensor:
    """A tensor; one that is none yet gets the dtype if its kind of number allows it."""
    wrong = _method.MethodError(f"{label} must be made of tensors, got {_kind(value)}{where}.")
    if value is None or isinstance(value, Mapping | tuple | list):
        raise wrong
    if tf.is_tensor(value):
        try:
            return tf.convert_to_tensor(value)
        except (TypeError, ValueError):
            raise wrong from None
    array = np.asarray(value)
    if array.dtype.kind not in "biufSU" and array.dtype != tf.bfloat16.as_numpy_dtype:
        raise wrong
    if dtype is None:
        dtype = {float: tf.float32, int: tf.int32}.get(type(value))  # As TensorFlow does.
    if dtype is not None and np.can_cast(array.dtype, dtype.as_numpy_dtype, "same_kind"):
        array = array.astype(dtype.as_numpy_dtype)
    return tf.convert_to_tensor(array)


def _leaves(structure, path=""):
    """(path, value) of each value."""
    if isinstance(structure, Mapping):
        for name, part in structure.items():
            yield from _leaves(part, f"{path}[{name!r}]")
    elif isinstance(structure, tuple | list):
        for number, part in enumerate(structure):
            yield from _leaves(part, f"{path}[{number}]")
    else:
        yield path, structure


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _shape(shape: tf.TensorShape) -> str:
    return "unknown" if shape.rank is None else str(shape.as_list()).replace("None", "?")


def _spec(tensor) -> str:
    return f"{tensor.dtype.name} {_shape(tensor.shape)}"


def _kind(value: Any) -> str:
    """A value in a few words."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:80]
    if isinstance(value, Mapping):
        names = ", ".join(map(str, value))
        return f"a mapping with {names[:80]}" if names else "an empty mapping"
    if hasattr(value, "_fields"):
        return f"a {type(value).__name__}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}" if value else "()"
    if tf.is_tensor(value) and hasattr(value, "shape"):
        return f"a tensor {_spec(value)}"
    return f"a {type(value).__name__}"
