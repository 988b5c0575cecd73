"""Runs an experiment round by round: sampling, `next`, evaluation, metrics, checkpoint, resume.

A run directory holds

  config.json    every choice of the run, the versions it ran with, and the runtimes, each with
                 the first round that it computed
  metrics.csv    one row for each round
  tensorboard/   the same for TensorBoard
  run.log        the same as text, and when the run was started, resumed, stopped
  checkpoints/   the states of the last two saved rounds, written by TFF's program state manager;
                 best/ holds the state with the best validation accuracy
  round.json     the metrics of the last saved round, until they are in metrics.csv
  summary.json   the result, once the run is finished
  partition.csv  who holds how many images of which class, labelled and unlabelled
  client_accuracy.csv, client_accuracy.png  accuracy of the final model by client
  initial_weights.npz  what the run started from, if that was another run's model

A round is computed from the state before it and from (seed, round) alone, so a run that was
stopped anywhere and resumed ends with the same weights as one that was not.
"""

import collections
import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tff_fedlabel import _notebook, _progress, _validation, algorithms, models
from tff_fedlabel import runtime as runtimes
from tff_fedlabel.datasets import federated, sources
from tff_fedlabel.training import client_accuracy, differential_privacy
from tff_fedlabel.training import experiment as experiments
from tff_fedlabel.training.checkpoints import Checkpoints
from tff_fedlabel.training.config import RunConfig, lr_factor
from tff_fedlabel.training.evaluation import NOT_EVALUATED, evaluations
from tff_fedlabel.training.interrupt import Interrupt, Interrupted
from tff_fedlabel.training.round_records import Best, is_lost, round_metrics
from tff_fedlabel.training.run_directory import RunDirectory
from tff_fedlabel.training.stored_run import RunDirectoryError, stored_runtime
from tff_fedlabel.training.stored_values import json_number


class ConfigError(ValueError):
    """The choices of the run do not fit the data, each other, or the runtime.

    Or a function of the method returned what it must not.
    """


