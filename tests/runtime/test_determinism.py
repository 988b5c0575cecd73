"""Graphs: what TensorFlow refuses on a deterministic GPU, and what it has no GPU kernel for."""

import collections
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from short_resnet import build_short_resnet
from tensorflow.python.framework import config as private_config

import tff_fedlabel
from tff_fedlabel import algorithms, augmentation, models
from tff_fedlabel.runtime import _determinism, _private_tensorflow
from tff_fedlabel.runtime._compiling import compile_computation
from tff_fedlabel.runtime._graphs import Graph

CROSS_ENTROPY = "SparseSoftmaxCrossEntropyWithLogits"
SHAPE = (8, 8, 3)
MODELS = {"cnn": models.build_cnn, "resnet": build_short_resnet}

METHODS = {
    # A loop over what `RandAugment.single()` does once.
    "fedlabel, paper": ("fedlabel", augmentation.RandAugment(), "resnet"),
    "fedlabel, weak": ("fedlabel", augmentation.WeakAugment(), "cnn"),
    "fedavg": ("fedavg", None, "cnn"),
    "fedprox": ("fedprox", None, "cnn"),
}


@pytest.fixture
def deterministic():
    private_config.enable_op_determinism()
    yield
    private_config.disable_op_determinism()


def build(name):
    method, augment, model = METHODS[name]
    configs = {
        "fedlabel": tff_fedlabel.FedLabelConfig(strong_augment=augment),
        "fedprox": algorithms.FedProxConfig(proximal_strength=0.3),
    }
    return algorithms.ALGORITHMS[method](
        models.functional_model(MODELS[model](SHAPE, 4, width=4), input_shape=SHAPE),
        tff.learning.optimizers.build_sgdm(0.1),
        *([configs[method]] if method in configs else []),
    )


def graphs(process):
    plan = compile_computation(process.next)
    return {n: g.graph_def for n, g in vars(plan).items() if isinstance(g, Graph)}


@functools.cache
def graphs_without_determinism(name):
    return graphs(build(name))


def nodes(graph_def):
    bodies = (function.node_def for function in graph_def.library.function)
    return list(itertools.chain(graph_def.node, *bodies))


@pytest.mark.parametrize("name", METHODS)
def test_nothing_that_a_deterministic_gpu_refuses(name, deterministic):
    found = graphs(build(name))
    assert {"prepare", "work", "accumulate", "update"} <= set(found)
    assert len(nodes(found["work"])) > 500  # the functions of the loops are there
    for graph_def in found.values():
        types = {node.op for node in nodes(graph_def)}
        assert not types & _determinism.REFUSED
        assert not types & {"Timestamp", "RandomUniform", "RandomStandardNormal"}


@pytest.mark.parametrize("name", METHODS)
def test_built_without_determinism_it_is_the_cross_entropy_only(name):
    for original in graphs_without_determinism(name).values():
        graph_def = tf.compat.v1.GraphDef()
        graph_def.CopyFrom(original)
        before = [node.device for node in nodes(graph_def)]
        moved = _determinism.keep_on_cpu(graph_def)
        assert set(moved) <= {CROSS_ENTROPY}
        for node, device in zip(nodes(graph_def), before, strict=True):
            assert node.device == ("/device:CPU:0" if node.op == CROSS_ENTROPY else device)
        if not moved:
            same = (g.SerializeToString(deterministic=True) for g in (graph_def, original))
            assert next(same) == next(same)


@pytest.mark.parametrize("name", METHODS)
def test_the_clients_work_has_gpu_kernels(name):
    """For all operations with their dtypes: TensorFlow tells without a GPU."""
    if not tf.sysconfig.get_build_info()["is_cuda_build"]:
        pytest.skip("this TensorFlow is built without CUDA")
    work = graphs_without_determinism(name)["work"]
    own = {function.signature.name for function in work.library.function}
    without = collections.Counter()
    for node in nodes(work):
        support = _private_tensorflow.support_on_gpu(node)
        if node.op not in own and support.startswith(_private_tensorflow.NO_GPU_KERNEL):
            without[node.op, support] += 1
    assert set(without) <= {
        ("Const", "no GPU kernel for string"),  # what a failure would say
        ("GatherV2", "no GPU kernel for uint8"),  # images of the dataset that keep their label
    }


def node_of(op, **types):
    node = tf.compat.v1.NodeDef(op=op)
    for name, dtype in types.items():
        node.attr[name].type = tf.as_dtype(dtype).as_datatype_enum
    return node


@pytest.mark.parametrize(
    "node, expected",
    [
        (node_of("MatMul", T="float32"), "GPU kernel"),
        (node_of("ReduceDataset"), "no GPU kernel"),
        (node_of("MatMul", T="uint8"), "no GPU kernel for uint8"),
        (node_of("GatherV2", Tparams="uint8", Tindices="int64"), "no GPU kernel for uint8"),
        (node_of("FloorDiv", T="int32"), "host memory"),
        (node_of("FloorDiv", T="float32"), "GPU kernel"),
        (node_of("Shape", T="float32", out_type="int32"), "host memory"),
        # T is told by the definition's default: float32.
        (node_of("RandomUniformInt", Tout="int32", T="int32"), "GPU kernel"),
        (node_of("AnOperationThatIsNone"), "no GPU kernel"),
    ],
)
def test_support_on_a_gpu(node, expected):
    if not tf.sysconfig.get_build_info()["is_cuda_build"]:
        pytest.skip("this TensorFlow is built without CUDA")
    assert _private_tensorflow.support_on_gpu(node) == expected


def test_refused_operations_are_operations_with_gpu_kernels():
    """A misspelt name would never be found in a graph."""
    if not tf.sysconfig.get_build_info()["is_cuda_build"]:
        pytest.skip("this TensorFlow is built without CUDA")
    for op in _determinism.REFUSED | _determinism._BATCH_NORMS:
        assert _private_tensorflow._gpu_kernels(op), op


def test_batch_norms_are_refused_where_they_do_not_train():
    node = tf.compat.v1.NodeDef(op="FusedBatchNormGradV3")
    node.attr["is_training"].b = True
    assert not _determinism.is_refused(node)
    node.attr["is_training"].b = False
    assert _determinism.is_refused(node)


def test_levels_are_counted_as_numpy_counts_them():
    """Equalize's histogram, at the sizes and values where sums over segments could go wrong."""
    levels = np.concatenate(
        [np.zeros((1, 8, 8, 3)), np.full((1, 8, 8, 3), 255), np.arange(192).reshape(1, 8, 8, 3)]
    ).astype(np.float32)
    found = augmentation._operations._equalize(tf.constant(levels), None, None).numpy()
    for image, channel in itertools.product(range(3), range(3)):
        values = levels[image, ..., channel].astype(int)
        counts = np.bincount(values.ravel(), minlength=256)
        below = np.cumsum(counts) - counts
        step = below[values.max()] // 255
        table = np.minimum((step // 2 + below) // max(step, 1), 255) if step else np.arange(256)
        np.testing.assert_array_equal(found[image, ..., channel], table[values])
