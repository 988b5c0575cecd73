"""Exports compute what the run computed, in a process that cannot import this package."""

import json
import subprocess
import sys
import sysconfig

import export as script
import numpy as np
import pandas as pd
import pytest
import short_resnet
import tensorflow as tf
import trained_runs
from numpy_network import network
from scripts import run_script

from tff_fedlabel import training
from tff_fedlabel.datasets import federated
from tff_fedlabel.models.resnet import _ARCHITECTURES as architectures
from tff_fedlabel.training import experiment, exporting, keras_model, trained_model

SHAPES = {"digits": (8, 8, 1), "resnet18": (20, 16, 3)}


def images(shape, number=7):
    return np.random.default_rng(3).integers(0, 256, (number, *shape)).astype(np.uint8)


def resnet(trained, name, **choices):
    """A ResNet as a run would leave it, all weights (scales and shifts too) moved; a short one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(architectures, 18, short_resnet.STAGES)
        model = keras_model.build(name, SHAPES[name], 4, width=4, **choices)
    rng = np.random.default_rng(5)
    for weight in model.weights:
        weight.assign(weight.numpy() + 0.1 * rng.normal(size=weight.shape).astype(np.float32))
    run = training.StoredRun(trained)
    run.choices["model"] = name
    return training.TrainedModel(run, 9, ("a", "b,c", 'd"', "e é"), model, SHAPES[name])


@pytest.fixture(scope="module")
def digits(trained):
    return training.load_model(trained)


@pytest.fixture(scope="module")
def models(trained, digits):
    return {"digits": digits, "resnet18": resnet(trained, "resnet18")}


@pytest.fixture(scope="module")
def exports(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    for name, model in models.items():
        for ending in ("", ".keras", ".npz"):
            training.export(model, folder / f"{name}{ending}")
        np.save(folder / f"{name}.npy", images(SHAPES[name]))
    return folder


def own_logits(model, name):
    """By the functional model that training evaluates with."""
    functional = model.functional
    return functional.predict_on_batch(
        functional.initial_weights, images(SHAPES[name]), training=False
    ).numpy()


@pytest.fixture(scope="module")
def logits(models):
    return {name: own_logits(model, name) for name, model in models.items()}


def test_the_weights_are_those_of_the_checkpoint(trained, digits, logits, unbuilt):
    config = training.make_config(**training.stored_choices(trained))
    model = experiment.build(config).model
    number = len(model.initial_weights[0])
    stored = trained_runs.checkpoint(trained)[:number]
    for ours, expected in zip(digits.weights.trainable, stored, strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert digits.round_num == trained_runs.ROUNDS and digits.class_names == tuple("0123456789")
    x = images(SHAPES["digits"])
    expected = model.predict_on_batch((stored, ()), x, training=False).numpy()
    np.testing.assert_array_equal(logits["digits"], expected)
    assert np.abs(expected).max() > 0.1


def test_best_is_the_best_round(trained):
    summary = json.loads((trained / "summary.json").read_text())
    best = training.load_model(trained, best=True)
    assert best.round_num == summary["best_round"]
    stored = trained_runs.checkpoint(trained, f"best/round_{summary['best_round']}")
    np.testing.assert_array_equal(best.weights.trainable[0], stored[0])


# What the subprocess runs, as if the package were not installed: -S leaves out its .pth file too.
_READER = """
import gc; gc.disable()  # Which takes a fifth of TensorFlow's import.
import json, pathlib, sys
sys.path.insert(0, sys.argv[2])
sys.modules["tff_fedlabel"] = None
import os; os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np, tensorflow as tf
try:
    import tf_keras
except ImportError:  # TensorFlow 2.14, whose own Keras it is
    tf_keras = tf.keras
folder = pathlib.Path(sys.argv[1])
for images in sorted(folder.glob("*.npy")):
    name, x = images.stem, np.load(images)
    served = tf.saved_model.load(str(folder / name)).signatures["serving_default"]
    answers = {key: value.numpy() for key, value in served(images=tf.constant(x)).items()}
    loaded = tf_keras.models.load_model(folder / f"{name}.keras", compile=False)
    answers["keras"] = loaded(x).numpy()
    np.savez(folder / f"{name}-answers", **answers)
