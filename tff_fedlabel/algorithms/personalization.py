"""Fine-tuning by a method's client work, for TFF's evaluation of personalization.

    tff.learning.algorithms.build_personalization_eval_computation(
        model_fn=personalization.model_fn(model),
        personalize_fn_dict=collections.OrderedDict(
            sgd=personalization.fine_tune("fedavg", model, optimizer, batch_size=16),
            fedlabel=personalization.fine_tune("fedlabel", model, optimizer, batch_size=16),
        ),
        baseline_evaluate_fn=personalization.evaluate,
    )

A client's data is `OrderedDict(train_data=, test_data=)`, both datasets of single examples
`OrderedDict(x=, y=)`, where y is -1 for an image without label
(`FederatedData.client_examples` gives such datasets).
"""

import collections
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel import _validation, algorithms

_EVALUATION_BATCH = 100


def model_fn(
    model: tff.learning.models.FunctionalModel,
) -> Callable[[], tff.learning.models.VariableModel]:
    """The model in the form that TFF's evaluation of personalization takes."""
    return lambda: tff.learning.models.model_from_functional(model)


@tf.function
def evaluate(model: tff.learning.models.VariableModel, examples: tf.data.Dataset):
    """Accuracy and loss on the labelled ones of a client's examples.

    Args:
      model: Outputs logits `[batch, classes]`.
      examples: Dataset of single `OrderedDict(x=, y=)`.

    Returns:
      `OrderedDict(accuracy=, loss=, num_examples=)`, float32 [] each; 0 without examples.
    """

    def add(totals, batch):
        output = model.forward_pass(batch, training=False)
        count = tf.cast(tf.shape(batch["y"])[0], tf.float32)
        found = tf.argmax(output.predictions, axis=-1, output_type=batch["y"].dtype)
        correct = tf.reduce_sum(tf.cast(tf.equal(found, batch["y"]), tf.float32))
        return totals + tf.stack([correct, tf.cast(output.loss, tf.float32) * count, count])

    correct, loss, count = tf.unstack(
        _labeled(examples).batch(_EVALUATION_BATCH).reduce(tf.zeros([3]), add)
    )
    return collections.OrderedDict(
        accuracy=tf.math.divide_no_nan(correct, count),
        loss=tf.math.divide_no_nan(loss, count),
        num_examples=count,
    )


def fine_tune(
    method: str,
    model: tff.learning.models.FunctionalModel,
    optimizer: tff.learning.optimizers.Optimizer,
    config: Any = None,
    *,
    batch_size: int,
    passes: int = 1,
) -> Callable[[], Callable[..., collections.OrderedDict]]:
    """A personalization strategy: the work of one client in one round, then evaluation.

    Args:
      method: Name in `algorithms.METHODS`. "fedavg" is plain optimizer steps on the labelled
        images; "fedlabel" is FedLabel's local update, on the unlabelled ones too.
      model: The functional model that `model_fn` was made from.
      optimizer: The optimizer of the local steps.
      config: The method's parameters; its defaults where None.
      batch_size: Images in a batch, labelled and unlabelled; the last one holds what is left.
      passes: Passes over the images.

    Returns:
      A value for `personalize_fn_dict`: `() -> (model, train_data, test_data) -> metrics`, metrics
      as of `evaluate`.

    Raises:
      ValueError: An argument is out of its range, or the method needs a state at the server or a
        memory, which a client that is evaluated does not have.
    """
    _validation.check_name("method", method, algorithms.METHODS)
    batch_size = _validation.check_int("batch_size", batch_size)
    passes = _validation.check_int("passes", passes)
    chosen = algorithms.METHODS[method]
    if chosen.server_state is not None or chosen.initial_memory is not None:
        raise ValueError(f"method {method!r} needs a state that only training has.")
    config = chosen.config_class() if config is None else config
    setup = algorithms.Setup(
        model, optimizer, config, tff.learning.LoopImplementation.DATASET_ITERATOR
    )

    def build():
        @tf.function
        def personalize(variables, train_data, test_data):
            weights = tuple(v.read_value() for v in variables.trainable_variables)
            specs = tuple(tf.TensorSpec(w.shape, w.dtype) for w in weights)
            unlabeled = train_data.filter(lambda example: example["y"] < 0).map(
                lambda example: collections.OrderedDict(x=example["x"])
            )
            client = algorithms.Client(
                weights=weights,
                non_trainable=tuple(v.read_value() for v in variables.non_trainable_variables),
                labeled=_labeled(train_data).repeat(passes).batch(batch_size),
                unlabeled=unlabeled.repeat(passes).batch(batch_size),
                round_num=tf.constant(0),
                hparams=optimizer.get_hparams(optimizer.initialize(specs)),
            )
            delta = chosen.client_update(setup, client).delta
            for variable, weight, d in zip(
                variables.trainable_variables, weights, delta, strict=True
            ):
                variable.assign(weight + d)
            return evaluate(variables, test_data)

        return personalize

    return build


def _labeled(examples: tf.data.Dataset) -> tf.data.Dataset:
    return examples.filter(lambda example: example["y"] >= 0)
