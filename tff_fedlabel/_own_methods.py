"""Methods in files of one's own, known to every command and to each process that it starts.

The environment variable TFF_FEDLABEL_METHODS names the files, separated by colons (on Windows by
semicolons). They are executed after the package's own methods, and call `algorithms.register`.
"""

import contextlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator

VARIABLE = "TFF_FEDLABEL_METHODS"

_folders: list[pathlib.Path] = []  # of the files that were executed
_executing: list[pathlib.Path] = []


class MethodFileError(ValueError):
    """A file that the variable names cannot be used."""

    def __init__(self, name: str | os.PathLike, what: str):
        super().__init__(f"{VARIABLE} names {name}, which {what}.")


def load() -> None:
    """Executes the files.

    Raises:
      MethodFileError: A file is missing, fails, or is no Python file.
    """
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        path = pathlib.Path(os.path.expanduser(name))
        if not path.is_file():
            raise MethodFileError(name, "is no file")
        if not _is_running(path):
            _execute(path)


def check_not_loading() -> None:
    """Raises `MethodFileError` inside a file that is being loaded: it must not run a command."""
    if _executing:
        raise MethodFileError(
            _executing[-1], "runs a command; it should do so under `if __name__ == '__main__':`"
        )


def _is_running(path):
    """Whether it is the script that Python was started with, which registers its method itself."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return main is not None and os.path.exists(main) and path.samefile(main)


def _execute(path):
    name = f"_own_methods_{len(_folders)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise MethodFileError(path, "is not called .py")
    _add_folder(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses look their module up.
    try:
        with _noted(path):
            spec.loader.exec_module(module)
    except MethodFileError:
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        text = " ".join(str(error).split())
        raise MethodFileError(path, f"fails: {type(error).__name__}: {text}") from error


@contextlib.contextmanager
def _noted(path) -> Iterator[None]:
    _executing.append(path)
    try:
        yield
    finally:
        _executing.pop()


def _add_folder(path):
    """Lets a file import what lies beside it, as a script can.

    Raises:
      MethodFileError: It would get what lies beside an earlier file.
    """
    folder = path.resolve().parent
    for other in _folders:
        for beside in () if other == folder else folder.iterdir():
            loaded = getattr(sys.modules.get(beside.stem), "__file__", None)
            if beside != path.resolve() and loaded and other in pathlib.Path(loaded).parents:
                raise MethodFileError(
                    path, f"has {beside.name} beside it, as {other} has; one needs another name"
                )
    _folders.append(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
