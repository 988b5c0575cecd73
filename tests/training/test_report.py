"""The page about runs: what is on it, that it needs nothing else, and what unfinished runs lack."""

import html.parser
import json
import re
import shutil

import pandas as pd
import pytest
import report as script
from scripts import run_script

from tff_fedlabel import training
from tff_fedlabel.training import partition_table


class Page(html.parser.HTMLParser):
    """Tags that are open at the end, addresses, tables by heading."""

    VOID = {"meta", "img", "br"}

    def __init__(self, path):
        super().__init__()
        self.open, self.addresses, self.cells, self.headings = [], [], {}, []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href"):
                self.addresses.append(value)
        if tag == "tr":
            self.row = []
        if tag in ("td", "th"):
            self.row.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "tr" and self.headings:
            self.cells.setdefault(self.headings[-1], []).append(self.row)

    def handle_data(self, data):
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)
        if {"td", "th"} & set(self.open):
            self.row[-1] += data


def page(tmp_path, *runs):
    output = tmp_path / "page.html"
    training.write_report(runs, output, overwrite=True)
    return Page(output)


@pytest.fixture
def unfinished(trained, tmp_path):
    """As a run of another method is after its second round, with a name that HTML must not read."""
    run = tmp_path / "<b>half & half"
    run.mkdir()
    config = json.loads((trained / "config.json").read_text())
    config.update(algorithm="fedavg", lr=0.25, alpha="inf")
    (run / "config.json").write_text(json.dumps(config))
    metrics = pd.read_csv(trained / "metrics.csv").head(3)
    selection = ["kept_fraction", "local_fraction", "agreement_fraction", "pseudo_label_accuracy"]
    metrics.drop(columns=selection).to_csv(run / "metrics.csv", index=False)
    return run


def test_a_finished_run(trained, tmp_path):
    found = page(tmp_path, trained)
    assert found.headings == [
        *("Results", "Curves", "Pseudo-labels", "Accuracy by client", "Clients"),
        *("Configuration and environment", "Evaluated rounds"),
    ]
    results = {row[0]: row[1] for row in found.cells["Results"]}
    summary = json.loads((trained / "summary.json").read_text())
    assert results["test accuracy"] == f"{summary['test_accuracy']:.4f}"
    assert results["worst tenth of clients"] == f"{summary['client_accuracy_worst_tenth']:.4f}"
    assert results["rounds"] == "4 of 4"
    assert results["best validation accuracy"] == f"{summary['best_validation_accuracy']:.4f}"
    choices = {row[0]: row[1] for row in found.cells["Configuration and environment"]}
    assert choices["tau"] == "20" and choices["tensorflow-federated"] == "0.87.0"
    metrics = pd.read_csv(trained / "metrics.csv").dropna(subset="test_accuracy")
    header, *rows = found.cells["Evaluated rounds"]
    column = header.index("test accuracy")
    assert [row[column] for row in rows] == [f"{v:.4f}" for v in metrics["test_accuracy"]]


def test_it_needs_no_other_file(trained, unfinished, tmp_path):
    found = page(tmp_path, trained, unfinished)
    assert len(found.addresses) == 10  # 4 curves, 4 of the selection, clients, one partition
    assert all(address.startswith("data:image/") for address in found.addresses)
    text = (tmp_path / "page.html").read_text()
    text = re.sub(r"base64,[^\"]*", "", text)
    assert "http" not in text and "<script" not in text and "url(" not in text


def test_several_runs_are_compared(trained, unfinished, tmp_path):
    found = page(tmp_path, trained, unfinished)
    header, *rows = found.cells["Differences"]
    assert header == ["choice", trained.name, unfinished.name]
    assert sorted(rows) == [
        ["algorithm", "fedlabel", "fedavg"],
        ["alpha", "1.0", "inf"],
        ["lr", "0.2", "0.25"],
    ]
    results = {row[0]: row[1:] for row in found.cells["Results"]}
    metrics = pd.read_csv(trained / "metrics.csv")
    assert results["rounds"] == ["4 of 4", "3 of 4"]
    assert results["test accuracy"][1] == f"{metrics['test_accuracy'][1]:.4f}"
    assert results["worst tenth of clients"][1] == "–"
    assert "&lt;b&gt;half &amp; half: not finished" in (tmp_path / "page.html").read_text()


