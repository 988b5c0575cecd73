"""Each supported TensorFlow beside TFF: import order, silence, and what was put in its place."""

import gc
import importlib.machinery
import json
import os
import subprocess
import sys
import warnings
from importlib import metadata

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import _compatibility

KERAS_3 = _compatibility.tensorflow_version() >= (2, 16)
needs_keras_3 = pytest.mark.skipif(not KERAS_3, reason="this TensorFlow has Keras 2 as tf.keras")
needs_keras_2 = pytest.mark.skipif(KERAS_3, reason="this TensorFlow has Keras 3 as tf.keras")

# A model of TFF's on the tf.keras that all three share.
USE = """
import tensorflow as tf
import tensorflow_federated as tff
import tff_fedlabel
from tensorflow.keras import layers
assert layers.Dense is tf.keras.layers.Dense
assert issubclass(tf.keras.Model, tff_fedlabel.models.functional.tf.keras.Model)
model = tff_fedlabel.models.functional_model(
    tf.keras.Sequential([tf.keras.Input([2, 2, 1]), layers.Flatten(), layers.Dense(3)]),
    input_shape=(2, 2, 1),
)
assert isinstance(model, tff.learning.models.FunctionalModel)
assert [w.shape for w in model.initial_weights[0]] == [(4, 3), (3,)]
print("done")
"""


def python(code, *arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**environment, **variables},
    )


# The order of isort, and the package first, are those of test_notebook.py and test_package.py.
def test_tff_may_be_imported_first_and_all_is_silent():
    result = python(f"import tensorflow_federated\n{USE}")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n" and result.stderr == ""


def test_no_garbage_is_collected_during_an_import():
    import _tff_fedlabel_startup as startup

    assert gc.isenabled() and gc.get_freeze_count() > 100_000  # From when TFF was imported.
    with pytest.raises(ImportError), startup._no_collections():
        with startup._no_collections():
            pass
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with startup._no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


# Imports TensorFlow once, and runs each code of its argument in a forked child.
FORKS = """
import json, os, sys, tempfile, traceback, warnings
import tensorflow
results = []
for code in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # There are threads.
            pid = os.fork()
        if not pid:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            status = 0
            try:
                exec(code, {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
        results.append([status, *texts])
print(json.dumps(results))
"""

AFTER_TENSORFLOW = {
    # What a test runner or a notebook may have done long before.
    "used": "import tensorflow as tf\nfrom tensorflow import keras\n"
    "tf.function(tf.square)(tf.constant(2.0))\n"
    "tf.data.Dataset.range(3).map(lambda x: x + 1).reduce(tf.constant(0, tf.int64), tf.add)\n"
    + USE,
    "Keras used": "tensorflow.keras.layers",
    "Keras imported": "import tensorflow.keras",
    "without TFF": "import tensorflow as tf; print(tf.keras.__version__)",
}
for keras in ("Keras used", "Keras imported"):
    AFTER_TENSORFLOW[keras] = (
        f"import tensorflow\n{AFTER_TENSORFLOW[keras]}\nimport tff_fedlabel, tensorflow_federated"
    )


@pytest.fixture(scope="module")
def after_tensorflow():
    """(exit code, output, errors) of each code in a process that has imported TensorFlow."""
    result = python(FORKS, json.dumps(list(AFTER_TENSORFLOW.values())))
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return dict(zip(AFTER_TENSORFLOW, json.loads(result.stdout), strict=True))


def test_tensorflow_may_have_been_used_before(after_tensorflow):
    assert after_tensorflow["used"] == [0, "done\n", ""]


@needs_keras_3
@pytest.mark.parametrize("use", ["Keras used", "Keras imported"])
def test_keras_3_in_use_is_refused_in_one_line(use, after_tensorflow):
    code, _, errors = after_tensorflow[use]
    assert code == 1
    last = errors.splitlines()[-1]
    assert last.startswith("ImportError: TensorFlow Federated needs Keras 2")
    assert "restart Python" in last and "TF_USE_LEGACY_KERAS=1" in last


@needs_keras_3
def test_keras_3_stays_where_nobody_imports_tff(after_tensorflow):
    code, version, errors = after_tensorflow["without TFF"]
    assert code == 0 and version.startswith("3."), errors


@needs_keras_3
@pytest.mark.parametrize("number,expected", [(2, "int32@SERVER"), (2**40, "int64@SERVER")])
def test_tff_infers_the_types_of_python_numbers(number, expected):
    filters = list(warnings.filters)
    at_server = tff.federated_computation(lambda: tff.federated_value(number, tff.SERVER))
    assert str(at_server.type_signature.result) == expected
    assert warnings.filters == filters


