"""Comparisons of several methods on one task: learning-rate search, runs, table and curves.

A study is a set of arms. An arm's learning rate is chosen on validation images by short runs at
one alpha; then each arm is trained at every alpha. Every run has a directory of its own, so a
study that was stopped continues where it was.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from tff_fedlabel import training


@dataclasses.dataclass(frozen=True)
class Arm:
    """One line of the table.

    Attributes:
      algorithm: Name in `algorithms.ALGORITHMS`.
      accounting: What makes arms comparable; only arms with the same one may be compared.
      label: What the table calls the arm.
      choices: Fields of `training.RunConfig`; with an `lr` among them nothing is searched.
    """

    algorithm: str
    accounting: str
    label: str
    choices: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Study:
    """A comparison.

    Attributes:
      task: Name in `tasks.TASKS`.
      arms: Name -> arm.
      alphas: Heterogeneities at which every arm is trained.
      rounds: Rounds of each run.
      lrs: Learning rates that are tried; more follow, by factors of 2, while the best is the
        smallest or the largest.
      search_rounds: Rounds of each trial.
      search_alpha: Heterogeneity of the trials.
      choices: Fields of `training.RunConfig` that all arms share.
    """

    task: str
    arms: dict[str, Arm]
    alphas: tuple[float, ...]
    rounds: int
    lrs: tuple[float, ...]
    search_rounds: int
    search_alpha: float
    choices: dict[str, Any] = dataclasses.field(default_factory=dict)


_ONE_PASS = "one pass"
_EQUAL_WORK = "equal work"


def _label_arms(labels: str, equal_steps: int) -> dict[str, Arm]:
    return {
        "fedavg": Arm("fedavg", _ONE_PASS, f"FedAvg, {labels} labels", {"tau": "epoch"}),
        "fedlabel": Arm(
            "fedlabel",
            f"{_ONE_PASS}, {_EQUAL_WORK}",
            f"FedLabel, {labels} labels",
            {"tau": "epoch", "tau_unlabeled": "epoch"},
        ),
        "fedavg_all": Arm(
            "fedavg",
            f"{_ONE_PASS}, {_EQUAL_WORK}",
            "FedAvg, all labels (upper bound)",
            {"tau": "epoch", "labeled_fraction": 1.0},
        ),
        "fedavg_equal": Arm(
            "fedavg",
            _EQUAL_WORK,
            f"FedAvg, {labels} labels, as many steps as FedLabel",
            {"tau": equal_steps},
        ),
    }


STUDIES = {
    # 560 images a client: 28 labelled (1 batch of 32) and 532 unlabelled (17 batches).
    "fashion_mnist": Study(
        task="fashion_mnist",
        arms=_label_arms("5%", equal_steps=18),
        alphas=(1.0, 0.1),
        rounds=150,
        lrs=(0.05, 0.1, 0.2, 0.4),
        search_rounds=60,
        search_alpha=1.0,
        choices={"labeled_fraction": 0.05},
    ),
    "digits": Study(
        task="digits",
        arms={
            "fedlabel": Arm("fedlabel", "5 + 5 steps", "FedLabel, 20% labels", {}),
            "fedavg": Arm("fedavg", "5 + 5 steps", "FedAvg, 20% labels, 10 steps", {"tau": 10}),
        },
        alphas=(1.0,),
        rounds=60,
        lrs=(0.02, 0.05, 0.1, 0.2),
        search_rounds=60,
        search_alpha=1.0,
    ),
    # The same work divided evenly over FedLabel's two phases, so that the local model has taken
    # more than one step when it labels.
    "fashion_mnist_even": Study(
        task="fashion_mnist",
        arms={
            "fedlabel_even": Arm(
                "fedlabel",
                _EQUAL_WORK,
                "FedLabel, 5% labels, 9 + 9 steps",
                {"tau": 9, "tau_unlabeled": 9, "lr": 0.1},
            ),
        },
        alphas=(1.0,),
        rounds=150,
        lrs=(),
        search_rounds=0,
        search_alpha=1.0,
        choices={"labeled_fraction": 0.05},
    ),
    # The learning rate that the search at alpha 1 finds for the upper bound diverges at alpha .1.
    "fashion_mnist_upper": Study(
        task="fashion_mnist",
        arms={
            "fedavg_all_lr0.2": Arm(
                "fedavg",
                _ONE_PASS,
                "FedAvg, all labels (upper bound), second-best lr",
                {"tau": "epoch", "labeled_fraction": 1.0, "lr": 0.2},
            ),
        },
        alphas=(0.1,),
        rounds=150,
        lrs=(),
        search_rounds=0,
        search_alpha=1.0,
    ),
    # 480 images a client: 96 labelled (3 batches of 32) and 384 unlabelled (12 batches).
    # Learning rates as found for Fashion-MNIST.
    "cifar10": Study(
        task="cifar10",
        arms={
            name: dataclasses.replace(arm, choices={**arm.choices, "lr": lr})
            for (name, arm), lr in zip(
                _label_arms("20%", equal_steps=15).items(), (0.4, 0.2, 0.4, 0.1), strict=True
            )
        },
        alphas=(1.0,),
        rounds=100,
        lrs=(),
        search_rounds=0,
        search_alpha=1.0,
        choices={
            "labeled_fraction": 0.2,
            "model": "cnn",
            "width": 16,
            "strong_augment": "single",
            "eval_every": 5,
        },
    ),
}


def run(
    study: Study,
    output_dir: str,
    *,
    data_dir: str | None = None,
    checkpoint_every: int = 10,
    report: Callable[[str], None] = print,
) -> pd.DataFrame:
    """Runs what is still missing of a study; returns one row per arm and alpha.

    Args:
      study: What to run.
      output_dir: Holds one run directory for each trial and run.
      data_dir: Where the data sets lie.
      checkpoint_every: Rounds between checkpoints.
      report: Called with a line of text for each run.

    Returns:
      Columns accounting, arm, alpha, lr, test_accuracy, test_loss, validation_accuracy,
      seconds_per_round.
    """
    root = pathlib.Path(output_dir)

    def train(name: str, arm: Arm, **choices: Any) -> dict[str, Any]:
        config = training.make_config(
            study.task, arm.algorithm, **{**study.choices, **arm.choices, **choices}
        )
        summary = training.run(
            config,
            root / name,
            data_dir=data_dir,
            resume=True,
            checkpoint_every=checkpoint_every,
        )
        report(
            f"{name}: validation {summary['validation_accuracy']:.4f}, "
            f"{summary['seconds_per_round']:.2f} s a round"
        )
        return summary

    def search(name: str, arm: Arm) -> float:
        """The learning rate of the best validation accuracy, not at the edge of what was tried."""
        if "lr" in arm.choices:
            return arm.choices["lr"]
        trials: dict[float, float] = {}
        wanted = list(study.lrs)
        while wanted:
            for lr in wanted:
                trials[lr] = train(
                    f"search-{name}-lr{lr:g}",
                    arm,
                    lr=lr,
                    rounds=study.search_rounds,
                    alpha=study.search_alpha,
                    eval_every=study.search_rounds,
                )["validation_accuracy"]
            best = max(trials, key=trials.get)
            wanted = {max(trials): [2 * best], min(trials): [best / 2]}.get(best, [])
        (root / f"search-{name}.json").write_text(
            json.dumps({f"{lr:g}": trials[lr] for lr in sorted(trials)}, indent=2) + "\n"
        )
        return best

    chosen = {name: search(name, arm) for name, arm in study.arms.items()}
    rows = []
    for alpha in study.alphas:
        for name, arm in study.arms.items():
            summary = train(
                f"{name}-alpha{alpha:g}", arm, lr=chosen[name], rounds=study.rounds, alpha=alpha
            )
            rows.append(
                {
                    "accounting": arm.accounting,
                    "arm": arm.label,
                    "alpha": alpha,
                    "lr": chosen[name],
                    **{
                        column: summary[column]
                        for column in (
                            "test_accuracy",
                            "test_loss",
                            "validation_accuracy",
                            "seconds_per_round",
                        )
                    },
                }
            )
    return pd.DataFrame(rows)


def curves(study: Study, output_dir: str) -> Iterator[tuple[float, Arm, pd.DataFrame]]:
    """The metrics of the study's runs, finished or not: alpha, arm, metrics.csv."""
    for alpha in study.alphas:
        for name, arm in study.arms.items():
            path = pathlib.Path(output_dir) / f"{name}-alpha{alpha:g}" / "metrics.csv"
            if path.exists():
                yield alpha, arm, pd.read_csv(path)