@_notebook.tells_errors_in_one_line
def run(
    config: RunConfig | experiments.Experiment,
    output_dir: str | os.PathLike,
    *,
    data_dir: str | None = None,
    resume: bool = False,
    runtime: str = "auto",
    runtime_options: Mapping[str, Any] | None = None,
    checkpoint_every: int = 1,
    progress: bool | None = None,
    on_round: Callable[[int, dict[str, float]], None] | None = None,
) -> dict[str, Any]:
    """Starts or continues training, and writes everything to `output_dir`.

    It may be called in a notebook cell, where an event loop is already running. Its exceptions are
    shown there in one line, and interrupting the cell stops it as Ctrl-C does elsewhere.

    Args:
      config: The run's choices, which `make_config` makes, or an experiment, of `make_experiment`
        or `build`. A run of an experiment is resumed with the same experiment, made again.
      output_dir: The run directory itself.
      data_dir: Where the data sets are; of one's own images, where they are kept once read. An
        experiment has its data already.
      resume: Whether to continue the run in `output_dir`. If there is none, a run starts; a
        finished run returns its summary at once.
      runtime: Name of the runtime, see `tff_fedlabel.runtime.use`. `"auto"` is the last runtime of
        a resumed run, else `tff_fedlabel.runtime.choose`.
      runtime_options: The runtime's own options. A run that is resumed in its last runtime keeps
        the options that are not given.
      checkpoint_every: Rounds between checkpoints; the last round always has one.
      progress: Whether to show a progress bar; by default in a notebook only.
      on_round: Called after each round with the number of completed rounds and their metrics.

    Returns:
      The content of summary.json.

    Raises:
      RunDirectoryError: See there.
      ConfigError: The choices do not fit the data, or the runtime has no such options.
      CheckpointError: The newest checkpoint is damaged.
      runtime.WorkerError and similar: The runtime did not start, or was lost.
      Interrupted: SIGINT or SIGTERM arrived.
      datasets.sources.DataNotFoundError, datasets.sources.CorruptDataError: See there.
    """
    experiment = None
    if isinstance(config, experiments.Experiment):
        config, experiment = config.config, config
    wanted = "a RunConfig (training.make_config) or an Experiment (training.make_experiment)"
    _validation.check_type("config", config, RunConfig, wanted)
    _validation.check_type("output_dir", output_dir, (str, os.PathLike), "the path of a folder")
    _validation.check_type(
        "runtime_options", runtime_options or {}, Mapping, "a mapping of the runtime's options"
    )
    _validation.check_callable_or_none("on_round", on_round, "lambda done, metrics: ...")
    _validation.check_name("runtime", runtime, ("auto", *runtimes.RUNTIMES))
    checkpoint_every = _validation.check_int("checkpoint_every", checkpoint_every)
    stored = stored_runtime(output_dir) if resume else None
    if runtime == "auto":
        runtime = stored[0] if stored else runtimes.choose()
    options = dict(runtime_options or {})
    if stored and stored[0] == runtime:
        options = {**stored[1], **options}
    try:
        differential_privacy.check_run(config, checkpoint_every, options)
        prepared = runtimes.use(runtime, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    directory = RunDirectory(pathlib.Path(output_dir), config, resume, runtime, options)
    with (
        contextlib.closing(directory),
        directory.log(),
        _notebook.without_notices(),
        Interrupt() as interrupt,
    ):
        finished = directory.finished_summary()
        if finished is not None:
            return finished
        with contextlib.ExitStack() as stack:
            # Before the data: a missing GPU should not cost a download, and TensorFlow's use of a
            # GPU can be configured only before its first operation.
            try:
                if runtime == "device":
                    at_once = options.get("max_concurrent_clients") or config.clients_per_round
                    runtimes.device.share_cores(min(at_once, config.clients_per_round))
                stack.enter_context(prepared)
            except Exception:
                directory.discard_if_new()
                raise
            experiment = _build(config, experiment, data_dir, directory, interrupt)
            callbacks = [] if on_round is None else [on_round]
            if _notebook.is_running() if progress is None else progress:
                callbacks.insert(0, stack.enter_context(_progress.bar(config.rounds)))
            rounds = _Rounds(experiment, directory, checkpoint_every, interrupt)
            return rounds.run(runtime, callbacks)


def _build(config, experiment, data_dir, directory, interrupt) -> experiments.Experiment:
    try:
        kept = directory.initial_weights()
        options = {} if kept is None else {"initial_weights": kept}
        with interrupt.allowed():
            if experiment is None:
                experiment = experiments.build(config, data_dir, **options)
            directory.check_data(experiment.fingerprint())
        if config.init_from is not None and kept is None:
            trainable, constant = experiment.model.initial_weights
            directory.keep_initial_weights([*trainable, *constant])
        directory.note_data(experiment.source, experiment.clients)
        start = f"starts from the {experiment.start}" if kept is None and experiment.start else None
        for line in filter(None, (experiment.source.note, start, experiment.advice())):
            directory.note(line)
            print(line, file=sys.stderr)
        return experiment
    except KeyboardInterrupt:
        raise Interrupted("before a round", directory.path, interrupt.signal_number) from None
    except Exception as error:
        directory.discard_if_new()
        named = (
            sources.CorruptDataError,
            federated.ClientDataError,
            models.BatchNormError,
            RunDirectoryError,
        )
        if isinstance(error, ValueError) and not isinstance(error, named):
            raise ConfigError(str(error)) from error
        raise


class _Rounds:
    """The rounds of one run, starting from the last state in its directory.

    The state is saved after a round. From then on the round's metrics are in round.json, until it
    has been evaluated and they are in metrics.csv, so a stop in between loses neither.
    """

    def __init__(self, experiment, directory: RunDirectory, checkpoint_every: int, interrupt):
        self._experiment, self._directory = experiment, directory
        self._config, self._process = experiment.config, experiment.process
        self._checkpoint_every, self._interrupt = checkpoint_every, interrupt
        self._checkpoints = Checkpoints(directory.path)
        self._memory = experiment.new_memory()
        self._state = self._process.initialize()
        self._done = self._saved = 0
        self._evaluated = (0, dict(NOT_EVALUATED))  # round, evaluation
        self._told_lost = False
        self._load()

    def run(self, runtime: str, callbacks) -> dict[str, Any]:
        """Computes the remaining rounds; returns the summary."""
        config, directory = self._config, self._directory
        directory.check_rounds(self._done)
        start = self._done
        directory.note_start(start)
        unfinished = directory.unfinished_round(start)
        if unfinished is not None:
            self._finish_round(unfinished)
        best = Best(directory.evaluated(self._done))
        if best.round_num == self._done > 0:  # Perhaps stopped before it was saved.
            self._checkpoints.save_best(self._content(), self._done)
        while self._done < config.rounds and not best.is_over(config.early_stopping_patience):
            metrics = self._finish_round(self._compute_round())
            if best.add(self._done, metrics["validation_accuracy"]):
                self._checkpoints.save_best(self._content(), self._done)
            if is_lost(metrics):
                self._tell_lost(best)
            for on_round in callbacks:
                on_round(self._done, metrics)
        if self._saved != self._done:
            self._save(None)
        return self._finish(runtime, start, best)

    def _tell_lost(self, best: Best) -> None:
        """Says, once, that a round changed nothing: on its own it would go on like that."""
        if self._told_lost:
            return
        self._told_lost = True
        text = (
            f"round {self._done}: no client's update was finite, so the model stays as it is. "
            "Training has diverged (try a smaller --lr), or the labelled images hold NaN."
        )
        if best.round_num:
            text += f" The best weights so far, of round {best.round_num}, are in checkpoints/best."
        self._directory.note(text)
        _progress.write(text)

    def _compute_round(self) -> dict[str, float]:
        """Computes a round and saves its state if that is due; returns its metrics."""
        started = time.perf_counter()
        output = None
        try:
            with self._interrupt.allowed():
                self._set_learning_rate()
                cohort = self._experiment.cohort(self._done, self._memory)
                output = self._process.next(self._state, cohort)
        except KeyboardInterrupt:
            if output is None:
                self._stop()
        except Exception as error:
            self._save(None)
            self._directory.note(f"failed after round {self._done}: {error}")
            if isinstance(error, algorithms.MethodError):
                raise ConfigError(str(error)) from error
            raise
        self._state, self._done = output.state, self._done + 1
        if self._memory is not None:
            self._memory.update(output.metrics["client_work"]["memory"])
        metrics = round_metrics(output.metrics, time.perf_counter() - started)
        if self._memory is not None:
            metrics["memory_bytes"] = float(self._memory.nbytes)
        if self._done % self._checkpoint_every == 0 or self._done == self._config.rounds:
            self._save(metrics)
        return metrics

    def _finish_round(self, metrics: dict[str, float]) -> dict[str, float]:
        """Evaluates the round if that is due, and adds it to metrics.csv."""
        evaluated = NOT_EVALUATED
        if self._done % self._config.eval_every == 0 or self._done == self._config.rounds:
            evaluated = self._evaluate(metrics)
        metrics = {**metrics, **evaluated}
        _notebook.wait(self._directory.release(metrics, self._done))
        return metrics

    def _evaluate(self, metrics: dict[str, float]) -> dict[str, float]:
        """Evaluates the state; `metrics` are those of its round, not in metrics.csv yet."""
        evaluated = None
        try:
            with self._interrupt.allowed():
                evaluated = evaluations(self._experiment, self._state)
        except KeyboardInterrupt:
            if evaluated is None:
                self._stop(metrics)
        self._evaluated = (self._done, evaluated)
        return evaluated

    def _stop(self, metrics: dict[str, float] | None = None):
        """Saves the state and raises `Interrupted`."""
        self._save(metrics)
        self._directory.note(f"stopped after round {self._done}")
        raise Interrupted(
            f"after round {self._done}", self._directory.path, self._interrupt.signal_number
        ) from None

    def _set_learning_rate(self) -> None:
        config = self._config
        if config.lr_schedule == "constant":
            return
        lr = config.lr * lr_factor(config.lr_schedule, self._done, config.rounds)
        hparams = self._process.get_hparams(self._state)
        hparams["client_work"]["learning_rate"] = np.float32(lr)
        if self._experiment.method.server_training is not None:
            hparams["finalizer"]["training"]["learning_rate"] = np.float32(lr)
        self._state = self._process.set_hparams(self._state, hparams)

    def _content(self):
        """What a checkpoint holds."""
        memory = () if self._memory is None else (self._memory.state(),)
        return (self._state, self._done, *memory)

    def _save(self, metrics: dict[str, float] | None) -> None:
        """Saves the state, with the metrics of a round that is not in metrics.csv yet."""
        if self._saved == self._done:
            return
        if metrics is not None:
            self._directory.note_unfinished(metrics, self._done)
        self._checkpoints.save(self._content(), self._done)
        self._saved = self._done

    def _load(self) -> None:
        found = self._checkpoints.load_latest(self._content())
        if found is None:
            return
        (self._state, done, *memory), _ = found
        self._done = self._saved = int(done)
        if memory:
            self._memory.restore(memory[0])

    def _finish(self, runtime, start, best) -> dict[str, Any]:
        config, directory = self._config, self._directory
        source = self._experiment.source
        if self._evaluated[0] != self._done:
            # Stopped between the last checkpoint and the summary.
            self._evaluate({})
        _, metrics = self._evaluated
        summary = collections.OrderedDict(
            task=config.task_name,
            algorithm=config.algorithm,
            model=config.model,
            seed=config.seed,
            rounds=config.rounds,
            labeled_fraction=config.labeled_fraction,
            labels_at=config.labels_at,
            # Of a partition; one's own clients have none.
            alpha=None if source.has_own_clients else json_number(config.alpha),
            test_accuracy=metrics["test_accuracy"],
            test_loss=metrics["test_loss"],
            validation_accuracy=metrics["validation_accuracy"],
            seconds_per_round=directory.mean_seconds(start),
            runtime=runtime,
            rounds_done=self._done,
            best_round=best.round_num,
            best_validation_accuracy=best.accuracy,
        )
        if self._memory is not None:
            summary["memory_bytes"] = self._memory.nbytes
        if self._experiment.method.server_training is not None:
            labeled = self._experiment.clients.labeled_arrays()["y"]
            summary["labeled_images_at_server"] = len(labeled)
        if config.init_from is not None:
            summary["init_from"] = config.init_from
        summary.update(self._experiment.privacy(self._done))
        if config.client_accuracy:
            summary.update(self._measure_clients())
        directory.finish(summary)
        return summary

    def _measure_clients(self) -> dict[str, float]:
        """Writes the accuracy by client; returns what of it goes into the summary."""
        rows = None
        try:
            with self._interrupt.allowed():
                weights = self._process.get_model_weights(self._state)
                experiment = self._experiment
                rows = client_accuracy.measure(experiment.model, weights, experiment.clients)
        except KeyboardInterrupt:
            if rows is None:
                self._stop()
        client_accuracy.write(rows, self._directory.path)
        return client_accuracy.in_short(rows)
