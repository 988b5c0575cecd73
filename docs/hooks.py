"""Writes the builders into the reference: the registry makes them, no file holds them."""

import inspect

import griffe

_PLACE = "{{ builders }}"
# Where the docstring of a builder goes on with what all of them have in common.
_COMMON = "With model weights"


def on_page_markdown(markdown, **_):
    """Called by MkDocs with the text of each page."""
    if _PLACE not in markdown:
        return markdown
    from tff_fedlabel import algorithms

    builders = list(algorithms.ALGORITHMS.values())
    return markdown.replace(_PLACE, "\n\n".join([*map(_one, builders), _common(builders[0])]))


def _one(builder) -> str:
    """A builder's signature, and what only its docstring says."""
    first, *others = inspect.signature(builder).parameters.values()
    names = [first.name, others[0].name, f"{others[1].name}=...", "*"]
    names += [f"{parameter.name}=..." for parameter in others[2:]]
    signature = f"{builder.__name__}({', '.join(names)})"
    about = inspect.getdoc(builder).split("\n\n", 1)[1].split(_COMMON)[0]
    return f"## `{builder.__name__}`\n\n```python\n{signature}\n```\n\n{about.strip()}"


def _common(builder) -> str:
    """What the docstrings of all builders say, as Markdown."""
    docstring = griffe.Docstring(_COMMON + inspect.getdoc(builder).split(_COMMON, 1)[1])
    text = ["## Arguments and results of the builders"]
    for section in docstring.parse("google", warn_missing_types=False, warnings=False):
        if section.kind is griffe.DocstringSectionKind.text:
            text.append(section.value)
            continue
        text.append(f"**{section.kind.value.title()}**")
        text.append("\n".join(_item(item) for item in section.value))
    return "\n\n".join(text)


def _item(item) -> str:
    name = getattr(item, "name", "") or getattr(item, "annotation", "") or ""
    description = " ".join(item.description.split())
    return f"- `{name}`: {description}" if name else f"- {description}"
