"""The choices of one run, with the task's defaults for what is not given."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from typing import Any

from tff_fedlabel import _own_methods, _parameters, _validation, algorithms, augmentation, tasks
from tff_fedlabel.datasets import own_data, partition, sources
from tff_fedlabel.training import differential_privacy, label_places

# The strong augmentations that can be chosen by name.
STRONG_AUGMENTS = {
    "paper": augmentation.RandAugment(),
    "single": augmentation.RandAugment.single(),
    "none": None,
}
# The weak augmentations that can be chosen by name; shifts of 4 pixels suit images of 28 to 32.
WEAK_AUGMENTS = {
    "flip_and_shift": augmentation.WeakAugment(),
    "shift": augmentation.WeakAugment(flip=False),
    "small_shift": augmentation.WeakAugment(flip=False, max_shift=1),
    "none": None,
}
# Fields of a method's configuration that are set by such a name.
AUGMENTS = {"strong_augment": STRONG_AUGMENTS, "weak_augment": WEAK_AUGMENTS}
EPOCH = "epoch"
OWN_PARTS = "own parts"  # The source of an experiment that `make_experiment` made.
MIXED_PRECISION = ("float16", "bfloat16")
LR_SCHEDULES = ("constant", "cosine", "step", "inverse_sqrt")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Every choice of one run; `make_config` makes one from a task.

    Attributes:
      task: Name of the task in `tasks.TASKS`, or the path of one's own data.
      source: Name of the data set in `datasets.sources`; or a path; or, of a task that was
        registered with a function, the task's name.
      model: cnn, resnet18, resnet34 or resnet50.
      num_clients: Clients M that the images are divided among.
      clients_per_round: Clients m in a round.
      alpha: Dirichlet parameter of the partition, 0.01 to inf (IID).
      labeled_fraction: Share of each client's images that keep their label, in (0, 1]; of the
        clients, with labels_at some_clients.
      labels_at: every_client; server (the images that would keep their label at the clients are at
        the server, and the clients have none) or some_clients (a share of the clients keep all
        labels, the others none); None is the method's own, every_client for most.
      rounds: Communication rounds T.
      lr: Learning rate eta of the clients' SGD; with a schedule, that of the first round.
      batch_size: Images in a batch, labelled and unlabelled.
      tau: Labelled steps of a client in a round, or "epoch": one pass over its labelled images.
      tau_unlabeled: Unlabelled steps tau', or "epoch".
      strong_augment: paper (10 operations at magnitude 1), single (1 at 10) or none.
      weak_augment: flip_and_shift (mirrored or not, moved by up to 4 pixels), shift (not mirrored),
        small_shift (by up to 1 pixel) or none.
      eval_every: Rounds between evaluations.
      width: Width of the model (64 for ResNets); None is the model's own default.
      algorithm: Name in `algorithms.ALGORITHMS`.
      partition: client (each client's mixture of classes is Dir(alpha N p), p the shares of N
        classes), client_symmetric (it is plain Dir(alpha)) or class (each class is divided among
        the clients by Dir(alpha)).
      split: pooled (80/5/15 of all published images) or official (the published test set).
      image_size: Side of the images in pixels: for data sets that come in several sizes one of
        those (None is the data set's own default); one's own images are resized to it, 8 to 256.
      mixed_precision: float16 or bfloat16: the model computes in it, with float32 weights, for
        fast GPUs; None is float32 throughout.
      lr_schedule: How lr changes over the rounds: constant, cosine (to 0), step (a tenth after half
        of the rounds, a hundredth after three quarters) or inverse_sqrt (1 / sqrt(1 + round)).
      early_stopping_patience: Evaluations without a better validation accuracy after which the run
        ends; None is never.
      server_lr: Learning rate of the server's SGD.
      server_momentum: Momentum of the server's SGD; None is the method's own, 0 for most.
      dp_noise_multiplier: Noise of user-level differential privacy on the sum of the clients'
        updates, in units of the clipping norm; None is no noise and no privacy.
      dp_clipping_norm: L2 norm to which each client's update is clipped; None with noise is TFF's
        adaptive clipping to the median norm.
      dp_delta: The delta for which epsilon is given at the end; None is num_clients ** -1.1.
      seed: Seed of everything: splits, partition, labels kept, initial weights, sampling,
        augmentation.
      init_from: Run directory whose trained model this run starts from: the same model on images
        of the same shape and classes. None is a new model, by the seed.
      client_accuracy: Whether accuracy by client is measured at the end of the run.
      parameters: The method's own parameters that replace the method's defaults.

    Raises:
      ValueError: A field is out of its range or of the wrong type; the message names it.
    """

    task: str
    source: str
    model: str
    num_clients: int
    clients_per_round: int
    alpha: float
    labeled_fraction: float
    rounds: int
    lr: float
    batch_size: int
    tau: int | str
    tau_unlabeled: int | str
    strong_augment: str
    weak_augment: str
    eval_every: int
    width: int | None = None
    algorithm: str = "fedlabel"
    partition: str = "client"
    labels_at: str | None = None
    split: str = "pooled"
    image_size: int | None = None
    mixed_precision: str | None = None
    lr_schedule: str = "constant"
    early_stopping_patience: int | None = None
    server_lr: float = 1.0
    server_momentum: float | None = None
    dp_noise_multiplier: float | None = None
    dp_clipping_norm: float | None = None
    dp_delta: float | None = None
    seed: int = 0
    init_from: str | None = None
    client_accuracy: bool = True
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self):
        check = _validation
        checked: dict[str, Any] = {}
        for name, known in self._known_names().items():
            check.check_name(name, getattr(self, name), known)
        if self.mixed_precision is not None:
            check.check_name("mixed_precision", self.mixed_precision, MIXED_PRECISION)
        for name in ("num_clients", "clients_per_round", "rounds", "batch_size", "eval_every"):
            checked[name] = check.check_int(name, getattr(self, name))
        for name in ("width", "image_size", "early_stopping_patience"):
            if getattr(self, name) is not None:
                checked[name] = check.check_int(name, getattr(self, name))
        for name in ("tau", "tau_unlabeled"):
            if getattr(self, name) != EPOCH:
                checked[name] = check.check_int(
                    name, getattr(self, name), or_else=f", or {EPOCH!r}"
                )
                check.check_images_per_round(name, checked[name], checked["batch_size"])
        checked["labeled_fraction"] = check.check_number(
            "labeled_fraction", self.labeled_fraction, 0.0, 1.0, open_low=True
        )
        checked["alpha"] = check.check_number_or_infinity("alpha", self.alpha, 0.01)
        for name in ("lr", "server_lr"):
            checked[name] = check.check_number(name, getattr(self, name), 0.0, 1e3, open_low=True)
        momentum = self.server_momentum
        if momentum is None:
            momentum = self.method.server_momentum
        checked["server_momentum"] = check.check_number("server_momentum", momentum, 0.0, 1.0)
        checked["labels_at"] = label_places.checked(self.labels_at, self.method)
        checked["seed"] = check.check_seed(self.seed)
        checked["client_accuracy"] = check.check_flag("client_accuracy", self.client_accuracy)
        if self.init_from is not None:
            kinds = (str, os.PathLike)
            check.check_type("init_from", self.init_from, kinds, "None or the path of a run")
            checked["init_from"] = os.fspath(self.init_from)
        if self.clients_per_round > self.num_clients:
            raise ValueError(
                f"clients_per_round is {self.clients_per_round} but there are "
                f"{self.num_clients} clients."
            )
        checked.update(differential_privacy.check(self, self.method))
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_parameters()

    def _known_names(self) -> dict[str, Any]:
        """Field -> the names that it can have."""
        from tff_fedlabel import models

        return {
            "algorithm": algorithms.METHODS,
            "model": models.MODELS,
            **AUGMENTS,
            "partition": partition.SCHEMES,
            "split": sources.SPLITS,
            "lr_schedule": LR_SCHEDULES,
        }

    def _check_parameters(self) -> None:
        known = _method_fields(self.algorithm)
        for name in self.parameters:
            if name not in known:
                raise ValueError(f"{name} is not a parameter of the algorithm {self.algorithm}.")
        made = self.algorithm_config()  # The method's own parameters check themselves.
        checked = {name: getattr(made, name) for name in self.parameters}
        object.__setattr__(self, "parameters", checked)

    def algorithm_config(self) -> Any:
        """The method's parameters (for instance `FedLabelConfig`) for this run."""
        wanted = dict(self.parameters)
        known = _method_fields(self.algorithm)
        if "seed" in known:
            wanted["seed"] = self.seed
        for name in known.intersection(AUGMENTS):
            wanted[name] = AUGMENTS[name][getattr(self, name)]
        return self.method.config_class(**wanted)

    def choices(self) -> dict[str, Any]:
        """All choices by name, including the method's parameters, as `make_config` takes them."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(RunConfig)}
        parameters = fields.pop("parameters")
        return {**fields, **parameters}

    @property
    def method(self) -> algorithms.Method:
        """The method called `algorithm`."""
        return algorithms.METHODS[self.algorithm]

    @property
    def task_name(self) -> str:
        """The task's name; of a path, its last part."""
        return pathlib.Path(self.task).name if os.sep in self.task else self.task


