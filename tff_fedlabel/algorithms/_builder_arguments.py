"""Checks the arguments of a method's builder before anything is traced."""

import collections
import dataclasses

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import _validation
from tff_fedlabel.algorithms import _method


def check(method: _method.Method, setup: _method.Setup, options: dict) -> None:
    """Checks the arguments of a builder.

    Args:
      method: The method.
      setup: Model, optimizer and configuration as given.
      options: The other keyword arguments, by name.

    Raises:
      ValueError: An argument has the wrong type (`WrongTypeError`) or does not fit the model or
        the method; the message names it.
    """
    check_type = _validation.check_type
    check_type(
        "model",
        setup.model,
        tff.learning.models.FunctionalModel,
        "a tff.learning.models.FunctionalModel (tff_fedlabel.models.functional_model makes one "
        "from Keras)",
    )
    optimizer = (
        "a tff.learning.optimizers.Optimizer (for example tff.learning.optimizers.build_sgdm(0.1))"
    )
    check_type("client_optimizer", setup.optimizer, tff.learning.optimizers.Optimizer, optimizer)
    if options["server_optimizer"] is not None:
        check_type(
            "server_optimizer",
            options["server_optimizer"],
            tff.learning.optimizers.Optimizer,
            optimizer,
        )
    check_type(
        "client_weighting",
        options["client_weighting"],
        tff.learning.ClientWeighting,
        "a tff.learning.ClientWeighting",
    )
    check_type(
        "loop_implementation",
        setup.loop_implementation,
        tff.learning.LoopImplementation,
        "a tff.learning.LoopImplementation",
    )
    check_type(
        "config",
        setup.config,
        method.config_class,
        f"a {method.config_class.__name__}",
    )
    _validation.check_flag("diagnose", setup.diagnose)
    _check_aggregator(method, options["model_aggregator"])
    _check_augmentations(setup)


def _check_aggregator(method, aggregator) -> None:
    if aggregator is None:
        return
    if method.aggregate is not None:
        raise ValueError(
            f"model_aggregator must be left out: {method.name} has its own aggregation, which sees "
            "each client's update."
        )
    _validation.check_type(
        "model_aggregator",
        aggregator,
        tff.aggregators.WeightedAggregationFactory,
        "a tff.aggregators.WeightedAggregationFactory (tff.aggregators.as_weighted_aggregator "
        "turns an unweighted factory into one that weights all clients equally)",
    )


def input_specs(model: tff.learning.models.FunctionalModel) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """The specs of x and y, from an `input_spec` that is a mapping or a pair."""
    spec = model.input_spec
    if isinstance(spec, collections.abc.Mapping):
        return spec["x"], spec["y"]
    return tuple(spec)


def _check_augmentations(setup) -> None:
    """Raises `ValueError` if an augmentation of the configuration does not fit the inputs."""
    x_spec, _ = input_specs(setup.model)
    for field in dataclasses.fields(setup.config):
        augment = getattr(setup.config, field.name)
        if not field.name.endswith("_augment") or augment is None:
            continue
        hint = f"Set {field.name}=None"
        if not isinstance(x_spec, tf.TensorSpec):
            raise ValueError(
                f"{field.name} needs a model whose input is one tensor of images but it takes "
                f"{x_spec}. {hint} for other inputs."
            )
        if x_spec.dtype != tf.uint8 and not x_spec.dtype.is_floating:
            raise ValueError(
                f"{field.name} needs uint8 images or float images in [0, 1] but the model takes "
                f"{x_spec}. {hint} for other inputs."
            )
        if hasattr(augment, "check_images"):
            try:
                augment.check_images(x_spec.shape, x_spec.dtype)
            except ValueError as error:
                raise ValueError(
                    f"{field.name}: {str(error).rstrip('.')}. {hint}, or to your own function, "
                    "for other inputs."
                ) from None


def check_server_data(method: _method.Method, setup: _method.Setup, data):
    """Returns the labelled images at the server as `OrderedDict(x=, y=)` of arrays, or None.

    Raises:
      ValueError: The data is missing but the method needs it, or given but not used, or does not
        fit the model's inputs.
    """
    if method.server_training is None:
        if data is not None:
            raise ValueError(f"server_data must be left out: {method.name} does not use it.")
        return None
    form = "server_data must be a mapping with the arrays x [n, ...] and y [n]"
    if data is None:
        raise ValueError(f"{form}: {method.name} trains at the server on labelled images.")
    if not isinstance(data, collections.abc.Mapping) or set(data) != {"x", "y"}:
        raise _validation.WrongTypeError(f"{form}, got {type(data).__name__}.")
    arrays = collections.OrderedDict()
    for name, spec in zip(("x", "y"), input_specs(setup.model), strict=True):
        array = np.asarray(data[name])
        expected = spec.shape[1:]
        fits = array.ndim and expected.is_compatible_with(array.shape[1:])
        if not fits or not np.can_cast(array.dtype, spec.dtype.as_numpy_dtype, "same_kind"):
            raise ValueError(
                f"{form}: {name} is {array.dtype} {list(array.shape)} and the model takes "
                f"{spec.dtype.name} [n, {', '.join(map(str, expected))}]."
            )
        arrays[name] = array.astype(spec.dtype.as_numpy_dtype)
    if len(arrays["x"]) != len(arrays["y"]) or not len(arrays["x"]):
        raise ValueError(
            f"{form} of equal length n >= 1; got {len(arrays['x'])} and {len(arrays['y'])}."
        )
    return arrays
