"""What `runtime.use` refuses, and when."""

import pytest

from tff_fedlabel import runtime


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("locl", {}), r"no runtime 'locl' \(did you mean 'local'\?\); there is: .*local"),
        (("", {}), "no runtime ''; there is: .*local"),
        ((None, {}), "no runtime None"),
        (("local", {"log_fle": "x"}), r"no option 'log_fle' \(did you mean 'log_file'\?\)"),
        (("local", {"zzz": 1}), "has no option 'zzz'; there is: asynchronous, default_num"),
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
