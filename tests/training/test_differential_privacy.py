"""Noise, clipping and epsilon against NumPy and SciPy, and a whole private run."""

import dataclasses
import functools
import json
import math
import types

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from scipy import optimize, special, stats

from tff_fedlabel import algorithms, runtime, training
from tff_fedlabel.training import differential_privacy
from tff_fedlabel.training import experiment as experiments

epsilon = differential_privacy.epsilon
PRIVATE = {"dp_noise_multiplier": 1.5, "dp_clipping_norm": 0.5}


def gaussian_delta(eps, mu):
    """Balle & Wang 2018, Theorem 8: delta of a Gaussian mechanism, mu = sensitivity / sigma."""
    second = np.exp(eps + stats.norm.logcdf(-mu / 2 - eps / mu))
    return stats.norm.cdf(mu / 2 - eps / mu) - second


def gaussian_epsilon(delta, mu):
    return optimize.brentq(lambda eps: gaussian_delta(eps, mu) - delta, 0, 1000, xtol=1e-12)


def from_renyi(orders, divergences, delta):
    """Canonne, Kamath, Steinke 2020, Proposition 12."""
    eps = divergences + np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    return eps.min()


def log_binomial(n, k):
    return special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)


@pytest.mark.parametrize("z, rounds, delta", [(1.0, 1, 1e-5), (2.5, 40, 1e-3), (0.7, 9, 0.02)])
def test_without_sampling_epsilon_is_that_of_the_gaussian_mechanism(z, rounds, delta):
    sizes = {"num_clients": 20, "clients_per_round": 20, "rounds": rounds, "delta": delta}
    mu = math.sqrt(rounds) / z
    known = epsilon(z, **{**sizes, "clients_per_round": 5}, sampling="known")
    assert known == pytest.approx(gaussian_epsilon(delta, mu), abs=1e-6)
    # Replacing a client moves the sum by up to two clipping norms.
    replaced = epsilon(z, **sizes)
    assert replaced == pytest.approx(gaussian_epsilon(delta, 2 * mu), abs=1e-6)


@pytest.mark.parametrize(
    "z, clients, drawn, rounds", [(1.2, 1000, 50, 300), (2.0, 100, 10, 150), (3.0, 500, 50, 400)]
)
def test_poisson_sampling_is_numpys_renyi_accounting(z, clients, drawn, rounds):
    """Mironov, Talwar, Zhang 2019, section 3.3, for whole orders."""
    q, delta, orders = drawn / clients, clients**-1.1, np.arange(2, 200)
    divergences = []
    for order in orders:
        k = np.arange(order + 1)
        terms = log_binomial(order, k) + k * np.log(q) + (order - k) * np.log1p(-q)
        terms += (k * k - k) / (2 * z * z)
        divergences.append(special.logsumexp(terms) / (order - 1))
    expected = from_renyi(orders, rounds * np.array(divergences), delta)
    sizes = {"num_clients": clients, "clients_per_round": drawn, "rounds": rounds}
    found = epsilon(z, **sizes, delta=delta, sampling="poisson")
    # The library also tries orders between whole numbers, which can only help.
    assert 0.97 * expected < found <= expected * (1 + 1e-9)


@pytest.mark.parametrize("z, clients, drawn", [(4.0, 1000, 50), (6.0, 100, 10), (10.0, 20, 5)])
def test_sampling_without_replacement_lies_between_truth_and_bound(z, clients, drawn):
    q, delta, mu = drawn / clients, clients**-1.1, 2 / z
    sizes = {"num_clients": clients, "clients_per_round": drawn, "delta": delta}
    # One round, exactly: Balle, Barthe, Gaboardi 2018, Theorem 9, is tight for a replaced record.
    if q * gaussian_delta(0.0, mu) > delta:
        inner = optimize.brentq(lambda e: q * gaussian_delta(e, mu) - delta, 0, 100)
        assert epsilon(z, **sizes, rounds=1) >= math.log1p(q * math.expm1(inner))
    # Wang, Balle, Kasiviswanathan 2019, Theorem 9 with epsilon(infinity) infinite: an upper bound
    # of the upper bound.
    orders, divergences = np.arange(2, 64), []
    for order in orders:
        j = np.arange(3, order + 1)
        second = 2 * mu**2 / 2
        total = q**2 * math.comb(order, 2) * min(4 * math.expm1(second), 2 * math.exp(second))
        logs = j * np.log(q) + log_binomial(order, j) + np.log(2) + (j - 1) * j * mu**2 / 2
        log_total = special.logsumexp([0.0, np.log(total), *logs])
        divergences.append(log_total / (order - 1))
    for rounds in (1, 200):
        bound = from_renyi(orders, rounds * np.array(divergences), delta)
        found = epsilon(z, **sizes, rounds=rounds)
        assert found <= bound * (1 + 1e-9)
        # Half the noise multiplier, and no more than without sampling.
        assert found <= gaussian_epsilon(delta, math.sqrt(rounds) * mu) + 1e-6