def write_results(name: str, table: pd.DataFrame, output_dir: str, results_dir: str) -> None:
    """Writes `<name>.csv`, `<name>_search.csv`, `<name>_curves.csv` and `<name>.png`.

    Args:
      name: The study's name.
      table: What `run` returned.
      output_dir: The directory of the runs.
      results_dir: Where the files go.
    """
    study, root, results = STUDIES[name], pathlib.Path(output_dir), pathlib.Path(results_dir)
    results.mkdir(parents=True, exist_ok=True)
    table.to_csv(results / f"{name}.csv", index=False, float_format="%.4f")
    searches = {
        arm.label: json.loads((root / f"search-{arm_name}.json").read_text())
        for arm_name, arm in study.arms.items()
        if "lr" not in arm.choices
    }
    if searches:
        frame = pd.DataFrame(searches).T
        frame = frame[sorted(frame.columns, key=float)]
        frame.rename_axis("validation accuracy at lr").to_csv(
            results / f"{name}_search.csv", float_format="%.4f"
        )
    evaluated = []
    for alpha, arm, metrics in curves(study, output_dir):
        rows = metrics[metrics["test_accuracy"].notna()]
        rows = rows[[column for column in _CURVE_COLUMNS if column in rows]]
        evaluated.append(rows.assign(alpha=alpha, arm=arm.label))
    pd.concat(evaluated).to_csv(results / f"{name}_curves.csv", index=False, float_format="%.4f")
    _plot(study, pd.concat(evaluated), results / f"{name}.png")


_CURVE_COLUMNS = (
    "round",
    "test_accuracy",
    "validation_accuracy",
    "kept_fraction",
    "local_fraction",
    "agreement_fraction",
    "pseudo_label_accuracy",
)


def _plot(study: Study, rows: pd.DataFrame, path: pathlib.Path) -> None:
    from matplotlib import figure

    panels = figure.Figure(figsize=(5 * len(study.alphas), 4), layout="constrained")
    axes = panels.subplots(1, len(study.alphas), sharey=True, squeeze=False)[0]
    for axis, alpha in zip(axes, study.alphas, strict=True):
        for arm in study.arms.values():
            curve = rows[(rows["alpha"] == alpha) & (rows["arm"] == arm.label)]
            axis.plot(curve["round"], curve["test_accuracy"], label=arm.label)
        axis.set(title=f"{study.task}, alpha {alpha:g}", xlabel="round")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy")
    axes[-1].legend(fontsize="small", loc="lower right")
    panels.savefig(path, dpi=120)