found = [name for name, module in sys.modules.items() if module]
print("not there:", [name for name in found if "fedlabel" in name or "federated" in name])
"""


@pytest.fixture(scope="module")
def answers(exports):
    packages = sysconfig.get_paths()["purelib"]
    result = subprocess.run(
        [sys.executable, "-S", "-c", _READER, str(exports), packages],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=exports,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "not there: []"
    return {path.stem.split("-")[0]: np.load(path) for path in exports.glob("*-answers.npz")}


@pytest.mark.parametrize("name", SHAPES)
def test_another_process_gets_the_same_logits(logits, answers, name):
    expected = logits[name]
    np.testing.assert_allclose(answers[name]["logits"], expected, atol=1e-5)
    np.testing.assert_allclose(answers[name]["keras"], expected, atol=1e-5)
    exponentials = np.exp(np.float64(expected) - expected.max(1, keepdims=True))
    probabilities = exponentials / exponentials.sum(1, keepdims=True)
    np.testing.assert_allclose(answers[name]["probabilities"], probabilities, atol=1e-5)
    np.testing.assert_array_equal(answers[name]["class_index"], expected.argmax(1))


@pytest.mark.parametrize("name", SHAPES)
def test_numpy_gets_the_same_logits_from_the_npz(logits, exports, name):
    """By a reader that knows no more than what `architecture` says."""
    with np.load(exports / f"{name}.npz") as arrays:
        description = json.loads(arrays["architecture"].item())
        assert description["image_shape"] == list(SHAPES[name])
        weights = {key: arrays[key] for key in arrays if key != "architecture"}
    pixels = images(SHAPES[name]) / 255.0
    np.testing.assert_allclose(
        network(description["layers"], weights, pixels), logits[name], atol=1e-5
    )
    named = [weight for layer in description["layers"] for weight in layer["weights"]]
    assert sorted(named) == sorted(weights)


def test_class_names_lie_beside(exports, models):
    for name, model in models.items():
        for path in (exports / name / "assets" / "classes.json", exports / f"{name}.classes.json"):
            assert tuple(json.loads(path.read_text())) == model.class_names


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_is_exported_as_it_was(trained, logits, tmp_path, dtype):
    """To what rounding in 16 bits leaves; in float32 the logits differ by more."""
    model = resnet(trained, "resnet18", mixed_precision=dtype)
    expected = own_logits(model, "resnet18")
    training.export(model, tmp_path / "served")
    training.export(model, tmp_path / "m.keras")
    x = images(SHAPES["resnet18"])
    served = tf.saved_model.load(str(tmp_path / "served")).signatures["serving_default"]
    np.testing.assert_allclose(served(tf.constant(x))["logits"], expected, atol=1e-5)
    loaded = tf.keras.models.load_model(tmp_path / "m.keras", compile=False)(x).numpy()
    assert loaded.dtype == np.float32
    off = np.abs(logits["resnet18"] - expected).max()
    assert np.abs(loaded - expected).max() <= 0.5 * off


def test_names_do_not_depend_on_what_was_built_before(exports, models):
    text = json.loads(np.load(exports / "digits.npz")["architecture"].item())["layers"]
    assert [layer["name"] for layer in text] == [
        *("conv2d_0", "conv2d_1", "flatten_0", "dense_0", "dense_1")
    ]


def test_what_is_there_is_replaced_only_on_request(digits, tmp_path):
    for name in ("m", "m.keras", "m.npz"):
        training.export(digits, tmp_path / name)
        with pytest.raises(exporting.ExportError, match="--overwrite"):
            training.export(digits, tmp_path / name)
        training.export(digits, tmp_path / name, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "m.classes.json", "m.keras", "m.npz"]
    assert (tmp_path / "m" / "saved_model.pb").exists()


def test_nothing_but_an_export_is_ever_replaced(digits, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    (tmp_path / "m.npz").mkdir()
    (tmp_path / "notes").write_text("text")
    for name in ("home", "m.npz", "notes"):
        with pytest.raises(exporting.ExportError, match="choose another"):
            training.export(digits, tmp_path / name, overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years"
    with pytest.raises(exporting.ExportError, match="NAME.keras"):
        training.export(digits, tmp_path / "model.h5")


def test_the_script(trained, tmp_path):
    out = tmp_path / "m.npz"
    code, text, err = run_script(script, script.export, trained, out, "--best")
    assert (code, err) == (0, "") and "8x8x1" in text and out.exists()
    code, text, err = run_script(script, script.export, trained, out)
    assert code == 2 and "--overwrite" in err and len(err.splitlines()) == 1
    assert run_script(script, script.export, trained, out, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    "arguments,words",
    [
        ([], ["needs RUN_DIR OUT"]),
        (["one"], ["needs RUN_DIR OUT, got one"]),
        (["one", "two", "three"], ["three"]),
        (["nowhere", "m.npz"], ["nowhere", "holds no run"]),
    ],
)
def test_wrong_use_of_the_script(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_script(script, script.export, *arguments)
    assert code == 2 and not out and len(err.splitlines()) == 1
    assert all(word in err for word in words)
    assert not list(tmp_path.iterdir())


def test_a_missing_run_is_noticed_before_the_target(tmp_path):
    (tmp_path / "m.npz").touch()
    code, _, err = run_script(script, script.export, tmp_path / "nowhere", tmp_path / "m.npz")
    assert code == 2 and "nowhere holds no run" in err and len(err.splitlines()) == 1


def test_runs_that_cannot_be_exported(trained, tmp_path):
    (tmp_path / "config.json").write_text((trained / "config.json").read_text())
    with pytest.raises(training.RunDirectoryError, match="no checkpoint"):
        training.load_model(tmp_path)
    (tmp_path / "checkpoints" / "round_3").mkdir(parents=True)
    with pytest.raises(training.CheckpointError, match="round_3 cannot be read"):
        training.load_model(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(trained, tmp_path):
    config = json.loads((trained / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "width": 5}))
    (tmp_path / "checkpoints").symlink_to(trained / "checkpoints")
    with pytest.raises(training.CheckpointError, match="does not hold the weights"):
        training.load_model(tmp_path)


def test_a_model_of_ones_own(tmp_path):
    def build():
        return tf.keras.Sequential(
            [tf.keras.layers.Input((8, 8, 1)), tf.keras.layers.Flatten(), tf.keras.layers.Dense(3)]
        )

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (24, 8, 8, 1)).astype(np.uint8), rng.integers(0, 3, 24)
    clients = federated.from_arrays(x, y, [0, 1] * 12, rng.random(24) < 0.9, num_classes=3)
    own = training.make_experiment(clients, build, "fedavg", rounds=1, tau=1, batch_size=4)
    training.run(own, tmp_path / "run", runtime="device")
    with pytest.raises(training.RunDirectoryError, match="model of its own"):
        training.load_model(tmp_path / "run")
    model = training.load_model(tmp_path / "run", model=build())
    with pytest.raises(exporting.ExportError, match="SavedModel"):
        training.export(model, tmp_path / "m.keras")
    training.export(model, tmp_path / "m")
    kernel, bias = trained_runs.checkpoint(tmp_path / "run", "round_1")[:2]
    served = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"]
    expected = x.reshape(24, -1) / 255 @ np.float64(kernel) + bias
    np.testing.assert_allclose(served(tf.constant(x))["logits"], expected, atol=1e-5)
    # Nothing is known of the unlabelled images: clients are measured on their labelled ones.
    table = pd.read_csv(tmp_path / "run" / "client_accuracy.csv")
    assert set(table["part"]) == {"labeled"}
    with pytest.raises(ValueError, match="init_from"):
        training.make_experiment(clients, build, "fedavg", init_from=tmp_path / "run")


def test_runs_that_do_not_say_what_their_images_are(trained, tmp_path):
    """Older ones: the data set tells."""
    config = json.loads((trained / "config.json").read_text())
    del config["images"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "checkpoints").symlink_to(trained / "checkpoints")
    model = trained_model.load_model(tmp_path)
    assert model.image_shape == (8, 8, 1) and model.class_names == tuple("0123456789")
