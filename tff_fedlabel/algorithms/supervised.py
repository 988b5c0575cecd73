"""FedAvg and FedProx on the labelled part of the same client data.

FedAvg: McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017. FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar
and Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020. On partly labelled
clients they are the lower bound that FedLabel is measured against; on clients whose images are all
labelled, the upper bound. Unlabelled images are never read.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow_federated as tff

from tff_fedlabel import pseudo_labels
from tff_fedlabel.algorithms import _client_work, _local_sgd


@dataclasses.dataclass(frozen=True)
class FedAvgConfig:
    """FedAvg has no parameters of its own.

    Attributes:
      seed: Unused; every configuration has one.
    """

    seed: int = 0

    def __post_init__(self):
        _client_work.check_seed(self.seed)


@dataclasses.dataclass(frozen=True)
class FedProxConfig:
    """FedProx's parameter.

    Attributes:
      proximal_strength: mu >= 0 of the added loss `mu / 2 ||w - w0||^2`. Semi-supervised FL papers
        use 1e-2 (FedMatch) and 1e-3.
      seed: Unused; every configuration has one.

    Raises:
      ValueError: A field is out of its range; the message names it.
    """

    proximal_strength: float = 0.01
    seed: int = 0

    def __post_init__(self):
        pseudo_labels.check_number("proximal_strength", self.proximal_strength, 0.0)
        _client_work.check_seed(self.seed)


def build_fedavg(
    model: tff.learning.models.FunctionalModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    config: FedAvgConfig = FedAvgConfig(),  # noqa: B008 (frozen)
    *,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
    client_weighting: tff.learning.ClientWeighting = tff.learning.ClientWeighting.NUM_EXAMPLES,
    model_distributor: tff.learning.templates.DistributionProcess | None = None,
    model_aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    metrics_aggregator: Callable[..., Any] | None = None,
    loop_implementation: tff.learning.LoopImplementation = (
        tff.learning.LoopImplementation.DATASET_ITERATOR
    ),
    diagnose: bool = False,
) -> tff.learning.templates.LearningProcess:
    """Builds FedAvg on the labelled batches.

    Args:
      model: As in `build_fedlabel`.
      client_optimizer: The optimizer of the local steps.
      config: FedAvg has no parameters of its own.
      server_optimizer, client_weighting, model_distributor, model_aggregator, metrics_aggregator,
      loop_implementation, diagnose: As in `build_fedlabel`.

    Returns:
      A `tff.learning.templates.LearningProcess` on the client data of `build_fedlabel`; r_k is the
      number of labelled images used. Metrics: the model's own, `labeled_loss`, `images_used`,
      `rejected_clients`.

    Raises:
      ValueError: An argument is of the wrong kind.
    """
    _client_work.check_config(config, FedAvgConfig)
    return _build_supervised(
        model,
        client_optimizer,
        0.0,
        server_optimizer=server_optimizer,
        client_weighting=client_weighting,
        model_distributor=model_distributor,
        model_aggregator=model_aggregator,
        metrics_aggregator=metrics_aggregator,
        loop_implementation=loop_implementation,
        diagnose=diagnose,
    )


def build_fedprox(
    model: tff.learning.models.FunctionalModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    config: FedProxConfig = FedProxConfig(),  # noqa: B008 (frozen)
    *,
    server_optimizer: tff.learning.optimizers.Optimizer | None = None,
    client_weighting: tff.learning.ClientWeighting = tff.learning.ClientWeighting.NUM_EXAMPLES,
    model_distributor: tff.learning.templates.DistributionProcess | None = None,
    model_aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
    metrics_aggregator: Callable[..., Any] | None = None,
    loop_implementation: tff.learning.LoopImplementation = (
        tff.learning.LoopImplementation.DATASET_ITERATOR
    ),
    diagnose: bool = False,
) -> tff.learning.templates.LearningProcess:
    """Builds FedProx on the labelled batches; see `build_fedavg`.

    Args:
      model: As in `build_fedlabel`.
      client_optimizer: The optimizer of the local steps.
      config: The proximal strength mu.
      server_optimizer, client_weighting, model_distributor, model_aggregator, metrics_aggregator,
      loop_implementation, diagnose: As in `build_fedlabel`.

    Returns:
      A `tff.learning.templates.LearningProcess` with the metrics of `build_fedavg`.

    Raises:
      ValueError: An argument is of the wrong kind.
    """
    _client_work.check_config(config, FedProxConfig)
    return _build_supervised(
        model,
        client_optimizer,
        config.proximal_strength,
        server_optimizer=server_optimizer,
        client_weighting=client_weighting,
        model_distributor=model_distributor,
        model_aggregator=model_aggregator,
        metrics_aggregator=metrics_aggregator,
        loop_implementation=loop_implementation,
        diagnose=diagnose,
    )


def _build_supervised(
    model, client_optimizer, proximal_strength: float, *, loop_implementation, **tail
):
    def client_update(client: _client_work.ClientInput) -> _client_work.ClientOutput:
        weights, supervised = _local_sgd.run(
            _local_sgd.supervised_gradients(
                model, client.non_trainable, client.weights, proximal_strength
            ),
            client.weights,
            client.labeled,
            _local_sgd.supervised_totals(model),
            optimizer=client_optimizer,
            hparams=client.hparams,
            loop_implementation=loop_implementation,
        )
        return _client_work.ClientOutput(
            delta=tuple(w - w0 for w, w0 in zip(weights, client.weights, strict=True)),
            num_images=supervised["images"],
            model_metrics=supervised["model"],
            metrics=collections.OrderedDict(
                labeled_loss=[supervised["loss"], supervised["images"]]
            ),
        )

    return _client_work.build_learning_process(
        model, client_optimizer, client_update, loop_implementation=loop_implementation, **tail
    )
