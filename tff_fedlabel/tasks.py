"""The catalogue of tasks: data set, model, clients and hyper-parameters of each."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Task:
    """One experiment of the paper, or one of ours; every field is a default of
    `training.RunConfig`.

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
      strong_augment: A name of `training.STRONG_AUGMENTS`.
      eval_every: Rounds between evaluations.
      width: Width of the model; None is the model's own default.
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
