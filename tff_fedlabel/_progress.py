"""How a run shows its progress while it goes on."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator

import tqdm

from tff_fedlabel import _notebook


@contextlib.contextmanager
def bar(rounds: int) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """A progress bar of tqdm, in a notebook's cell or on a terminal.

    Args:
      rounds: How many rounds there will be.

    Yields:
      A function to call after each round with the number of completed rounds and their metrics.
    """
    if _notebook.is_running():
        made = _CellBar(total=rounds, unit="round", smoothing=0.1)
    else:
        made = tqdm.tqdm(total=rounds, unit="round", smoothing=0.1, dynamic_ncols=True)
    # The figures of the last evaluation, so that the bar always shows an accuracy.
    shown: dict[str, str] = {}
    with made as progress:

        def on_round(done: int, metrics: dict[str, float]) -> None:
            shown.update(headline(metrics))
            if progress.n == 0 and done > 1:  # A resumed run.
                progress.initial = progress.n = done - 1
            progress.set_postfix(shown, refresh=False)
            progress.update(done - progress.n)

        yield on_round


def write(text: str) -> None:
    """Shows a line on stderr, above the bar if there is one."""
    tqdm.tqdm.write(text, file=sys.stderr)


def headline(metrics: dict[str, float]) -> dict[str, str]:
    """The few figures of a round that fit next to a progress bar."""
    shown = {}
    if metrics["test_accuracy"] == metrics["test_accuracy"]:  # NaN where it was not evaluated.
        shown["accuracy"] = f"{metrics['test_accuracy']:.3f}"
    if "kept_fraction" in metrics:
        shown["kept"] = f"{metrics['kept_fraction']:.0%}"
    return shown


class _CellBar(tqdm.tqdm):
    """tqdm's bar as a line of text in the cell's output, which is replaced as the run goes on.

    tqdm's own bar for notebooks is a widget: it needs ipywidgets, and in a saved notebook that is
    only viewed (GitHub, nbviewer) it stays at 0%.
    """

    def __init__(self, **options):
        from IPython import display

        self._output = display.display({"text/plain": ""}, raw=True, display_id=True)
        # The file takes what tqdm writes apart from the bar, such as the end of the line. With
        # miniters set, tqdm's monitor thread leaves the bar to this thread.
        super().__init__(file=io.StringIO(), ascii=False, ncols=90, miniters=1, **options)

    def display(self, msg=None, pos=None):
        """Overrides how tqdm writes the bar."""
        self._output.update({"text/plain": str(self)}, raw=True)
