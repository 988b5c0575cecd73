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

# TensorFlow computes with int32 and float32; between these two float32 is at its full precision,
# and below the first it is 0 where TensorFlow flushes.
_INT32_LIMIT = 2**31
_LEAST_FLOAT32, _MOST_FLOAT32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


class WrongTypeError(TypeError, ValueError):
    """An argument is of the wrong type. A `ValueError` too: it is a bad argument like others."""


def check_name(field: str, name: Any, known: Iterable[str], more: str = "") -> str:
    """Returns `name` if it is one of `known`; the message has the nearest of them, then `more`."""
    known = list(known)
    if not isinstance(name, str):
        raise WrongTypeError(f"{field} must be one of {', '.join(known)}, got {name!r}.")
    if name not in known:
        hint, choices = nearest(name, known), ", ".join(known)
        raise ValueError(f"{field} {name!r} is unknown{hint}; choose from: {choices}.{more}")
    return name


def check_int(
    name: str, value: Any, least: int = 1, limit: int | None = None, or_else: str = ""
) -> int:
    """Returns a whole number in [least, limit), an int32 where there is no limit.

    Args:
      name: What the argument is called.
      value: Any integer, also NumPy's; no bool.
      least: The smallest that is allowed.
      limit: The first that is too large; None is that of int32, 2**31.
      or_else: What else the caller takes, for the message: " or 'epoch'".
    """
    integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if limit is None and integral and value >= _INT32_LIMIT:
        limit = _INT32_LIMIT
    wanted = f"of {least} or more" if limit is None else f"in [{least}, {limit})"
    message = f"{name} must be a whole number {wanted}{or_else}, got {value!r}."
    if not integral:
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
    """Returns a float in [low, high], or in (low, high] with `open_low`; never a NaN.

    It is 0, or a number that float32 can hold: neither so large that it would be infinite there
    nor so small that it would be 0. `check_number_or_infinity` takes infinity.
    """
    number = _check_number(name, value, low, high, open_low, infinity=False)
    if number != 0 and not _LEAST_FLOAT32 <= abs(number) <= _MOST_FLOAT32:
        raise ValueError(
            f"{name} must be a number that float32 can hold, {_LEAST_FLOAT32:.2g} to "
            f"{_MOST_FLOAT32:.2g}{'' if open_low else ' or 0'}, got {value!r}."
        )
    return number


def check_temperature(name: str, value: Any) -> float:
    """Returns a float in [1e-6, 1e6]: logits divided by a smaller one would be infinite."""
    return check_number(name, value, 1e-6, 1e6)


def check_number_or_infinity(name: str, value: Any, low: float = 0.0) -> float:
    """Returns a float of `low` or more, or infinity."""
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
    try:
        return float(value)
    except OverflowError:  # A whole number of hundreds of digits.
        raise ValueError(message) from None


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
