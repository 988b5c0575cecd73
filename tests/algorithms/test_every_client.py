"""An aggregation that counts every client of the cohort, against the guard that does not."""

import numpy as np
import pytest
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_client, to_tff
from weights import assert_weights_equal

from tff_fedlabel import build_fedavg
from tff_fedlabel.algorithms import every_client

pytestmark = pytest.mark.usefixtures("device_runtime")
sgd = tff.learning.optimizers.build_sgdm
EMPTY = [to_tff(random_client(seed, labeled=0)) for seed in (1, 2)]
SOME = [to_tff(random_client(3)), *EMPTY]


def deltas(factory, cohort):
    process = build_fedavg(build_model(initial_weights()), sgd(0.2), model_aggregator=factory)
    state = process.initialize()
    output = process.next(state, cohort)
    return [
        new - old
        for new, old in zip(
            process.get_model_weights(output.state).trainable,
            process.get_model_weights(state).trainable,
            strict=True,
        )
    ]


def noisy(clients):
    return tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(1.0, clients, 0.3)


def test_noise_comes_whether_or_not_a_client_contributed():
    unchanged = deltas(tff.aggregators.as_weighted_aggregator(noisy(2.0)), EMPTY)
    assert_weights_equal(unchanged, [np.zeros_like(d) for d in unchanged])
    changed = deltas(every_client.EveryClient(noisy(2.0)), EMPTY)
    assert all((d != 0).all() for d in changed)


def test_clients_without_an_update_count_in_the_mean():
    alone = deltas(None, SOME[:1])
    among = deltas(every_client.EveryClient(tff.aggregators.UnweightedMeanFactory()), SOME)
    for one, three in zip(alone, among, strict=True):
        np.testing.assert_allclose(three, one / 3, rtol=1e-5, atol=1e-7)


def test_only_an_unweighted_factory_is_taken():
    with pytest.raises(ValueError, match="^factory must be a tff.aggregators.Unweighted"):
        every_client.EveryClient(tff.aggregators.MeanFactory())
