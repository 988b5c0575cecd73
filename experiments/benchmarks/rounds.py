"""Whole rounds: client work, round time, overhead per client, and shares of a FedLabel round."""

import functools

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import tff_fedlabel
from benchmarks import bare, setup
from benchmarks.harness import Goal, Table, in_turn, runners
from tff_fedlabel import augmentation

_BATCH = 32


def _fedlabel_data(clients: int, steps: int):
    images = steps * _BATCH
    return setup.round_data(setup.clients(clients, images, images), range(clients), _BATCH)


def _size(clients: int, steps: int) -> str:
    return f"CNN, {clients} clients, {steps}+{steps} steps of {_BATCH}"


def every_image_kept():
    """FedLabel at its most expensive; then the work does not depend on the weights."""
    return tff_fedlabel.FedLabelConfig(
        threshold=0.0, strong_augment=augmentation.RandAugment.single()
    )


def client_work(table: Table, options: setup.Options) -> None:
    """FedLabel in a runtime against the same tensor operations in one `tf.function`."""
    sizes = ((2, 2), (3, 2)) if options.quick else ((4, 4), (10, 10), (10, 20))
    model, optimizer = setup.cnn(), tff.learning.optimizers.build_sgdm(0.01)
    arguments = (model, optimizer, every_image_kept())
    client_update = bare.client_update_of("fedlabel", *arguments)
    bare_round = bare.build_round(model, optimizer, client_update)
    process = tff_fedlabel.build_fedlabel(*arguments)
    with runners(options.runtime) as (tested,):
        for clients, steps in sizes:
            data = _fedlabel_data(clients, steps)
            functions = {
                tested.label: tested.round(process, data),
                "bare": functools.partial(bare_round, data),
            }
            initial, _ = model.initial_weights
            bare.check_same(initial, *(function() for function in functions.values()))
            seconds = in_turn(functions, options.repeats)
            table.add(
                _size(clients, steps),
                f"{tested.label} round",
                "bare tf.function",
                "s",
                seconds[tested.label],
                seconds["bare"],
                Goal(1.1),
            )


def round_time(table: Table, options: setup.Options) -> None:
    """A FedLabel round in a runtime against TFF's C++ worker, with either loop."""
    sizes = ((2, 2), (3, 2)) if options.quick else ((10, 10), (10, 20))
    loops = tff.learning.LoopImplementation
    processes = {
        loop: tff_fedlabel.build_fedlabel(
            setup.cnn(),
            tff.learning.optimizers.build_sgdm(0.01),
            every_image_kept(),
            loop_implementation=loop,
        )
        for loop in (loops.DATASET_ITERATOR, loops.DATASET_REDUCE)
    }
    with runners(options.runtime, "local") as (tested, local):
        for clients, steps in sizes:
            data = _fedlabel_data(clients, steps)
            functions = {tested.label: tested.round(processes[loops.DATASET_ITERATOR], data)}
            for loop, process in processes.items():
                functions[loop] = local.round(process, data)
            seconds = in_turn(functions, options.repeats)
            for loop, limit in ((loops.DATASET_REDUCE, 0.85), (loops.DATASET_ITERATOR, 0.95)):
                table.add(
                    _size(clients, steps),
                    f"{tested.label} round",
                    f"{local.label} round, {loop.name}",
                    "s",
                    seconds[tested.label],
                    seconds[loop],
                    Goal(limit),
                )


