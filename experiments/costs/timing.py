"""Seconds per client of all methods, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from benchmarks import harness

from costs.subject import Before, Size, Subject


def seconds_per_client(
    names: Sequence[str], size: Size, clients: int, turns: int, runtime: str
) -> dict[str, list[float]]:
    """Times a round of each method, then again of each, and so on.

    A round is all that is done for it, at the server too: the broadcast, the clients, the
    aggregation.

    Args:
      names: The methods.
      size: How much work a client has.
      clients: Clients in a round.
      turns: How often.
      runtime: The runtime that computes it.

    Returns:
      Method -> seconds of a round by the number of clients, one for each turn.
    """
    with harness.runners(runtime) as (runner,):
        rounds = {}
        for name in names:
            subject = Subject(name, size)
            rounds[name] = one_round(subject, subject.before(runner), clients, runner)
        seconds = harness.in_turn(rounds, turns)
    return {name: [value / clients for value in values] for name, values in seconds.items()}


def one_round(
    subject: Subject, before: Before, clients: int, runner: harness.Runner
) -> Callable[[], list[np.ndarray]]:
    """A function that computes the measured round, and returns the weights after it."""

    data = [subject.client_data(before.memories)] * clients

    def run():
        output = runner.call(before.process.next, before.state, data)
        return [np.asarray(w) for w in output.state.global_model_weights.trainable]

    return run