def test_a_run_that_has_only_begun(trained, tmp_path):
    run = tmp_path / "new"
    run.mkdir()
    (run / "config.json").write_text('{"task": "digits", "rounds": 9}')
    found = page(tmp_path, run)
    assert found.headings == ["Results", "Configuration and environment"]
    assert {row[0]: row[1] for row in found.cells["Results"]}["rounds"] == "0 of 9"
    (run / "metrics.csv").touch()
    assert page(tmp_path, run).headings == found.headings


def test_equal_choices_and_equal_names(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / trained.name)
    found = page(tmp_path, trained, copy)
    assert found.cells["Results"][0] == ["", str(trained), str(copy)]
    assert "Differences" not in found.cells
    assert "All choices of the runs are the same" in (tmp_path / "page.html").read_text()
    assert sum(address.startswith("data:image/png") for address in found.addresses) == 1


def test_the_script(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_script(script, script.report, trained)
    assert (code, err) == (0, "") and "report.html" in out
    assert Page(tmp_path / "report.html").headings
    (tmp_path / "report.html").write_text("old")
    code, out, err = run_script(script, script.report, trained)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert "report.html exists; --overwrite" in err
    assert (tmp_path / "report.html").read_text() == "old"
    assert run_script(script, script.report, trained, "--overwrite")[0] == 0
    assert Page(tmp_path / "report.html").headings
    for arguments, words in (([], "needs RUN_DIR..."), (["nowhere"], "nowhere holds no run")):
        code, out, err = run_script(script, script.report, *arguments)
        assert code == 2 and words in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["metrics.csv", "summary.json", "partition.csv", "config.json"])
def test_damaged_files_are_named(trained, tmp_path, name):
    copy = shutil.copytree(trained, tmp_path / "run")
    (copy / name).write_text('{"a": \n"1,2\n3,4,5,6\n')
    with pytest.raises(training.RunDirectoryError, match=name):
        training.write_report([copy], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_partition_is_kept(trained, tmp_path):
    config = training.make_config(**training.stored_choices(trained))
    clients = training.build(config).clients
    table = partition_table.read(trained / "partition.csv")
    for part in ("labeled", "unlabeled", "all"):
        assert (table.class_counts(part) == clients.class_counts(part)).all()
    sizes = clients.sizes()
    assert (table.sizes()[["labeled", "total"]] == sizes[["labeled", "total"]]).all(axis=None)
    assert table.client_ids == tuple("012345") and table.label_names == tuple("0123456789")


def test_a_partition_of_unknown_classes(trained, tmp_path):
    import dataclasses

    table = partition_table.read(trained / "partition.csv")
    names = ("a,b", 'q"', "é", *"3456789")
    dataclasses.replace(table, unlabeled=None, label_names=names).write(tmp_path / "t.csv")
    read = partition_table.read(tmp_path / "t.csv")
    assert read.unlabeled is None and read.label_names == names
    assert (read.sizes() == table.sizes()).all(axis=None)
    with pytest.raises(ValueError, match="not known"):
        read.class_counts("all")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}\n")
    with pytest.raises(training.RunDirectoryError, match="holds no run"):
        training.write_report([run], tmp_path / "page.html")
    (run / "config.json").write_text('{"task": "own"}\n')
    shutil.copy(tmp_path / "t.csv", run / "partition.csv")
    page(tmp_path, run)
    assert "classes of the unlabelled images are not known" in (tmp_path / "page.html").read_text()
