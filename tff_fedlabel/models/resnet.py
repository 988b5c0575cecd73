"""ResNet-18, -34 and -50 for small images, with group normalisation in place of batch statistics.

He et al., "Deep Residual Learning for Image Recognition", 2016, with the stem its section 4.2 uses
for 32x32 images (one 3x3 convolution, no pooling), and Wu & He, "Group Normalization", 2018.
"""

import tensorflow as tf

from tff_fedlabel import _validation
from tff_fedlabel.models import _arguments
from tff_fedlabel.models._group_norm import GroupNorm

# Depth -> (blocks in each of the four stages, whether a block is a bottleneck).
_ARCHITECTURES = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
}
_MAX_GROUPS = 32
_MIN_GROUP_VALUES = 16
_BOTTLENECK_EXPANSION = 4


def build_resnet(
    depth: int,
    input_shape: tuple[int, int, int],
    num_classes: int,
    width: int = 64,
    seed: int = 0,
) -> tf.keras.Model:
    """Builds a ResNet whose normalisation looks at one image at a time.

    The four stages have `width * (1, 2, 4, 8)` channels (times 4 at the end of a bottleneck block)
    and halve the image from the second on; global average pooling makes the parameter count
    independent of the image size. Convolutions have no bias and He-normal weights, every group
    norm starts as scale 1 and shift 0 (the last one of a block included), and the final layer
    starts Glorot-uniform.

    Args:
      depth: 18, 34 (basic blocks) or 50 (bottleneck blocks).
      input_shape: `(height, width, channels)` of one image, sides 8 to 256 px, 1 or 3 channels.
      num_classes: Number of logits, 2 or more.
      width: Channels of the first stage, 1 or more.
      seed: In [0, 2^31); fixes the initial weights to the bit.

    Returns:
      A model from float32 images `[batch, *input_shape]` to float32 logits `[batch, num_classes]`.

    Raises:
      ValueError: If the depth is not one of the three or another argument is out of range; a
        `TypeError` too if an argument is of the wrong type.
    """
    depth = _validation.check_int("depth", depth)
    if depth not in _ARCHITECTURES:
        raise ValueError(f"depth must be one of {sorted(_ARCHITECTURES)}, got {depth!r}.")
    input_shape, num_classes, width, seed = _arguments.checked_arguments(
        input_shape, num_classes, width, seed
    )
    seeds = _arguments.seeds(seed)
    stages, bottleneck = _ARCHITECTURES[depth]
    block = _bottleneck_block if bottleneck else _basic_block

    with tf.device("CPU"):  # An accelerator may round the initial weights differently.
        images = tf.keras.Input(shape=input_shape)
        x = _norm(_conv(images, width, 3, 1, seeds))
        x = tf.keras.layers.ReLU()(x)
        for stage, blocks in enumerate(stages):
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                x = block(x, width * 2**stage, stride, seeds)
        dtype = _arguments.logits_dtype()
        x = tf.keras.layers.GlobalAveragePooling2D(dtype=dtype)(x)
        logits = tf.keras.layers.Dense(
            num_classes,
            kernel_initializer=tf.keras.initializers.GlorotUniform(next(seeds)),
            dtype=dtype,
        )(x)
        return tf.keras.Model(images, logits, name=f"resnet{depth}")


def _basic_block(x, channels, stride, seeds):
    y = tf.keras.layers.ReLU()(_norm(_conv(x, channels, 3, stride, seeds)))
    y = _norm(_conv(y, channels, 3, 1, seeds))
    return _add_shortcut(x, y, stride, seeds)


def _bottleneck_block(x, channels, stride, seeds):
    y = tf.keras.layers.ReLU()(_norm(_conv(x, channels, 1, 1, seeds)))
    y = tf.keras.layers.ReLU()(_norm(_conv(y, channels, 3, stride, seeds)))
    y = _norm(_conv(y, channels * _BOTTLENECK_EXPANSION, 1, 1, seeds))
    return _add_shortcut(x, y, stride, seeds)


def _add_shortcut(x, y, stride, seeds):
    channels = y.shape[-1]
    if stride != 1 or x.shape[-1] != channels:
        x = _norm(_conv(x, channels, 1, stride, seeds))
    return tf.keras.layers.ReLU()(tf.keras.layers.Add()([x, y]))


def _conv(x, channels, kernel_size, stride, seeds):
    return tf.keras.layers.Conv2D(
        channels,
        kernel_size,
        strides=stride,
        padding="same",
        use_bias=False,
        kernel_initializer=tf.keras.initializers.HeNormal(next(seeds)),
    )(x)


def _norm(x):
    return GroupNorm(_num_groups(*x.shape[1:]))(x)


def _num_groups(height: int, width: int, channels: int) -> int:
    """The most groups, up to 32, that share the channels and hold enough values each.

    With one channel in a group, the mean over the pixels that ends the network would be the same
    for all images; with a few pixels as well, only the signs of the values would be left.
    """
    for groups in range(min(_MAX_GROUPS, channels // 2), 1, -1):
        if channels % groups == 0 and height * width * channels // groups >= _MIN_GROUP_VALUES:
            return groups
    return 1
