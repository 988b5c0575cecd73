"""An experiment from one's own clients, model, method and optimizers.

experiment = make_experiment(clients, build_keras_model, "fedlabel", test=Examples(x, y))
summary = run(experiment, "runs/mine")
"""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import _validation, algorithms, models, tasks
from tff_fedlabel.algorithms import Method
from tff_fedlabel.datasets import _client_data_checks, federated, server_labels, sources
from tff_fedlabel.training import config as configuration
from tff_fedlabel.training import experiment as experiments
from tff_fedlabel.training import keras_model, label_places

# Fields of a RunConfig that one's own parts decide.
_DECIDED = {
    **dict.fromkeys(("task", "source", "split", "image_size"), "the clients are one's own"),
    **dict.fromkeys(("num_clients", "alpha", "partition"), "the clients are one's own"),
    "labeled_fraction": "the clients say which images are labelled",
    "algorithm": "the method is an argument",
    "init_from": "the model is an argument, which may hold trained weights",
    "parameters": "the method's parameters are arguments of their own",
}
_MODEL_CHOICES = ("width", "mixed_precision")


@dataclasses.dataclass(frozen=True)
class _OwnConfig(configuration.RunConfig):
    """A `RunConfig` of an experiment whose parts no name stands for.

    Attributes:
      own_method: The method.
      own_parameters: Its parameters.
      recorded: What config.json holds about the parts, in JSON's types.
    """

    own_method: Method | None = None
    own_parameters: Any = None
    recorded: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def method(self) -> Method:
        return self.own_method

    def _known_names(self) -> dict[str, Any]:
        known = super()._known_names()
        del known["algorithm"], known["model"]
        return known

    def _check_parameters(self) -> None:
        pass  # They were checked when they were made.

    def algorithm_config(self) -> Any:
        return self.own_parameters

    def choices(self) -> dict[str, Any]:
        return {**super().choices(), **self.recorded}


def make_experiment(
    clients: federated.FederatedData,
    model: Any,
    method: str | Method = "fedlabel",
    config: Any = None,
    *,
    name: str = "own",
    validation: sources.Examples | None = None,
    test: sources.Examples | None = None,
    client_optimizer: tff.learning.optimizers.Optimizer | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
    model_aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    **choices: Any,
) -> experiments.Experiment:
    """Makes an experiment from one's own parts, which `training.run` drives like any other.

    Args:
      clients: Who holds which images: `federated.from_arrays`, `from_datasets`,
        `from_client_data` or `from_source`.
      model: A function without arguments that builds a Keras model, a Keras model, a
        `tff.learning.models.FunctionalModel` whose output is logits `[batch, classes]`, or a name
        in `models.MODELS`. Give a Keras model's initialisers seeds if its runs are to repeat.
      method: A name in `algorithms.ALGORITHMS`, or a `Method`, registered or not.
      config: The method's parameters, an instance of its `config_class`. By default made from
        those of `choices` that are fields of it; `seed`, `strong_augment` and `weak_augment` are
        then the run's.
      name: What the run's task is called, in summary.json too.
      validation: Images for `early_stopping_patience` and the best checkpoint; may be left out.
      test: Images for the reported accuracy; may be left out.
      client_optimizer: By default SGD with learning rate `lr`.
      server_optimizer: By default SGD with `server_lr` and `server_momentum`.
      model_aggregator: As in the method's builder; by default the weighted mean.
      **choices: Other fields of `RunConfig`: `rounds`, `clients_per_round` (default: 10, or all
        clients if they are fewer), `batch_size`, `tau`, `tau_unlabeled`, `eval_every`, `seed`,
        `lr_schedule` and so on, and parameters of the method. Defaults: `tasks.OWN_DATA`. The
        clients say which images are labelled; with `labels_at="server"`, the default of methods
        that need it, their labelled images move to the server.

    Returns:
      The experiment. Resuming its run takes the same experiment, made again in the same way:
      config.json has the shapes of the weights, the optimizers and the method's parameters, and
      the fingerprint of the data, and a run is not continued if one of them has changed.

    Raises:
      ValueError: A choice is unknown, out of range, or decided by the parts; or the parts do not
        fit together. A `TypeError` too if an argument is of the wrong type.
    """
    check_type = _validation.check_type
    check_type("clients", clients, federated.FederatedData, "a FederatedData (federated.from_...)")
    check_type("name", name, str, "a name")
    method = _method(method)
    choices = {key: value for key, value in choices.items() if value is not None}
    own_parameters = _parameters(method, config, choices)
    _check_choices(choices, model, client_optimizer, server_optimizer)
    made_model = _model(model, clients, choices)
    source = _source(name, clients, validation, test)
    if validation is None and choices.get("early_stopping_patience") is not None:
        raise ValueError("early_stopping_patience needs validation images (validation=).")
    recorded = _record(
        method, own_parameters, made_model, client_optimizer, server_optimizer, model_aggregator
    )
    sizes = clients.sizes()
    at_server = isinstance(clients, server_labels.LabelsAtServer)
    labeled = len(clients.server_rows) if at_server else int(sizes["labeled"].sum())
    if not labeled:
        raise ValueError("clients must hold labelled images, and none has a label.")
    images = int(sizes["unlabeled"].sum()) + labeled
    labels_at = label_places.of_own_labels(
        choices.get("labels_at"), method, "one's own clients", at_server
    )
    if labels_at == "server":
        clients = server_labels.move_to_server(clients)
    defaults = configuration.defaults_of(tasks.OWN_DATA)
    defaults["clients_per_round"] = min(defaults["clients_per_round"], len(clients.client_ids))
    decided = {
        "task": name,
        "source": configuration.OWN_PARTS,
        "algorithm": method.name,
        "model": model if isinstance(model, str) else _name_of(model),
        "num_clients": len(clients.client_ids),
        "labeled_fraction": max(round(labeled / images, 6), 1e-6),
        "labels_at": labels_at,
        "alpha": math.inf,
        "split": "official",
    }
    own_config = _OwnConfig(
        **{**defaults, **choices, **decided},
        own_method=method,
        own_parameters=own_parameters,
        recorded=recorded,
    )
    if own_config.lr_schedule != "constant" and recorded.get("lr", 0.0) is None:
        raise ValueError("lr_schedule must be 'constant': client_optimizer has no learning rate.")
    if isinstance(recorded.get("lr"), float):  # What a schedule starts from.
        own_config = dataclasses.replace(own_config, lr=recorded["lr"])
    return experiments.assemble(
        own_config,
        source,
        clients,
        made_model,
        client_optimizer=client_optimizer,
        server_optimizer=server_optimizer,
        model_aggregator=model_aggregator,
    )