def test_epsilon_of_nothing_and_of_wrong_numbers():
    sizes = {"num_clients": 10, "clients_per_round": 5, "rounds": 3, "delta": 0.01}
    assert epsilon(1.0, **{**sizes, "rounds": 0}) == 0
    more = [epsilon(1.0, **{**sizes, "rounds": rounds}) for rounds in (1, 2, 4)]
    assert more == sorted(more) and more[0] > 0
    for name, value in [
        ("num_clients", 0),
        ("clients_per_round", 11),
        ("rounds", -1),
        ("delta", 0.0),
        ("sampling", "shuffled"),
    ]:
        with pytest.raises(ValueError, match=f"^{name}"):
            epsilon(1.0, **{**sizes, name: value})
    for noise in (0.0, 1e-300, 1e300):
        with pytest.raises(ValueError, match="^noise_multiplier"):
            epsilon(noise, **sizes)


@pytest.mark.parametrize("sampling", ["without_replacement", "poisson", "known"])
def test_the_least_and_the_most_noise_have_an_epsilon(sampling):
    """So that no run ends without its summary."""
    sizes = {"num_clients": 10, "clients_per_round": 5, "rounds": 3, "delta": 0.01}
    least, most = (epsilon(noise, **sizes, sampling=sampling) for noise in (1e-9, 1e9))
    assert 1e17 < least < np.inf and 0 <= most < 0.1


def test_little_loss_is_not_rounded_below_nothing():
    """Of few among many clients, under much noise."""
    sizes = {"num_clients": 10**6, "clients_per_round": 10, "rounds": 3, "delta": 1e-7}
    assert 0 <= epsilon(1000.0, **sizes, sampling="poisson") < 0.1


def test_participations_are_of_the_busiest_client():
    rounds = [[0, 1], [1, 2], [1, 0], [3, 1]]
    draw = [np.array(clients) for clients in rounds].__getitem__
    assert differential_privacy.participations(draw, 5, 4) == 4
    assert differential_privacy.participations(draw, 5, 1) == 1


def make_config(**choices):
    return training.make_config("digits", num_clients=30, clients_per_round=20, **choices)


@pytest.mark.parametrize("norm", [0.5, None])
def test_the_mean_is_clipped_and_noised(norm):
    """A vector long enough to measure the noise; weights and r_k have no part in it."""
    z, clients, size = 1.5, 20, 40_000
    config = make_config(dp_noise_multiplier=z, dp_clipping_norm=norm)
    options = differential_privacy.builder_options(config)
    assert options["client_weighting"] is tff.learning.ClientWeighting.UNIFORM
    vector = tff.TensorType(np.float32, [size])
    process = options["model_aggregator"].create(vector, tff.TensorType(np.float32))
    rng = np.random.default_rng(0)
    direction = rng.normal(size=size) / math.sqrt(size)
    direction /= np.linalg.norm(direction)
    # 15 clients far beyond the norm, 4 with nothing to say, one within.
    scales = [100.0] * 15 + [0.0] * 4 + [0.05]
    values = [(scale * direction).astype(np.float32) for scale in scales]
    with runtime.use("device"):
        state = process.initialize()
        results = [process.next(state, values, [0.0] * clients).result for _ in range(2)]
    c, stddev = (norm, z) if norm else (0.1, (z**-2 - (2 * 0.05 * clients) ** -2) ** -0.5)
    mean = sum(min(scale, c) for scale in scales) / clients * direction
    noises = [np.float64(result) - mean for result in results]
    for noise in noises:
        # 40,000 draws: 2% are more than 5 standard errors.
        assert noise.std() == pytest.approx(stddev * c / clients, rel=0.02)
        assert abs(noise.mean()) < 5 * stddev * c / clients / math.sqrt(size)
    assert abs(np.corrcoef(*noises)[0, 1]) < 0.03  # Drawn anew, from the same state.


