"""The fields of a configuration class as somebody sees them who sets them by name."""

import dataclasses
import inspect
import re
from typing import Any, NamedTuple


class Parameter(NamedTuple):
    """A field that can be set from text.

    Attributes:
      name: The field.
      kind: int, float, str or bool: what a value is made of.
      default: Its default; None where it has none.
      help: One sentence.
      or_text: Whether a text is a value, too, beside numbers.
    """

    name: str
    kind: type
    default: Any
    help: str
    or_text: bool = False

    def parse(self, value: Any) -> Any:
        """A value as it was typed, as the field wants it."""
        if not self.or_text or not isinstance(value, str):
            return value
        try:
            return int(value)
        except ValueError:
            return value  # The class says what is wrong with it.


_KINDS = {"int": int, "float": float, "str": str, "bool": bool}


def of(config_class: type) -> dict[str, Parameter]:
    """The parameters of a dataclass, by name.

    A field is explained by its `metadata["help"]`, else by the first sentence about it in the
    section "Attributes:" of the docstring of the class, or of one that it is derived from. A field
    that holds something else than a number, a text or a truth value is none that can be set from
    text, and is left out.
    """
    documented = {}
    for base in reversed(config_class.__mro__):
        documented.update(_attributes(inspect.getdoc(base) or ""))
    found = {}
    for field in dataclasses.fields(config_class):
        default = None if field.default is dataclasses.MISSING else field.default
        named = _named_kinds(field.type)
        # "float = 1" is a float; where several are named, the default tells.
        of_default = [type(default)] if type(default) in _KINDS.values() else []
        kinds = named if len(named) == 1 else of_default or named
        if not kinds or not (default is None or type(default) in _KINDS.values()):
            continue
        text = field.metadata.get("help") or documented.get(field.name, "")
        or_text = int in named and str in named
        found[field.name] = Parameter(
            field.name, str if or_text else kinds[0], default, text, or_text
        )
    return found


def _named_kinds(annotation: Any) -> list[type]:
    """The kinds in an annotation such as float, "float | None" or Optional[float]."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = re.sub(r"^(typing\.)?Optional\[(\w+)\]$", r"\2", text)
    return [_KINDS[word] for word in text.split(" | ") if word in _KINDS]


def _attributes(docstring: str) -> dict[str, str]:
    """Name -> first sentence, from the section "Attributes:" of a docstring."""
    section = re.search(r"^Attributes:\n(.*?)(?=^\S|\Z)", docstring, re.M | re.S)
    entries = re.findall(r"^  (\w+): (.*?)(?=^  \w|\Z)", section[1] if section else "", re.M | re.S)
    return {
        name: _lower(re.split(r"[.](?=\s[A-Z`]|$)", " ".join(text.split()), maxsplit=1)[0])
        for name, text in entries
    }


def _lower(text: str) -> str:
    """The text as it stands after a colon, names such as M and RandAugment left as they are."""
    return text[0].lower() + text[1:] if re.match("[A-Z][a-z]+\\b", text) else text
