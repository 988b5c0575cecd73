"""TFF's optimizers on server and clients, and learning rates that change, against float64 NumPy."""

import numpy as np
import pytest
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_client, to_tff
from numpy_reference import CLASSES, Reference, flat, softmax
from weights import assert_weights_close

from tff_fedlabel import FedLabelConfig, build_fedavg, build_fedlabel

pytestmark = pytest.mark.usefixtures("device_runtime")
optimizers = tff.learning.optimizers
COHORTS = [[random_client(seed), random_client(seed + 1, labeled=7)] for seed in (1, 3, 5)]


class Adam:
    """Kingma & Ba 2015, section 2: the order of computation with one learning rate a step."""

    def __init__(self, lr, epsilon=1e-7):
        self.lr, self.epsilon, self.step, self.m, self.v = lr, epsilon, 0, 0.0, 0.0

    def second_moment(self, g):
        return 0.999 * self.v + 0.001 * g**2

    def __call__(self, w, g):
        self.step += 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, self.second_moment(g)
        lr = self.lr * np.sqrt(1 - 0.999**self.step) / (1 - 0.9**self.step)
        return w - lr * self.m / (np.sqrt(self.v) + self.epsilon)


class Yogi(Adam):
    """Zaheer et al. 2018, algorithm 2, with TFF's defaults and Adam's correction of the bias."""

    def __init__(self, lr):
        super().__init__(lr, epsilon=1e-3)
        self.v = 1e-6

    def second_moment(self, g):
        return self.v - 0.001 * np.sign(self.v - g**2) * g**2


class Adagrad:
    """Duchi et al. 2011, from a first accumulator of 0.1."""

    def __init__(self, lr):
        self.lr, self.sum = lr, 0.1

    def __call__(self, w, g):
        self.sum = self.sum + g**2
        return w - self.lr * g / np.sqrt(self.sum + 1e-7)


def train(process, cohorts=COHORTS, before_round=lambda round_num, state: state):
    state = process.initialize()
    for round_num, cohort in enumerate(cohorts):
        state = before_round(round_num, state)
        state = process.next(state, [to_tff(client) for client in cohort]).state
    return process.get_model_weights(state).trainable


def start():
    return [np.float64(np.float32(w)) for w in initial_weights()]


def mean_delta(reference, weights, cohort):
    outputs = [reference.client(weights, *client) for client in cohort]
    total = sum(r for _, r in outputs)
    return [sum(r * delta[i] for delta, r in outputs) / total for i in range(2)]


@pytest.mark.parametrize(
    "build, numpy_optimizer, method",
    [
        (optimizers.build_adam, Adam, "fedlabel"),
        # The server's part is the same for all methods, and FedAvg is quicker to compile.
        (optimizers.build_yogi, Yogi, "fedavg"),
        (optimizers.build_adagrad, Adagrad, "fedavg"),
    ],
)
def test_the_server_takes_any_optimizer(build, numpy_optimizer, method):
    """FedAdam, FedYogi, FedAdagrad (Reddi et al. 2021): the update is minus the mean delta."""
    builder, *config = {
        "fedlabel": (build_fedlabel, FedLabelConfig(strong_augment=None)),
        "fedavg": (build_fedavg,),
    }[method]
    process = builder(
        build_model(initial_weights()),
        optimizers.build_sgdm(0.3),
        *config,
        server_optimizer=build(0.1),
    )
    found = train(process)
    weights, steps = start(), [numpy_optimizer(0.1) for _ in range(2)]
    for cohort in COHORTS:
        used = cohort if method == "fedlabel" else [(labeled, []) for labeled, _ in cohort]
        delta = mean_delta(Reference(), weights, used)
        weights = [step(w, -d) for step, w, d in zip(steps, weights, delta, strict=True)]
    assert_weights_close(found, weights, atol=1e-4)


def labeled_delta(weights, batches, make_optimizer):
    """A client's labelled steps from fresh optimizer state, and its number of images."""
    weights = [w.copy() for w in weights]
    before, steps, used = [w.copy() for w in weights], [make_optimizer() for _ in weights], 0
    for x, y in batches:
        error = softmax(flat(x) @ weights[0] + weights[1]) - np.eye(CLASSES)[y]
        gradients = [flat(x).T @ error / len(y), error.mean(axis=0)]
        weights = [s(w, g) for s, w, g in zip(steps, weights, gradients, strict=True)]
        used += len(y)
    return [w - w0 for w, w0 in zip(weights, before, strict=True)], used


def test_clients_keep_optimizer_state_within_a_round_only():
    process = build_fedavg(build_model(initial_weights()), optimizers.build_adam(0.05))
    found = train(process)
    weights = start()
    for cohort in COHORTS:
        outputs = [labeled_delta(weights, labeled, lambda: Adam(0.05)) for labeled, _ in cohort]
        total = sum(used for _, used in outputs)
        weights = [
            w + sum(used * delta[i] for delta, used in outputs) / total
            for i, w in enumerate(weights)
        ]
    assert_weights_close(found, weights, atol=1e-4)


def test_hyper_parameters_are_set_from_round_to_round():
    process = build_fedlabel(
        build_model(initial_weights()),
        optimizers.build_sgdm(0.3, momentum=0.9),
        FedLabelConfig(strong_augment=None),
        server_optimizer=optimizers.build_sgdm(1.0),
    )
    client_lrs, server_lrs = (0.3, 0.1, 0.02), (1.0, 0.5, 0.25)

    def set_rates(round_num, state):
        hparams = process.get_hparams(state)
        hparams["client_work"]["learning_rate"] = np.float32(client_lrs[round_num])
        hparams["finalizer"]["learning_rate"] = np.float32(server_lrs[round_num])
        state = process.set_hparams(state, hparams)
        again = process.get_hparams(state)
        assert again["client_work"]["learning_rate"] == np.float32(client_lrs[round_num])
        assert again["client_work"]["momentum"] == np.float32(0.9)
        assert again["finalizer"]["learning_rate"] == np.float32(server_lrs[round_num])
        return state

    found = train(process, before_round=set_rates)
    weights = start()
    for cohort, lr, server_lr in zip(COHORTS, client_lrs, server_lrs, strict=True):
        delta = mean_delta(Reference(lr=lr, lr_momentum=0.9), weights, cohort)
        weights = [w + server_lr * d for w, d in zip(weights, delta, strict=True)]
    assert_weights_close(found, weights, atol=1e-4)