def test_tensorflows_seed_does_not_seed_the_noise():
    config = make_config(**PRIVATE)
    results = []
    for _ in range(2):
        tf.random.set_seed(7)
        factory = differential_privacy.builder_options(config)["model_aggregator"]
        process = factory.create(tff.TensorType(np.float32, [50]), tff.TensorType(np.float32))
        with runtime.use("device"):
            state = process.initialize()
            results.append(process.next(state, [np.zeros(50, np.float32)], [1.0]).result)
    assert not np.isclose(*results).any()


@pytest.mark.parametrize(
    "choices, message",
    [
        ({"dp_clipping_norm": 1.0}, "dp_clipping_norm needs dp_noise_multiplier"),
        ({"dp_delta": 0.01}, "dp_delta needs dp_noise_multiplier"),
        ({"dp_noise_multiplier": 0.0}, "dp_noise_multiplier must be a number in \\[1e-09"),
        ({"dp_noise_multiplier": 1e-300}, "dp_noise_multiplier must be a number in \\[1e-09"),
        ({"dp_noise_multiplier": 2.0}, "below a tenth of clients_per_round \\(2\\) with adaptive"),
        ({**PRIVATE, "dp_delta": 0.04}, "dp_delta must be below 1 / num_clients"),
        ({**PRIVATE, "dp_clipping_norm": -1.0}, "dp_clipping_norm must be a number in \\(0"),
    ],
)
def test_bad_choices_are_refused(choices, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_config(**choices)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "field", ["aggregate", "server_state", "choose_helpers", "server_training"]
)
def test_methods_that_release_more_than_updates_are_refused(field):
    needs = {"server_state": "server_update", "choose_helpers": "initial_memory"}
    fields = {name: print for name in (field, needs.get(field)) if name}
    method = dataclasses.replace(algorithms.METHODS["fedlabel"], name="own", **fields)
    config = types.SimpleNamespace(**PRIVATE, dp_delta=None, num_clients=5, clients_per_round=2)
    with pytest.raises(ValueError, match="with the algorithm own: it .* without noise"):
        differential_privacy.check(config, method)
    differential_privacy.check(config, algorithms.METHODS["fedlabel"])


@pytest.mark.usefixtures("build_once")
def test_a_private_run_ends_with_its_epsilon_and_counts_each_round_once(
    main, small_flags, linear, tmp_path, capsys, monkeypatch
):
    # What the run has asked for, in the same words, is not computed again for the test.
    known = functools.cache(epsilon)
    monkeypatch.setattr(differential_privacy, "epsilon", known)
    where = ("--output_dir", str(tmp_path / "run"), "--algorithm", "fedavg", "--model", linear)
    noise = ("--dp_noise_multiplier", "1.5", "--dp_clipping_norm", "0.5")
    for wrong in (("--checkpoint_every", "2"), ("--deterministic",)):
        assert main(*small_flags, *noise, *where, *wrong) == 2
        assert "cannot be used with" in (err := capsys.readouterr().err) or "must be 1" in err
        assert "Traceback" not in err
    assert main(*small_flags, *noise, *where, "--rounds", "2") == 0
    first = json.loads((tmp_path / "run" / "summary.json").read_text())
    capsys.readouterr()
    assert main("--resume", *where[:2], "--rounds", "5") == 0
    printed = capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    sizes = {"num_clients": 6, "clients_per_round": 3}
    for rounds, found in ((2, first), (5, summary)):
        assert found["dp_delta"] == pytest.approx(6**-1.1)
        of = functools.partial(known, 1.5, **sizes, rounds=rounds, delta=6**-1.1)
        assert found["dp_epsilon"] == of(sampling="without_replacement")
        assert found["dp_epsilon_poisson"] == of(sampling="poisson")
    counts = np.zeros(6, int)
    for round_num in range(5):
        rng = np.random.default_rng(np.random.SeedSequence((1, 0, round_num)))
        counts[rng.choice(6, 3, replace=False)] += 1
    mu = math.sqrt(counts.max()) / 1.5
    expected = gaussian_epsilon(6**-1.1, mu)
    assert summary["dp_epsilon_known_cohorts"] == pytest.approx(expected, abs=1e-6)
    assert f"epsilon {summary['dp_epsilon']:.3g} at delta 0.139" in printed
    assert "metrics of training are not private" in printed
    for part in ("5 rounds of 3 of 6 clients", "without replacement", "metrics are not"):
        assert part in summary["dp_accounting"]


def test_no_noise_no_privacy():
    assert differential_privacy.builder_options(make_config()) == {}
    assert differential_privacy.summary(make_config(), 5, 2) == {}
    experiment = types.SimpleNamespace(config=make_config())
    assert experiments.Experiment.privacy(experiment, 5) == {}
