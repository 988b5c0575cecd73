"""FedAvg and FedProx on the labelled part of the same client data.

FedAvg: McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017. FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar
and Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020. On partly labelled
clients they are the lower bound that FedLabel is measured against; on clients whose images are all
labelled, the upper bound. Unlabelled images are never read.

What differs from the papers:
  * A client takes the number of steps that its data have, tau of the run, not epochs over all its
    images; the trainer's `tau="epoch"` is one epoch.
  * The mean over the clients is weighted by the images that were used, r_k, as in FedLabel, not by
    those that a client has. With as many steps for each client both are the same but for batches
    that are not full.
  * The cohort is drawn by the caller, in the trainer uniformly; FedProx' paper draws clients by
    their shares of the images and weights them alike.
  * FedProx: all clients do the same work. The paper also lets slow ones do less.
"""

from __future__ import annotations

import dataclasses

from tff_fedlabel import _validation
from tff_fedlabel.algorithms import _local_training, _method


@dataclasses.dataclass(frozen=True)
class FedAvgConfig:
    """FedAvg has no parameters of its own.

    Attributes:
      seed: Unused; every configuration has one.
    """

    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "seed", _validation.check_seed(self.seed))


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
        strength = _validation.check_number("proximal_strength", self.proximal_strength)
        object.__setattr__(self, "proximal_strength", strength)
        object.__setattr__(self, "seed", _validation.check_seed(self.seed))


def client_update(setup: _method.Setup, client: _method.Client) -> _method.ClientOutput:
    """Local steps on the labelled batches; r_k is the number of labelled images used.

    FedProx's proximal term pulls its steps towards the received weights. The metric is
    `labeled_loss`.
    """
    proximal_strength = getattr(setup.config, "proximal_strength", 0.0)
    local = _local_training.run(
        setup,
        client.hparams,
        _local_training.labeled_step(setup, client, proximal_strength),
        client.weights,
        client.labeled,
    )
    return _method.ClientOutput(
        delta=tuple(w - w0 for w, w0 in zip(local.weights, client.weights, strict=True)),
        num_examples=local.num_examples,
        model_metrics=local.model_metrics,
        metrics=local.metrics,
    )


FEDAVG = _method.Method("fedavg", FedAvgConfig, client_update, reads_unlabeled=False)
FEDPROX = _method.Method("fedprox", FedProxConfig, client_update, reads_unlabeled=False)
