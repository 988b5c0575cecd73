"""Data, clients, model and learning process of a run, built from its configuration."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow_federated as tff

from tff_fedlabel import algorithms, models
from tff_fedlabel.datasets import data_source, federated, own_data, partition, sources
from tff_fedlabel.training import config as configuration
from tff_fedlabel.training import differential_privacy, starting_point
from tff_fedlabel.training import keras_model as keras_models
from tff_fedlabel.training import memory as client_memory


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What `build` makes from a `RunConfig`, and `make_experiment` from one's own parts.

    Attributes:
      config: The run's choices.
      source: The data set, with its validation and test images.
      clients: The clients' images.
      model: The functional model.
      process: The learning process, built with `diagnose` where the method reads unlabelled
        images and their true labels are known.
      initial_memory: The memory of a client that has not taken part yet; None for a method without
        memory.
      start: Where the model's initial weights come from, in words, if from another run.
    """

    config: configuration.RunConfig
    source: sources.Source
    clients: federated.FederatedData
    model: tff.learning.models.FunctionalModel
    process: tff.learning.templates.LearningProcess
    initial_memory: Any = None
    start: str | None = None

    @property
    def method(self) -> algorithms.Method:
        return self.config.method

    @property
    def diagnoses(self) -> bool:
        """Whether unlabelled images carry their true labels, for metrics."""
        return self.method.reads_unlabeled and self.clients.hidden_y is not None

    def advice(self) -> str | None:
        """What the method says of a run with these parameters and rounds; mostly None."""
        method, config = self.method, self.config
        return method.advice and method.advice(config.algorithm_config(), config.rounds)

    def fingerprint(self) -> str:
        """Changes when the clients' data or the evaluation images change."""
        return f"{self.clients.fingerprint()[:32]}{self.source.fingerprint()[:32]}"

    def new_memory(self) -> client_memory.ClientMemory | None:
        """The memory of clients before the first round; None for a method without memory."""
        if self.initial_memory is None:
            return None
        method = self.method
        return client_memory.ClientMemory(self.initial_memory, method.choose_helpers, method.name)

    def cohort(
        self, round_num: int, memory: client_memory.ClientMemory | None = None
    ) -> Sequence[Any]:
        """The client data of one round, drawn from (seed, round) alone, without replacement.

        Args:
          round_num: 0 in the first round.
          memory: The clients' memory, if the method has memory.

        Returns:
          One element for each client, built on access and not kept.

        Raises:
          algorithms.MethodError: The method's `choose_helpers` returned what it must not.
        """
        config = self.config
        drawn = self.clients.draw_clients(config.clients_per_round, round_num, config.seed)
        cohort = self.clients.cohort(
            [self.clients.client_ids[client] for client in drawn],
            round_num,
            **self._client_options(),
        )
        if memory is None:
            return cohort
        # Chosen before the round begins: an error would waste it.
        helpers = [memory.helpers(int(client), round_num) for client in drawn]
        return _CohortWithMemory(cohort, drawn, helpers, memory, round_num)

    def data_source(self) -> data_source.RoundDataSource:
        """The clients as a data source for `tff.program`: its rounds are those of `cohort`."""
        return self.clients.data_source(**self._client_options())

    def privacy(self, rounds: int) -> dict[str, Any]:
        """The privacy of the model after `rounds` rounds, as in summary.json; {} without noise."""
        config = self.config
        if config.dp_noise_multiplier is None:
            return {}

        def draw(round_num):
            return self.clients.draw_clients(config.clients_per_round, round_num, config.seed)

        most = differential_privacy.participations(draw, config.num_clients, rounds)
        return differential_privacy.summary(config, rounds, most)

    def _client_options(self) -> dict[str, Any]:
        """How a client's batches are made: arguments of `FederatedData.client_dataset`."""
        config, reads_unlabeled = self.config, self.method.reads_unlabeled
        tau, tau_unlabeled = (
            None if steps == configuration.EPOCH else steps
            for steps in (config.tau, config.tau_unlabeled)
        )
        return {
            "labeled_steps": tau,
            # Data that is not read need not be sent to the worker.
            "unlabeled_steps": tau_unlabeled if reads_unlabeled else 1,
            "batch_size": config.batch_size,
            "seed": config.seed,
            "with_hidden_labels": self.diagnoses,
        }


