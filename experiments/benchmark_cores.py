"""How well the device runtime uses several cores.

  python experiments/benchmark_cores.py

A FedLabel round (CNN of width 16, 10 clients, 10 + 10 steps of 32) in one process bound to n cores,
against n independent processes, bound to one core each, that compute whole rounds at the same time:
these share nothing, so they show what the machine has to give. A ratio of 1 is all of it.

The processes live through the whole measurement and take turns; what is told is the best of the
turns, as other programs can only add to a time. The processors' seconds hardly depend on them: what
one process takes more of than its share is the price of dividing operations among threads.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS
_READY = "ready"


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured on a number of cores.

    Attributes:
      cores: How many.
      together: Seconds of a round in one process that has all of them.
      alone: Seconds of a round in each of as many processes with one core, all at once.
      together_cpu: Processor seconds of a round in the one process.
      alone_cpu: Processor seconds of a round in a process with one core.
    """

    cores: int
    together: float
    alone: float
    together_cpu: float
    alone_cpu: float

    @property
    def ratio(self) -> float:
        """The time of a round against that at which the single-core processes finish rounds."""
        return self.together / (self.alone / self.cores)


def define_flags() -> None:
    flags.DEFINE_list("cores", None, "numbers of cores to measure; default: 1, 2 and all")
    flags.DEFINE_integer("turns", 5, "turns; the best counts", lower_bound=1)
    flags.DEFINE_integer("clients", 10, "clients a round", lower_bound=1)
    flags.DEFINE_integer("steps", 10, "labelled, and unlabelled, steps of a client", lower_bound=1)
    flags.DEFINE_integer("width", 16, "width of the CNN", lower_bound=1)
    flags.DEFINE_integer(
        "intra_op_threads",
        None,
        "threads that share an operation, in the process with all cores; default: TensorFlow's",
        lower_bound=1,
    )
    flags.DEFINE_bool("probe", False, "used by the benchmark itself")
    flags.DEFINE_bool("verbose", False, "show TensorFlow's log and the traceback of a failure")


def benchmark() -> int:
    if FLAGS.probe:
        probe(FLAGS.clients, FLAGS.steps, FLAGS.width)
        return 0
    available = sorted(os.sched_getaffinity(0))
    size = [f"--clients={FLAGS.clients}", f"--steps={FLAGS.steps}", f"--width={FLAGS.width}"]
    print("         one process        processes of one core")
    print("cores    s a round  cpu s   s a round each  cpu s   ratio")
    for cores in _numbers_of_cores(len(available)):
        r = measure(available[:cores], FLAGS.turns, size, FLAGS.intra_op_threads)
        print(
            f"{cores:5}    {r.together:9.3f}  {r.together_cpu:5.2f}   {r.alone:14.3f}  "
            f"{r.alone_cpu:5.2f}   {r.ratio:5.2f}",
            flush=True,
        )
    return 0


def _numbers_of_cores(available: int) -> list[int]:
    if FLAGS.cores is None:
        return sorted({1, min(2, available), available})
    if not all(text.isdigit() and 1 <= int(text) <= available for text in FLAGS.cores):
        raise command_line.UsageError(f"--cores must be numbers of 1 to {available}")
    return [int(text) for text in FLAGS.cores]


def measure(
    cores: Sequence[int],
    turns: int,
    size: Sequence[str] = (),
    intra_op_threads: int | None = None,
) -> Result:
    """Measures on some of this machine's cores.

    Args:
      cores: Their numbers.
      turns: How often; the best counts.
      size: Flags of this script that choose the size of a round.
      intra_op_threads: Threads that share an operation in the process that has all the cores; None
        leaves the choice to TensorFlow.
    """
    with contextlib.ExitStack() as stack:
        together = stack.enter_context(_process(cores, size, intra_op_threads))
        alone = [stack.enter_context(_process([core], size)) for core in cores]
        turn = [(_round([together]), _round(alone)) for _ in range(turns)]
    best = [
        [min(values) for values in zip(*figures, strict=True)]
        for figures in zip(*turn, strict=True)
    ]
    return Result(len(cores), best[0][0], best[1][0], best[0][1], best[1][1])


@contextlib.contextmanager
def _process(
    cores: Sequence[int], size: Sequence[str], intra_op_threads: int | None = None
) -> Iterator[subprocess.Popen]:
    """A process that computes a round for each line it is sent, on these cores."""
    environment = dict(os.environ)
    if intra_op_threads is not None:
        environment["TF_NUM_INTRAOP_THREADS"] = str(intra_op_threads)
    process = subprocess.Popen(
        [sys.executable, __file__, "--probe", *size],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # TensorFlow makes its threads for the cores it sees when it starts.
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    with process:
        try:
            _answer(process)
            yield process
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


def _round(processes: Sequence[subprocess.Popen]) -> tuple[float, float]:
    """Seconds until all have computed a round, started at once, and processor seconds of one."""
    started = time.perf_counter()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    used = [_answer(process) for process in processes]
    return time.perf_counter() - started, min(used)


def _answer(process: subprocess.Popen) -> float:
    """The processor seconds of what a process was asked for."""
    ready, _, seconds = process.stdout.readline().partition(" ")
    if ready != _READY:
        raise RuntimeError("a process of the benchmark failed; its message is above")
    return float(seconds)


def probe(clients: int, steps: int, width: int) -> None:
    """Computes a round for each line of standard input, and says when it is ready for the next."""
    from tff_fedlabel import runtime

    process, cohort = fedlabel_round(clients, steps, width)
    with runtime.use("device"):
        state = process.initialize()
        for _ in range(2):  # compiles, and makes every thread's memory
            state = process.next(state, cohort).state
        print(_READY, 0.0, flush=True)
        for _ in sys.stdin:
            started = time.process_time()
            state = process.next(state, cohort).state
            print(_READY, time.process_time() - started, flush=True)


def fedlabel_round(clients: int, steps: int, width: int, batch_size: int = 32):
    """A FedLabel process, and a cohort of random images for it."""
    import numpy as np
    import tensorflow_federated as tff

    import tff_fedlabel
    from tff_fedlabel import augmentation, models
    from tff_fedlabel.datasets import federated

    shape, classes, images = (28, 28, 1), 10, 2 * steps * batch_size
    rng = np.random.default_rng(0)
    data = federated.from_arrays(
        rng.integers(0, 256, (clients * images, *shape), dtype=np.uint8),
        rng.integers(0, classes, clients * images),
        np.repeat(np.arange(clients), images),
        np.arange(clients * images) % 2 == 0,
        num_classes=classes,
    )
    process = tff_fedlabel.build_fedlabel(
        models.functional_model(
            models.build_keras("cnn", shape, classes, width=width), input_shape=shape
        ),
        tff.learning.optimizers.build_sgdm(0.01),
        # Every label is kept, so that the work does not depend on the weights.
        tff_fedlabel.FedLabelConfig(
            threshold=0.0, strong_augment=augmentation.RandAugment.single()
        ),
    )
    cohort = [
        data.client_dataset(
            client, 0, labeled_steps=steps, unlabeled_steps=steps, batch_size=batch_size
        )
        for client in data.client_ids
    ]
    return process, cohort


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, benchmark))
