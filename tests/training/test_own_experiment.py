"""Experiments from one's own parts, and runs on one's own data from the command line."""

import dataclasses
import json

import four_methods
import numpy as np
import one_layer
import pandas as pd
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_fedlabel
from tff_fedlabel import augmentation, models, tasks, training
from tff_fedlabel.algorithms import METHODS
from tff_fedlabel.datasets import federated, sources

pytestmark = pytest.mark.usefixtures("compile_once")
RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (60, 8, 8, 1)).astype(np.uint8)
Y = RNG.integers(0, 3, 60)
OWNERS = np.array(["ann", "bob", "cy", "dee"])[np.arange(60) % 4]
SMALL = {"tau": 2, "tau_unlabeled": 2, "batch_size": 4, "eval_every": 2}


def build_keras():
    init = tf.keras.initializers.GlorotUniform(seed=1)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Flatten(input_shape=(8, 8, 1)),
            tf.keras.layers.Dense(3, kernel_initializer=init),
        ]
    )


def own_clients(**options):
    return federated.from_arrays(X[:40], Y[:40], OWNERS[:40], np.arange(40) % 3 > 0, **options)


def make(method="fedavg", clients=None, model=build_keras, **options):
    clients = own_clients() if clients is None else clients
    return training.make_experiment(clients, model, method, **{**SMALL, **options})


def checkpoint(directory, round_num):
    saved = tf.saved_model.load(str(directory / "checkpoints" / f"round_{round_num}"))()
    return [np.asarray(value) for value in tf.nest.flatten(saved)]


def summary_of(directory):
    return json.loads((directory / "summary.json").read_text())


@pytest.fixture(scope="module")
def own():
    return make(
        "fedlabel",
        name="mine",
        threshold=0.4,
        strong_augment="none",  # Which takes long to compile.
        client_optimizer=tff.learning.optimizers.build_adam(0.01),
        lr_schedule="inverse_sqrt",
        validation=sources.Examples(X[40:45], Y[40:45]),
        test=sources.Examples(X[45:], Y[45:]),
        rounds=4,
        clients_per_round=2,
    )


def test_own_parts_make_a_run_that_resumes(own, tmp_path):
    training.run(own, tmp_path / "whole", checkpoint_every=4)
    two = dataclasses.replace(own, config=dataclasses.replace(own.config, rounds=2))
    training.run(two, tmp_path / "half")
    training.run(own, tmp_path / "half", resume=True)
    for a, b in zip(*(checkpoint(tmp_path / name, 4) for name in ("whole", "half")), strict=True):
        np.testing.assert_array_equal(a, b)

    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["task"] == "mine" and config["source"] == "own parts"
    assert config["weights"] == ["float32 [64, 3]", "float32 [3]"]
    assert config["client_optimizer"]["learning_rate"] == config["lr"] == pytest.approx(0.01)
    assert config["threshold"] == 0.4
    assert config["strong_augment"] is None
    assert (config["rounds"], config["num_clients"], config["labeled_fraction"]) == (4, 4, 0.65)
    summary = summary_of(tmp_path / "half")
    assert (summary["task"], summary["algorithm"], summary["model"]) == (
        "mine",
        "fedlabel",
        "build_keras",
    )
    assert summary["alpha"] is None and summary["best_round"] in (2, 4)
    # The accuracy, by NumPy from the checkpoint.
    kernel, bias = (
        next(a for a in checkpoint(tmp_path / "half", 4) if a.shape == s) for s in ((64, 3), (3,))
    )
    hits = np.argmax(X[45:].reshape(15, 64) / 255.0 @ kernel + bias, axis=1) == Y[45:]
    assert summary["test_accuracy"] == pytest.approx(hits.mean())
    # True labels of the unlabelled images are not known, so nothing can be said of pseudo-labels.
    table = pd.read_csv(tmp_path / "half" / "metrics.csv")
    assert "kept_fraction" in table and "pseudo_label_accuracy" not in table


