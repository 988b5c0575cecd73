"""What `RandAugment` and `WeakAugment` draw is a function of their arguments, in every runtime."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from grey_images import applied, as_float, levels_of, make_images
from tensorflow.python.framework import op_def_registry

from tff_fedlabel.augmentation import OPERATIONS, RandAugment, WeakAugment, step_seed

STRONG = RandAugment(num_ops=3, magnitude=20)
WEAK = WeakAugment()
BOTH = pytest.mark.parametrize("augment", [STRONG, WEAK], ids=["strong", "weak"])


def _all_variants(images, magnitude):
    """levels [14 * 2, batch, ...] of every operation and sign."""
    pairs = itertools.product(OPERATIONS, (1, -1))
    return np.stack([applied(name, images, magnitude, sign) for name, sign in pairs])


def _count_variants(augment, images, **key):
    """How often each operation and sign explains an image's output."""
    variants = _all_variants(images, augment.magnitude)
    outputs = levels_of(augment(as_float(images), **key))
    fits = (variants == outputs[np.newaxis]).all(axis=(2, 3, 4))
    assert fits.any(axis=0).all(), "an output is none of the operations"
    return dict(zip(itertools.product(OPERATIONS, (1, -1)), fits.sum(axis=1), strict=True))


def test_one_slot_draws_each_operation_and_sign_equally():
    images = make_images(1400, 20, 18, seed=1)  # below 256 pixels Equalize changes nothing
    counts = _count_variants(RandAugment(1, 30), images, seed=(3, 5))
    signed = set(OPERATIONS) - {"Identity", "AutoContrast", "Equalize", "Solarize", "Posterize"}
    for name in OPERATIONS:
        if name in signed:
            # 50 expected: 5 standard deviations either side
            assert 16 < counts[name, 1] < 86 and 16 < counts[name, -1] < 86, (name, counts)
        else:
            assert 52 < counts[name, 1] < 150, (name, counts)


def test_slots_follow_one_another():
    images = make_images(40, 8, 8, seed=2)
    outputs = levels_of(RandAugment(2, 30)(as_float(images), seed=(1, 0)))
    once = _all_variants(images, 30)
    twice = _all_variants(np.uint8(once).reshape(-1, *images.shape[1:]), 30)
    twice = twice.reshape(len(once), *once.shape)  # [second, first, batch, ...]
    fits = (twice == outputs).all(axis=(3, 4, 5))
    assert fits.any(axis=(0, 1)).all(), "an output is no pair of operations"
    # With one draw for both slots every output would be an operation applied twice.
    repeated = np.stack([fits[pair, pair] for pair in range(len(fits))]).any(axis=0)
    assert repeated.mean() < 0.5


def test_no_slots_return_the_images_untouched():
    images = np.random.default_rng(0).random((3, 8, 8, 1), np.float32)
    np.testing.assert_array_equal(RandAugment(0)(images, seed=(0, 0)), images)


@pytest.mark.parametrize("flip", [True, False])
def test_weak_flips_and_shifts_with_reflection(flip):
    images = make_images(1200, 10, 9, seed=4)
    outputs = levels_of(WeakAugment(flip, max_shift=2)(as_float(images), seed=(9, 2)))
    counts = {}
    padded = np.pad(images, [(0, 0), (2, 2), (2, 2), (0, 0)], "reflect")
    for mirrored, down, right in itertools.product((False, True), range(5), range(5)):
        expected = padded[:, down : down + 10, right : right + 9]
        expected = expected[:, :, ::-1] if mirrored else expected
        counts[mirrored, down, right] = (expected == outputs).all(axis=(1, 2, 3)).sum()
    assert sum(counts.values()) == len(images)
    expected = len(images) / (50 if flip else 25)
    for (mirrored, _, _), count in counts.items():
        if mirrored and not flip:
            assert count == 0
        else:
            assert abs(count - expected) < 5 * expected**0.5, counts


def test_weak_without_flip_and_shift_is_the_identity():
    images = np.random.default_rng(0).random((3, 8, 8, 1), np.float32)
    np.testing.assert_array_equal(WeakAugment(False, 0)(images, seed=(0, 0)), images)


@BOTH
def test_same_pixels_wherever_the_image_stands(augment):
    images = as_float(make_images(20))
    whole = augment(images, seed=(4, 7)).numpy()
    order = np.random.default_rng(0).permutation(20)
    np.testing.assert_array_equal(augment(images[order], seed=(4, 7)), whole[order])
    for image in range(0, 20, 7):
        alone = augment(images[image : image + 1], seed=(4, 7))
        np.testing.assert_array_equal(alone, whole[image : image + 1])


@BOTH
def test_same_pixels_in_a_graph_of_unknown_batch_size(augment):
    images = as_float(make_images(12))

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, *images.shape[1:]], tf.float32),
            tf.TensorSpec([2], tf.int32),
        ]
    )
    def in_graph(images, seed):
        return augment(images, seed=seed)

    expected = augment(images, seed=(11, 2))
    np.testing.assert_array_equal(in_graph(images, [11, 2]), expected)
    np.testing.assert_array_equal(in_graph(images[3:5], [11, 2]), expected[3:5])
    assert in_graph(images[:0], [11, 2]).shape == (0, *images.shape[1:])
    assert in_graph.get_concrete_function().output_shapes.as_list() == [None, *images.shape[1:]]


