"""TFF's evaluation of personalization with our client work, against NumPy."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from linear_model import build_model, initial_weights, random_images
from numpy_reference import CLASSES, Reference, flat, softmax

from tff_fedlabel import FedLabelConfig, algorithms, runtime
from tff_fedlabel.algorithms import personalization

LR, BATCH, PASSES = 0.3, 4, 2


def examples(x, y):
    return tf.data.Dataset.from_tensor_slices(collections.OrderedDict(x=x, y=y))


def random_client(seed, images):
    rng = np.random.default_rng(seed)
    x, y = random_images(rng, images), rng.integers(CLASSES, size=images).astype(np.int32)
    return x, np.where(np.arange(images) % 3 == 0, y, -1).astype(np.int32)


def expected_metrics(weights, x, y):
    logits = flat(x) @ weights[0] + weights[1]
    accuracy = np.mean(np.argmax(logits, axis=1) == y)
    return accuracy, -np.mean(np.log(softmax(logits)[np.arange(len(y)), y])), len(y)


def test_it_is_the_local_update_of_numpy():
    model = build_model(initial_weights())
    sgd = tff.learning.optimizers.build_sgdm(LR)
    config = FedLabelConfig(strong_augment=None)
    sizes = {"batch_size": BATCH, "passes": PASSES}
    computation = tff.learning.algorithms.build_personalization_eval_computation(
        model_fn=personalization.model_fn(model),
        personalize_fn_dict=collections.OrderedDict(
            sgd=personalization.fine_tune("fedavg", model, sgd, **sizes),
            fedlabel=personalization.fine_tune("fedlabel", model, sgd, config, **sizes),
        ),
        baseline_evaluate_fn=personalization.evaluate,
    )
    trains = [random_client(seed, 3 * images) for seed, images in ((1, 5), (2, 9), (3, 7))]
    tests = []
    for seed in (4, 5, 6):
        rng = np.random.default_rng(seed)
        tests.append((random_images(rng, 20 + seed), rng.integers(CLASSES, size=20 + seed)))
    clients = [
        collections.OrderedDict(
            train_data=examples(*train), test_data=examples(x, y.astype(np.int32))
        )
        for train, (x, y) in zip(trains, tests, strict=True)
    ]
    weights = [np.float32(w) for w in initial_weights()]
    with runtime.use("device"):
        found = computation(tff.learning.models.ModelWeights(tuple(weights), ()), clients)
    # The clients come back in an order of TFF's own: by their number of test images.
    order = np.argsort(found["baseline_metrics"]["num_examples"])
    start = [np.float64(w) for w in weights]
    for place, (x, y), (test_x, test_y) in zip(order, trains, tests, strict=True):
        labeled, unlabeled = (np.concatenate([rows] * PASSES) for rows in (x[y >= 0], x[y < 0]))
        labels = np.concatenate([y[y >= 0]] * PASSES)
        batches = [
            (labeled[i : i + BATCH], labels[i : i + BATCH]) for i in range(0, len(labels), BATCH)
        ]
        rest = [unlabeled[i : i + BATCH] for i in range(0, len(unlabeled), BATCH)]
        reference = Reference(lr=LR)
        tuned = {"baseline_metrics": start}
        for name, more in (("sgd", []), ("fedlabel", rest)):
            delta, _ = reference.client(start, batches, more)
            tuned[name] = [w + d for w, d in zip(start, delta, strict=True)]
        for name, final in tuned.items():
            metrics = [found[name][key][place] for key in ("accuracy", "loss", "num_examples")]
            np.testing.assert_allclose(metrics, expected_metrics(final, test_x, test_y), rtol=1e-4)
    assert not np.allclose(found["sgd"]["loss"], found["fedlabel"]["loss"], rtol=1e-3)


def test_wrong_arguments_are_named():
    model, sgd = build_model(initial_weights()), tff.learning.optimizers.build_sgdm(LR)
    for name, value in (("batch_size", 0), ("passes", 1.5)):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            personalization.fine_tune("fedavg", model, sgd, **{"batch_size": 4, name: value})
    with pytest.raises(ValueError, match="^method 'fedlable' is unknown .did you mean fedlabel"):
        personalization.fine_tune("fedlable", model, sgd, batch_size=4)
    assert "fedlabel" in algorithms.METHODS
