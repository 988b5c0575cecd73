"""The options of a runtime: one frozen dataclass for each, whose fields carry their checks.

>>> class Options(CheckedOptions):
...     attempts: int = option(integer(1), 3)
"""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable
from typing import Any

# (name of the option, value) -> the value as Python's own type. A bad one raises `ValueError`.
Check = Callable[[str, Any], Any]


def option(check: Check, default: Any) -> Any:
    """A field of a `CheckedOptions`."""
    return dataclasses.field(default=default, metadata={"check": check})


class CheckedOptions:
    """Base of the frozen dataclasses of options.

    Raises:
      ValueError: An option has a bad value; in one line, which starts with the option's name.
    """

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = field.metadata["check"](field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)  # the dataclass is frozen

    @classmethod
    def names(cls) -> list[str]:
        """The names of all options."""
        return [field.name for field in dataclasses.fields(cls)]


def integer(least: int) -> Check:
    """A check for an integer, NumPy's included, of `least` or more."""

    def check(name, value):
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not whole or value < least:
            raise ValueError(f"{name} is {value!r}; it must be an integer of {least} or more")
        return int(value)

    return check


def flag(name: str, value: Any) -> bool:
    """Checks that an option is True or False."""
    if type(value).__name__ not in ("bool", "bool_"):  # the second is NumPy's
        raise ValueError(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def seconds(name: str, value: Any) -> float:
    """Checks for a finite time above 0."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value!r}; it must be a number of seconds above 0")
    return float(value)


def writable_file(name: str, value: Any) -> Any:
    """Checks for a writable file, which may not exist yet."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} is {value!r}; it must be the path of a file")
    folder = os.path.dirname(os.path.abspath(value))
    target = value if os.path.exists(value) else folder
    if os.path.isdir(value) or not os.access(target, os.W_OK):
        raise ValueError(f"{name} {str(value)!r} is not a writable file")
    return value


def program(name: str, value: Any) -> Any:
    """Checks for an executable file."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} is {value!r}; it must be the path of a program")
    if not (os.path.isfile(value) and os.access(value, os.X_OK)):
        raise ValueError(f"{name} {str(value)!r} is not an executable file")
    return value


def or_none(check: Check) -> Check:
    """The check for an option that may also be None."""
    return lambda name, value: None if value is None else check(name, value)