@BOTH
def test_python_numbers_and_tensors_mean_the_same(augment):
    images = as_float(make_images(12))
    expected = augment(images, seed=(-3, 6))
    for seed in [
        [-3, 6],
        tf.constant([-3, 6]),
        tf.constant([-3, 6], tf.int64),
        np.int64([-3, 6]),
        [tf.constant(-3), 6],
    ]:
        np.testing.assert_array_equal(augment(images, seed=seed), expected)


def _assert_drawn_apart(outputs):
    for one, other in itertools.combinations(outputs, 2):
        same = (one == other).all(axis=(1, 2, 3)).mean()
        assert same < 0.3


@BOTH
def test_seeds_and_images_draw_differently(augment):
    images = as_float(make_images(40, seed=5))
    seeds = [(0, 0), (0, 1), (1, 0), (1, 1), (2**30, 0), (0, 2**20), (-1, 0), (0, -(2**31))]
    outputs = [augment(images, seed=seed).numpy() for seed in seeds]
    _assert_drawn_apart(outputs)
    # Images that differ in one pixel by one level draw afresh.
    twins = np.repeat(make_images(1, seed=6), 40, axis=0)
    twins[np.arange(40), np.arange(40) % 32, np.arange(40) % 24, 0] ^= 1
    moved = augment(as_float(twins), seed=(0, 0)).numpy()
    assert len(np.unique(np.round(moved * 64).reshape(40, -1), axis=0)) > 10


@BOTH
def test_the_same_image_in_two_steps_of_a_round_draws_differently(augment):
    images = as_float(make_images(40, seed=8))
    _assert_drawn_apart([augment(images, seed=step_seed(3, 7, step)).numpy() for step in range(4)])


def test_weak_and_strong_draw_independently():
    # With a shared stream, images with the same weak flip would share half of the operations.
    images = make_images(600, 8, 8, seed=7)
    weak = levels_of(WeakAugment(True, 0)(as_float(images), seed=(0, 0)))
    flipped = (weak != images).any(axis=(1, 2, 3))
    strong = levels_of(RandAugment(1, 30)(as_float(images), seed=(0, 0)))
    for name in ("Rotate", "TranslateY"):
        chosen = np.zeros(len(images), bool)
        for sign in (1, -1):
            chosen |= (applied(name, images, 30, sign) == strong).all(axis=(1, 2, 3))
        assert 0.15 < flipped[chosen].mean() < 0.85


@BOTH
@pytest.mark.parametrize("channels", [1, 3])
def test_empty_batch_and_result_type(augment, channels):
    images = tf.zeros([0, 28, 28, channels])
    assert augment(images, seed=(0, 0)).shape == (0, 28, 28, channels)
    result = augment(tf.ones([2, 28, 28, channels]), seed=(0, 0))
    assert result.dtype == tf.float32 and result.shape == (2, 28, 28, channels)


def test_ten_operations_of_any_strength_stay_in_range():
    images = np.random.default_rng(1).random((16, 32, 32, 3), np.float32)
    for magnitude in (1, 30):
        result = RandAugment(10, magnitude)(images, seed=(0, 0)).numpy()
        assert np.isfinite(result).all() and result.min() >= 0 and result.max() <= 1


# In other runtimes.


@pytest.mark.parametrize("augment", [RandAugment(), WEAK], ids=["strong", "weak"])
def test_graph_has_no_variable_and_no_stateful_operation(augment):
    function = tf.function(lambda images: augment(images, seed=(0, 0)))
    graph = function.get_concrete_function(tf.TensorSpec([None, 32, 32, 3])).graph
    assert not graph.captures and not graph.variables
    definition = graph.as_graph_def()
    nodes = [*definition.node]
    for library_function in definition.library.function:
        nodes += library_function.node_def
    assert len(nodes) > 20
    assert not {node.op for node in nodes if op_def_registry.get(node.op).is_stateful}
    assert not [node.op for node in nodes if "Var" in node.op]


def test_graph_can_be_imported_again():
    images = as_float(make_images(8))
    function = tf.function(lambda images: STRONG(images, seed=(1, 2)))
    concrete = function.get_concrete_function(tf.TensorSpec([None, *images.shape[1:]]))
    definition = concrete.graph.as_graph_def()

    def load():
        tf.graph_util.import_graph_def(definition, name="")

    imported = tf.compat.v1.wrap_function(load, [])
    feed, fetch = concrete.inputs[0].name, concrete.outputs[0].name
    run = imported.prune(
        imported.graph.get_tensor_by_name(feed), imported.graph.get_tensor_by_name(fetch)
    )
    np.testing.assert_array_equal(run(tf.constant(images)), STRONG(images, seed=(1, 2)))


@pytest.mark.parametrize("channels", [1, 3])
def test_same_pixels_in_tffs_worker(local_runtime, channels):
    images = as_float(make_images(64, channels=channels))
    strong = RandAugment(10, 1)
    spec = tf.TensorSpec([None, *images.shape[1:]], tf.float32)

    @tff.tensorflow.computation(tff.SequenceType(tff.types.tensorflow_to_type(spec)), np.int32)
    def collect(batches, round_num):
        def append(results, batch):
            return tuple(
                tf.concat([result, augment(batch, seed=step_seed(8, round_num, 1))], axis=0)
                for result, augment in zip(results, (strong, STRONG, WEAK), strict=True)
            )

        return batches.reduce((tf.zeros([0, *images.shape[1:]]),) * 3, append)

    collected = collect(tf.data.Dataset.from_tensor_slices(images).batch(24), 5)
    for actual, augment in zip(collected, (strong, STRONG, WEAK), strict=True):
        np.testing.assert_array_equal(actual, augment(images, seed=step_seed(8, 5, 1)))
