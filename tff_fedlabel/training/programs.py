"""What `tff.learning.programs.train_model` needs beside TFF to be stopped anywhere and go on.

`train_model` saves states and releases metrics in tasks of their own while it trains, and evaluates
in further ones. TFF 0.87's managers are not made for two of these at once, and not for a round that
is computed again after a kill:

* `CSVFileReleaseManager` reads, changes and writes its file; of two releases at once, one is lost.
  It also deletes the rows of later rounds when an earlier one arrives: `InOrder`.
* `FileProgramStateManager` deletes old states after saving; of two saves at once, both may try to
  delete the same one, and one of them fails: `ProgramStateManager`.
* `EvaluationManager` fails with `ProgramStateExistsError` when a round whose evaluation was begun
  is computed again, and counts clients twice in an evaluation that had not quite ended:
  `EvaluationManager`.
"""

import asyncio
import datetime
import os
import pathlib
from collections.abc import Callable
from typing import Any

import tensorflow_federated as tff

from tff_fedlabel._validation import check_int, check_type


class InOrder(tff.program.ReleaseManager):
    """Releases one value after the other, in the order of the calls, to one or more managers.

    Args:
      *managers: The `tff.program.ReleaseManager`s that receive each value.
    """

    def __init__(self, *managers: tff.program.ReleaseManager):
        if not managers:
            raise ValueError("InOrder needs a release manager.")
        for manager in managers:
            check_type(
                "managers", manager, tff.program.ReleaseManager, "tff.program.ReleaseManagers"
            )
        self._managers, self._lock = managers, asyncio.Lock()

    async def release(self, value: Any, key: Any) -> None:
        async with self._lock:
            for manager in self._managers:
                await manager.release(value, key)


class ProgramStateManager(tff.program.FileProgramStateManager):
    """TFF's manager of states in files, which here saves one state after the other.

    Its arguments are those of `tff.program.FileProgramStateManager`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._in_order = asyncio.Lock()

    async def save(self, program_state: Any, version: int) -> None:
        async with self._in_order:
            await super().save(program_state, version)


class EvaluationManager(tff.learning.programs.EvaluationManager):
    """Evaluates rounds of `train_model`: each once, in order, on one cohort.

    An evaluation that was stopped starts again when the program does. Training goes on beside an
    evaluation and waits for it where the next one is due.

    Args:
      source: Gives the clients, for example `FederatedData.evaluation_source(batch_size=100)`.
      build_process: `() -> tff.learning.templates.LearningProcess`, for example
        `lambda: tff.learning.algorithms.build_fed_eval(model)`.
      state_dir: A folder of its own for the evaluations that are under way.
      metrics_manager: Receives the metrics of each evaluated round, under the round's number.
      cohort_size: Clients in an evaluation; all are drawn anew from round 0 of the source each
        time, so each evaluation sees the same clients.

    Raises:
      ValueError: An argument has the wrong type or is out of its range.
    """

    def __init__(
        self,
        *,
        source: tff.program.FederatedDataSource,
        build_process: Callable[[], tff.learning.templates.LearningProcess],
        state_dir: str | os.PathLike,
        metrics_manager: tff.program.ReleaseManager,
        cohort_size: int,
    ):
        check_type(
            "source", source, tff.program.FederatedDataSource, "a tff.program.FederatedDataSource"
        )
        check_type(
            "metrics_manager",
            metrics_manager,
            tff.program.ReleaseManager,
            "a tff.program.ReleaseManager",
        )
        self._state_dir = pathlib.Path(state_dir)
        process = build_process()  # One for all evaluations: it is compiled once.
        super().__init__(
            data_source=source,
            aggregated_metrics_manager=InOrder(metrics_manager),
            create_state_manager_fn=self._states,
            create_process_fn=lambda name: (process, None),
            cohort_size=check_int("cohort_size", cohort_size),
            duration=datetime.timedelta(0),  # One cohort.
        )

    def _states(self, name: str) -> tff.program.FileProgramStateManager:
        # The manager's own state is the one that is not an evaluation's.
        kind = _StartOnly if name.startswith("evaluation") else tff.program.FileProgramStateManager
        return kind(str(self._state_dir / name))

    async def start_evaluation(self, train_round, start_timestamp_seconds, model_weights) -> None:
        """Starts the evaluation of a round, after those before it; replaces one that was begun."""
        await self.wait_for_evaluations_to_finish()
        await self._states(f"evaluation_of_train_round_{train_round:05d}").remove_all()
        await super().start_evaluation(train_round, start_timestamp_seconds, model_weights)


class _StartOnly(tff.program.FileProgramStateManager):
    """Keeps the weights to evaluate and no later state: what is resumed counts no client twice."""

    async def save(self, program_state: Any, version: int) -> None:
        if version == 0:
            await super().save(program_state, version)
