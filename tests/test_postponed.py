"""Packages that are put into `sys.modules` and execute when they are used."""

import importlib
import subprocess
import sys
import threading

import pytest

from tff_fedlabel import _postponed


@pytest.fixture
def package(tmp_path, monkeypatch):
    """`package(init)` -> a postponed package `heavy.pack` with a module `inner`, and its parent."""

    def make(init):
        folder = tmp_path / "heavy" / "pack"
        folder.mkdir(parents=True)
        (tmp_path / "heavy" / "__init__.py").write_text("from heavy import pack\n")
        (folder / "__init__.py").write_text(init)
        (folder / "inner.py").write_text("value = 5\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(_postponed, "_PACKAGES", ("heavy.pack",))
        _postponed.postpone()
        return importlib.import_module("heavy").pack

    yield make
    for name in [name for name in sys.modules if name.split(".")[0] == "heavy"]:
        del sys.modules[name]


def test_it_executes_once_and_when_used(package, tmp_path):
    log = tmp_path / "log"
    pack = package(f"open({str(log)!r}, 'a').write('x')\nnumber = 7\n__version__ = '1'\n")
    from heavy.pack.inner import value

    assert value == 5 and not log.exists()
    _postponed.postpone()  # Again, as by a second import of TFF.
    assert sys.modules["heavy.pack"] is pack
    assert pack.__version__ == "1" and pack.number == 7 and log.read_text() == "x"
    with pytest.raises(AttributeError, match="module 'heavy.pack' has no attribute 'missing'"):
        _ = pack.missing
    assert "number" in dir(pack) and log.read_text() == "x"


def test_names_and_modules_come_out_as_always(package):
    package("from heavy.pack import inner\nnumber = inner.value + 1\n")
    from heavy.pack import inner, number

    assert (inner.value, number) == (5, 6)


def test_its_own_getattr_answers(package):
    pack = package("def __getattr__(name):\n    return name.upper()\n")
    assert pack.word == "WORD"


def test_a_failure_is_told_at_every_use(package):
    pack = package("raise ImportError('broken on purpose')\n")
    for _ in range(2):
        with pytest.raises(ImportError, match="broken on purpose"):
            _ = pack.number


def test_threads_never_see_half_of_it(package):
    pack = package("import time\ntime.sleep(0.3)\nnumber = 7\n")
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(pack.number)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [7] * 4


def test_what_is_not_installed_or_imported_already_is_left_alone(monkeypatch):
    monkeypatch.setattr(_postponed, "_PACKAGES", ("no_such_package.inside", "no_such", "json"))
    before = sys.modules["json"]
    _postponed.postpone()
    assert sys.modules["json"] is before and not {"no_such_package", "no_such"} & set(sys.modules)


AFTER_TFF = """
import sys
import numpy as np
import tensorflow_federated as tff
heavy = ("matplotlib", "scipy.signal", "tensorflow_probability.python", "dp_accounting.pld.common")
print([name for name in heavy if name in sys.modules])
factory = tff.aggregators.EncodedSumFactory.quantize_above_threshold(8)
factory.create(tff.TensorType(np.float32, [9]))
import tensorflow_probability as tfp
assert tfp.__version__ and tfp.distributions.Normal(2.0, 0.0).sample().numpy() == 2.0
import dp_accounting
assert dp_accounting.pld.PLDAccountant().get_epsilon(0.1) == 0
assert type(dp_accounting.pld.PLDAccountant()).__module__ in sys.modules
"""


def test_tff_is_imported_without_them_and_they_work():
    done = subprocess.run(
        [sys.executable, "-c", AFTER_TFF], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
