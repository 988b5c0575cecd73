"""Lets TensorFlow, TensorFlow Federated and tff_fedlabel be imported in any order.

TFF 0.87 cannot be imported beside a newer TensorFlow unless it is prepared for it, and a program
imports it before this package, alphabetically. So this module lies beside the package and not in
it, and `tff_fedlabel.pth` has it imported whenever Python starts. It does nothing then but to
register a finder, which Python asks about each import. It finds what the others find, and

* before `tensorflow_federated` is executed, `tff_fedlabel._compatibility` prepares it;
* while `tensorflow` is executed, its notices about this machine's CUDA and processor stay away
  from the screen. With TF_CPP_MIN_LOG_LEVEL=0, 1 or 2 in the environment they are shown.

Only modules that Python has loaded itself are used while others are imported: another import in
the middle of one could wait for another thread's for ever.
"""

import os
import sys
import time

# Lines of TensorFlow's C++ log. Those that it writes before its log is set up heed no setting. As
# long as it is not, a warning or an error may be another library's, so those are known by file.
_NOTICE = (
    "^(WARNING: All log messages before absl::InitializeLog"
    "|I[0-9]{4} [0-9:.]+ +[0-9]+ "
    "|[WE][0-9]{4} [0-9:.]+ +[0-9]+ (cuda_|computation_placer|cudart_stub|cpu_feature_guard|port)"
    "|[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+: [IWE] (tensorflow|external)/"
    "|To enable the following instructions:)"
)
_FILTER = ("grep", "-a", "--line-buffered", "-v", "-E", _NOTICE)
_LAST_SECONDS = 1.0  # for the filter to write what it has, where somebody else still writes to it


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

    A process rather than a file that is read afterwards: where the import aborts, what TensorFlow
    says last has been shown.
    """

    def __enter__(self):
        self._filter = None
        try:
            self._stderr = os.dup(2)
        except OSError:  # It is closed: nobody sees anything.
            return
        reads, writes = os.pipe()
        try:
            self._filter = os.posix_spawnp(
                _FILTER[0],
                _FILTER,
                {**os.environ, "LC_ALL": "C"},  # Bytes, whatever they are.
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, reads, 0),
                    (os.POSIX_SPAWN_DUP2, self._stderr, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
            )
            _flush()
            os.dup2(writes, 2)
        except OSError:  # There is no such program.
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
        except OSError:  # Somebody else has waited for it.
            pass


def _flush():
    try:
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 (there may be none, or any object)
        pass