def _method(method: Any) -> Method:
    if isinstance(method, str):
        return algorithms.METHODS[_validation.check_name("method", method, algorithms.METHODS)]
    wanted = "a name in algorithms.ALGORITHMS or a Method"
    return _validation.check_type("method", method, Method, wanted)


def _parameters(method: Method, config: Any, choices: dict[str, Any]) -> Any:
    """The method's parameters; removes from `choices` what is one of them."""
    fields = {field.name for field in dataclasses.fields(method.config_class)}
    run_fields = {field.name for field in dataclasses.fields(configuration.RunConfig)}
    given = {key: choices.pop(key) for key in sorted(fields - run_fields) if key in choices}
    if config is not None:
        wanted = f"a {method.config_class.__name__}"
        _validation.check_type("config", config, method.config_class, wanted)
        both = [*given, *(key for key in configuration.AUGMENTS if key in choices)]
        if both:
            raise ValueError(f"{both[0]} is in config; leave one of them out.")
        return config
    if "seed" in fields:
        given["seed"] = choices.get("seed", 0)
    for name, known in configuration.AUGMENTS.items():
        if name in fields:
            augment = choices.get(name, getattr(tasks.OWN_DATA, name))
            given[name] = known[_validation.check_name(name, augment, known)]
    return method.config_class(**given)


def _check_choices(choices, model, client_optimizer, server_optimizer) -> None:
    known = {field.name for field in dataclasses.fields(configuration.RunConfig)}
    decided = dict(_DECIDED)
    if not isinstance(model, str):
        decided.update(dict.fromkeys(_MODEL_CHOICES, "the model is one's own"))
    if client_optimizer is not None:
        decided["lr"] = "client_optimizer has it"
    if server_optimizer is not None:
        decided.update(dict.fromkeys(("server_lr", "server_momentum"), "server_optimizer has it"))
    for name in choices:
        if name in decided:
            raise ValueError(f"{name} must be left out: {decided[name]}.")
        if name not in known:
            raise ValueError(f"unknown choice {name!r}{_validation.nearest(name, known)}.")


