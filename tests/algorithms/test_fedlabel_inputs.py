"""What FedLabel takes: configurations, models and their inputs, labels in columns."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from fedlabel_rounds import COHORT, build, negative, run, sgd, start
from linear_model import build_model, initial_weights, to_tff
from numpy_reference import Reference
from weights import assert_weights_close

from tff_fedlabel.algorithms import FedAvgConfig, FedLabelConfig, build_fedlabel

pytestmark = pytest.mark.usefixtures("device_runtime")


@pytest.mark.parametrize(
    "field,value",
    [
        ("threshold", 1.5),
        ("threshold", "high"),
        ("consistency_weight", -1.0),
        ("proximal_strength", float("nan")),
        ("confidence", "certainty"),
        ("confidence_input", "features"),
        ("selection", "both"),
        ("pseudo_label_view", "weak"),
        ("consistency_view", "weak"),
        ("strong_augment", "randaugment"),
        ("seed", -1),
        ("seed", 1.5),
    ],
)
def test_bad_configuration_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"^{field} "):
        FedLabelConfig(**{field: value})


def test_entropy_of_logits_is_refused():
    with pytest.raises(ValueError, match="confidence_input='logits'"):
        FedLabelConfig(confidence="entropy", confidence_input="logits")


def test_wrong_arguments_are_named():
    model, config = build_model(initial_weights()), FedLabelConfig(strong_augment=None)
    with pytest.raises(ValueError, match="^model must be"):
        build_fedlabel(lambda: None, sgd(0.1), config)
    with pytest.raises(ValueError, match="^client_optimizer must be"):
        build_fedlabel(model, tf.keras.optimizers.SGD(), config)
    with pytest.raises(ValueError, match="^config must be a FedLabelConfig"):
        build_fedlabel(model, sgd(0.1), FedAvgConfig())
    with pytest.raises(ValueError, match="^loop_implementation must be"):
        build_fedlabel(model, sgd(0.1), config, loop_implementation="iterator")
    with pytest.raises(ValueError, match="^model_aggregator must be"):
        build_fedlabel(
            model, sgd(0.1), config, model_aggregator=tff.aggregators.UnweightedMeanFactory()
        )


def flat_model(dtype):
    """Flat features, an input_spec that is a pair, logits of `dtype`."""
    kernel, bias = (w.astype(dtype.as_numpy_dtype) for w in initial_weights())

    @tf.function
    def predict(model_weights, x, training=True):
        del training
        kernel, bias = model_weights[0]
        return tf.cast(x, dtype) @ kernel + bias

    def loss(output, label, sample_weight=None):
        del sample_weight
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=output)
        )

    return tff.learning.models.FunctionalModel(
        initial_weights=((kernel, bias), ()),
        predict_on_batch_fn=predict,
        loss_fn=loss,
        input_spec=(tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int32)),
    )


def flat_data(client):
    return tf.nest.map_structure(
        lambda d: d.map(lambda e: {**e, "x": tf.reshape(e["x"], [-1, 4])}), to_tff(client)
    )


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_flat_inputs_other_dtypes_and_an_augmentation_of_ones_own(dtype):
    process = build_fedlabel(flat_model(dtype), sgd(0.3), FedLabelConfig(strong_augment=negative))
    state = process.initialize()
    output = process.next(state, [flat_data(c) for c in COHORT])
    weights = [np.float64(w.astype(dtype.as_numpy_dtype)) for w in initial_weights()]
    expected, _ = Reference(augment=lambda x, step: 1.0 - x).round(weights, COHORT)
    actual = process.get_model_weights(output.state).trainable
    assert_weights_close(actual, expected)


def test_randaugment_is_refused_for_inputs_that_are_no_images():
    with pytest.raises(ValueError, match="^strong_augment"):
        build_fedlabel(flat_model(tf.float32), sgd(0.3))


def test_labels_of_a_column_are_labels():
    """Hidden labels of shape [batch, 1], as Keras data sets have them."""
    process = build(tail={"diagnose": True})
    _, metrics = run(process, [COHORT], hidden=np.ones)
    model = build_model(initial_weights())
    in_columns = tff.learning.models.FunctionalModel(
        initial_weights=model.initial_weights,
        predict_on_batch_fn=model.predict_on_batch,
        loss_fn=lambda output, label, sample_weight=None: model.loss(
            output=output, label=tf.reshape(label, [-1])
        ),
        input_spec={"x": model.input_spec["x"], "y": tf.TensorSpec([None, 1], tf.int32)},
    )
    config = FedLabelConfig(strong_augment=None)
    process = build_fedlabel(in_columns, sgd(0.3), config, diagnose=True)

    def with_columns(client):
        data = to_tff(client, np.ones)
        return tf.nest.map_structure(
            lambda d: d.map(lambda e: {**e, "y": e["y"][:, tf.newaxis]}), data
        )

    output = process.next(process.initialize(), [with_columns(c) for c in COHORT])
    found = output.metrics["client_work"]["train"]["pseudo_label_accuracy"]
    assert 0 < found == metrics["pseudo_label_accuracy"]


@pytest.mark.parametrize("skip", [True, False])
def test_inputs_of_several_tensors(skip):
    """The features in two parts of a dictionary: the same as in one."""
    one = build_model(initial_weights())

    def joined(x):
        return tf.concat([x["first"], x["second"]], axis=1)

    def predict(weights, x, training=True):
        return one.predict_on_batch(weights, joined(x), training=training)

    half = tf.TensorSpec([None, 1, 2, 1], tf.float32)
    model = tff.learning.models.FunctionalModel(
        initial_weights=one.initial_weights,
        predict_on_batch_fn=tf.function(predict),
        loss_fn=one.loss,
        input_spec={
            "x": {"first": half, "second": half},
            "y": tf.TensorSpec([None], tf.int32),
        },
    )

    def in_two(element):
        x = element["x"]
        return {**element, "x": {"first": x[:, :1], "second": x[:, 1:]}}

    config = FedLabelConfig(strong_augment=None, skip_discarded=skip)
    process = build_fedlabel(model, sgd(0.3), config)
    data = [tf.nest.map_structure(lambda d: d.map(in_two), to_tff(c)) for c in COHORT]
    output = process.next(process.initialize(), data)
    expected, _ = Reference().round(start(), COHORT)
    assert_weights_close(process.get_model_weights(output.state).trainable, expected)
    with pytest.raises(ValueError, match="strong_augment needs a model whose input is one tensor"):
        build_fedlabel(model, sgd(0.3))
