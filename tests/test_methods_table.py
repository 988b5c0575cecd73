"""methods_table.py: the table of all methods."""

import methods_table
import numpy as np
from grids import command, pool
from hand_made_runs import FakePool
from scripts import run_script


def test_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_POLL", 0.0)
    monkeypatch.setattr(command, "Pool", FakePool)
    accuracies = {0: 0.7, 1: 0.9}

    def accuracy(cell):
        value = accuracies.get(cell.config.seed)
        if cell.config.algorithm == "fedprox":
            return None
        return None if value is None else [value] * cell.config.rounds

    monkeypatch.setattr(FakePool, "accuracies", staticmethod(accuracy))
    output = tmp_path / "methods.md"
    code, out, err = run_script(
        *(methods_table, methods_table.write, "--algorithms", "fedavg,fedprox"),
        *("--seeds", "0,1,2", "--rounds", "2", "--width", "4"),
        *("--output_dir", tmp_path / "runs", "--output", output),
    )
    assert code == 1 and "4 runs failed" in err
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in output.read_text().splitlines()
        if line.startswith("|")
    ]
    found = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    assert list(found) == ["`fedavg`", "`fedprox`"]
    failed = found.pop("`fedprox`")
    assert failed.pop("test accuracy, %") == "failed"
    assert failed.pop("labels") and set(failed.values()) == {"`fedprox`", ""}
    deviation = 100 * np.std([0.7, 0.9], ddof=1)
    assert found["`fedavg`"]["test accuracy, %"] == f"80.0 ± {deviation:.1f} (2 of 3 seeds)"
    for row in found.values():
        assert row["runtimes"] == "`local`, `workers`, `device`"
        assert row["s a round"] == "0.50"
        assert row["labels"] == "some of each client's images"
        assert row["KB down"] == row["KB up"] == "23"
    text = output.read_text()
    assert "--algorithms=fedavg,fedprox --seeds=0,1,2 --rounds=2 --width=4" in text
    assert str(tmp_path) not in text
