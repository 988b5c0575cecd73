"""Whether a run on disk has the choices that are wanted."""

import os
from collections.abc import Mapping
from typing import Any

from tff_fedlabel.training import stored_values
from tff_fedlabel.training.config import OF_OLDER_RUNS, RunConfig

# Fields in which a resumed run may differ from what is on disk: it may go on for longer, and what
# is measured at its end does not change it.
MAY_DIFFER = ("rounds", "client_accuracy")
# Fields that may be paths of one's own data, which may be moved.
PATHS = ("task", "source")
# Schedules of the learning rate that depend on the number of rounds.
_SCHEDULES_OVER_ALL_ROUNDS = ("cosine", "step")


def differences(there: Mapping[str, Any], config: RunConfig) -> list[str]:
    """What forbids to continue a run with a configuration; empty if nothing does.

    Args:
      there: The choices of the run, in the form that config.json has.
      config: The configuration.

    Returns:
      One text for each choice, such as "lr is 0.1 there and 0.2 here".
    """
    wanted = stored_values.stored(config.choices())
    may_differ = set(MAY_DIFFER)
    if config.lr_schedule in _SCHEDULES_OVER_ALL_ROUNDS:
        may_differ.remove("rounds")
    # A choice that did not exist when the run began has its default.
    there = {**OF_OLDER_RUNS, **there}
    return [
        f"{name} is {there.get(name)!r} there and {wanted.get(name)!r} here"
        for name in dict.fromkeys([*wanted, *there])
        if there.get(name) != wanted.get(name)
        and name not in may_differ
        and not _is_moved(name, there.get(name), wanted.get(name))
    ]


def _is_moved(name: str, there: Any, here: Any) -> bool:
    """Whether both are the path of one's own data, in different folders.

    What is in it is compared when the run goes on.
    """
    if name not in PATHS or not all(isinstance(p, str) and os.sep in p for p in (there, here)):
        return False
    return os.path.basename(there) == os.path.basename(here)
