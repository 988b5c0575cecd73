"""The simulated secure sums against NumPy's integers and TFF's own test backend."""

import collections

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_fedlabel import runtime

modular_sum = tff.backends.mapreduce.federated_secure_modular_sum


@pytest.fixture(scope="module")
def simulated():
    with runtime.use("device", simulate_secure_aggregation=True) as handle:
        yield handle


@pytest.fixture(scope="module")
def plain():
    with runtime.use("device") as handle:
        yield handle


def of_clients(member):
    return tff.FederatedType(tff.to_type(member), tff.CLIENTS)


def run(where, comp, *arguments):
    with where.installed():
        return comp(*arguments)


STRUCTURE = collections.OrderedDict(
    small=tff.TensorType(np.int32, [3]),
    pair=(tff.TensorType(np.int64), tff.TensorType(np.int32, [2, 2])),
)
BITS = collections.OrderedDict(small=4, pair=(40, 20))
MODULI = collections.OrderedDict(small=11, pair=(10**11 + 7, 2**20))


@tff.federated_computation(of_clients(STRUCTURE))
def all_three(value):
    return collections.OrderedDict(
        bits=tff.federated_secure_sum_bitwidth(value, BITS),
        most=tff.federated_secure_sum(value["small"], 15),
        most_each=tff.federated_secure_sum(value["pair"], (10**12, 2**20)),
        modular=modular_sum(value, MODULI),
        one_modulus=modular_sum(value["small"], 5),
        clear=tff.federated_sum(value["small"]),
    )


def draw(rng):
    return collections.OrderedDict(
        small=rng.integers(16, size=3).astype(np.int32),
        pair=(
            np.int64(rng.integers(10**12)),
            rng.integers(2**20, size=(2, 2)).astype(np.int32),
        ),
    )


def leaves(value):
    return [np.asarray(leaf) for leaf in tff.structure.flatten(as_struct(value))]


def as_struct(value):
    return tff.structure.from_container(value, recursive=True)


def test_raw_intrinsics_equal_numpy_and_tffs_test_backend(simulated, local_runtime):
    rng = np.random.default_rng(0)
    clients = [draw(rng) for _ in range(5)]
    found = run(simulated, all_three, clients)
    total = collections.OrderedDict(
        small=sum(np.int64(c["small"]) for c in clients),
        pair=(
            sum(int(c["pair"][0]) for c in clients),
            sum(np.int64(c["pair"][1]) for c in clients),
        ),
    )
    expected = collections.OrderedDict(
        bits=total,
        most=total["small"],
        most_each=total["pair"],
        modular=collections.OrderedDict(
            small=total["small"] % 11,
            pair=(total["pair"][0] % (10**11 + 7), total["pair"][1] % 2**20),
        ),
        one_modulus=total["small"] % 5,
        clear=total["small"],
    )
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    # TFF's bodies of the secure intrinsics, on TFF's own executor.
    replaced = tff.backends.test.replace_secure_intrinsics_with_bodies(all_three)
    for a, b in zip(leaves(found), leaves(run(local_runtime, replaced, clients)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)


def test_a_modular_sum_takes_any_integer(simulated):
    @tff.federated_computation(of_clients(np.int32))
    def wrapped(value):
        return modular_sum(value, 7)

    assert run(simulated, wrapped, [-3, 25, 6, -(2**31)]) == (-3 + 25 + 6 - 2**31) % 7


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64, np.uint64])
def test_dtypes(simulated, dtype):
    @tff.federated_computation(of_clients(dtype))
    def total(value):
        return tff.federated_secure_sum_bitwidth(value, 5)

    result = run(simulated, total, [dtype(31), dtype(0), dtype(30)])
    assert result == 61 and result.dtype == dtype
    assert run(simulated, total, []) == 0


def test_quantization_equals_numpys_integers(simulated):
    """A factory clips to [-b, b], rounds to 2**32 - 1 steps, and sums integers."""
    kind = tff.TensorType(np.float32, [50])
    process = tff.aggregators.SecureSumFactory(0.75).create(kind)
    rng = np.random.default_rng(1)
    clients = [rng.normal(size=50).astype(np.float32) for _ in range(4)]
    with simulated.installed():
        output = process.next(process.initialize(), clients)
    steps = 2**32 - 1
    scale = steps / 1.5
    lowest = int(np.rint(-0.75 * scale))
    quantized = [
        [min(max(int(np.rint(v * scale)) - lowest, 0), steps) for v in np.clip(c, -0.75, 0.75)]
        for c in np.float64(clients)
    ]
    sums = [sum(column) + 4 * lowest for column in zip(*quantized, strict=True)]
    np.testing.assert_array_equal(output.result, np.float32([s * (1.5 / steps) for s in sums]))
    clipped = np.clip(clients, -0.75, 0.75)
    np.testing.assert_allclose(output.result, clipped.sum(0), atol=4 * 1.5 / steps + 2e-7)
    assert np.abs(output.result - np.sum(clients, 0)).max() > 0.1  # what clipping costs
    assert output.measurements["secure_upper_clipped_count"] == 4


def test_integers_are_clipped(simulated):
    process = tff.aggregators.SecureSumFactory(10, -5).create(tff.TensorType(np.int32, [4]))
    clients = np.int32([[-9, 3, 10, 40], [2, -1, 11, -5]])
    with simulated.installed():
        output = process.next(process.initialize(), list(clients))
    np.testing.assert_array_equal(output.result, np.clip(clients, -5, 10).sum(0))


def secure_sum(dtype, most, bits=None, shape=()):
    @tff.federated_computation(of_clients(tff.TensorType(dtype, shape)))
    def total(value):
        if bits is not None:
            return tff.federated_secure_sum_bitwidth(value, bits)
        return tff.federated_secure_sum(value, most)

    return total


def test_what_breaks_a_protocol_is_an_error(simulated):
    cases = [
        (secure_sum(np.int32, 9), [3, 10], "client 1 of the cohort sends 10 to federated_secure_"),
        (secure_sum(np.int32, 9), [-1, 3], "client 0 .* sends -1 .* values from 0 to 9"),
        (secure_sum(np.int32, 0, bits=8), [256], "sends 256 .*bitwidth, .* from 0 to 255"),
        (secure_sum(np.int32, 2**31 - 1), [2**30] * 2, "does not fit in int32"),
        (secure_sum(np.int64, 2**62), [2**62] * 2, "does not fit in int64"),
        (secure_sum(np.uint64, 0, bits=62), [2**62 - 1] * 5, "does not fit in uint64"),
        (secure_sum(np.int64, 0, bits=63), [1], r"needs a bound in \[1, 62\], got 63"),
        (secure_sum(np.int32, -1), [0], "needs a bound of 0 or more, got -1"),
    ]
    for comp, clients, message in cases:
        with pytest.raises(runtime.ComputationError, match=message) as caught:
            run(simulated, comp, clients)
        assert "\n" not in str(caught.value)
    wide = secure_sum(np.int64, 0, bits=62)
    assert run(simulated, wide, [2**62 - 1] * 2) == 2**63 - 2


def test_without_the_option_it_is_named(plain):
    for comp in (secure_sum(np.int32, 9), all_three):
        with pytest.raises(
            runtime.UnsupportedComputationError,
            match="^the device runtime cannot run federated_secure_sum: .*"
            'use."device", simulate_secure_aggregation=True',
        ):
            run(plain, comp, [])
    with pytest.raises(ValueError, match="^simulate_secure_aggregation is 1"):
        runtime.use("device", simulate_secure_aggregation=1)
