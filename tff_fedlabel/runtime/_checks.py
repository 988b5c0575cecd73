"""Checks of the options that runtimes share; each raises `ValueError`, in one line."""

from __future__ import annotations


def check_integer(option: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{option} is {value!r}; it must be an integer of {least} or more")


def check_flag(option: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{option} is {value!r}; it must be True or False")


def check_seconds(option: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise ValueError(f"{option} is {value!r}; it must be seconds above 0")