# Fields of a method's configuration that the run sets.
_SET_BY_THE_RUN = ("seed", *AUGMENTS)


def _method_fields(algorithm: str) -> set[str]:
    config_class = algorithms.METHODS[algorithm].config_class
    return {field.name for field in dataclasses.fields(config_class)}


def make_config(task: str, algorithm: str = "fedlabel", **choices: Any) -> RunConfig:
    """Fills in what `choices` leaves out (or gives as None) from the task.

    Args:
      task: Name in `tasks.TASKS`; or the path of one's own data, a folder or an `.npz` file, which
        is looked at (but not read) to know its clients. A name goes before a folder of that name
        (`./digits` is a folder).
      algorithm: Name in `algorithms.ALGORITHMS`.
      **choices: Fields of `RunConfig`, and parameters of the method.

    Raises:
      ValueError: The task is unknown (the message has the nearest name), a choice is out of range,
        there is no choice of that name, or a choice contradicts one's own data.
      datasets.sources.DataNotFoundError, datasets.sources.CorruptDataError: One's own data is
        missing or damaged.
    """
    if choices.get("source") == OWN_PARTS:
        raise ValueError(
            f"the run {task!r} was made in Python, by training.make_experiment; make the "
            "experiment again and continue it by training.run(experiment, ..., resume=True)."
        )
    task, defaults = _task(task)
    own_methods = f" A method of your own is known if {_own_methods.VARIABLE} names its file."
    _validation.check_name("algorithm", algorithm, algorithms.METHODS, own_methods)
    own = {field.name for field in dataclasses.fields(RunConfig)} - {"parameters"}
    given = {name: value for name, value in choices.items() if value is not None}
    given = {**tasks.TASKS.get(task, tasks.OWN_DATA).by_method.get(algorithm, {}), **given}
    parameters = {**given.pop("parameters", {})}
    known = own.union(*(_method_fields(name) for name in algorithms.METHODS))
    for name in [name for name in given if name not in own]:
        if name not in known:
            raise ValueError(f"unknown choice {name!r}{_validation.nearest(name, known)}.")
        parameters[name] = given.pop(name)
    if own_source(defaults["source"]) is not None:
        given.pop("source", None)  # The task decides it; its data may have been moved.
        defaults.update(_facts(defaults, given, algorithms.METHODS[algorithm]))
    return RunConfig(task=task, algorithm=algorithm, **{**defaults, **given}, parameters=parameters)


