"""Checks that all configurations share: numbers that TensorFlow can hold, as floats."""

import fractions

import numpy as np
import pytest

from tff_fedlabel import algorithms
from tff_fedlabel._validation import check_int, check_number, check_number_or_infinity


@pytest.mark.parametrize("value", [6, np.int64(6), np.float32(6), fractions.Fraction(12, 2), 6.0])
def test_a_number_is_a_float(value):
    for check in (check_number, check_number_or_infinity):
        found = check("factor", value)
        assert type(found) is float and found == 6.0


LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, LARGEST, SMALLEST, -LARGEST, -SMALLEST])
def test_what_float32_can_hold(value):
    assert check_number("factor", value, -np.inf) == value == float(np.float32(value))


@pytest.mark.parametrize("value", [1e39, 10**39, pytest.param(10**400, id="10**400"), 1e-50, 1e-40])
def test_what_float32_cannot_hold_is_refused(value):
    for sign in (1, -1):
        with pytest.raises(ValueError, match="^factor must be a number") as caught:
            check_number("factor", sign * value, -np.inf)
        assert "\n" not in str(caught.value)


def test_others_are_refused():
    for value in (True, np.bool_(True), "6", None, 1j):
        with pytest.raises(TypeError, match="^factor must be a number"):
            check_number("factor", value)
    for value in (np.nan, np.inf, -1):
        with pytest.raises(ValueError, match="^factor must be a number of 0 or more, got"):
            check_number("factor", value)
    assert check_number_or_infinity("alpha", np.inf) == np.inf
    assert check_number_or_infinity("alpha", 1e300) == 1e300  # No tensor.


def test_a_whole_number_is_an_int32_unless_it_has_a_limit():
    assert check_int("size", np.int32(2**31 - 1)) == 2**31 - 1
    for value in (2**31, 2**63, 10**30):
        with pytest.raises(
            ValueError, match=r"^size must be a whole number in \[1, 2147483648\), got"
        ):
            check_int("size", value)
    with pytest.raises(ValueError, match="^size must be a whole number of 1 or more, got 0"):
        check_int("size", 0)
    assert check_int("size", 2**40, limit=2**41) == 2**40


@pytest.mark.parametrize("method", algorithms.METHODS.values(), ids=lambda method: method.name)
def test_the_parameters_of_every_method(method):
    """Each number that is a float by default is one in any case, and what float32 holds."""
    fields = method.config_class.__dataclass_fields__.values()
    for name, default in ((f.name, f.default) for f in fields):
        if isinstance(default, float):
            made = getattr(method.config_class(**{name: 1}), name)
            assert type(made) is float and made == 1.0
            for wrong in (1e39, 1e-50, True):
                with pytest.raises(ValueError, match=f"^{name} must be a number"):
                    method.config_class(**{name: wrong})
        elif type(default) is int:
            for wrong in (2**31, 2**70):
                with pytest.raises(ValueError, match=f"^{name} must be a whole number"):
                    method.config_class(**{name: wrong})
