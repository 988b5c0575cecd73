"""Lets TensorFlow, TensorFlow Federated and tff_fedlabel be imported in any order.

TFF 0.87 cannot be imported with a newer TensorFlow unless something is prepared first, and programs
that sort their imports import TFF before this package. So this module is installed next to the
package, not in it, and `tff_fedlabel.pth` makes Python import it at every start. All it does then
is to register a finder, which Python asks about each import. It finds what the others find, and

* before `tensorflow_federated` is executed, `tff_fedlabel._compatibility` prepares it;
* while `tensorflow` is executed, its notices about this machine's CUDA and processor are kept off
  the screen. With TF_CPP_MIN_LOG_LEVEL=0, 1 or 2 in the environment they are shown;
* while either is executed, Python collects no garbage.

While another module is being imported, this one uses only modules that Python itself has loaded: a
second import inside the first could wait forever for one in another thread.
"""

import gc
import os
import sys
import time

# Lines of TensorFlow's C++ log. Before its log is set up, TensorFlow writes lines whatever the
# settings say. Until then a warning or an error may come from another library, so TensorFlow's are
# recognised by the names of its source files.
_NOTICE = (
    "^(WARNING: All log messages before absl::InitializeLog"
    "|I[0-9]{4} [0-9:.]+ +[0-9]+ "
    "|[WE][0-9]{4} [0-9:.]+ +[0-9]+ (cuda_|computation_placer|cudart_stub|cpu_feature_guard|port)"
    "|[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+: [IWE] (tensorflow|external)/"
    "|To enable the following instructions:)"
)
_FILTER = ("grep", "-a", "--line-buffered", "-v", "-E", _NOTICE)
_LAST_SECONDS = 1.0  # for the filter to write the rest, if another process still writes to it


def install() -> None:
    """Registers the finder, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "tensorflow_federated":
            return self._found(name, _prepared)
        if name == "tensorflow":
            return self._found(name, _without_notices if _is_quiet() else _plainly)
        return None

    def _found(self, name, wrap):
        """What the other finders find, executed by `wrap(execute, module)`."""
        spec = _spec(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def exec_module(module):
                with _no_collections():
                    wrap(execute, module)

            spec.loader.exec_module = exec_module
        return spec


def _spec(name):
    """What the other finders find."""
    others = (other for other in sys.meta_path if not isinstance(other, _Finder))
    finders = (getattr(other, "find_spec", None) for other in others)
    specs = (find_spec(name, None, None) for find_spec in finders if find_spec)
    return next((spec for spec in specs if spec is not None), None)


def _is_quiet() -> bool:
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3").strip()
    return level.isdigit() and int(level) >= 3


def _prepared(execute, module):
    if _tensorflow_imports_distutils():
        import tensorflow  # noqa: F401
    from tff_fedlabel import _compatibility

    _compatibility.prepare()
    execute(module)


def _tensorflow_imports_distutils() -> bool:
    """Whether it is a TensorFlow, as 2.14, that other imports should wait for.

    setuptools, where installed, finds distutils by importing its own, and all the while Python's
    lock of every import is held. In another thread, who has begun to import one of the modules
    that this needs, and then asks for that lock, waits forever. So nothing is begun before.
    """
    spec = _spec("tensorflow")
    if spec is None or not spec.origin:
        return False
    with open(spec.origin, "rb") as source:
        return b"import distutils" in source.read()


def _without_notices(execute, module):
    with _notices_filtered():
        execute(module)


def _plainly(execute, module):
    execute(module)


class _no_collections:  # noqa: N801 (read as a function)
    """Inside, Python collects no garbage; afterwards, none among the objects that are there.

    An import makes some 400,000 objects that stay until the process ends. To look through them for
    garbage, again and again, takes a fifth of TFF's import, and as much again in what comes next.
    """

    def __enter__(self):
        self._was_enabled = gc.isenabled()  # Not where one import is inside another.
        gc.disable()

    def __exit__(self, *_):
        if self._was_enabled:
            gc.freeze()
            gc.enable()


class _notices_filtered:  # noqa: N801 (read as a function; contextlib is not loaded yet)
    """Inside, what is written to file descriptor 2 passes through a process that drops notices.

    It is a process, and not a file that is read afterwards, so that TensorFlow's last words are
    shown even if the import aborts.
    """

    def __enter__(self):
        self._filter = None
        try:
            self._stderr = os.dup(2)
        except OSError:  # It is closed, so nothing can be shown.
            return
        reads, writes = os.pipe()
        try:
            self._filter = os.posix_spawnp(
                _FILTER[0],
                _FILTER,
                {**os.environ, "LC_ALL": "C"},  # So that grep takes any bytes.
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, reads, 0),
                    (os.POSIX_SPAWN_DUP2, self._stderr, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
            )
            _flush()
            os.dup2(writes, 2)
        except OSError:  # grep is not installed.
            os.close(self._stderr)
        finally:
            os.close(reads)
            os.close(writes)

    def __exit__(self, *_):
        if self._filter is None:
            return
        _flush()
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        deadline = time.monotonic() + _LAST_SECONDS
        try:
            while os.waitpid(self._filter, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.002)
        except OSError:  # Other code has waited for it already.
            pass


def _flush():
    try:
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 (there may be none, or any object)
        pass
