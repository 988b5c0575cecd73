"""The tasks: data set, model, clients and hyper-parameters, and how a run is built from them.

A `RunConfig` holds every choice of one run. `make_config` fills in what the caller leaves out from
the task; `build` turns the result into data, model and learning process.
"""

import contextlib
import dataclasses
import difflib
import math
import numbers
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import algorithms, augmentation, models
from tff_fedlabel.datasets import federated, partition, sources

# The strong augmentations that can be asked for by name.
STRONG_AUGMENTS = {
    "paper": augmentation.RandAugment(),
    "single": augmentation.RandAugment.single(),
    "none": None,
}
EPOCH = "epoch"
MIXED_PRECISION = ("float16", "bfloat16")
# Fields of `RunConfig` that belong to the method; not every method has every one.
_METHOD_FIELDS = (
    "threshold",
    "consistency_weight",
    "confidence",
    "selection",
    "proximal_strength",
)
_SAMPLING = 1  # Sets the stream of client sampling apart from others of the same seed.


@dataclasses.dataclass(frozen=True)
class Task:
    """One experiment of the paper, or one of ours; every field is a default of `RunConfig`.

    Attributes:
      source: Name of the data set in `datasets.sources`.
      model: Name of the model in `models.MODELS`.
      num_clients: M.
      clients_per_round: m, the size of a cohort.
      alpha: Dirichlet parameter of the partition.
      labeled_fraction: Share of each client's images that keep their label.
      rounds: T.
      lr: eta, the learning rate of the clients' SGD.
      batch_size: b, images in a batch, labelled and unlabelled.
      tau: Labelled steps, or "epoch" for one pass over the labelled images.
      tau_unlabeled: tau', unlabelled steps, or "epoch".
      strong_augment: A name of `STRONG_AUGMENTS`.
      eval_every: Rounds between evaluations.
      width: Width of the model; None is the model's own default.
      by_algorithm: Algorithm -> the fields it wants otherwise.
      origin: Where the values come from.
    """

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
    strong_augment: str = "paper"
    eval_every: int = 10
    width: int | None = None
    by_algorithm: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    origin: str = ""


_PAPER = (
    "Data set, model, clients, cohort, alpha and label fraction: the paper, section 4.1. The paper "
    "gives no learning rate, batch size, numbers of steps or rounds: they are common values, not "
    "searched for, of a size that trained well on the smaller tasks."
)


def _paper_task(source: str, model: str, num_clients: int, cohort: int, fraction: float) -> Task:
    return Task(
        source=source,
        model=model,
        num_clients=num_clients,
        clients_per_round=cohort,
        alpha=0.1,
        labeled_fraction=fraction,
        rounds=500,
        lr=0.05,
        batch_size=32,
        tau=10,
        tau_unlabeled=10,
        origin=_PAPER,
    )