class _CohortWithMemory(Sequence):
    """A cohort that attaches the clients' memories to their data."""

    def __init__(self, cohort, clients, helpers, memory, round_num: int):
        self._cohort, self._clients, self._helpers = cohort, clients, helpers
        self._memory, self._round_num = memory, round_num

    def __len__(self) -> int:
        return len(self._cohort)

    def __getitem__(self, index):
        if isinstance(index, slice):
            parts = (part[index] for part in (self._cohort, self._clients, self._helpers))
            return _CohortWithMemory(*parts, self._memory, self._round_num)
        client, helpers = int(self._clients[index]), self._helpers[index]
        return self._memory.attach(self._cohort[index], client, self._round_num, helpers)


def build(
    config: configuration.RunConfig,
    data_dir: str | None = None,
    *,
    initial_weights: Sequence[np.ndarray] | None = None,
) -> Experiment:
    """Loads the data, divides it among the clients, and builds model and process.

    Args:
      config: The run's choices.
      data_dir: Where the data sets are; None is the loader's default.
      initial_weights: What the model starts with, in the order of its `initial_weights`; None is
        what the run in `config.init_from` ended with, or else what the seed gives.

    Raises:
      ValueError: The choices do not fit the data, or the run in `config.init_from` has another
        model.
      RunDirectoryError, CheckpointError: The run in `config.init_from` cannot be read.
      datasets.sources.DataNotFoundError, datasets.sources.CorruptDataError: The data is missing or
        damaged.
    """
    start = None
    if initial_weights is None and config.init_from is not None:
        start = starting_point.read(config.init_from)  # First: a wrong path costs no download.
    source, clients = _load(config, data_dir)
    if start is not None:
        initial_weights = start.weights_for(config, source)
    model = _build_model(config, source, initial_weights)
    experiment = assemble(config, source, clients, model)
    return experiment if start is None else dataclasses.replace(experiment, start=str(start))


def assemble(
    config: configuration.RunConfig,
    source: sources.Source,
    clients: federated.FederatedData,
    model: tff.learning.models.FunctionalModel,
    *,
    client_optimizer: tff.learning.optimizers.Optimizer | None = None,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
    model_aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
) -> Experiment:
    """Builds the learning process; an optimizer of None is SGD as the configuration says."""
    method, parameters = config.method, config.algorithm_config()
    if client_optimizer is None:
        client_optimizer = tff.learning.optimizers.build_sgdm(config.lr)
    if server_optimizer is None:
        server_optimizer = tff.learning.optimizers.build_sgdm(
            config.server_lr, momentum=config.server_momentum
        )
    private = differential_privacy.builder_options(config)
    if private and model_aggregator is not None:
        raise ValueError(
            "model_aggregator must be left out with dp_noise_multiplier, which has its own."
        )
    # A method that trains at the server gets all labelled images there.
    at_server = {} if method.server_training is None else {"server_data": clients.labeled_arrays()}
    process = method(
        model,
        client_optimizer,
        parameters,
        server_optimizer=server_optimizer,
        **{"model_aggregator": model_aggregator, **private},
        diagnose=method.reads_unlabeled and clients.hidden_y is not None,
        **at_server,
    )
    memory = algorithms.initial_memory(method, model, client_optimizer, parameters)
    return Experiment(config, source, clients, model, process, memory)


def _load(config, data_dir) -> tuple[sources.Source, federated.FederatedData]:
    if config.source == configuration.OWN_PARTS:
        raise ValueError("no name stands for one's own parts: pass the experiment, not its config.")
    own = configuration.own_source(config.source)
    if own is not None:
        return own_data.load(
            own,
            config.task_name,
            num_clients=config.num_clients,
            alpha=config.alpha,
            labeled_fraction=config.labeled_fraction,
            scheme=config.partition,
            seed=config.seed,
            image_size=config.image_size,
            data_dir=data_dir,
            labels_at=config.labels_at,
        )
    source = sources.load(
        config.source,
        data_dir=data_dir,
        split=config.split,
        seed=config.seed,
        image_size=config.image_size,
    )
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
        labels_at=config.labels_at,
    )
    return source, clients


def _build_model(config, source, initial_weights) -> tff.learning.models.FunctionalModel:
    input_shape = source.train.x.shape[1:]
    keras_model = keras_models.build(
        config.model,
        input_shape,
        source.num_classes,
        width=config.width,
        seed=config.seed,
        mixed_precision=config.mixed_precision,
    )
    if initial_weights is not None:
        keras_models.assign(keras_model, initial_weights)
    return models.functional_model(keras_model, input_shape=input_shape)