def overhead(table: Table, options: setup.Options) -> None:
    """What a client costs when its work is next to nothing, and where that goes."""
    sizes = (10, 40) if options.quick else (100, 1000, 5000)
    batch = 10
    model, optimizer = setup.linear(), tff.learning.optimizers.build_sgdm(0.01)
    client_update = bare.client_update_of("fedavg", model, optimizer)
    bare_round = bare.build_round(model, optimizer, client_update)
    process = tff_fedlabel.build_fedavg(model, optimizer)
    with runners(options.runtime, "local") as (tested, local):
        functions = {}
        for number in sizes:
            clients = setup.clients(number, 2 * batch, 0)
            build = functools.partial(setup.round_data, clients, range(number), batch)
            data, empty = build(), setup.without_batches(number)
            functions |= {
                ("tested", number): tested.round(process, data),
                ("tested, no batches", number): tested.round(process, empty),
                ("local", number): local.round(process, data),
                ("bare", number): functools.partial(bare_round, data),
                ("bare, no batches", number): functools.partial(bare_round, empty),
                ("building the datasets", number): build,
            }
        # All sizes in one turn: flatness is a ratio, too.
        seconds = in_turn(functions, options.repeats)

    milliseconds = {
        (name, number): [1000 * s / number for s in values]
        for (name, number), values in seconds.items()
    }
    labels = {"tested": tested.label, "local": local.label}
    labels["tested, no batches"] = f"{tested.label}, no batches"

    def add(size, a, b, goal=None):
        (name_a, _), (name_b, _) = a, b
        label_a, label_b = (labels.get(name, name) for name in (name_a, name_b))
        if name_a == name_b:
            label_a, label_b = (f"{label_a}, {number:,} clients" for _, number in (a, b))
        table.add(size, label_a, label_b, "ms per client", milliseconds[a], milliseconds[b], goal)

    for number in sizes:
        size = f"linear model, {number:,} clients, 2 batches of {batch}"
        for name_a, name_b, goal in (
            ("tested", "local", Goal(2.0, of="A")),
            ("tested", "bare", None),
            ("tested, no batches", "tested", None),
            ("bare, no batches", "bare", None),
            ("building the datasets", "tested", None),
        ):
            add(size, (name_a, number), (name_b, number), goal)
    for name, goal in (("tested", Goal(1.2)), ("local", None), ("bare", None)):
        size = f"linear model, 2 batches of {batch}"
        add(size, (name, sizes[-1]), (name, sizes[0]), goal)


def shares(table: Table, options: setup.Options) -> None:
    """Parts of a FedLabel round, as differences of rounds that have them and that do not.

    The labelled steps, the two experts that label, the student's steps and the strong augmentation
    add up to the round. Skipping is seen at half the images kept, against propagating them all.
    """
    sizes = ((2, 2), (3, 2)) if options.quick else ((4, 4), (10, 10))
    model = setup.cnn()
    # So small a step that the share of kept images does not change.
    optimizer = tff.learning.optimizers.build_sgdm(1e-9)
    single, paper = augmentation.RandAugment.single(), augmentation.RandAugment()
    images = setup.clients(1, 0, 256)
    (batch,) = setup.round_data(images, [0], 256)[0]["unlabeled"]
    logits = model.predict_on_batch(model.initial_weights, batch["x"], training=False)
    half = float(np.median(tf.nn.softmax(logits).numpy().max(axis=1)))

    def fedlabel(threshold, augment, skip=True):
        config = tff_fedlabel.FedLabelConfig(
            threshold=threshold, strong_augment=augment, skip_discarded=skip
        )
        return tff_fedlabel.build_fedlabel(model, optimizer, config)

    processes = {
        "labelled steps": tff_fedlabel.build_fedavg(model, optimizer),
        "nothing kept": fedlabel(1.0, None),
        "no augmentation": fedlabel(0.0, None),
        "single": fedlabel(0.0, single),
        "paper": fedlabel(0.0, paper),
        "half, kept only": fedlabel(half, single),
        "half, all images": fedlabel(half, single, skip=False),
    }
    with runners(options.runtime) as (tested,):
        for clients, steps in sizes:
            data = _fedlabel_data(clients, steps)
            seconds = in_turn(
                {name: tested.round(process, data) for name, process in processes.items()},
                options.repeats,
            )
            seconds = {name: np.array(values) for name, values in seconds.items()}
            single_round = f"{tested.label} round, 1 operation at magnitude 10"
            for part, difference in (
                ("labelled steps", seconds["labelled steps"]),
                ("experts", seconds["nothing kept"] - seconds["labelled steps"]),
                ("student", seconds["no augmentation"] - seconds["nothing kept"]),
                ("strong augmentation", seconds["single"] - seconds["no augmentation"]),
            ):
                table.add(
                    _size(clients, steps), part, single_round, "s", difference, seconds["single"]
                )
            table.add(
                _size(clients, steps),
                "strong augmentation",
                f"{tested.label} round, 10 operations at magnitude 1",
                "s",
                seconds["paper"] - seconds["no augmentation"],
                seconds["paper"],
            )
            table.add(
                _size(clients, steps),
                f"{tested.label} round, half kept, kept images only",
                f"{tested.label} round, half kept, all images",
                "s",
                seconds["half, kept only"],
                seconds["half, all images"],
            )
