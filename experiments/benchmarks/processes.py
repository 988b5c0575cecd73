"""Processes that do something whenever they are asked to, so that it can be timed in turn."""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def answers():
    """The real standard output; from here on, what is printed goes to standard error."""
    real = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Nothing else may come between the answers.
    return real


def answer(requests: Mapping[str, Callable[[], Any]], output) -> None:
    """Answers requests on standard input, each a line, with a line, until there are no more.

    Args:
      requests: The name of a request -> what is done. A text that it returns is the answer, and
        "done" where it returns something else.
      output: What `answers` returned, before anything was printed.
    """
    for line in sys.stdin:
        found = requests[line.strip()]()
        print(found if isinstance(found, str) else "done", file=output)


@contextlib.contextmanager
def process(
    command: Sequence[str], cores: Sequence[int] | None = None
) -> Iterator[Callable[[str], str]]:
    """Starts a process that calls `answer`; yields a function that sends a request.

    Args:
      command: Its command.
      cores: The cores of the process, by number; by default all of this process.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # TensorFlow makes threads for the cores that it sees when it is imported.
        preexec_fn=None if cores is None else functools.partial(os.sched_setaffinity, 0, cores),
    )

    def request(text: str) -> str:
        with contextlib.suppress(BrokenPipeError):
            print(text, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"{command[0]} ended with {process.wait()} before it answered {text!r}"
            )
        return answer.strip()

    try:
        yield request
    finally:
        process.stdin.close()
        process.wait()
