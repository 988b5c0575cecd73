"""Runs that are small, and processes that are built once."""

import contextlib
import dataclasses

import one_layer
import pytest
from small_run import SMALL

from tff_fedlabel import models
from tff_fedlabel.training import experiment as experiments


@pytest.fixture(scope="session")
def built():
    """What `training.build` made in this process, by configuration."""
    return {}


@pytest.fixture
def build_once(built, compile_once, monkeypatch):
    """A process that was built, and compiled, serves all runs of its configuration."""
    build = experiments.build

    def cached(config, data_dir, **options):
        if options or config.init_from is not None:
            return build(config, data_dir, **options)
        # What the process does not depend on.
        key = repr(
            dataclasses.replace(
                config,
                rounds=1,
                eval_every=1,
                early_stopping_patience=None,
                lr_schedule="constant",
                client_accuracy=True,
            )
        )
        if key not in built:
            built[key] = build(config, data_dir)
        return dataclasses.replace(built[key], config=config)

    monkeypatch.setattr(experiments, "build", cached)


@pytest.fixture
def unbuilt(monkeypatch):
    """Experiments without a process, for what is checked before anything is trained."""

    def assemble(*parts, **_):
        return experiments.Experiment(*parts, None)

    monkeypatch.setattr(experiments, "assemble", assemble)


@pytest.fixture
def shared_worker(build_once, local_runtime, monkeypatch):
    """Runs in this process take the worker that all tests share."""
    from tff_fedlabel import runtime

    use = runtime.use

    def shared(name, **options):
        if name != "local":
            return use(name, **options)
        assert not options
        return contextlib.nullcontext(local_runtime)

    monkeypatch.setattr(runtime, "use", shared)


@pytest.fixture
def linear(monkeypatch):
    """The name of a model that runs, in this process, can have."""
    monkeypatch.setitem(models.MODELS, one_layer.NAME, one_layer.build)
    return one_layer.NAME


@pytest.fixture
def small_flags():
    return [f"--{name}={value}" for name, value in SMALL.items()]
