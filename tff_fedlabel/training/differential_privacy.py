"""Differentially private runs: the aggregation with noise, and what privacy the run ends with.

What is protected is a client with all its images (user-level privacy), and what is private is the
trained model, with every model on the way there. The metrics of training (losses, shares, numbers
of images) are sums over the clients without noise and are not.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from tff_fedlabel import _validation

if TYPE_CHECKING:
    from tff_fedlabel import algorithms
    from tff_fedlabel.training.config import RunConfig

# TFF's adaptive clipping adds noise of this many clients to the count of clipped clients, and the
# noise multiplier must stay below twice that.
_COUNT_STDDEV = 0.05

# Noise multipliers for which epsilon can be computed; at the least of them it is above 10**17.
_LEAST_NOISE, _MOST_NOISE = 1e-9, 1e9
# More is counted as this much, which bounds it, and is nearly 0; its divergences take minutes.
_ENOUGH_NOISE = 1e3

# What a method may do beside sending an update, none of which gets noise.
_WITHOUT_NOISE = {
    "aggregate": "has an aggregation of its own",
    "server_state": "sums up what clients send beside their updates",
    "choose_helpers": "passes clients' memories on to other clients",
    "server_training": "trains on labelled images at the server",
}


def check(config: RunConfig, method: algorithms.Method) -> dict[str, float]:
    """Checks the fields `dp_*` of a configuration.

    Returns:
      Those that are set, as Python's numbers.

    Raises:
      ValueError: One is out of its range, or does not fit the method or the other fields.
    """
    checked = {
        name: _validation.check_number(name, getattr(config, name), low, high, open_low=not low)
        for name, low, high in (
            ("dp_noise_multiplier", _LEAST_NOISE, 1e3),
            ("dp_clipping_norm", 0.0, 1e6),
            ("dp_delta", 0.0, 1.0),
        )
        if getattr(config, name) is not None
    }
    noise = checked.get("dp_noise_multiplier")
    if noise is None:
        if checked:
            raise ValueError(f"{next(iter(checked))} needs dp_noise_multiplier.")
        return checked
    for field, what in _WITHOUT_NOISE.items():
        if getattr(method, field) is not None:
            raise ValueError(
                f"dp_noise_multiplier cannot be used with the algorithm {method.name}: it {what}, "
                "which would go without noise."
            )
    if config.num_clients < 2:
        raise ValueError("dp_noise_multiplier needs 2 clients or more: privacy is among clients.")
    if checked.get("dp_delta", 0.0) >= 1 / config.num_clients:
        raise ValueError(
            f"dp_delta must be below 1 / num_clients ({1 / config.num_clients:g}), got "
            f"{config.dp_delta!r}."
        )
    limit = 2 * _COUNT_STDDEV * config.clients_per_round
    if "dp_clipping_norm" not in checked and noise >= limit:
        raise ValueError(
            "dp_noise_multiplier must be below a tenth of clients_per_round "
            f"({limit:g}) with adaptive clipping, got {config.dp_noise_multiplier!r}; give "
            "dp_clipping_norm for a fixed norm, or take more clients per round."
        )
    return checked


def check_run(config: RunConfig, checkpoint_every: int, runtime_options: dict[str, Any]) -> None:
    """Raises ValueError if a private run cannot be run in this way."""
    if config.dp_noise_multiplier is None:
        return
    if checkpoint_every != 1:
        raise ValueError(
            "checkpoint_every must be 1 with dp_noise_multiplier: a round that is lost and "
            "computed again would release its model twice, with new noise."
        )
    if runtime_options.get("deterministic"):
        raise ValueError(
            "deterministic cannot be used with dp_noise_multiplier: noise has no seed."
        )


def builder_options(config: RunConfig) -> dict[str, Any]:
    """The arguments of a method's builder that make its process private; none without noise.

    With a clipping norm C, each client's whole update is scaled down to an L2 norm of C, the
    updates are added up, Gaussian noise of standard deviation z C (z the noise multiplier) is added
    to the sum, and the sum is divided by `clients_per_round`. Without one, TFF adapts C to the
    median norm (Andrew et al. 2021, arXiv:1905.03871), from 0.1 in the first round: the median is
    estimated from a count that gets noise too, and the noise of the sum is raised so that both
    together are worth z. Weights are 1 for all clients.
    """
    noise = config.dp_noise_multiplier
    if noise is None:
        return {}
    import tensorflow_federated as tff

    from tff_fedlabel.algorithms import every_client

    private = tff.aggregators.DifferentiallyPrivateFactory
    clients = float(config.clients_per_round)
    if config.dp_clipping_norm is None:
        # `tff.learning.dp_aggregator` is this with zeroing, whose threshold is learnt from the
        # clients without noise.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That noise is raised: `text` says so.
            factory = private.gaussian_adaptive(noise, clients)
    else:
        factory = private.gaussian_fixed(noise, clients, config.dp_clipping_norm)
    return {
        "client_weighting": tff.learning.ClientWeighting.UNIFORM,
        "model_aggregator": every_client.EveryClient(factory),
    }


def default_delta(num_clients: int) -> float:
    """num_clients ** -1.1, a common choice below 1 / num_clients."""
    return num_clients**-1.1


def epsilon(
    noise_multiplier: float,
    *,
    num_clients: int,
    clients_per_round: int,
    rounds: int,
    delta: float,
    sampling: str = "without_replacement",
) -> float:
    """An upper bound of epsilon for the models of all rounds together.

    Args:
      noise_multiplier: z, the standard deviation of the noise on the sum of the clipped updates,
        divided by the clipping norm.
      num_clients: M, clients in all.
      clients_per_round: m, clients in a round.
      rounds: T.
      delta: in (0, 1).
      sampling: How the clients of a round are drawn, and what is compared.
        * "without_replacement": m of M, uniformly and independently in each round, and hidden. Two
          sets of clients are neighbours if one client's data is replaced by other data. The sum
          then changes by up to two clipping norms, so the accountant gets z / 2
          (`dp_accounting` takes the multiplier relative to that change). Wang, Balle,
          Kasiviswanathan 2019, arXiv:1808.00087, Theorem 27, by Renyi orders; where that is worse,
          the value without any gain from sampling.
        * "poisson": each client with probability m / M, hidden; neighbours differ by one client
          more. What most papers give (Mironov, Talwar, Zhang 2019, arXiv:1908.10530).
        * "known": a client takes part in `rounds` rounds (m and M have no part in it), and these
          may be known to everybody. Neighbours: the client's data, or none. Exact (Balle, Wang
          2018, arXiv:1805.06530).

    Raises:
      ValueError: A number is out of its range, or no such `sampling`.
    """
    check = _validation
    z = check.check_number("noise_multiplier", noise_multiplier, _LEAST_NOISE, _MOST_NOISE)
    clients = check.check_int("num_clients", num_clients)
    drawn = check.check_int("clients_per_round", clients_per_round, 1, clients + 1)
    rounds = check.check_int("rounds", rounds, 0)
    delta = check.check_number("delta", delta, 0.0, 1.0, open_low=True)
    check.check_name("sampling", sampling, ("without_replacement", "poisson", "known"))
    if not rounds or delta == 1:
        return 0.0
    if sampling == "known":
        return _gaussian(z / math.sqrt(rounds), delta)
    import dp_accounting
    from dp_accounting import rdp

    if sampling == "poisson":
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    else:
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE

    def renyi(z):
        if sampling == "poisson":
            event = dp_accounting.PoissonSampledDpEvent(
                drawn / clients, dp_accounting.GaussianDpEvent(z)
            )
        else:
            # Not z, though the event's docstring asks for it: its accountant does not double the
            # sensitivity (google/differential-privacy, issue 378).
            event = dp_accounting.SampledWithoutReplacementDpEvent(
                clients, drawn, dp_accounting.GaussianDpEvent(z / 2)
            )
        accountant = rdp.RdpAccountant(neighboring_relation=relation)
        accountant.compose(event, rounds)
        try:
            return float(accountant.get_epsilon(delta))
        except ValueError:
            if z <= 1:
                raise
            # Divergences so small that they are rounded below 0. Less noise gives a bound as well.
            return renyi(z / 2)

    found = renyi(min(z, _ENOUGH_NOISE))
    if sampling == "without_replacement":
        found = min(found, _gaussian(z / 2 / math.sqrt(rounds), delta))
    return found


def _gaussian(noise_multiplier: float, delta: float) -> float:
    """The exact epsilon of one Gaussian mechanism, its noise relative to the sensitivity."""
    from dp_accounting.pld import privacy_loss_mechanism
    from scipy import optimize

    mechanism = privacy_loss_mechanism.GaussianPrivacyLoss(noise_multiplier)

    def excess(eps):
        # An array: the library's way with a single number fails under NumPy 2.
        return mechanism.get_delta_for_epsilon(np.array([eps]))[0] - delta

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    # At `high` or just above the root, never below it.
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-9)) + 1e-9


def participations(draw, num_clients: int, rounds: int) -> int:
    """How often the client took part that did so most often.

    Args:
      draw: `(round_num) -> positions of the clients`, int [m].
      num_clients: M.
      rounds: T.
    """
    counts = np.zeros(num_clients, np.int64)
    for round_num in range(rounds):
        counts[draw(round_num)] += 1
    return int(counts.max())


def summary(config: RunConfig, rounds: int, most_rounds: int) -> dict[str, Any]:
    """The privacy of a run's model, for summary.json; {} for a run without noise.

    Args:
      config: The run's choices.
      rounds: Rounds that were done, each counted once.
      most_rounds: Rounds of the client that took part most often.
    """
    z = config.dp_noise_multiplier
    if z is None:
        return {}
    sizes = {"num_clients": config.num_clients, "clients_per_round": config.clients_per_round}
    delta = config.dp_delta
    delta = default_delta(config.num_clients) if delta is None else delta
    of = {
        sampling: epsilon(z, **sizes, rounds=number, delta=delta, sampling=sampling)
        for sampling, number in (
            ("without_replacement", rounds),
            ("poisson", rounds),
            ("known", most_rounds),
        )
    }
    norm = config.dp_clipping_norm
    clipping = "adapted to the median by TFF" if norm is None else f"{norm:g}"
    text = (
        f"user-level; noise multiplier {z:g} on the sum of updates, clipping norm {clipping}, "
        f"{rounds} rounds of {config.clients_per_round} of {config.num_clients} clients; "
        f"dp_epsilon: one client replaced, fixed-size cohorts without replacement (RDP), as drawn "
        "here; dp_epsilon_poisson: one client added or removed, Poisson sampling (RDP), as papers "
        "quote; both only while nobody knows the cohorts, so the seed; "
        f"dp_epsilon_known_cohorts: one client's data or none, cohorts known, {most_rounds} rounds "
        "of the client that took part most often; only the model is private, metrics are not"
    )
    return {
        "dp_epsilon": of["without_replacement"],
        "dp_epsilon_poisson": of["poisson"],
        "dp_epsilon_known_cohorts": of["known"],
        "dp_delta": delta,
        "dp_accounting": text,
    }
