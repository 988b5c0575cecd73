"""What is known of the rounds of a run: their metrics, and which was the best."""

import math

import numpy as np


class Best:
    """The evaluation with the best validation accuracy; of equals, the first.

    Args:
      evaluated: (round, validation accuracy) of the evaluations so far, in order.
    """

    def __init__(self, evaluated):
        self.round_num, self.accuracy = 0, -math.inf
        self._without_better = 0
        for round_num, accuracy in evaluated:
            self.add(round_num, accuracy)

    def add(self, round_num: int, accuracy: float) -> bool:
        """Adds an evaluation (NaN if there was none); returns whether it is the best so far."""
        if math.isnan(accuracy):
            return False
        self._without_better += 1
        if accuracy <= self.accuracy:
            return False
        self.round_num, self.accuracy, self._without_better = round_num, accuracy, 0
        return True

    def is_over(self, patience: int | None) -> bool:
        return patience is not None and self._without_better >= patience


def is_lost(metrics):
    """Whether a round changed nothing because no client's update was finite.

    Args:
      metrics: A row of metrics.csv, or all of it as a table.

    Returns:
      bool, or a column of them.
    """
    if "rejected_clients" not in metrics:
        return False
    return (metrics["rejected_clients"] > 0) & (metrics["images_used"] == 0)


def round_metrics(metrics, seconds: float) -> dict[str, float]:
    """One row of metrics.csv, but for the evaluation, from the metrics of a process's `next`."""
    work, finalizer = metrics["client_work"], metrics["finalizer"]
    # A secure sum of metrics adds a structure: how many clients were clipped.
    numbers = {n: v for n, v in work["train"].items() if n != "secure_sum_measurements"}
    values = {name: float(np.asarray(value)) for name, value in numbers.items()}
    for part in (work, finalizer):  # What did not change, since its new value was not finite.
        for name in [name for name in part if name.endswith("_non_finite")]:
            values[name] = float(np.asarray(part[name]))
    if values.get("images_used") == 0:  # The model stayed as it was, but nothing was wrong.
        values["update_non_finite"] = 0.0
    if values.get("kept_fraction") == 0 and "pseudo_label_accuracy" in values:
        values["pseudo_label_accuracy"] = math.nan  # No label was kept: none was right or wrong.
    if not values.get("num_examples", 1.0):  # No client of the round had a label.
        values.update((name, math.nan) for name in ("labeled_loss", "accuracy") if name in values)
    # Those of the server's images, in place of the clients' metrics of the same name.
    of_server = finalizer.get("server_training", {})
    values.update((name, float(np.asarray(value))) for name, value in of_server.items())
    # The model's own metrics are over the labelled batches; `labeled_loss` is its `loss`.
    values["labeled_accuracy"] = values.pop("accuracy", math.nan)
    for duplicate in ("loss", "num_examples"):
        values.pop(duplicate, None)
    return {**values, "seconds": seconds}
