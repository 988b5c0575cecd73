"""The search: what it tries, what it chooses, what it does when a trial fails."""

import math

import pytest
from grids import search
from hand_made_runs import FakePool

from tff_fedlabel import command_line

LR = search.Search("lr", (0.1, 0.2, 0.4), rounds=2)


@pytest.mark.parametrize(
    "trials,following",
    [
        ({0.1: 0.3, 0.2: 0.5, 0.4: 0.4}, []),
        ({0.1: 0.3, 0.2: 0.5, 0.4: 0.6}, [0.8]),
        ({0.1: 0.6, 0.2: 0.5, 0.4: 0.4}, [0.05]),
        ({0.1: 0.3, 0.2: 0.5, 0.4: 0.6, 0.8: 0.5}, []),
        ({0.1: 0.1, 0.2: 0.2, 0.4: 0.3, 0.8: 0.4, 1.6: 0.5, 3.2: 0.6}, []),  # far enough
        ({0.1: math.nan, 0.2: 0.5, 0.4: math.nan}, []),
    ],
)
def test_it_goes_on_while_the_best_is_at_the_edge(trials, following):
    assert search.beyond(trials, LR) == following
    assert search.beyond(trials, search.Search("lr", LR.values, 2, extend=False)) == []


def test_the_best_is_never_a_nan_and_the_first_of_equals():
    assert search.best({0.1: math.nan, 0.2: 0.3, 0.4: 0.3}) == 0.2


def test_only_learning_rates_go_beyond():
    read = lambda name, text: float(text)  # noqa: E731
    assert search.parse("lr=.1,.2,.1", 5, True, read) == search.Search("lr", (0.1, 0.2), 5, True)
    assert not search.parse("threshold=.1,.2", 5, True, read).extend
    for text in ("lr", "lr=", "=.1"):
        with pytest.raises(command_line.UsageError, match="--search must be like"):
            search.parse(text, 5, True, read)


def test_trials_are_judged_by_validation_images(tmp_path, monkeypatch):
    """The pool's runs have a validation accuracy that falls where the test accuracy rises."""
    from grids import cells, pool

    monkeypatch.setattr(pool, "_POLL", 0.0)
    monkeypatch.setattr(FakePool, "accuracies", staticmethod(lambda cell: [0.5] * 2))
    original = FakePool.start

    def start(self, cell, cores):
        import hand_made_runs

        if cell.config.lr == 0.4 and cell.config.algorithm == "fedprox":
            type(self).accuracies = staticmethod(lambda cell: None)
            ended = original(self, cell, cores)
            type(self).accuracies = staticmethod(lambda cell: [0.5] * 2)
            return ended
        path = cell.directory(self.root)
        rate = cell.config.lr
        hand_made_runs.write_run(path, cell.config, [rate] * 2, validation_accuracy=[1 - rate] * 2)
        return hand_made_runs._Ended(0)

    monkeypatch.setattr(FakePool, "start", start)
    made = FakePool(tmp_path, 1)

    def cell_of(key, value):
        own = {"lr": value, "rounds": 2, "seed": 0}
        return cells.make_cell("digits", key, {}, own)

    chosen, trials = search.run(LR, made, cell_of, ["fedavg", "fedprox"], later=0)
    # .1 is best on validation images: .05, .025 and .0125 are tried after it.
    assert chosen == {"fedavg": 0.0125}
    assert sorted(trials["fedavg"]) == [0.0125, 0.025, 0.05, 0.1, 0.2, 0.4]
    assert trials["fedavg"][0.2] == pytest.approx(0.8)
    assert [f.cell.split("-")[0] for f in made.failures] == ["fedprox", "fedprox"]
    assert "a trial of its search failed" in made.failures[-1].reason
    table = search.table(LR, chosen, trials, lambda key: {"row": key})
    assert table[table["chosen"]]["lr"].tolist() == [0.0125]
