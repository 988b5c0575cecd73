"""What TensorFlow refuses on a GPU under op determinism, and how it is computed anyway.

`tf.config.experimental.enable_op_determinism` makes some operations raise `UnimplementedError`
when they run on a GPU. Their CPU kernels are deterministic, so they are placed there: a graph that
was traced before determinism was turned on, or contains a user's model, runs too.

Checked for TensorFlow 2.14.1 and 2.21.0, which refuse the same operations:

* Of the operations below, the clients' work of this package contains at most one:
  SparseSoftmaxCrossEntropyWithLogits, in a process that was built before the runtime was started.
  Inside the block, TensorFlow's Python code traces log_softmax and a gather instead, whose gradient
  is a segment sum.
* Refused in cases that the graph does not show, and left where they are: Svd of one column,
  scatter operations on TensorFlow 1's variables, depthwise convolutions with a cuDNN before 7.6.3.
* Not refused, with a deterministic algorithm under the flag: convolutions and their gradients,
  BiasAddGrad, segment sums (integers need none: their sum is the same in any order), the gradients
  of gather and bilinear resizing. Scatter operations run on the CPU without being moved.
* Not refused, and the same in any order: reductions, cumulative sums of integers, gathers,
  DynamicPartition, DynamicStitch with each index once, Where, ArgMax, matrix products,
  ImageProjectiveTransformV3 (not its gradient), stateless random numbers, tf.cond and loops.
* Refused on any device: Timestamp, and random operations without a seed, such as those that draw
  the noise of TFF's differential privacy. Its clipping, zeroing and compression run.
* tf.data keeps the order of its elements, and a map that has state runs serially. The clients'
  datasets here have none.
"""

from __future__ import annotations

import collections

import tensorflow as tf

from tff_fedlabel.runtime._graphs import all_nodes

REFUSED = frozenset(
    {
        "AdjustContrast",
        "AdjustContrastv2",
        "Bincount",
        "CropAndResizeGradBoxes",
        "CropAndResizeGradImage",
        "DenseBincount",
        "Dilation2DBackpropFilter",
        "Dilation2DBackpropInput",
        "FakeQuantWithMinMaxVarsGradient",
        "FakeQuantWithMinMaxVarsPerChannelGradient",
        "MaxPoolGradWithArgmax",
        "ResizeNearestNeighborGrad",
        "SoftmaxCrossEntropyWithLogits",
        "SparseSoftmaxCrossEntropyWithLogits",
        "SparseTensorDenseMatMul",
    }
)
# Refused unless in training mode.
_BATCH_NORMS = frozenset({"FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"})
_CPU = "/device:CPU:0"
_SUFFIX = "_refused_on_cpu"


def keep_on_cpu(graph_def: tf.compat.v1.GraphDef) -> collections.Counter:
    """Places the refused operations of a graph and of its functions on the CPU.

    Args:
      graph_def: Changed in place.

    Returns:
      Type of operation -> how many there are.
    """
    moved = collections.Counter()
    for node in all_nodes(graph_def):
        if is_refused(node):
            node.device = _CPU
            moved[node.op] += 1
    if moved:
        _rename_functions(graph_def)
    return moved


def _rename_functions(graph_def) -> None:
    """Avoids name clashes: a process has one function per name, perhaps the unchanged one."""
    names = {f.signature.name: f.signature.name + _SUFFIX for f in graph_def.library.function}
    for node in all_nodes(graph_def):
        node.op = names.get(node.op, node.op)
        for value in node.attr.values():
            kind = value.WhichOneof("value")
            called = [value.func] if kind == "func" else value.list.func if kind == "list" else ()
            for function in called:
                function.name = names.get(function.name, function.name)
    for function in graph_def.library.function:
        function.signature.name = names[function.signature.name]
    for gradient in graph_def.library.gradient:
        gradient.function_name = names.get(gradient.function_name, gradient.function_name)
        gradient.gradient_func = names.get(gradient.gradient_func, gradient.gradient_func)


def is_refused(node) -> bool:
    """Whether TensorFlow refuses a node on a GPU under op determinism."""
    if node.op in _BATCH_NORMS:
        return "is_training" in node.attr and not node.attr["is_training"].b
    return node.op in REFUSED
