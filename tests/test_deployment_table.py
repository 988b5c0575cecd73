"""The committed table of deployments is what is found now; the guide to one of them runs."""

import dataclasses
import inspect
import pathlib
import re

import deployment_table
import numpy as np
import pytest
from scripts import run_script

from tff_fedlabel import algorithms

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMITTED = (ROOT / "experiments/results/deployment.md").read_text()
GUIDE = ROOT / "docs/secure-aggregation.md"


@pytest.fixture(scope="module")
def rows():
    """Method -> column -> yes or no, as committed."""
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in COMMITTED.splitlines()
        if line.startswith("|")
    ]
    header, _, *lines = table
    return {line[0]: dict(zip(header[1:], line[1:], strict=True)) for line in lines}


def test_the_table_has_all_methods_and_columns(rows):
    # Methods that other tests register are not built in.
    built_in = {name for name in algorithms.__all__ if name.startswith("build_")}
    assert {f"build_{name}" for name in rows} == built_in
    assert deployment_table.COMMAND in COMMITTED
    for row in rows.values():
        assert list(row) == deployment_table.columns()
        assert set(row.values()) <= {"yes", "no"}


def parts_of(method):
    """The functions of a method that are compiled beside its client update."""
    fields = {field.name for field in dataclasses.fields(method)} - {"client_update", "advice"}
    return {name for name in fields if inspect.isfunction(getattr(method, name))}


def test_what_methods_compile_to_is_as_committed(rows):
    """All of it with FedLabel; `test_contract` runs each method in `device` and on workers.

    TFF compiles what stands around a client's work, so methods without parts of their own there
    compile as FedLabel does.
    """
    plain = parts_of(algorithms.METHODS["fedlabel"])
    compiled = set(deployment_table.columns()) - set(deployment_table.aggregators())
    for name, row in rows.items():
        columns = None if name == "fedlabel" else ["DistributeAggregateForm", "`local`"]
        if columns and parts_of(algorithms.METHODS[name]) == plain:
            assert {row[column] for column in compiled} == {"yes"}, name
            continue
        found = deployment_table.forms(algorithms.METHODS[name], columns)
        assert len(found) == (5 if columns is None else 2)
        for column in compiled:
            assert row[column] == ("yes" if found.get(column, True) else "no"), (name, column)


@pytest.mark.parametrize(
    "name,column",
    [
        ("fedlabel", "`compression_aggregator` with `add_debug_measurements`"),
        ("fedavg", "`dp_aggregator`, uniform"),
    ],
)
def test_three_rounds_with_an_aggregator_are_as_committed(rows, name, column):
    """Some of each; `test_contract` has the robust one, `test_secure` the secure one."""
    found = deployment_table.takes(algorithms.METHODS[name], column)
    assert rows[name][column] == ("yes" if found else "no")


def test_a_method_that_cannot_is_found():
    import four_methods

    for method in (four_methods.AT_SERVER, four_methods.OWN_AGGREGATION):
        assert not deployment_table.takes(method, "`secure_aggregator`")


def test_the_script_writes_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(deployment_table, "table", lambda: "the table\n")
    output = tmp_path / "new" / "deployment.md"
    code, out, _ = run_script(deployment_table, deployment_table.write, "--output", output)
    assert code == 0 and str(output) in out
    assert output.read_text() == "the table\n"
    assert [path.name for path in output.parent.iterdir()] == ["deployment.md"]


def test_the_guide_to_secure_aggregation_runs(capsys):
    names = {}
    for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(compile(code, str(GUIDE), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    rounding, clipping, count = (float(line.rsplit(" ", 1)[1]) for line in printed)
    assert rounding < 1e-5 and clipping > 1e-3 and count == 0
    train, plain = (names[n]["client_work"]["train"] for n in ("metrics", "plain_metrics"))
    assert train["images_used"] == plain["images_used"]
    np.testing.assert_allclose(train["labeled_loss"], plain["labeled_loss"], atol=1e-3)
