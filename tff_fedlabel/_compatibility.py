"""What TFF 0.87, made for TensorFlow 2.14, needs to work with a newer TensorFlow.

* Keras 2. TFF's models are Keras 2 models, and since TensorFlow 2.16 `tf.keras` is Keras 3. If
  TF_USE_LEGACY_KERAS is set before `tf.keras` is first used, it is the package tf-keras: Keras 2.
* TensorFlow Privacy 0.9. Its package imports estimators, which TensorFlow no longer has. TFF uses
  14 classes and a module of its queries, and those load and work without the rest.
* `jax.lib.xla_client`. JAX has moved it; TFF's JAX part names two of its classes when imported.
* Dictionaries in a `tf.Module`. TensorFlow wraps them, with wrapt, in a class that Python 3.12
  cannot look into where wrapt is older than 2.2.2, as in Colab; TFF's checkpoints are such modules.
* libcusolver. TensorFlow 2.21 looks for it in the system's folders and not where its extra
  `and-cuda` installs it, and then sees no GPU. It does find a library that the process has loaded
  already. It looks once, at its first operation, so loading it when a runtime starts is too late.
* Arguments of `warnings.catch_warnings`. With NumPy 2, TFF passes two of them, which Python has had
  since 3.11, where it infers the type of a Python number.

With TensorFlow 2.14 none of this does anything. It is done when TFF is imported, by any program;
`_startup` takes care of that. What makes that import faster is in `_postponed`.
"""

import contextlib
import ctypes
import glob
import importlib.util
import inspect
import os
import re
import sys
import types
import warnings
from importlib import metadata

from tff_fedlabel import _postponed

_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"

# Class -> module of tensorflow_privacy.privacy.dp_query.
_QUERIES = {
    "DPQuery": "dp_query",
    "DistributedDiscreteGaussianSumQuery": "distributed_discrete_gaussian_query",
    "DistributedSkellamSumQuery": "distributed_skellam_query",
    "GaussianSumQuery": "gaussian_query",
    "NoPrivacyQuantileEstimatorQuery": "quantile_estimator_query",
    "NoPrivacySumQuery": "no_privacy_query",
    "NormalizedQuery": "normalized_query",
    "QAdaClipTreeResSumQuery": "quantile_adaptive_clip_tree_query",
    "QuantileAdaptiveClipSumQuery": "quantile_adaptive_clip_sum_query",
    "QuantileEstimatorQuery": "quantile_estimator_query",
    "RestartQuery": "restart_query",
    "SumAggregationDPQuery": "dp_query",
    "TreeRangeSumQuery": "tree_range_query",
    "TreeResidualSumQuery": "tree_aggregation_query",
}


def choose_keras_2() -> None:
    """Makes a TensorFlow that is not imported yet use Keras 2 as `tf.keras`."""
    if tensorflow_version() >= (2, 16):
        os.environ[_LEGACY_KERAS] = "1"


def prepare() -> None:
    """Makes `import tensorflow_federated` work from here on.

    Raises:
      ImportError: `tf.keras` is in use as Keras 3, or Keras 2 is not installed.
    """
    _postponed.postpone()
    if tensorflow_version() < (2, 16):
        return
    choose_keras_2()
    _settle_keras_2()
    _load_privacy_queries()
    _complete_jax()
    _make_wrapped_dictionaries_traceable()
    _load_cusolver()
    _complete_catch_warnings()


def known_fault() -> str | None:
    """What is known to be wrong with the installed packages, in one line; None if nothing is.

    These packages fail late, silently, or far from the cause.
    """
    python = sys.version_info[:2]
    if python >= (3, 12) and _release("tf-keras") == (2, 18):
        return "tf-keras 2.18 fails after tf.keras.utils.set_random_seed: install 2.19 or newer"
    if _release("tensorflow-metadata") >= (1, 18) and _release("protobuf") < (6, 0):
        return (
            "this tensorflow-metadata and protobuf 5 leave tensorflow-datasets without data sets "
            "to read: pip install 'tensorflow-metadata<1.18'"
        )
    return None


def without_dependencies() -> list[str]:
    """The requirements of the package's extra `tff`, such as "tensorflow-federated==0.87.0"."""
    required = metadata.requires("tff-fedlabel") or []
    return [line.split(";")[0].strip() for line in required if re.search("extra == .tff", line)]


def _release(package: str) -> tuple[int, ...]:
    """Major and minor version of an installed package; () where it is not installed."""
    try:
        parts = metadata.version(package).split(".")[:2]
    except metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in parts if part.isdigit())


