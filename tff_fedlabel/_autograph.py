"""Which functions become graphs as they are written, and which as AutoGraph converts them.

AutoGraph rewrites Python's `if` and `for` over tensors into TensorFlow's, for which it parses every
function that a traced function calls. A method has dozens of them, without anything to rewrite, and
parsing them takes longer than tracing them. What users give may have something to rewrite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tff_fedlabel._lazy import tf


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: neither `function` nor what it calls is converted.

    Except for functions that it calls by `given`, and each `tf.function`, which is traced by rules
    of its own.
    """

    @functools.wraps(function)
    def unconverted(*args, **kwargs):
        return tf.autograph.experimental.do_not_convert(function)(*args, **kwargs)

    return unconverted


def given(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's function as AutoGraph converts it, also where it has been turned off."""
    return function if tf.executing_eagerly() else functools.partial(_converted(), function)


@functools.cache
def _converted():
    return tf.autograph.to_graph(_call)


def _call(function, *args, **kwargs):
    return function(*args, **kwargs)
