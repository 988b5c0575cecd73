"""Tasks as the paper has them, choices checked, cohorts drawn from (seed, round) alone."""

import dataclasses
import math
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tff_fedlabel import tasks, training

FLAGFILES = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "flagfiles"


@pytest.mark.parametrize(
    "name,model,clients,cohort,fraction",
    [  # Section 4.1 of the paper.
        ("emnist", "resnet18", 100, 10, 0.2),
        ("cifar10", "resnet34", 100, 10, 0.2),
        ("cifar100", "resnet50", 100, 10, 0.2),
        ("organamnist", "resnet18", 10, 3, 0.05),
        ("bloodmnist", "resnet18", 5, 5, 0.05),
    ],
)
def test_tasks_of_the_paper(name, model, clients, cohort, fraction):
    config = training.make_config(name)
    assert config.source == name and config.algorithm == "fedlabel"
    assert (config.model, config.num_clients, config.clients_per_round) == (model, clients, cohort)
    assert (config.labeled_fraction, config.alpha) == (fraction, 0.1)
    assert config.width is None
    method = config.algorithm_config()
    assert (method.strong_augment.num_ops, method.strong_augment.magnitude) == (10, 1.0)
    assert (method.threshold, method.consistency_weight) == (0.5, 1.0)
    assert method.confidence == "variance"


def test_our_tasks():
    digits, fashion = training.make_config("digits"), training.make_config("fashion_mnist")
    assert (digits.num_clients, digits.clients_per_round) == (20, 5)
    assert (digits.alpha, digits.labeled_fraction, digits.model) == (1.0, 0.2, "cnn")
    assert (fashion.num_clients, fashion.clients_per_round) == (100, 10)
    assert (fashion.alpha, fashion.labeled_fraction, fashion.model) == (0.1, 0.05, "cnn")


@pytest.mark.parametrize(
    "field,value",
    [
        ("algorithm", "fedlable"),
        ("model", "vgg"),
        ("partition", "shards"),
        ("split", "half"),
        ("strong_augment", "strong"),
        ("rounds", 0),
        ("num_clients", 0),
        ("clients_per_round", 0),
        ("clients_per_round", 21),
        ("tau", 0),
        ("tau", 2**31),
        ("tau_unlabeled", 2**31),
        ("tau_unlabeled", "all"),
        ("width", 0),
        ("labeled_fraction", 0.0),
        ("labeled_fraction", 1.01),
        ("alpha", 0.001),
        ("alpha", math.nan),
        ("lr", 0.0),
        ("server_momentum", 1.5),
        ("threshold", 1.5),
        ("consistency_weight", -0.5),
        ("confidence", "softmax"),
        ("selection", "best"),
        ("seed", -1),
        ("eval_every", 0),
        ("mixed_precision", "float8"),
    ],
)
def test_wrong_choice_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"^{field} "):
        training.make_config("digits", **{field: value})


def test_parameters_of_another_method_are_refused():
    for name, value in (("threshold", 0.9), ("proximal_strength", 0.1), ("selection", "local")):
        with pytest.raises(ValueError, match=f"^{name} is not a parameter of the algorithm fedavg"):
            training.make_config("digits", "fedavg", **{name: value})


def test_unknown_names_get_the_nearest():
    with pytest.raises(ValueError, match="did you mean cifar10"):
        training.make_config("cifar1O")
    with pytest.raises(ValueError, match="did you mean fedlabel"):
        training.make_config("digits", "fedlabels")


def test_choices_reach_the_method():
    config = training.make_config(
        "digits", threshold=0.7, confidence="entropy", strong_augment="none"
    )
    method = config.algorithm_config()
    assert (method.threshold, method.confidence, method.strong_augment) == (0.7, "entropy", None)
    assert training.make_config("digits", "fedprox").algorithm_config().proximal_strength == 0.01


def test_every_task_has_a_flag_file_that_says_what_the_task_does():
    assert {path.stem for path in FLAGFILES.glob("*.flags")} == set(tasks.TASKS)
    for path in FLAGFILES.glob("*.flags"):
        said = dict(line[2:].split("=") for line in path.read_text().splitlines())
        assert said.pop("task") == path.stem
        assert len(said) >= 12
        for name, value in said.items():
            wanted = getattr(tasks.TASKS[path.stem], name)
            assert type(wanted)(value) == wanted, (path.stem, name)


@pytest.fixture(scope="module")
def experiment():
    return training.build(training.make_config("digits", width=4, tau="epoch", tau_unlabeled=2))


def images_of(cohort):
    return [np.concatenate([b["x"].numpy() for b in client["labeled"]]) for client in cohort]


def test_cohorts_depend_on_seed_and_round_alone(experiment):
    first, again, other = (images_of(experiment.cohort(r)) for r in (0, 0, 1))
    assert len(first) == 5
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(a.shape != b.shape or (a != b).any() for a, b in zip(first, other, strict=True))


def test_a_client_is_drawn_once_a_round(experiment):
    for round_num in range(5):
        images = np.concatenate(images_of(experiment.cohort(round_num)))
        # tau = "epoch" takes every labelled image once, so a repeat would be a client drawn twice.
        distinct = np.unique(images.reshape(len(images), -1), axis=0)
        assert len(images) - len(distinct) <= 1  # two writers can draw the same 8 x 8 digit


def test_steps(experiment):
    for client in experiment.cohort(3):
        unlabeled = [len(b["x"]) for b in client["unlabeled"]]
        assert unlabeled == [16, 16]
        assert sum(len(b["x"]) for b in client["labeled"]) == 14  # 20% of 1437 // 20 = 71


def test_supervised_methods_get_no_unlabeled_work():
    config = training.make_config("digits", "fedavg", width=4)
    for client in training.build(config).cohort(0):
        assert len(list(client["unlabeled"])) <= 1


@pytest.mark.parametrize("dtype,mantissa", [("float16", 10), ("bfloat16", 7)])
def test_mixed_precision_is_the_models_and_nobody_elses(experiment, dtype, mantissa):
    config = dataclasses.replace(experiment.config, mixed_precision=dtype)
    mixed = training.build(config)
    assert tf.keras.mixed_precision.global_policy().name == "float32"
    for weight, other in zip(
        mixed.model.initial_weights[0], experiment.model.initial_weights[0], strict=True
    ):
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, other)
    images = experiment.source.test.x[:50]
    logits, exact = (
        e.model.predict_on_batch(e.model.initial_weights, images, training=False).numpy()
        for e in (mixed, experiment)
    )
    error = np.abs(logits - exact).max() / np.abs(exact).max()
    assert 2.0 ** -(mantissa + 8) < error < 2.0 ** -(mantissa - 3)