@pytest.mark.parametrize(
    "changed,words",
    [
        ({"client_optimizer": tff.learning.optimizers.build_adam(0.02)}, ["client_optimizer"]),
        ({"client_optimizer": tff.learning.optimizers.build_sgdm(0.01)}, ["_SGD", "_Adam"]),
        ({"threshold": 0.5}, ["threshold is 0.4 there and 0.5 here"]),
        ({"model": "cnn", "width": 1}, ["weights is", "model is"]),
    ],
)
@pytest.mark.usefixtures("unbuilt")
def test_run_of_other_parts_is_not_continued(own, tmp_path, changed, words):
    choices = own.config.choices()
    (tmp_path / "config.json").write_text(json.dumps({**choices, "alpha": "inf"}))
    other = make(
        **{
            "method": "fedlabel",
            "name": "mine",
            "threshold": 0.4,
            "strong_augment": "none",
            "client_optimizer": tff.learning.optimizers.build_adam(0.01),
            "lr_schedule": "inverse_sqrt",
            "rounds": 4,
            "clients_per_round": 2,
            **changed,
        }
    )
    with pytest.raises(training.RunDirectoryError) as error:
        training.run(other, tmp_path, resume=True)
    for word in words:
        assert word in str(error.value)


def test_other_data_is_not_continued_nor_is_a_run_of_parts_from_the_command_line(
    own, tmp_path, main, capfd
):
    (tmp_path / "config.json").write_text(
        json.dumps({**own.config.choices(), "alpha": "inf", "data": "0" * 64})
    )
    with pytest.raises(training.RunDirectoryError, match="different data"):
        training.run(own, tmp_path, resume=True)
    assert main("--resume", "--output_dir", str(tmp_path)) == 2
    assert "training.run(experiment, ..., resume=True)" in capfd.readouterr().err
    with pytest.raises(training.ConfigError, match="pass the experiment, not its config"):
        training.run(own.config, tmp_path / "other")


def test_any_method_without_evaluation_images(tmp_path):
    """A method that is not registered, with memory of its own; a FunctionalModel; hidden labels."""
    method = four_methods.WITH_MEMORY
    assert method.name not in METHODS
    model = models.functional_model(build_keras, input_shape=(8, 8, 1))
    experiment = make(method, own_clients(hidden_y=Y[:40]), model, rounds=1)
    assert experiment.config.clients_per_round == 4
    summary = training.run(experiment, tmp_path / "run", runtime="device")
    assert summary["memory_bytes"] > 0 and summary["algorithm"] == method.name
    on_disk = summary_of(tmp_path / "run")
    assert on_disk["test_accuracy"] is on_disk["validation_accuracy"] is None


@pytest.mark.usefixtures("unbuilt")
def test_config_object_is_taken_as_it_is():
    config = tff_fedlabel.FedLabelConfig(strong_augment=None, seed=7)
    experiment = make("fedlabel", config=config)
    assert experiment.config.algorithm_config() is config
    assert experiment.config.choices()["method_seed"] == 7
    assert experiment.config.choices()["strong_augment"] is None
    default = training.make_experiment(own_clients(), build_keras, seed=5).config
    assert default.algorithm_config().strong_augment == augmentation.RandAugment.single()
    assert default.algorithm_config().seed == default.seed == 5
    named = {"type": "RandAugment", "num_ops": 1, "magnitude": 10.0}
    assert default.choices()["strong_augment"] == named


SGD = tff.learning.optimizers.build_sgdm(0.1)