def tensorflow_version() -> tuple[int, int]:
    """Major and minor version of the TensorFlow that is, or will be, imported."""
    module = sys.modules.get("tensorflow")
    found = getattr(module, "__version__", None)
    for package in ("tensorflow", "tensorflow-cpu", "tf-nightly"):
        if found is None:
            try:
                found = metadata.version(package)
            except metadata.PackageNotFoundError:
                pass
    if found is None:
        raise ImportError("tff_fedlabel needs TensorFlow: install tensorflow, as the README shows")
    major, minor, *_ = found.split(".")
    return int(major), int(minor)


def _settle_keras_2() -> None:
    if importlib.util.find_spec("tf_keras") is None:
        major, minor = tensorflow_version()
        raise ImportError(
            "TensorFlow Federated needs Keras 2 beside this TensorFlow: "
            f"pip install 'tf-keras=={major}.{minor}.*'"
        )
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return
    if _keras_in_use(tensorflow) and not tensorflow.keras.Model.__module__.startswith("tf_keras"):
        raise ImportError(
            "TensorFlow Federated needs Keras 2, but tf.keras is already in use as Keras 3 in this "
            "process: restart Python (in a notebook, the session) and import tff_fedlabel first, "
            f"or set the environment variable {_LEGACY_KERAS}=1"
        )
    # `import tensorflow.keras` looks in the folders of this path, and TensorFlow filled it for
    # Keras 3 when it was imported without the variable.
    (folder,) = importlib.util.find_spec("tf_keras").submodule_search_locations
    folder = os.path.join(folder, "api", "_v2")
    if folder not in tensorflow.__path__:
        tensorflow.__path__.insert(0, folder)


def _keras_in_use(tensorflow) -> bool:
    """Whether TensorFlow has looked up which Keras `tf.keras` is; it does so only once."""
    return vars(vars(tensorflow)["keras"]).get("_tfll_initialized", True)


def _load_privacy_queries() -> None:
    sys.skip_tf_privacy_import = True  # The package's own switch: it then imports nothing.
    try:
        import tensorflow_privacy
    finally:
        del sys.skip_tf_privacy_import
    queries = "tensorflow_privacy.privacy.dp_query"
    tensorflow_privacy.restart_query = importlib.import_module(f"{queries}.restart_query")
    for name, module in _QUERIES.items():
        query = getattr(importlib.import_module(f"{queries}.{module}"), name)
        setattr(tensorflow_privacy, name, query)


def _complete_jax() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import jax.lib
        from jaxlib import xla_client as current

        try:
            from jax.lib import xla_client
        except ImportError:
            xla_client = types.ModuleType("jax.lib.xla_client")
            jax.lib.xla_client = sys.modules[xla_client.__name__] = xla_client
        for name in ("Shape", "XlaComputation"):
            if not hasattr(xla_client, name):
                setattr(xla_client, name, getattr(current, name))


def _load_cusolver() -> None:
    wheels = importlib.util.find_spec("nvidia")
    if wheels is None:
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # No driver, no GPU.
        return
    for folder in wheels.submodule_search_locations or ():
        for path in glob.glob(f"{folder}/cusolver/lib/libcusolver.so.*"):
            with contextlib.suppress(OSError):
                ctypes.CDLL(path)


def _make_wrapped_dictionaries_traceable() -> None:
    if sys.version_info < (3, 12):
        return
    import tensorflow as tf

    module = tf.Module()
    module.wrapped = {}
    try:
        inspect.getattr_static(module.wrapped, "any", None)
    except TypeError:
        # Private: TensorFlow has no public function for the type of a value inside another value.
        from tensorflow.core.function import trace_type

        # TensorFlow first looks for this method, by which a value gives its own type. Where it
        # finds it, it does not look into the object.
        type(module.wrapped).__tf_tracing_type__ = lambda self, context: trace_type.from_value(
            self.__wrapped__, context
        )


def _complete_catch_warnings() -> None:
    if sys.version_info >= (3, 11):
        return

    class CatchWarnings(warnings.catch_warnings):
        """`warnings.catch_warnings` with the arguments `action` and `category` of Python 3.11."""

        def __init__(self, *, record=False, module=None, action=None, category=Warning):
            super().__init__(record=record, module=module)
            self._simple_filter = (action, category)

        def __enter__(self):
            log = super().__enter__()
            action, category = self._simple_filter
            if action is not None:
                self._module.simplefilter(action, category)
            return log

    warnings.catch_warnings = CatchWarnings