def _task(task: Any) -> tuple[str, dict[str, Any]]:
    """(the task as it stands in the configuration, the defaults of its runs)."""
    if isinstance(task, os.PathLike):
        task = os.fspath(task)
    if isinstance(task, str) and task not in tasks.TASKS:
        path = tasks.absolute(task)
        is_path = os.sep in task or task.endswith(".npz")
        if is_path and not os.path.exists(path):
            raise ValueError(f"task is {task!r}, but there is no folder or .npz file at {path}.")
        if is_path or os.path.exists(path):
            return path, defaults_of(dataclasses.replace(tasks.OWN_DATA, source=path))
        hint = _validation.nearest(task, tasks.TASKS)
        raise ValueError(
            f"task {task!r} is unknown{hint}; choose from: {', '.join(tasks.TASKS)}, or give the "
            "path of a folder or .npz file."
        )
    _validation.check_name("task", task, tasks.TASKS)
    return task, defaults_of(tasks.TASKS[task])


def defaults_of(task: tasks.Task) -> dict[str, Any]:
    """The fields of `RunConfig` that a task has."""
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    return {name: value for name, value in vars(task).items() if name in fields}


def own_source(source: str) -> Any:
    """What `own_data.list_images` takes: a path or a function; None for a built-in data set."""
    return tasks.SOURCES.get(source, source if os.sep in source else None)


