"""How a run shows its progress while it goes on."""

import contextlib
import warnings
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(rounds: int) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """A progress bar of tqdm, a notebook's or a terminal's.

    Args:
      rounds: How many rounds there will be.

    Yields:
      A function to call after each round with the number of completed rounds and their metrics.
    """
    with warnings.catch_warnings():
        # A notebook without ipywidgets gets the bar of a terminal.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm

    # Of the last evaluation, so that the bar always shows an accuracy.
    shown: dict[str, str] = {}
    with tqdm(total=rounds, unit="round", dynamic_ncols=True, smoothing=0.1) as progress:

        def on_round(done: int, metrics: dict[str, float]) -> None:
            shown.update(headline(metrics))
            if progress.n == 0 and done > 1:  # A resumed run.
                progress.initial = progress.n = done - 1
            progress.set_postfix(shown, refresh=False)
            progress.update(done - progress.n)

        yield on_round


def headline(metrics: dict[str, float]) -> dict[str, str]:
    """The few figures of a round that fit beside a progress bar."""
    shown = {}
    if metrics["test_accuracy"] == metrics["test_accuracy"]:  # NaN where it was not evaluated.
        shown["accuracy"] = f"{metrics['test_accuracy']:.3f}"
    if "kept_fraction" in metrics:
        shown["kept"] = f"{metrics['kept_fraction']:.0%}"
    return shown
