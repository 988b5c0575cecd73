"""What is different where Python runs in a notebook's kernel."""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any


def is_running() -> bool:
    """Whether this process is the kernel of a notebook (Jupyter, Colab)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


def wait(coroutine: Coroutine) -> Any:
    """Returns the result of a coroutine, even if this thread already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    # A kernel runs its cells inside a loop, and a loop cannot wait for another one in its thread.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@contextlib.contextmanager
def without_notices() -> Iterator[None]:
    """Inside, what libraries write about their own work does not appear in a cell's output."""
    if not is_running():
        yield
        return
    # TensorFlow reports each checkpoint, and each model that is evaluated for the first time. In a
    # notebook each line appears twice, because TensorFlow takes the kernel for a terminal.
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # From tqdm, which the loading of data sets uses, if ipywidgets is not installed.
            warnings.filterwarnings("ignore", "IProgress not found")
            yield
    finally:
        logger.setLevel(level)


def tells_errors_in_one_line(function: Callable) -> Callable:
    """Makes a notebook show an exception of `function` as one line instead of its traceback.

    `%tb` in a cell then shows the traceback.
    """

    @functools.wraps(function)
    def told(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if is_running():
                _shorten(error)
            raise

    return told


def _shorten(error: Exception) -> None:
    def render() -> list[str]:
        del error._render_traceback_  # The next time, in full.
        text = " ".join(str(error).split())
        return [f"{type(error).__name__}: {text}", "(%tb shows where it comes from)"]

    # IPython asks exceptions for this method.
    error._render_traceback_ = render
