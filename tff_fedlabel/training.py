"""Runs an experiment round by round: sampling, `next`, evaluation, metrics, checkpoint, resume.

A run directory holds

  config.json    every choice of the run, the versions it ran with, and the runtimes, each from
                 the round on that it computed
  metrics.csv    one row for each round
  tensorboard/   the same for TensorBoard
  run.log        the same as text, and when the run was started, resumed, stopped
  checkpoints/   the states of the last rounds, as TFF's program state manager writes them
  summary.json   the result, once the run is finished

A round is computed from the state before it and from (seed, round) alone, so a run that was
stopped anywhere and resumed ends in the same weights as one that was not.
"""

import collections
import contextlib
import math
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import _notebook, _progress, models, tasks
from tff_fedlabel import runtime as runtimes
from tff_fedlabel._run_directory import (
    RunDirectory,
    RunDirectoryError,
    checkpoint_manager,
    json_number,
    stored_choices,
    stored_runtime,
)
from tff_fedlabel.datasets import federated, sources

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Interrupted",
    "RunDirectoryError",
    "evaluate",
    "final_weights",
    "run",
    "stored_choices",
    "stored_runtime",
]

_EVALUATION_BATCH = 500


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read."""


class ConfigError(ValueError):
    """The choices of the run do not go with the data, with each other, or with the runtime."""


class Interrupted(Exception):
    """The run was asked to stop; every completed round is on disk.

    Attributes:
      signal_number: The signal that asked.
    """

    def __init__(self, when: str, output_dir: os.PathLike, signal_number: int):
        how = f"--resume --output_dir {output_dir} continues the run (in Python: resume=True)."
        if _notebook.is_running():
            how = f"the same call with resume=True continues the run in {output_dir}."
        super().__init__(f"stopped {when}; {how}")
        self.signal_number = signal_number


@_notebook.tells_errors_in_one_line
def run(
    config: tasks.RunConfig,
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
    """Trains, or goes on training, and leaves everything in `output_dir`.

    It may be called in a notebook's cell, where an event loop runs already. Its exceptions are
    shown there in one line, and interrupting the cell stops it as Ctrl-C does elsewhere.

    Args:
      config: The run's choices; `tasks.make_config` makes one.
      output_dir: The run directory itself.
      data_dir: Where the data sets lie.
      resume: Whether to continue what lies in `output_dir`. With nothing there the run starts, and
        a finished run returns its summary at once.
      runtime: Name of the runtime, see `tff_fedlabel.runtime.use`. `"auto"` is the one that a
        resumed run was in last, else `tff_fedlabel.runtime.choose`.
      runtime_options: The runtime's own options. A run that is resumed in the runtime it was in
        last keeps those that are not given.
      checkpoint_every: Rounds between checkpoints; the last round always has one.
      progress: Whether to show a progress bar; by default in a notebook only.
      on_round: Called after each round with the number of completed rounds and their metrics.

    Returns:
      The content of summary.json.

    Raises:
      RunDirectoryError: See there.
      ConfigError: The choices do not go with the data, or the runtime has no such options.
      CheckpointError: The newest checkpoint is damaged.
      runtime.WorkerError and its like: The runtime did not start, or was lost.
      Interrupted: SIGINT or SIGTERM arrived.
      datasets.sources.DataNotFoundError, datasets.sources.CorruptDataError: See there.
    """
    tasks.check_name("runtime", runtime, ("auto", *runtimes.RUNTIMES))
    tasks.check_count("checkpoint_every", checkpoint_every)
    stored = stored_runtime(output_dir) if resume else None
    if runtime == "auto":
        runtime = stored[0] if stored else runtimes.choose()
    options = dict(runtime_options or {})
    if stored and stored[0] == runtime:
        options = {**stored[1], **options}
    try:
        prepared = runtimes.use(runtime, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    directory = RunDirectory(pathlib.Path(output_dir), config, resume, runtime, options)
    with (
        contextlib.closing(directory),
        directory.log(),
        _notebook.without_notices(),
        _Interrupt() as interrupt,
    ):
        finished = directory.finished_summary()
        if finished is not None:
            return finished
        with contextlib.ExitStack() as stack:
            # Before the data: a GPU that is not there should not cost a download, and how
            # TensorFlow uses a GPU can be said only until its first operation.
            try:
                stack.enter_context(prepared)
            except Exception:
                directory.discard_if_new()
                raise
            experiment = _build(config, data_dir, directory, interrupt)
            callbacks = [] if on_round is None else [on_round]
            if _notebook.is_running() if progress is None else progress:
                callbacks.insert(0, stack.enter_context(_progress.bar(config.rounds)))
            return _train(experiment, directory, runtime, checkpoint_every, callbacks, interrupt)


def _build(config, data_dir, directory, interrupt) -> tasks.Experiment:
    try:
        with interrupt.allowed():
            return tasks.build(config, data_dir)
    except KeyboardInterrupt:
        raise Interrupted("before a round", directory.path, interrupt.signal_number) from None
    except Exception as error:
        directory.discard_if_new()
        named = (sources.CorruptDataError, federated.ClientDataError, models.BatchNormError)
        if isinstance(error, ValueError) and not isinstance(error, named):
            raise ConfigError(str(error)) from error
        raise


def _train(experiment, directory, runtime, checkpoint_every, callbacks, interrupt):
    config, process = experiment.config, experiment.process
    checkpoints = checkpoint_manager(directory.path)
    state, done = _load_latest(checkpoints, process.initialize(), directory.path)
    directory.check_rounds(done)
    start, saved = done, done if done else None
    directory.note_start(done)

    def save():
        nonlocal saved
        if saved != done:
            _notebook.wait(checkpoints.save((state, done), version=done))
            saved = done

    metrics = {}
    while done < config.rounds:
        started = time.perf_counter()
        try:
            with interrupt.allowed():
                output = process.next(state, experiment.cohort(done))
        except KeyboardInterrupt:
            save()
            directory.note(f"stopped after round {done}")
            raise Interrupted(
                f"after round {done}", directory.path, interrupt.signal_number
            ) from None
        except Exception as error:
            save()
            directory.note(f"failed after round {done}: {error}")
            raise
        state, done = output.state, done + 1
        metrics = _round_metrics(output.metrics, time.perf_counter() - started)
        evaluated = done % config.eval_every == 0 or done == config.rounds
        metrics.update(_evaluations(experiment, state) if evaluated else _NOT_EVALUATED)
        # Metrics first: what a checkpoint says is done has its row in metrics.csv.
        _notebook.wait(directory.release(metrics, done))
        if done % checkpoint_every == 0 or done == config.rounds:
            save()
        for on_round in callbacks:
            on_round(done, metrics)

    if not metrics:  # Stopped between the last checkpoint and the summary.
        metrics = _evaluations(experiment, state)
    summary = collections.OrderedDict(
        task=config.task,
        algorithm=config.algorithm,
        model=config.model,
        seed=config.seed,
        rounds=config.rounds,
        labeled_fraction=config.labeled_fraction,
        alpha=json_number(config.alpha),
        test_accuracy=metrics["test_accuracy"],
        test_loss=metrics["test_loss"],
        validation_accuracy=metrics["validation_accuracy"],
        seconds_per_round=directory.mean_seconds(start),
        runtime=runtime,
    )
    directory.finish(summary)
    return summary


def final_weights(output_dir: str | os.PathLike, process) -> tff.learning.models.ModelWeights:
    """The weights of the newest checkpoint in a run directory; needs a TFF context.

    Args:
      output_dir: A run directory.
      process: The learning process of that run, as `tasks.build` makes it.

    Raises:
      CheckpointError: There is no checkpoint, or it is damaged.
    """
    manager = checkpoint_manager(pathlib.Path(output_dir))
    state, done = _load_latest(manager, process.initialize(), output_dir)
    if not done:
        raise CheckpointError(f"{output_dir} holds no checkpoint.")
    return process.get_model_weights(state)


def evaluate(
    model: tff.learning.models.FunctionalModel, weights: Any, examples: Any
) -> tuple[float, float]:
    """Accuracy and mean loss of `weights` on `examples`.

    Args:
      model: Outputs logits `[batch, classes]`.
      weights: `tff.learning.models.ModelWeights`.
      examples: `datasets.sources.Examples`, x uint8 `[n, h, w, c]` and y int32 `[n]`.

    Returns:
      Accuracy in [0, 1] and loss in nats, NaN without examples.
    """
    model_weights = (tuple(weights.trainable), tuple(weights.non_trainable))
    correct = loss = count = 0.0
    for batch in federated.evaluation_dataset(examples, _EVALUATION_BATCH):
        batch_correct, batch_loss = _evaluate_batch(model, model_weights, batch["x"], batch["y"])
        size = len(batch["y"])
        correct, loss, count = correct + batch_correct, loss + batch_loss * size, count + size
    return (float(correct) / count, float(loss) / count) if count else (math.nan, math.nan)


@tf.function(reduce_retracing=True)
def _evaluate_batch(model, model_weights, x, y):
    logits = model.predict_on_batch(model_weights, x, training=False)
    hits = tf.equal(tf.argmax(logits, axis=-1, output_type=y.dtype), y)
    return tf.reduce_sum(tf.cast(hits, tf.float32)), model.loss(output=logits, label=y)


_NOT_EVALUATED = dict.fromkeys(
    ("validation_accuracy", "validation_loss", "test_accuracy", "test_loss"), math.nan
)


def _evaluations(experiment, state) -> dict[str, float]:
    weights = experiment.process.get_model_weights(state)
    values = []
    for examples in (experiment.source.validation, experiment.source.test):
        values += evaluate(experiment.model, weights, examples)
    return dict(zip(_NOT_EVALUATED, values, strict=True))


def _round_metrics(metrics, seconds: float) -> dict[str, float]:
    train = metrics["client_work"]["train"]
    values = {name: float(np.asarray(value)) for name, value in train.items()}
    # The model's own metrics are over the labelled batches; `labeled_loss` is its `loss`.
    values["labeled_accuracy"] = values.pop("accuracy", math.nan)
    for duplicate in ("loss", "num_examples"):
        values.pop(duplicate, None)
    return {**values, "seconds": seconds}


def _load_latest(manager, initial_state, directory):
    """The newest saved (state, rounds done), or the initial state and 0."""
    try:
        saved, version = _notebook.wait(manager.load_latest((initial_state, 0)))
    except Exception as error:
        version = max(_notebook.wait(manager.get_versions()) or [0])
        raise CheckpointError(
            f"checkpoint {version} in {directory} cannot be read ({type(error).__name__}); if it "
            "is damaged, delete it to resume from the one before."
        ) from error
    if saved is None:
        return initial_state, 0
    state, done = saved
    return state, int(done)


class _Interrupt:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt, but only where a round can be dropped.

    Everywhere else (while files are written) the signal waits for the next such place.
    """

    def __init__(self):
        self.signal_number = signal.SIGINT
        self._pending = False
        self._allowed = False
        self._previous = {}

    def __enter__(self):
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        except ValueError:  # Not the main thread: whoever owns it handles signals.
            pass
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, signal_number, _):
        self._pending, self.signal_number = True, signal_number
        if self._allowed:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        self._allowed = True
        try:
            if self._pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._allowed = False
