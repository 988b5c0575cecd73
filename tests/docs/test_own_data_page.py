"""The page about one's own data says what happens, and its Python runs."""

import json
import pathlib
import re

# RandAugment takes long to compile, and is not what the page is about.
PLAIN = {
    '"my_data.npz", rounds=2,': '"my_data.npz", rounds=2, strong_augment="none",',
    'name="my_parts",': 'name="my_parts", strong_augment="none",',
}
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "own-data.md"


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    from tff_fedlabel import tasks

    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    monkeypatch.setattr(tasks, "SOURCES", {})
    text = PAGE.read_text()
    names = {"__name__": "page"}
    plain = text
    for old, new in PLAIN.items():
        assert old in text
        plain = plain.replace(old, new)
    for code in re.findall(r"```python\n(.*?)```", plain, re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), names)
    out, err = capsys.readouterr()
    shown = re.search(r"( {4}my_data\.npz: .*\n.*)\n", text)[1]
    assert " ".join(shown.split()) in err
    first, registered, built, *_ = out.splitlines()
    assert first.startswith("3 my_data.npz 0.")
    assert registered == "40 5 5"
    assert "5 clients" in built
    summary = json.loads((tmp_path / "runs" / "my_parts" / "summary.json").read_text())
    assert summary["task"] == "my_parts" and summary["algorithm"] == "fedlabel"
    assert summary["validation_accuracy"] is None and 0 <= summary["test_accuracy"] <= 1
    assert "pixels" not in out and "3 clients" in out


def test_links_inside_the_page_lead_somewhere():
    text = PAGE.read_text()
    headings = re.findall(r"^## (.*)$", text, re.M)
    anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    assert set(re.findall(r"\]\(#(.*?)\)", text)) <= anchors
