"""Finds which deployments each method allows, and writes the table of it.

python experiments/deployment_table.py --output experiments/results/deployment.md

Of each method's process, built on a small linear model: whether its `next` compiles to TFF's
MapReduceForm and DistributeAggregateForm, and for each runtime; and whether three rounds with each
of TFF's recommended aggregators, in the device runtime, move the weights and leave them finite.
"""

import collections
import functools
import sys

from absl import flags

from tff_fedlabel import command_line

FLAGS = flags.FLAGS
COMMAND = "python experiments/deployment_table.py --output experiments/results/deployment.md"


def define_flags() -> None:
    flags.DEFINE_string("output", "runs/deployment.md", "the Markdown file to write")


@functools.cache
def _model_and_optimizer():
    """A linear model of images [2, 2, 1] and three classes."""
    import tensorflow as tf
    import tensorflow_federated as tff

    from tff_fedlabel import models

    def build_keras():
        layers = [tf.keras.layers.Input((2, 2, 1)), tf.keras.layers.Flatten()]
        return tf.keras.Sequential([*layers, tf.keras.layers.Dense(3)])

    model = models.functional_model(build_keras, input_shape=(2, 2, 1))
    return model, tff.learning.optimizers.build_sgdm(0.1)


def build(method, **tail):
    """The method's process on the linear model."""
    fields = method.config_class.__dataclass_fields__
    wanted = {"strong_augment": None, "weak_augment": None, "threshold": 0.5}
    config = method.config_class(**{k: v for k, v in wanted.items() if k in fields})
    if method.server_training is not None:
        tail["server_data"] = _labelled(7)
    return method(*_model_and_optimizer(), config, **tail)


def _labelled(seed):
    import numpy as np

    rng = np.random.default_rng(seed)
    x = rng.integers(256, size=(8, 2, 2, 1)).astype(np.uint8)
    return collections.OrderedDict(x=x, y=rng.integers(3, size=8).astype(np.int32))


def _client(seed):
    import tensorflow as tf

    labeled = _labelled(seed)
    unlabeled = collections.OrderedDict(x=_labelled(seed + 100)["x"])
    batches = [tf.data.Dataset.from_tensor_slices(d).batch(4) for d in (labeled, unlabeled)]
    return collections.OrderedDict(labeled=batches[0], unlabeled=batches[1])


def forms(method, asked=None) -> dict[str, bool]:
    """What the process compiles to, and which runtimes compile it; by name of the column.

    Only the columns in `asked`, if it is given.
    """
    import tensorflow_federated as tff

    comp = build(method).next
    native, mapreduce = tff.backends.native, tff.backends.mapreduce
    compilers = {
        "MapReduceForm": mapreduce.get_map_reduce_form_for_computation,
        "DistributeAggregateForm": mapreduce.get_distribute_aggregate_form_for_computation,
        "`local`": native.desugar_and_transform_to_native,
        "`workers`": native.compile_to_mergeable_comp_form,
    }
    # The device runtime runs what compiles to MapReduceForm.
    compilers["`device`"] = compilers["MapReduceForm"]
    compilers = {name: c for name, c in compilers.items() if asked is None or name in asked}
    ready = {compiler: _compiles(compiler, comp) for compiler in set(compilers.values())}
    return {name: ready[compiler] for name, compiler in compilers.items()}


def _compiles(compiler, comp) -> bool:
    try:
        compiler(comp)
    except (TypeError, ValueError, NotImplementedError):  # TFF has no class of its own for it
        return False
    return True


@functools.cache
def aggregators() -> dict[str, dict]:
    """Name of the column -> arguments of the builder."""
    import tensorflow_federated as tff

    learning = tff.learning
    private = tff.aggregators.as_weighted_aggregator(learning.dp_aggregator(0.1, 3))
    return {
        "`secure_aggregator`": {"model_aggregator": learning.secure_aggregator()},
        "`robust_aggregator`": {"model_aggregator": learning.robust_aggregator()},
        "`compression_aggregator` with `add_debug_measurements`": {
            "model_aggregator": learning.compression_aggregator(
                debug_measurements_fn=learning.add_debug_measurements
            )
        },
        "`dp_aggregator`, uniform": {
            "model_aggregator": private,
            "client_weighting": learning.ClientWeighting.UNIFORM,
        },
    }


def takes(method, column: str) -> bool:
    """Whether three rounds with an aggregator move the weights and leave them finite."""
    import numpy as np

    from tff_fedlabel import algorithms, runtime
    from tff_fedlabel.training import memory as client_memory

    try:
        process = build(method, **aggregators()[column])
    except ValueError:
        return False  # refused by the builder
    memory = None
    if method.initial_memory is not None:
        initial = algorithms.initial_memory(method, *_model_and_optimizer())
        memory = client_memory.ClientMemory(initial, method.choose_helpers)
    with runtime.use("device", simulate_secure_aggregation=True):
        state = first = process.initialize()
        for round_num in range(3):
            cohort = [_client(number) for number in range(3)]
            if memory is not None:
                cohort = [memory.attach(c, n, round_num) for n, c in enumerate(cohort)]
            output = process.next(state, cohort)
            state = output.state
            if memory is not None:
                memory.update(output.metrics["client_work"]["memory"])
        pairs = zip(
            process.get_model_weights(first).trainable,
            process.get_model_weights(state).trainable,
            strict=True,
        )
    return all(np.isfinite(b).all() and (a != b).any() for a, b in pairs)


def columns() -> list[str]:
    """The columns after the method's name."""
    compiled = ["MapReduceForm", "DistributeAggregateForm", "`device`", "`local`", "`workers`"]
    return [*compiled, *aggregators()]


def table() -> str:
    """The whole file."""
    from tff_fedlabel import algorithms

    lines = [["method", *columns()], ["---"] * (1 + len(columns()))]
    for name, method in algorithms.METHODS.items():
        found = {**forms(method), **{column: takes(method, column) for column in aggregators()}}
        lines.append([name, *("yes" if found[column] else "no" for column in columns())])
        print(*lines[-1], sep=", ")
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"""# Where each method can be deployed

    {COMMAND}

made it: what the process of each method, on a linear model, compiles to (MapReduceForm,
DistributeAggregateForm) and for which runtimes, and with which of TFF's recommended aggregators
three rounds in the device runtime, which simulates secure sums, move the weights and leave them
finite.

{rows}
"""


def write() -> int:
    from tff_fedlabel._replacing import replacing

    command_line.check_output("output", FLAGS.output, folder=False)
    with replacing(FLAGS.output) as partial:
        partial.write_text(table())
    print(f"table: {FLAGS.output}")
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run_command(sys.argv, define_flags, write))
