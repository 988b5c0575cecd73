"""The example in the README runs as it stands, on small data; its links lead somewhere."""

import pathlib
import re

import numpy as np
import pytest

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.usefixtures("local_runtime")
def test_pipeline_example_runs(capsys):
    code, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(code.splitlines()) < 50
    code = code.replace("range(20)", "range(2)").replace("_steps=10", "_steps=1")
    rng = np.random.default_rng(0)
    names = {
        "x": rng.integers(0, 256, (60, 12, 12, 1)).astype(np.uint8),
        "y": rng.integers(0, 10, 60),
        "client_ids": np.repeat(["ann", "bob", "cy", "dee", "eve", "fay"], 10),
        "labeled": np.tile([True, False], 30),
    }
    exec(compile(code, str(README), "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1"]
    assert all("kept_fraction" in line for line in lines)
    assert [w.shape for w in names["weights"].trainable][-1] == (10,)


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^):]+)\)", README.read_text())
    assert len(links) > 10
    assert [link for link in links if not (README.parent / link.split("#")[0]).exists()] == []


def test_its_table_of_methods_is_the_committed_one():
    committed = README.parent / "experiments" / "results" / "methods.md"
    (table,) = re.findall(r"(?:^\|.*\n)+", committed.read_text(), re.MULTILINE)
    assert table.count("\n") > 10 and table in README.read_text()