TASKS = {
    "emnist": _paper_task("emnist", "resnet18", 100, 10, 0.2),
    "cifar10": _paper_task("cifar10", "resnet34", 100, 10, 0.2),
    "cifar100": _paper_task("cifar100", "resnet50", 100, 10, 0.2),
    "organamnist": _paper_task("organamnist", "resnet18", 10, 3, 0.05),
    "bloodmnist": _paper_task("bloodmnist", "resnet18", 5, 5, 0.05),
    "fashion_mnist": Task(
        source="fashion_mnist",
        model="cnn",
        num_clients=100,
        clients_per_round=10,
        alpha=0.1,
        labeled_fraction=0.05,
        rounds=150,
        lr=0.1,
        batch_size=32,
        tau=10,
        tau_unlabeled=10,
        strong_augment="single",
        eval_every=5,
        width=16,
        origin=(
            "Steps and learning rate: experiments/results, where FedLabel with its work divided "
            "evenly over the two phases did best; the learning rate is what a search over .05, "
            ".1, .2, .4 on validation images found for FedAvg with as many steps."
        ),
    ),
    "digits": Task(
        source="digits",
        model="cnn",
        num_clients=20,
        clients_per_round=5,
        alpha=1.0,
        labeled_fraction=0.2,
        rounds=60,
        lr=0.05,
        batch_size=16,
        tau=5,
        tau_unlabeled=5,
        strong_augment="single",
        eval_every=5,
        width=16,
        origin=(
            "Learning rate: search over .02, .05, .1, .2 on validation images at 60 rounds "
            "(experiments/results/digits_search.csv); .05, .1 and .2 tied."
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Every choice of one run. The fields that `Task` has too are explained there.

    Attributes:
      task: Name of the task in `TASKS`.
      algorithm: Name in `algorithms.ALGORITHMS`.
      partition: "client" (each client's class mixture is Dir(alpha)) or "class" (each class is
        divided over the clients by Dir(alpha)).
      split: "pooled" (80/5/15 of all published images) or "official".
      mixed_precision: "float16" or "bfloat16", in which the model computes, from weights in
        float32; None is float32 throughout.
      server_lr: Learning rate of the server's SGD.
      server_momentum: Momentum of the server's SGD.
      threshold: beta; None is the method's own default, like the fields below.
      consistency_weight: lambda_0.
      confidence: h.
      selection: Which expert labels: "adaptive", "local" or "global".
      proximal_strength: mu.
      seed: Of everything: splits, partition, labels kept, initial weights, sampling, augmentation.

    Raises:
      ValueError: A field is out of its range; the message names it.
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
    eval_every: int
    width: int | None = None
    algorithm: str = "fedlabel"
    partition: str = "client"
    split: str = "pooled"
    mixed_precision: str | None = None
    server_lr: float = 1.0
    server_momentum: float = 0.0
    threshold: float | None = None
    consistency_weight: float | None = None
    confidence: str | None = None
    selection: str | None = None
    proximal_strength: float | None = None
    seed: int = 0

    def __post_init__(self):
        check_name("algorithm", self.algorithm, algorithms.ALGORITHMS)
        check_name("model", self.model, models.MODELS)
        check_name("strong_augment", self.strong_augment, STRONG_AUGMENTS)
        check_name("partition", self.partition, partition.SCHEMES)
        check_name("split", self.split, sources.SPLITS)
        for name in ("num_clients", "clients_per_round", "rounds", "batch_size", "eval_every"):
            check_count(name, getattr(self, name))
        if self.clients_per_round > self.num_clients:
            raise ValueError(
                f"clients_per_round is {self.clients_per_round} but there are "
                f"{self.num_clients} clients."
            )
        for name in ("tau", "tau_unlabeled"):
            if getattr(self, name) != EPOCH:
                check_count(name, getattr(self, name), f" or {EPOCH!r}")
        if self.width is not None:
            check_count("width", self.width)
        if self.mixed_precision is not None:
            check_name("mixed_precision", self.mixed_precision, MIXED_PRECISION)
        _check_between("labeled_fraction", self.labeled_fraction, 0.0, 1.0, open_low=True)
        _check_between("alpha", self.alpha, 0.01, math.inf)
        for name in ("lr", "server_lr"):
            _check_between(name, getattr(self, name), 0.0, 1e3, open_low=True)
        _check_between("server_momentum", self.server_momentum, 0.0, 1.0)
        known = {field.name for field in dataclasses.fields(algorithms.CONFIGS[self.algorithm])}
        for name in _METHOD_FIELDS:
            if getattr(self, name) is not None and name not in known:
                raise ValueError(f"{name} is no parameter of the algorithm {self.algorithm}.")
        self.algorithm_config()  # The method's own parameters check themselves.

    def algorithm_config(self) -> Any:
        """The method's parameters (for instance `FedLabelConfig`) as this run wants them."""
        config_class = algorithms.CONFIGS[self.algorithm]
        wanted = {}
        for field in dataclasses.fields(config_class):
            value = getattr(self, field.name, None)
            if field.name == "strong_augment":
                wanted[field.name] = STRONG_AUGMENTS[value]
            elif value is not None:
                wanted[field.name] = value
        return config_class(**wanted)


def make_config(task: str, algorithm: str = "fedlabel", **choices: Any) -> RunConfig:
    """Fills in what `choices` leaves out (or gives as None) from the task.

    Raises:
      ValueError: The task is unknown (the message has the nearest name) or a choice out of range.
    """
    check_name("task", task, TASKS)
    defaults = dataclasses.asdict(TASKS[task])
    del defaults["origin"]
    by_algorithm = defaults.pop("by_algorithm")
    defaults.update(by_algorithm.get(algorithm, {}))
    defaults.update({name: value for name, value in choices.items() if value is not None})
    return RunConfig(task=task, algorithm=algorithm, **defaults)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What `build` made of a `RunConfig`.

    Attributes:
      config: The run's choices.
      source: The data set, with its validation and test images.
      clients: The clients' images.
      model: The functional model.
      process: The learning process, built with `diagnose` where the method reads unlabelled
        images, since the hidden labels are known here.
    """

    config: RunConfig
    source: sources.Source
    clients: federated.FederatedData
    model: tff.learning.models.FunctionalModel
    process: tff.learning.templates.LearningProcess

    def cohort(self, round_num: int) -> list[Any]:
        """The client data of one round, drawn from (seed, round) alone, without replacement."""
        config = self.config
        tau, tau_unlabeled = (
            None if steps == EPOCH else steps for steps in (config.tau, config.tau_unlabeled)
        )
        reads_unlabeled = config.algorithm not in algorithms.SUPERVISED
        rng = np.random.default_rng(np.random.SeedSequence((_SAMPLING, config.seed, round_num)))
        clients = rng.choice(
            len(self.clients.client_ids), size=config.clients_per_round, replace=False
        )
        return [
            self.clients.client_dataset(
                self.clients.client_ids[client],
                round_num,
                labeled_steps=tau,
                # What is not read need not travel to the worker.
                unlabeled_steps=tau_unlabeled if reads_unlabeled else 1,
                batch_size=config.batch_size,
                seed=config.seed,
                with_hidden_labels=reads_unlabeled,
            )
            for client in clients
        ]


def build(config: RunConfig, data_dir: str | None = None) -> Experiment:
    """Loads the data, deals it out to the clients, and builds model and process.

    Args:
      config: The run's choices.
      data_dir: Where the data sets lie; None is the loader's default.

    Raises:
      datasets.sources.DataNotFoundError, datasets.sources.CorruptDataError: The data is missing or
        damaged.
    """
    source = sources.load(config.source, data_dir=data_dir, split=config.split, seed=config.seed)
    parts = partition.partition(
        source.train.y,
        config.num_clients,
        config.alpha,
        scheme=config.partition,
        seed=config.seed,
    )
    clients = federated.from_source(
        source.train,
        parts,
        config.labeled_fraction,
        config.seed,
        num_classes=source.num_classes,
        label_names=source.label_names,
    )
    input_shape = source.train.x.shape[1:]
    with _keras_policy(config.mixed_precision):
        keras_model = models.build_keras(
            config.model, input_shape, source.num_classes, width=config.width, seed=config.seed
        )
    model = models.functional_model(keras_model, input_shape=input_shape)
    tail = {} if config.algorithm in algorithms.SUPERVISED else {"diagnose": True}
    process = algorithms.ALGORITHMS[config.algorithm](
        model,
        tff.learning.optimizers.build_sgdm(config.lr),
        config.algorithm_config(),
        server_optimizer=tff.learning.optimizers.build_sgdm(
            config.server_lr, momentum=config.server_momentum
        ),
        **tail,
    )
    return Experiment(config, source, clients, model, process)


@contextlib.contextmanager
def _keras_policy(dtype: str | None) -> Iterator[None]:
    """Inside, Keras layers are made to compute in `dtype`; None changes nothing."""
    if dtype is None:
        yield
        return
    before = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy(f"mixed_{dtype}")
    try:
        yield
    finally:
        tf.keras.mixed_precision.set_global_policy(before)


def check_name(field: str, name: Any, known) -> None:
    """Raises `ValueError`, with the nearest known name, unless `name` is one of `known`."""
    if name not in known:
        near = difflib.get_close_matches(str(name), list(known), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{field} {name!r} is unknown{hint}; there is: {', '.join(known)}.")


def check_count(name: str, value: Any, also: str = "") -> None:
    """Raises `ValueError` unless `value` is a whole number of 1 or more."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or value < 1:
        raise ValueError(f"{name} must be a whole number of 1 or more{also}, got {value!r}.")


def _check_between(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r}.")