@pytest.mark.parametrize(
    "options,words",
    [
        ({"clients": X}, ["clients must be a FederatedData"]),
        ({"method": "fedavgs"}, ["did you mean fedavg"]),
        ({"method": 3}, ["method must be a name in algorithms.ALGORITHMS or a Method"]),
        ({"model": 3}, ["keras_model must be"]),
        ({"model": "vgg"}, ["model 'vgg' is unknown"]),
        ({"config": tff_fedlabel.FedLabelConfig()}, ["config must be a FedAvgConfig"]),
        ({"num_clients": 3}, ["num_clients must be left out"]),
        ({"alpha": 1.0}, ["alpha must be left out"]),
        ({"width": 3}, ["width must be left out: the model is one's own"]),
        ({"client_optimizer": SGD, "lr": 0.1}, ["lr must be left out"]),
        ({"server_optimizer": SGD, "server_lr": 1.0}, ["server_lr must be left out"]),
        ({"threshold": 0.1}, ["unknown choice 'threshold'"]),
        ({"rouns": 3}, ["did you mean rounds"]),
        ({"clients_per_round": 5}, ["clients_per_round is 5", "4 clients"]),
        ({"rounds": 0}, ["rounds must be"]),
        ({"early_stopping_patience": 3}, ["needs validation images"]),
        ({"test": (X, Y)}, ["test must be a datasets.sources.Examples"]),
        ({"test": sources.Examples(X / 255, Y)}, ["test has images float64"]),
        ({"test": sources.Examples(X, Y + 1)}, ["one label 0..2 for each of its 60"]),
        (
            {"method": "fedlabel", "config": tff_fedlabel.FedLabelConfig(), "threshold": 0.1},
            ["threshold is in config"],
        ),
    ],
)
def test_parts_that_do_not_fit(options, words):
    with pytest.raises(ValueError) as error:
        make(**options)
    for word in words:
        assert word in str(error.value)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    monkeypatch.setattr(tasks, "SOURCES", {})


FLAGS = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
FLAGS += ["--model", one_layer.NAME, "--algorithm", "fedavg", "--clients_per_round", "2"]


@pytest.mark.usefixtures("registry", "linear")
def test_registered_task(tmp_path, main, capfd):
    task = dataclasses.replace(tasks.OWN_DATA, rounds=7, lr=0.3, alpha=5.0)
    tasks.register("mine", task, source=lambda: {"x": X, "y": Y, "client_ids": OWNERS})
    config = training.make_config("mine")
    assert (config.rounds, config.lr, config.alpha) == (7, 0.3, 5.0)
    assert (config.num_clients, config.clients_per_round) == (4, 4)
    run = tmp_path / "run"
    flags = (*FLAGS, "--noclient_accuracy", "--output_dir", str(run))
    assert main("--task", "mine", *flags, "--rounds", "1") == 0
    assert main("--resume", "--rounds", "2", "--output_dir", str(run)) == 0
    assert "mine: 60 images of 3 classes, 8x8 px; its own: 4 clients" in capfd.readouterr().err
    assert summary_of(run)["rounds"] == 2 and summary_of(run)["task"] == "mine"
    config = json.loads((run / "config.json").read_text())
    assert (config["task"], config["source"], config["lr"]) == ("mine", "mine", 0.3)


@pytest.mark.usefixtures("registry")
def test_what_can_be_registered(tmp_path):
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    tasks.register("mine", tasks.OWN_DATA, source=tmp_path / "data.npz")
    config = training.make_config("mine")
    assert config.source == str(tmp_path / "data.npz") and config.num_clients == 20
    tasks.register("mine", tasks.OWN_DATA, source=lambda: {"x": X, "y": Y, "client_ids": OWNERS})
    assert training.make_config("mine").num_clients == 4  # Replaced.
    tasks.register("small_digits", dataclasses.replace(tasks.TASKS["digits"], num_clients=30))
    assert training.make_config("small_digits").source == "digits"
    for name, task, source, words in (
        ("digits", tasks.OWN_DATA, None, "built-in task named digits"),
        ("a/b", tasks.OWN_DATA, None, "name must be a word"),
        ("other", "digits", None, "task must be a tff_fedlabel.tasks.Task"),
        ("other", tasks.OWN_DATA, 3, "source must be a path or a function"),
    ):
        with pytest.raises(ValueError, match=words):
            tasks.register(name, task, source)


@pytest.fixture
def npz(tmp_path):
    path = tmp_path / "my_data.npz"
    np.savez(path, x=X[..., 0], y=Y, client_ids=OWNERS, labeled=np.arange(60) % 3 > 0)
    return path


