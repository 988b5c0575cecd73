"""Lets TensorFlow, TensorFlow Federated and tff_fedlabel be imported in any order.

TFF 0.87 cannot be imported beside a newer TensorFlow unless it is prepared for it, and a program
imports it before this package, alphabetically. So this module lies beside the package and not in
it, and `tff_fedlabel.pth` has it imported whenever Python starts. It does nothing then but to
register a finder, which finds nothing itself and is asked by Python about each import:

* before `tensorflow_federated` is imported, `tff_fedlabel._compatibility` prepares it;
* while `tensorflow` is imported, its notices about this machine's CUDA and processor stay away
  from the screen. With TF_CPP_MIN_LOG_LEVEL=0, 1 or 2 in the environment they are shown.
"""

import sys

# Lines of TensorFlow's C++ log below "fatal". Those that it writes before its log is set up heed no
# setting.
_NOTICE = (
    r"^(WARNING: All log messages before absl::InitializeLog"
    r"|[IWE][0-9]{4} [0-9:.]+ +[0-9]+ "
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.]+: [IWE] "
    r"|To enable the following instructions:)"
)


def install() -> None:
    """Registers the finder, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "tensorflow_federated":
            from tff_fedlabel import _compatibility

            _compatibility.prepare()
        elif name == "tensorflow":
            return _quiet_spec(self, name)
        return None


def _quiet_spec(finder, name):
    """What the other finders find, to be executed without notices on the screen."""
    import os

    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") != "3":
        return None
    others = [other for other in sys.meta_path if other is not finder]
    finders = (getattr(other, "find_spec", None) for other in others)
    specs = (find_spec(name, None, None) for find_spec in finders if find_spec)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is not None and hasattr(spec.loader, "exec_module"):
        execute = spec.loader.exec_module

        def exec_module(module):
            with _notices_filtered():
                execute(module)

        spec.loader.exec_module = exec_module
    return spec


class _notices_filtered:  # noqa: N801 (read as a function; contextlib would be imported at start)
    """Inside, what is written to file descriptor 2 passes through a process that drops notices.

    A process rather than a file that is read afterwards: where the import aborts, what TensorFlow
    says last has been shown.
    """

    def __enter__(self):
        import os
        import subprocess

        self._filter = None
        try:
            self._stderr = os.dup(2)
        except OSError:  # It is closed: nobody sees anything.
            return
        try:
            self._filter = subprocess.Popen(
                ["grep", "--line-buffered", "-v", "-E", _NOTICE],
                stdin=subprocess.PIPE,
                stdout=self._stderr,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            os.close(self._stderr)
            return
        _flush()
        os.dup2(self._filter.stdin.fileno(), 2)

    def __exit__(self, *_):
        import os
        import subprocess

        if self._filter is None:
            return
        _flush()
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        self._filter.stdin.close()
        try:
            self._filter.wait(5)
        except subprocess.TimeoutExpired:
            pass  # A process that was started meanwhile still writes to it.


def _flush():
    try:
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 (there may be none, or any object)
        pass
