"""How many local steps make methods comparable."""

from __future__ import annotations

from typing import Any

from tff_fedlabel import algorithms, training

ONE_PASS, EQUAL_STEPS = "one_pass", "equal_steps"
ACCOUNTINGS = (ONE_PASS, EQUAL_STEPS)


def is_supervised(algorithm: str) -> bool:
    """Whether a method leaves unlabelled images aside."""
    return not algorithms.METHODS[algorithm].reads_unlabeled


def steps(config: training.RunConfig, accounting: str, all_labels: bool) -> dict[str, Any]:
    """The steps that a cell takes instead of those of its configuration.

    A method that reads unlabelled images takes tau labelled and tau' unlabelled steps, however one
    counts. A supervised one takes its tau labelled steps if one pass is counted, and tau + tau'
    labelled ones if steps are. With all labels, tau + tau' steps are one pass, too.

    Args:
      config: The cell's choices so far.
      accounting: One of `ACCOUNTINGS`.
      all_labels: Whether all images of the clients have their labels.

    Returns:
      {} or {"tau": steps}.

    Raises:
      ValueError: The steps cannot be added up.
    """
    if not is_supervised(config.algorithm):
        return {}
    if accounting == ONE_PASS and not all_labels:
        return {}
    counts = (config.tau, config.tau_unlabeled)
    if all_labels and counts == (training.EPOCH, training.EPOCH):
        return {}  # One pass over all images is what that says with all labels.
    if training.EPOCH in counts:
        raise ValueError(
            f"tau and tau_unlabeled must be numbers to be added up for {config.algorithm}, got "
            f"{config.tau} and {config.tau_unlabeled}; give --tau and --tau_unlabeled, or "
            "--accounting one_pass."
        )
    return {"tau": config.tau + config.tau_unlabeled}