@needs_keras_2
def test_nothing_acts_on_tffs_own_tensorflow():
    result = python(
        "import os, sys, tensorflow_privacy\nfrom jax.lib import xla_client as client\n"
        "before = dict(vars(client))\n"
        "import tensorflow_federated, tff_fedlabel\n"
        "assert 'TF_USE_LEGACY_KERAS' not in os.environ and 'tf_keras' not in sys.modules\n"
        "assert vars(client) == before and tensorflow_privacy.DPKerasSGDOptimizer\n"
    )
    assert result.returncode == 0, result.stderr


def test_the_startup_module_imports_nothing_by_itself():
    result = python(
        "import sys\n"
        "assert '_tff_fedlabel_startup' in sys.modules\n"
        "assert not {'tff_fedlabel', 'tensorflow', 'subprocess', 'importlib.metadata'}"
        " & set(sys.modules)\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('tensorflow_federated').origin\n"
        "assert not {'tff_fedlabel', 'tensorflow'} & set(sys.modules)\n"
    )
    assert result.returncode == 0, result.stderr


NOTICES = """2026-01-02 03:04:05.678901: I tensorflow/core/util/port.cc:153] oneDNN is on
2026-01-02 03:04:05.678901: E external/local_xla/cuda_fft.cc:467] Unable to register cuFFT
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
E0000 00:00:1795875226.901701    4443 cuda_dnn.cc:8579] Unable to register cuDNN factory
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow.
"""


def write_while_filtered(text, then="pass"):
    return python(
        "import os, sys, _tff_fedlabel_startup as startup\n"
        "with startup._notices_filtered():\n"
        f"    os.write(2, {text.encode()!r})\n"
        "    print('of Python', file=sys.stderr)\n"
        f"    {then}\n"
        "print('after', file=sys.stderr)\n"
    )


def test_only_notices_are_kept_from_the_screen():
    result = write_while_filtered(NOTICES + "Illegal instruction\nF0000 00:00:17.9  1 a.cc] bad\n")
    assert result.stderr == (
        "Illegal instruction\nF0000 00:00:17.9  1 a.cc] bad\nof Python\nafter\n"
    )


def test_other_bytes_and_other_programs_errors_are_kept():
    others = b"a\0b\n caf\xe9\nE1128 10:00:00.0 12 mine.cc:3] mine\n2026-01-02 10:00:00: E mine\n"
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, _tff_fedlabel_startup as startup\n"
            "with startup._notices_filtered():\n"
            f"    os.write(2, {others!r})\n",
        ],
        capture_output=True,
        timeout=60,
    )
    assert result.stderr == others


