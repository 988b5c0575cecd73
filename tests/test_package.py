"""Importing the package: names, silence, and what it says in a wrong environment."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)


def test_import_is_quick_silent_and_complete():
    result = python(
        "import sys, tff_fedlabel\n"
        "assert 'tensorflow' not in sys.modules\n"
        # Keras may be used before TFF is imported.
        "import tensorflow as tf\n"
        "tf.keras.Model\n"
        "tff_fedlabel.pseudo_labels, tff_fedlabel.datasets\n"
        "assert tff_fedlabel.algorithms.ALGORITHMS['fedlabel'] is tff_fedlabel.build_fedlabel\n"
        "assert set(tff_fedlabel.models.MODELS) == {'cnn', 'resnet18', 'resnet34', 'resnet50'}\n"
        "assert 'FedLabelConfig' in dir(tff_fedlabel)\n"
        "tff_fedlabel.augmentation._operations._keras_cv_layers()\n"
        # Without it TFF's own context ends with a traceback; it must come in by itself.
        "assert 'tff_fedlabel.runtime.local' not in sys.modules\n"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "" and result.stderr == ""


def test_wrong_tff_is_refused_with_the_remedy():
    result = python(
        "from importlib import metadata\n"
        "real = metadata.version\n"
        "metadata.version = lambda p: '0.1.0' if p == 'tensorflow-federated' else real(p)\n"
        "import tff_fedlabel\n"
    )
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: tff_fedlabel needs tensorflow-federated 0.87.0")
    assert "0.1.0" in last
    assert "pip install --no-deps --ignore-requires-python" in last
    listed = (ROOT / "requirements" / "tff.txt").read_text().splitlines()
    assert last.split("--ignore-requires-python ")[1].split() == [
        line for line in listed if not line.startswith("#")
    ]


def test_unknown_attribute():
    result = python("import tff_fedlabel; tff_fedlabel.nothing")
    assert "has no attribute 'nothing'" in result.stderr
