"""Parameters of a run come back from config.json as they were; names that the trainer has."""

import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest

from tff_fedlabel import algorithms, training
from tff_fedlabel.algorithms import _reserved_names
from tff_fedlabel.training import stored_run
from tff_fedlabel.training.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class Config:
    """Values of all kinds.

    Attributes:
      sizes: Some.
      number: A number.
      word: A text.
      anything: Anything.
      seed: Unused.
    """

    sizes: tuple = (1, 2)
    number: float = 0.1
    word: str = "x"
    anything: object = None
    seed: int = 0


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(algorithms, "METHODS", dict(algorithms.METHODS))
    algorithms.register(algorithms.Method("mine", Config, lambda setup, client: None))


def opened(path, resume=False, **parameters):
    config = training.make_config("digits", "mine", **parameters)
    RunDirectory(path, config, resume, "device", {}).close()


def no_such_number(text):
    raise AssertionError(f"{text} is not JSON")


GOOD = {
    "tuple": ({"sizes": (3, 4)}, {"sizes": (3, 5)}),
    "nested": ({"sizes": ((3,), {"a": (4, "b", None)})}, {"sizes": ((3,), {"a": (4, "b", 0)})}),
    "NaN": ({"number": math.nan}, {"number": 1.0}),
    "-inf": ({"number": -math.inf}, {"number": math.inf}),
    "inf": ({"number": np.float32(np.inf)}, {"number": -math.inf}),
    "float32": ({"number": np.float32(0.3)}, {"number": 0.3}),
    "word inf": ({"word": "inf"}, {"word": "-inf"}),
    "dict": ({"anything": {"a": [1, np.int64(2)]}}, {"anything": {"a": [1, 3]}}),
    "flag": ({"anything": True}, {"anything": False}),
}


@pytest.mark.parametrize("given,other", list(GOOD.values()), ids=list(GOOD))
def test_a_run_with_any_parameter_is_resumed(tmp_path, given, other):
    opened(tmp_path, **given)
    text = (tmp_path / "config.json").read_text()
    written = json.loads(text, parse_constant=no_such_number)
    assert set(given) < set(written) and "parameters" not in written
    opened(tmp_path, resume=True, **given)
    with pytest.raises(training.RunDirectoryError, match=f"another .*{next(iter(given))} is "):
        opened(tmp_path, resume=True, **other)


@pytest.mark.parametrize("name", ["tuple", "NaN", "-inf", "inf", "float32", "word inf", "flag"])
def test_a_resumed_command_gets_the_values_back(tmp_path, name):
    (given, _) = GOOD[name]
    opened(tmp_path, **given)
    ((field, value),) = given.items()
    again = training.stored_choices(tmp_path)
    np.testing.assert_equal(again[field], value)
    assert isinstance(again[field], tuple | str | bool | float)
    opened(tmp_path, resume=True, **{field: again[field]})


def test_runs_of_earlier_versions_are_resumed(tmp_path):
    """Their config.json has the parameters twice."""
    opened(tmp_path, number=0.5)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "parameters": {"number": 0.5}}))
    opened(tmp_path, resume=True, number=0.5)
    assert "parameters" not in training.stored_choices(tmp_path)


@pytest.mark.parametrize(
    "value", [len, pathlib.Path("a"), np.ones(3), {1: 2}, (1, math.nan), [{"a": len}]], ids=str
)
def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, value):
    with pytest.raises(training.RunDirectoryError, match="^anything must .* stored with") as caught:
        opened(tmp_path / "run", anything=value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_directory_with_what_a_killed_start_left_is_empty(tmp_path):
    (tmp_path / ".config.partial-12.json").write_text("{")
    opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    for name in (".config.partial-13.json", ".round.partial-13.json", ".partition.partial-1.csv"):
        (tmp_path / name).write_text("half")
    opened(tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_confidence_of_ones_own_is_refused_as_well(tmp_path):
    """It goes into a process, but not into a run, which could not be told from others."""
    config = training.make_config("digits", confidence=lambda p: p[:, 0])
    with pytest.raises(training.RunDirectoryError, match="^confidence must be a number, a text"):
        RunDirectory(tmp_path / "run", config, False, "device", {})


def with_field(name):
    made = dataclasses.make_dataclass("Made", [(name, float, 0.1), ("seed", int, 0)], frozen=True)
    return algorithms.Method("made", made, lambda setup, client: None)


@pytest.mark.parametrize(
    "name", ["lr", "rounds", "parameters", "versions", "data", "output_dir", "search", "jobs"]
)
def test_names_of_the_trainer_are_refused(name):
    with pytest.raises(ValueError, match=f"^Made.{name} of the method made must have another name"):
        algorithms.register(with_field(name))


def test_the_list_of_names_is_complete():
    import ablate
    import compare
    import methods_table
    from absl import flags

    from tff_fedlabel import cli
    from tff_fedlabel.training.config import method_parameters

    names = set()
    for script in (cli, compare, ablate, methods_table):
        before = set(flags.FLAGS)
        script.define_flags()
        names |= set(flags.FLAGS) - before - set(method_parameters())
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)
    for module in ("absl.app", "absl.flags", "absl.logging"):
        names |= {flag.name for flag in flags.FLAGS.flags_by_module_dict().get(module, ())}
    names |= {field.name for field in dataclasses.fields(training.RunConfig)}
    names |= set(stored_run._NOT_CHOICES)
    assert names - _reserved_names.PARAMETERS == {"seed", "strong_augment", "weak_augment"}
    for method in algorithms.METHODS.values():
        _reserved_names.check_parameters(method.name, method.config_class)
    algorithms.register(with_field("strong_augment"))


def test_the_list_of_metrics_is_complete():
    from tff_fedlabel.training import evaluation, round_records

    train = {"accuracy": 1.0, "images_used": 2.0, "rejected_clients": 0.0}
    work = {"train": train, "server_state_non_finite": 0}
    finalizer = {"update_non_finite": 0, "server_training_non_finite": 1}
    columns = round_records.round_metrics({"client_work": work, "finalizer": finalizer}, 1.5)
    assert columns["server_training_non_finite"] == 1.0 and len(columns) == 7
    assert {*columns, *evaluation.NOT_EVALUATED} < _reserved_names.METRICS


@pytest.mark.parametrize("kept, reported", [(0.0, np.nan), (0.5, 0.25)])
def test_the_accuracy_of_no_label_is_unknown(kept, reported):
    from tff_fedlabel.training import round_records

    train = {"kept_fraction": kept, "pseudo_label_accuracy": 0.25 if kept else 0.0}
    row = round_records.round_metrics({"client_work": {"train": train}, "finalizer": {}}, 1.5)
    np.testing.assert_equal(row["pseudo_label_accuracy"], reported)


@pytest.mark.parametrize("images, reported", [(0.0, 0.0), (5.0, 1.0)])
def test_a_round_in_which_no_image_was_used_has_no_wrong_update(images, reported):
    """The process keeps the model in the same way as after an update that is not finite."""
    from tff_fedlabel.training import round_records

    work = {"train": {"images_used": images, "rejected_clients": 0.0}}
    row = round_records.round_metrics(
        {"client_work": work, "finalizer": {"update_non_finite": 1}}, 1.5
    )
    assert row["update_non_finite"] == reported
