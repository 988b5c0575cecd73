"""A network in NumPy, float64, from the description and the weights of an exported `.npz`."""

import numpy as np


def network(layers, weights, pixels):
    """Logits `[n, classes]` of pixels `[n, h, w, c]` in [0, 1]."""
    values = {"images": np.float64(pixels)}
    for layer in layers:
        inputs = [values[name] for name in layer["inputs"]]
        own = {name.split("/")[1]: np.float64(weights[name]) for name in layer["weights"]}
        y = _LAYERS[layer["type"]](layer, own, *inputs)
        activation = layer.get("activation", "linear")
        assert activation in ("linear", "relu")
        values[layer["name"]] = np.maximum(y, 0) if activation == "relu" else y
    return y


def _conv(layer, weights, x):
    kernel, (stride, _) = weights["kernel"], layer["strides"]
    size = kernel.shape[0]
    assert layer["padding"] == "same"
    padding = []
    for side in x.shape[1:3]:
        total = max((-(-side // stride) - 1) * stride + size - side, 0)
        padding.append((total // 2, total - total // 2))
    x = np.pad(x, [(0, 0), *padding, (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))
    windows = windows[:, ::stride, ::stride]
    return np.einsum("nhwcij,ijco->nhwo", windows, kernel) + weights.get("bias", 0.0)


def _group_norm(layer, weights, x):
    n, h, w, c = x.shape
    groups = x.reshape(n, h, w, layer["groups"], -1)
    mean = groups.mean((1, 2, 4), keepdims=True)
    variance = groups.var((1, 2, 4), keepdims=True)
    normal = ((groups - mean) / np.sqrt(variance + layer["epsilon"])).reshape(n, h, w, c)
    return normal * weights["gamma"] + weights["beta"]


_LAYERS = {
    "Conv2D": _conv,
    "GroupNorm": _group_norm,
    "Dense": lambda layer, weights, x: x @ weights["kernel"] + weights["bias"],
    "Flatten": lambda layer, weights, x: x.reshape(len(x), -1),
    "GlobalAveragePooling2D": lambda layer, weights, x: x.mean((1, 2)),
    "ReLU": lambda layer, weights, x: np.maximum(x, 0),
    "Add": lambda layer, weights, x, y: x + y,
}
