"""Which way imports point, and who may touch what is private or TFF's templates."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "tff_fedlabel"
FILES = sorted(PACKAGE.rglob("*.py"))

# Part -> the parts that it may import. A part is a folder or a file of the package; those that all
# may import are the leaves.
LEAVES = {"_autograph", "_lazy", "_replacing", "_validation"}
MAY_IMPORT = {
    "_autograph": {"_lazy"},
    "_lazy": set(),
    "_replacing": set(),
    "_validation": set(),
    "_own_methods": set(),
    "_parameters": set(),
    "_notebook": set(),
    "_progress": {"_notebook"},
    "_postponed": set(),
    "_compatibility": {"_postponed"},
    "_startup": {"_compatibility"},
    "__init__": {"_compatibility", "_startup"},
    "pseudo_labels": LEAVES,
    "augmentation": LEAVES,
    "models": LEAVES,
    "datasets": LEAVES,
    "runtime": set(),
    "tasks": LEAVES,
    "algorithms": {*LEAVES, "_own_methods", "_parameters", "augmentation", "pseudo_labels"},
    "training": {
        *LEAVES,
        *("_notebook", "_own_methods", "_parameters", "_progress"),
        *("algorithms", "augmentation", "datasets", "models", "runtime", "tasks"),
    },
    "command_line": {"_own_methods", "datasets", "runtime", "training"},
    "cli": {
        *LEAVES,
        *("_parameters", "_progress"),
        *("algorithms", "command_line", "runtime", "tasks", "training"),
    },
}


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """The parts of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "tff_fedlabel":
                yield rest[0] if rest else "__init__"
            elif first == "_tff_fedlabel_startup":
                yield "_startup"


def test_every_part_is_listed():
    assert {part_of(path) for path in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_imports_point_one_way(part):
    for path in FILES:
        if part_of(path) == part:
            beyond = set(imported(path)) - MAY_IMPORT[part] - {part}
            assert not beyond, f"{path.relative_to(PACKAGE)} imports {sorted(beyond)}"


def test_there_is_no_cycle():
    settled = set()
    while len(settled) < len(MAY_IMPORT):
        ready = {p for p, others in MAY_IMPORT.items() if others <= settled} - settled
        assert ready, set(MAY_IMPORT) - settled
        settled |= ready


def mentioning(*texts):
    found = {path for path in FILES if any(text in path.read_text() for text in texts)}
    return {str(path.relative_to(PACKAGE)) for path in found}


def test_only_one_file_composes_templates():
    made = ("templates.compose", "ClientWorkProcess(", "FinalizerProcess(", "ClientResult(")
    assert mentioning(*made) == {"algorithms/_process.py"}


def test_private_modules_are_in_the_named_files():
    private = ("tensorflow.python", "tensorflow_federated.python", "tensorflow.core")
    assert mentioning(*(f"{word} {name}" for word in ("from", "import") for name in private)) == {
        "_compatibility.py",
        "runtime/_private_tensorflow.py",
    }


def test_no_two_modules_share_a_name():
    names = [path.stem for path in FILES if path.stem != "__init__"]
    stems = [name.strip("_") for name in names]
    assert sorted(set(stems)) == sorted(stems)


def test_files_are_short():
    long = {str(p.relative_to(PACKAGE)) for p in FILES if len(p.read_text().splitlines()) > 400}
    assert not long
    assert len((PACKAGE / "algorithms/fedlabel.py").read_text().splitlines()) < 250