@pytest.mark.usefixtures("linear")
def test_own_file_from_the_command_line(npz, tmp_path, main, capfd, monkeypatch):
    """Trained, resumed from another folder, and not resumed once its labels have changed."""
    monkeypatch.chdir(tmp_path)
    flags = ["--task", npz.name, *FLAGS, "--data_dir", "kept"]
    assert main(*flags, "--rounds", "2") == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("my_data.npz-fedavg-")
    out, err = capfd.readouterr()
    note = "my_data.npz: 60 images of 3 classes, 8x8 px; its own: 4 clients, 20 images without "
    assert err.startswith(note) and note in (run / "run.log").read_text()
    assert out.split()[:2] == ["task", "my_data.npz"]
    assert summary_of(run)["task"] == "my_data.npz" and summary_of(run)["alpha"] is None
    config = json.loads((run / "config.json").read_text())
    assert config["task"] == config["source"] == str(npz)
    assert (config["num_clients"], config["split"]) == (4, "pooled")
    # 40 labelled: 2 for validation, 6 for the test.
    assert config["labeled_fraction"] == pytest.approx(32 / 52, abs=1e-6)

    monkeypatch.chdir("/")
    resume = ["--resume", "--output_dir", str(run), "--data_dir", str(tmp_path / "kept")]
    resume.append("--noclient_accuracy")  # The first run has drawn it.
    assert main(*resume, "--rounds", "3") == 0
    assert summary_of(run)["rounds"] == 3
    moved = tmp_path / "elsewhere" / npz.name
    moved.parent.mkdir()
    npz.rename(moved)
    assert main(*resume) == 2
    assert "no folder or .npz file" in capfd.readouterr().err
    assert main(*resume, "--task", str(moved), "--rounds", "4") == 0
    config = json.loads((run / "config.json").read_text())
    assert config["task"] == config["source"] == str(moved)
    np.savez(moved, x=X[..., 0], y=2 - Y, client_ids=OWNERS, labeled=np.arange(60) % 3 > 0)
    capfd.readouterr()
    assert main(*resume, "--rounds", "5") == 2
    assert "started with different data" in capfd.readouterr().err


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--num_clients", "3"], ["num_clients must be 4 for my_data.npz", "got 3"]),
        (["--labeled_fraction", ".5"], ["labeled_fraction must be 0.615385", "got 0.5"]),
        (["--split", "official"], ["split must be 'pooled' for my_data.npz"]),
        (["--clients_per_round", "5"], ["clients_per_round is 5", "4 clients"]),
        (["--image_size", "300"], ["image_size must be"]),
        (["--task", "./nothing.npz"], ["no folder or .npz file", "nothing.npz"]),
        (["--task", "nothing"], ["task 'nothing' is unknown", "path of a folder or .npz"]),
    ],
)
def test_choices_that_contradict_own_data(npz, tmp_path, main, capfd, flags, words):
    run = tmp_path / "run"
    assert main("--task", str(npz), "--output_dir", str(run), *flags) == 2
    out, err = capfd.readouterr()
    assert not out and len(err.splitlines()) == 1 and not run.exists()
    for word in words:
        assert word in err


def test_wrong_files_are_named_on_lines_of_their_own(tmp_path, main, capfd):
    for name in ("a/0.png", "b/0.png", "b/1.jpg"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"no image")
    run = tmp_path / "run"
    flags = ("--data_dir", str(tmp_path / "kept"), "--output_dir", str(run))
    assert main("--task", str(tmp_path / "data"), *flags) == 1
    first, *lines = capfd.readouterr().err.splitlines()
    assert "3 files in" in first and [line.split(":")[0] for line in lines] == [
        "  a/0.png",
        "  b/0.png",
        "  b/1.jpg",
    ]
    assert not run.exists()


@pytest.mark.parametrize(
    "field,scale,problem",
    [
        ("test", 1, "image 0 has values .*divide by 255"),
        ("validation", np.nan, "image 0 holds NaN"),
    ],
)
def test_images_to_measure_on_are_checked_like_those_of_clients(field, scale, problem):
    fractions = (X / 255).astype(np.float32)
    clients = federated.from_arrays(fractions, Y, np.arange(60) % 3, np.full(60, True))
    examples = sources.Examples((X * scale).astype(np.float32), Y)
    with pytest.raises(ValueError, match=f"^{field}: {problem}") as error:
        training.make_experiment(
            clients, "cnn", "fedavg", name="mine", width=4, **{field: examples}
        )
    assert "\n" not in str(error.value)