def test_threads_may_import_at_once():
    result = python(
        "import faulthandler, importlib, threading\n"
        "faulthandler.dump_traceback_later(200, exit=True)\n"
        "names = ['tensorflow', 'tensorflow'] + ['tensorflow_federated']\n"
        "threads = [threading.Thread(target=importlib.import_module, args=[n]) for n in names]\n"
        "[t.start() for t in threads]\n"
        "[t.join() for t in threads]\n" + USE
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"


def test_where_tff_is_missing_it_is_not_found():
    result = python(
        "import importlib.util, sys\n"
        "sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        "assert importlib.util.find_spec('tensorflow_federated') is None\n"
        "assert importlib.util.find_spec('tensorflow') is None\n"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("level,quiet", [("10", True), (" 3", True), ("2", False), ("-1", False)])
def test_levels_of_tensorflows_log(level, quiet, monkeypatch):
    import _tff_fedlabel_startup as startup

    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    assert startup._is_quiet() is quiet


def test_what_an_import_says_before_it_aborts_is_seen():
    result = write_while_filtered("Illegal instruction\n", then="sys.stderr.flush(); os.abort()")
    assert result.returncode < 0
    assert result.stderr == "Illegal instruction\nof Python\n"


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """A folder with a `tensorflow` that only says what TensorFlow's C++ says of a machine."""
    folder = tmp_path_factory.mktemp("talkative")
    code = f"import os\ntry:\n    os.write(2, {NOTICES.encode()!r})\nexcept OSError:\n    pass\n"
    (folder / "tensorflow").mkdir()
    (folder / "tensorflow" / "__init__.py").write_text(code)
    return str(folder)


@pytest.mark.parametrize(
    "code,notices", [("os.close(2)", 0), ("sys.stderr = None", 0), ("os.environ['PATH'] = ''", 1)]
)
def test_a_closed_or_missing_standard_error_or_filter_is_no_failure(code, notices, talkative):
    result = python(
        f"import os, sys\n{code}\nimport tensorflow\nprint('done')", PYTHONPATH=talkative
    )
    assert result.returncode == 0, result.stderr
    assert (result.stdout, result.stderr) == ("done\n", NOTICES * notices)


@pytest.mark.parametrize("level,notices", [(None, 0), ("3", 0), ("2", 1), ("0", 1)])
def test_notices_come_where_they_are_asked_for(level, notices, talkative):
    variables = {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    result = python("import tensorflow", PYTHONPATH=talkative, **variables)
    assert (result.returncode, result.stderr) == (0, NOTICES * notices)


def test_private_mean_is_the_clipped_one(local_runtime):
    """TensorFlow Privacy's queries inside TFF's aggregator, without noise."""
    rng = np.random.default_rng(0)
    values = [rng.normal(size=4).astype(np.float32) * scale for scale in (0.1, 3, 5)]
    clip, expected_number = 0.7, 2.0
    clipped = [v * min(1, clip / np.linalg.norm(v)) for v in values]
    factory = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
        noise_multiplier=0.0, clients_per_round=expected_number, clip=clip
    )
    process = factory.create(tff.TensorType(np.float32, [4]))
    with tff.framework.get_context_stack().install(local_runtime.context):
        output = process.next(process.initialize(), values)
    np.testing.assert_allclose(output.result, sum(clipped) / expected_number, rtol=1e-5)


def test_adaptive_clipping_follows_its_quantile(local_runtime):
    norms = (0.05, 0.2, 4.0)  # Two of three lie below the first clip.
    values = [np.array([norm, 0.0], np.float32) for norm in norms]
    clips = [1.0]
    for _ in range(2):
        below = sum(norm <= clips[-1] for norm in norms) / len(norms)
        clips.append(clips[-1] * np.exp(-0.3 * (below - 0.5)))
    factory = tff.aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(
        noise_multiplier=0.0,
        clients_per_round=3.0,
        initial_l2_norm_clip=1.0,
        target_unclipped_quantile=0.5,
        learning_rate=0.3,
        clipped_count_stddev=0.0,
    )
    process = factory.create(tff.TensorType(np.float32, [2]))
    with tff.framework.get_context_stack().install(local_runtime.context):
        state = process.next(process.initialize(), values).state
        output = process.next(state, values)
    expected = sum(v * min(1, clips[1] / np.linalg.norm(v)) for v in values) / 3
    np.testing.assert_allclose(output.result, expected, rtol=1e-5)


def test_all_queries_that_tff_names_are_there():
    import tensorflow_privacy

    for name in _compatibility._QUERIES:
        assert issubclass(getattr(tensorflow_privacy, name), tensorflow_privacy.DPQuery)
    assert tensorflow_privacy.restart_query.PeriodicRoundRestartIndicator


def test_dictionaries_in_a_module_can_be_traced():
    """As TFF's checkpoints need it."""
    module = tf.Module()
    module.saved = {"a": np.float32(1.5), "b": ({"c": np.int32(2)},)}
    doubled = tf.function(lambda v: v["a"] + tf.cast(v["b"][0]["c"], tf.float32))(module.saved)
    assert float(doubled) == 3.5


@pytest.mark.parametrize(
    "versions,words",
    [
        ({"tensorflow-metadata": "1.21.0", "protobuf": "5.29.5"}, ["tensorflow-metadata<1.18"]),
        ({"tensorflow-metadata": "1.21.0", "protobuf": "6.31.1"}, None),
        ({"tensorflow-metadata": "1.17.2", "protobuf": "5.29.5"}, None),
        ({"tf-keras": "2.18.0"}, ["2.19"] if sys.version_info >= (3, 12) else None),
    ],
)
def test_known_faults(versions, words, monkeypatch):
    good = {
        "tensorflow-metadata": "1.17.2",
        "protobuf": "7.36.2",
        "tf-keras": "2.21.0",
    }
    monkeypatch.setattr(metadata, "version", {**good, **versions}.__getitem__)
    fault = _compatibility.known_fault()
    if words is None:
        assert fault is None
    else:
        assert len(fault.splitlines()) == 1 and all(word in fault for word in words)


def test_this_environment_has_no_known_fault():
    assert _compatibility.known_fault() is None


def test_without_tf_keras_the_remedy_is_said(monkeypatch):
    monkeypatch.setattr(_compatibility.importlib.util, "find_spec", lambda name: None)
    major, minor = _compatibility.tensorflow_version()
    with pytest.raises(ImportError, match=rf"pip install 'tf-keras=={major}\.{minor}\.\*'"):
        _compatibility._settle_keras_2()


def test_cusolver_is_loaded_where_the_gpu_extra_lies(monkeypatch, tmp_path):
    folder = tmp_path / "nvidia" / "cusolver" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcusolver.so.11").touch()
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(_compatibility.importlib.util, "find_spec", lambda name: spec)
    loaded, driver = [], [False]

    def load(name):
        if name == "libcuda.so.1" and not driver[0]:
            raise OSError("no such file")
        loaded.append(name)

    monkeypatch.setattr(_compatibility.ctypes, "CDLL", load)
    _compatibility._load_cusolver()
    assert not loaded
    driver[0] = True
    _compatibility._load_cusolver()
    assert loaded == ["libcuda.so.1", str(folder / "libcusolver.so.11")]
