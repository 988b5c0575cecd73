"""Checks of arguments: one wording for all, one line each.

A value of the wrong type raises `WrongTypeError`, a value out of its range `ValueError`; both name
the argument. Each check returns the value as Python's own type, so that a NumPy number goes
wherever a number goes.
"""

import difflib
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

# Where the labels of a simulation can be: `datasets.federated` makes each, and a method names those
# that it can be used with.
LABELS_AT = ("every_client", "server", "some_clients")


class WrongTypeError(TypeError, ValueError):
    """An argument is of the wrong type. A `ValueError` too: it is a bad argument like others."""


def check_name(field: str, name: Any, known: Iterable[str]) -> str:
    """Returns `name` if it is one of `known`; the message has the nearest of them."""
    known = list(known)
    if not isinstance(name, str):
        raise WrongTypeError(f"{field} must be one of {', '.join(known)}, got {name!r}.")
    if name not in known:
        hint = nearest(name, known)
        raise ValueError(f"{field} {name!r} is unknown{hint}; choose from: {', '.join(known)}.")
    return name


def check_int(
    name: str, value: Any, least: int = 1, limit: int | None = None, or_else: str = ""
) -> int:
    """Returns a whole number in [least, limit).

    Args:
      name: What the argument is called.
      value: Any integer, also NumPy's; no bool.
      least: The smallest that is allowed.
      limit: The first that is too large.
      or_else: What else the caller takes, for the message: " or 'epoch'".
    """
    wanted = f"of {least} or more" if limit is None else f"in [{least}, {limit})"
    message = f"{name} must be a whole number {wanted}{or_else}, got {value!r}."
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise WrongTypeError(message)
    if value < least or (limit is not None and value >= limit):
        raise ValueError(message)
    return int(value)


# Images that a client can be given in a round: their row numbers alone take 128 MB.
_MOST_IMAGES = 2**24


def check_images_per_round(name: str, steps: int, batch_size: int) -> None:
    """Raises `ValueError` for more images than a client could ever use in one round.

    Args:
      name: What the number of steps is called.
      steps: Batches of a client in a round.
      batch_size: Images in a batch.
    """
    if steps * batch_size > _MOST_IMAGES:
        raise ValueError(
            f"{name} x batch_size is {steps} x {batch_size}; a client can be given at most "
            f"{_MOST_IMAGES} images a round."
        )


def check_seed(seed: Any, name: str = "seed") -> int:
    """Returns a seed, an int in [0, 2**31)."""
    return check_int(name, seed, 0, 2**31)


def check_number(
    name: str, value: Any, low: float = 0.0, high: float = math.inf, open_low: bool = False
) -> float:
    """Returns a number in [low, high], or in (low, high] with `open_low`; never a NaN.

    Where `high` is infinite, infinity itself is refused; `check_number_or_infinity` takes it.
    """
    return _check_number(name, value, low, high, open_low, infinity=False)


def check_number_or_infinity(name: str, value: Any, low: float = 0.0) -> float:
    """Returns a number of `low` or more, or infinity."""
    return _check_number(name, value, low, math.inf, False, infinity=True)


def _check_number(name, value, low, high, open_low, infinity):
    if high != math.inf:
        wanted = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
    else:
        wanted = f"above {low:g}" if open_low else f"of {low:g} or more"
        wanted += " or infinity" if infinity else ""
    message = f"{name} must be a number {wanted}, got {value!r}."
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise WrongTypeError(message)
    if not low <= value <= high or (open_low and value == low):
        raise ValueError(message)
    if value == math.inf and not infinity:
        raise ValueError(message)
    # An int stays one: what was written into a configuration is what is read from it.
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def check_flag(name: str, value: Any) -> bool:
    """Returns True or False, NumPy's too."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise WrongTypeError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def check_type(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> Any:
    """Returns `value` if it is an instance of `kind`; `wanted` says in words what that is."""
    if not isinstance(value, kind):
        got = repr(value)
        got = type(value).__name__ if len(got) > 80 or got.startswith("<") else got
        raise WrongTypeError(f"{name} must be {wanted}, got {got}.")
    return value


def check_callable_or_none(name: str, value: Any, example: str) -> Callable | None:
    """Returns `value` if it is None or can be called; `example` is one that can."""
    if value is not None and not callable(value):
        raise WrongTypeError(f"{name} must be None or a callable such as {example}, got {value!r}.")
    return value


def nearest(word: Any, known: Iterable[str]) -> str:
    """ " (did you mean fedlabel?)" for the nearest of `known`, or ""."""
    near = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