_DECIDED_BY = {
    "num_clients": "has clients of its own",
    "labeled_fraction": "has images without label of its own",
    "split": "says by itself whether there is a test part",
}


def _facts(
    defaults: dict[str, Any], given: dict[str, Any], method: algorithms.Method
) -> dict[str, Any]:
    """What one's own data decides, in place of the task's defaults.

    Raises:
      ValueError: A choice that was given contradicts it.
    """
    source = defaults["source"]
    found = own_data.facts(own_source(source), source)
    decided = {name: value for name, value in found.items() if value is not None}
    for name, value in decided.items():
        if given.get(name, value) != value:
            raise ValueError(
                f"{name} must be {value!r} for {os.path.basename(source)}, which "
                f"{_DECIDED_BY[name]}, got {given[name]!r}; leave it out. (Where a run is resumed: "
                "its data has changed.)"
            )
    if "labeled_fraction" in decided:
        name = os.path.basename(source)
        place = label_places.of_own_labels(given.get("labels_at"), method, name)
        decided["labels_at"] = place
    clients = given.get("num_clients", decided.get("num_clients", defaults["num_clients"]))
    if isinstance(clients, int):  # Else it is refused where all choices are checked.
        decided["clients_per_round"] = min(defaults["clients_per_round"], max(clients, 1))
    return decided


def run_parameters() -> dict[str, _parameters.Parameter]:
    """The fields of `RunConfig` that can be set from text, by name."""
    return _parameters.of(RunConfig)


def method_parameters() -> dict[str, dict[str, _parameters.Parameter]]:
    """The parameters of methods that can be set from text: name -> method -> parameter."""
    found: dict[str, dict[str, _parameters.Parameter]] = {}
    for method in algorithms.METHODS.values():
        for name, parameter in _parameters.of(method.config_class).items():
            if name not in _SET_BY_THE_RUN:
                found.setdefault(name, {})[method.name] = parameter
    return found


# What a run had before a choice existed: its default, but for those whose default is a method's.
OF_OLDER_RUNS = {
    field.name: field.default
    for field in dataclasses.fields(RunConfig)
    if field.default is not dataclasses.MISSING
} | {"labels_at": "every_client", "server_momentum": 0.0}


def lr_factor(schedule: str, round_num: int, rounds: int) -> float:
    """The factor of the learning rate in a round.

    Args:
      schedule: One of `LR_SCHEDULES`.
      round_num: 0 in the first round.
      rounds: T, the number of rounds.
    """
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * round_num / rounds))
    if schedule == "step":
        return 0.1 ** ((2 * round_num >= rounds) + (4 * round_num >= 3 * rounds))
    if schedule == "inverse_sqrt":
        return 1.0 / math.sqrt(1.0 + round_num)
    return 1.0
