"""Lets TensorFlow, TensorFlow Federated and tff_fedlabel be imported in any order.

TFF 0.87 cannot be imported with a newer TensorFlow unless something is prepared first, and programs
that sort their imports import TFF before this package. So this module is installed next to the
package, not in it, and `tff_fedlabel.pth` makes Python import it at every start. All it does then
is to register a finder, which Python asks about each import. It finds what the others find, and

* before `tensorflow_federated` is executed, `tff_fedlabel._compatibility` prepares it;
* while `tensorflow` is executed, its notices about this machine's CUDA and processor are kept off
  the screen. With TF_CPP_MIN_LOG_LEVEL=0, 1 or 2 in the environment they are shown.

While another module is being imported, this one uses only modules that Python itself has loaded: a
second import inside the first could wait forever for one in another thread.
"""

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
        if name == "tensorflow" and _is_quiet():
            return self._found(name, _without_notices)
        return None

    def _found(self, name, wrap):
        """What the other finders find, executed by `wrap(execute, module)`."""
        others = (other for other in sys.meta_path if other is not self)
        finders = (getattr(other, "find_spec", None) for other in others)
        specs = (find_spec(name, None, None) for find_spec in finders if find_spec)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: wrap(execute, module)
        return spec


def _is_quiet() -> bool:
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3").strip()
    return level.isdigit() and int(level) >= 3


def _prepared(execute, module):
    from tff_fedlabel import _compatibility

    _compatibility.prepare()
    execute(module)


def _without_notices(execute, module):
    with _notices_filtered():
        execute(module)


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