def _model(model: Any, clients, choices) -> tff.learning.models.FunctionalModel:
    spec = clients.input_spec
    shape = tuple(spec["x"].shape[1:])
    if isinstance(model, tff.learning.models.FunctionalModel):
        x_spec = tf.nest.flatten(model.input_spec)[0]
        if not x_spec.is_compatible_with(spec["x"]):
            raise ValueError(f"the model takes {x_spec} and the clients hold {spec['x']}.")
        return model
    if len(shape) != 3:
        raise ValueError(
            f"model must be a FunctionalModel for inputs of shape {list(shape)}; Keras models and "
            "names are for images [height, width, channels]."
        )
    if isinstance(model, str):
        with keras_model.keras_policy(choices.get("mixed_precision")):
            model = models.build_keras(
                model,
                shape,
                clients.num_classes,
                width=choices.get("width"),
                seed=choices.get("seed", 0),
            )
    return models.functional_model(
        model, input_shape=shape, input_dtype=spec["x"].dtype, num_classes=clients.num_classes
    )


def _source(name, clients, validation, test) -> sources.Source:
    """The evaluation images; the training images are the clients'."""
    spec = clients.input_spec["x"]
    shape = tuple(spec.shape[1:])
    dtype = spec.dtype.as_numpy_dtype
    none = sources.Examples(np.zeros((0, *shape), dtype), np.zeros(0, np.int32))
    checked = []
    for field, examples in (("validation", validation), ("test", test)):
        if examples is None:
            checked.append(none)
            continue
        wanted = "a datasets.sources.Examples(x, y)"
        _validation.check_type(field, examples, sources.Examples, wanted)
        x = examples.x if hasattr(examples.x, "dtype") else np.asarray(examples.x)
        if (x.dtype, tuple(x.shape[1:])) != (dtype, shape):
            raise ValueError(
                f"{field} has images {x.dtype} {list(x.shape[1:])} and the clients "
                f"{np.dtype(dtype)} {list(shape)}."
            )
        try:
            _client_data_checks.check_image_values(x, lambda row: None)
        except federated.ClientDataError as error:
            problem = str(error).partition(": ")[2]
            raise ValueError(f"{field}: {problem}.") from None
        y = np.asarray(examples.y)
        in_range = y.dtype.kind in "iu" and y.shape == (len(x),)
        if not in_range or (len(y) and not 0 <= y.min() <= y.max() < clients.num_classes):
            raise ValueError(
                f"{field} must have one label 0..{clients.num_classes - 1} for each of its "
                f"{len(x)} images."
            )
        checked.append(sources.Examples(x, y.astype(np.int32)))
    return sources.Source(
        name, none, *checked, clients.num_classes, clients.label_names, has_own_clients=True
    )


def _record(method, parameters, model, client_optimizer, server_optimizer, aggregator) -> dict:
    """What config.json holds: enough to notice that a run is resumed with other parts."""
    weights = tf.nest.flatten(model.initial_weights)
    fields = dataclasses.fields(method.config_class)
    recorded = {field.name: _plain(getattr(parameters, field.name)) for field in fields}
    del recorded["seed"]  # The run's own is there already.
    recorded["method_seed"] = _plain(parameters.seed)
    recorded["weights"] = [f"{w.dtype} {list(np.shape(w))}" for w in map(np.asarray, weights)]
    for name, optimizer in (("client", client_optimizer), ("server", server_optimizer)):
        if optimizer is not None:
            hparams = _hparams(optimizer, model)
            recorded[f"{name}_optimizer"] = {"type": type(optimizer).__name__, **hparams}
            if name == "client":
                recorded["lr"] = hparams.get("learning_rate")
    if aggregator is not None:
        recorded["model_aggregator"] = type(aggregator).__name__
    return json.loads(json.dumps(recorded))


def _hparams(optimizer, model) -> dict[str, float]:
    """The optimizer's hyper-parameters that are numbers; none if it tells none."""
    specs = [tf.TensorSpec(np.shape(w), np.asarray(w).dtype) for w in model.initial_weights[0]]
    with tf.Graph().as_default():  # Nothing is computed.
        try:
            hparams = optimizer.get_hparams(optimizer.initialize(specs))
        except (NotImplementedError, ValueError, TypeError):
            return {}
        return {
            key: float(value)
            for key, value in hparams.items()
            if isinstance(value, int | float | np.number)
        }


def _plain(value: Any) -> Any:
    """The value in JSON's types, the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    return _name_of(value)


def _name_of(thing: Any) -> str:
    """Name of a function or a Keras model, else the type's: no address, as repr may have."""
    own = getattr(thing, "__qualname__", None) or getattr(thing, "name", None)
    return own if isinstance(own, str) else type(thing).__name__
