"""Loss scaling, so that the gradients of a float16 model neither vanish nor overflow.

float16 holds 2^-24 to 2^16, and gradients are often smaller (Micikevicius et al., "Mixed Precision
Training", 2018). Keras' `LossScaleOptimizer` multiplies the loss by a scale that it adapts from
step to step, and skips the steps that overflow meanwhile. A TFF client runs a function of weights
and images that keeps no state, and takes few steps. So here every backward pass finds a scale of
its own, no step is skipped, and code outside the model need not know about it.
"""

from collections.abc import Callable

import tensorflow as tf

# What the gradients of the logits add up to, in absolute value, before they go back through the
# network. They may grow 2^6 times on the way, and values 2^34 times smaller are not lost.
_LARGEST_SUM = 2.0**10
# Where that overflows: how much less the next attempt starts with. The last starts with 2^-8.
_STEP = 2.0**-6
_ATTEMPTS = 4


def with_loss_scaling(function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Returns `function`, with gradients that are those of a scaled loss, scaled back.

    The gradient that arrives at the logits is multiplied by the power of two that makes its
    absolute values add up to 2^9 to 2^10, goes back through `function`, and what arrives at the
    weights is divided by that number. If one is not finite, it overflowed: the same is done from a
    smaller start, three times at most. If a gradient is still not finite, there is another reason,
    such as a NaN in the images or an overflow in the forward pass. It is then returned as it is, so
    that the checks of updates find it.

    Args:
      function: `(*weights) -> logits`; weights float32 or float64, logits of any float dtype, the
        gradients of weights dense tensors.

    Returns:
      `(*weights) -> logits` in float32.
    """

    @tf.custom_gradient
    def scaled(*weights):
        # Persistent: every graph that takes gradients writes down a backward pass of its own.
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(weights)
            logits = tf.cast(function(*weights), tf.float32)

        def gradients_fn(upstream, variables=()):
            total = tf.reduce_sum(tf.abs(upstream))
            exponent = tf.floor(tf.math.log(_LARGEST_SUM / total) / tf.math.log(2.0))
            first_scale = tf.pow(2.0, tf.clip_by_value(exponent, -100.0, 100.0))

            def attempt(scale, finite, gradients):
                del finite, gradients
                gradients = tape.gradient(
                    logits, weights, upstream * scale, unconnected_gradients="zero"
                )
                finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
                gradients = [g / tf.cast(scale, g.dtype) for g in gradients]
                return scale * _STEP, finite, gradients

            _, _, gradients = tf.while_loop(
                lambda scale, finite, gradients: tf.logical_not(finite),
                attempt,
                (first_scale, tf.constant(False), [tf.zeros_like(w) for w in weights]),
                maximum_iterations=_ATTEMPTS,
            )
            # TensorFlow asks for the gradients of variables, too, where `function` reads any.
            return (gradients, [None for _ in variables]) if variables else gradients

        return logits, gradients_fn

    return scaled
