"""The choices of a run in JSON, and back."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tff_fedlabel import _parameters, algorithms

# JSON has no such numbers.
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def json_number(value: Any) -> Any:
    """`value` in JSON's types: NumPy numbers as Python's, infinity (of alpha) as "inf"."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def stored(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Choices as JSON holds them and gives them back: a tuple, for instance, is a list there.

    Raises:
      ValueError: JSON cannot hold a choice; the message names it.
    """
    return {name: _stored(name, value) for name, value in choices.items()}


def _stored(name: str, value: Any) -> Any:
    value = json_number(value)
    if isinstance(value, tuple | list):
        return [_stored_part(name, part) for part in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _stored_part(name, part) for key, part in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    text = " ".join(repr(value).split())
    raise ValueError(
        f"{name} must be a number, a text, True, False or None, or a tuple, a list or a dict with "
        "texts as keys of them, to be stored with the run, got "
        f"{text if len(text) <= 60 else type(value).__name__}."
    )


def _stored_part(name: str, value: Any) -> Any:
    """An entry of a tuple, list or dict."""
    if isinstance(value, float | np.floating) and not math.isfinite(value):
        raise ValueError(
            f"{name} must hold finite numbers only, to be stored with the run, got {value}."
        )
    return _stored(name, value)


def restored(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Choices as they were, from what `stored` made of them."""
    method = algorithms.METHODS.get(str(choices.get("algorithm")))
    fields = () if method is None else dataclasses.fields(method.config_class)
    texts = set()
    if method is not None:
        parameters = _parameters.of(method.config_class)
        texts = {name for name, parameter in parameters.items() if parameter.kind is str}
    tuples = {field.name for field in fields if isinstance(field.default, tuple)}

    def restore(name, value):
        if isinstance(value, str) and name not in texts:
            return _NOT_FINITE.get(value, value)
        return tuple(value) if isinstance(value, list) and name in tuples else value

    return {name: restore(name, value) for name, value in choices.items()}
