"""What `runtime.use` refuses, and when."""

import ast
import importlib
import pathlib

import numpy as np
import pytest

from tff_fedlabel import runtime
from tff_fedlabel.runtime._runtime_errors import readable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("locl", {}), r"no runtime 'locl' \(did you mean 'local'\?\); choose from: .*local"),
        (("", {}), "no runtime ''; choose from: .*local"),
        ((None, {}), "no runtime None"),
        (("local", {"log_fle": "x"}), r"no option 'log_fle' \(did you mean 'log_file'\?\)"),
        (("local", {"zzz": 1}), "has no option 'zzz'; choose from: asynchronous, default_num"),
        (("local", {"default_num_clients": -1}), "default_num_clients is -1"),
        (("local", {"default_num_clients": True}), "default_num_clients is True"),
        (("local", {"max_concurrent_computation_calls": 1.5}), "calls is 1.5"),
        (("local", {"stream_structs": 1}), "stream_structs is 1"),
        (("local", {"startup_timeout": 0}), "startup_timeout is 0"),
        (("local", {"startup_timeout": float("nan")}), "startup_timeout is nan"),
        (("local", {"startup_timeout": "30"}), "startup_timeout is '30'"),
        (("local", {"log_file": "/no/such/folder/log"}), "log_file '/no/such/folder/log'"),
        (("local", {"log_file": "/"}), "log_file '/'"),
        (("local", {"worker_binary": "/no/such/worker"}), "worker_binary '/no/such/worker'"),
        (("local", {"worker_binary": "/"}), "worker_binary '/'"),
        (("local", {"asynchronous": "yes"}), "asynchronous is 'yes'"),
    ],
)
def test_refused_on_the_call_itself_in_one_line(arguments, message):
    name, options = arguments
    with pytest.raises(ValueError, match=message) as caught:
        runtime.use(name, **options)
    assert "\n" not in str(caught.value)


def test_every_runtime_can_be_asked_for():
    needed = {"workers": {"addresses": ["localhost:8000"]}}
    for name in runtime.RUNTIMES:
        runtime.use(name, **needed.get(name, {}))  # nothing starts before the block is entered


@pytest.mark.parametrize(
    "message, expected",
    [
        ("{{function_node __inference_2}} Cancelled [Op:__inference_2]", "Cancelled"),
        (
            "a.bin; No such file\n\t [[{{node ReadFile}}]]\n\t [[{{function_node b}}c]] in d [e]",
            "a.bin; No such file",
        ),
        ("values [[1, 2], [3]] are odd", "values [[1, 2], [3]] are odd"),
        (
            "ValueError: odd\nTraceback\n  f\n\n\t [[{{node PyFunc}}]]",
            "ValueError: odd\nTraceback\n  f",
        ),
        ("[[{{node x}}]]", "[[{{node x}}]]"),
        ("", ""),
    ],
)
def test_messages_of_tensorflow_without_its_names(message, expected):
    assert readable(message) == expected


@pytest.mark.parametrize("name", runtime.RUNTIMES)
def test_every_option_is_documented(name):
    options = importlib.import_module(runtime.RUNTIMES[name]).Options
    for option in options.names():
        assert f"      {option}: " in options.__doc__


def test_numpys_numbers_are_options():
    options = runtime.local.Options(
        default_num_clients=np.int64(3),
        startup_timeout=np.float32(2),
        stream_structs=np.bool_(True),
    )
    assert (options.default_num_clients, options.startup_timeout) == (3, 2.0)
    assert type(options.default_num_clients) is int and type(options.startup_timeout) is float
    assert options.stream_structs is True


def test_the_runtimes_need_nothing_else_of_the_package():
    folder = pathlib.Path(runtime.__file__).parent
    imported = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    ours = {name for name in imported if name.split(".")[0] == "tff_fedlabel"}
    assert ours and not {name for name in ours if not name.startswith("tff_fedlabel.runtime.")}
