"""The models of `benchmarks.models` written by hand in jax, as its users would: plain `lax` and `jax.numpy`.

Each is ``model(parameters, statistics, x, key) -> (logits, statistics)``.  Parameters and statistics (the running
ones of batch norm) are dictionaries with the names that torch gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.models import RESNET18

Arrays = dict[str, jax.Array]
Model = Callable[[Arrays, Arrays, jax.Array, jax.Array], tuple[jax.Array, Arrays]]

_EPSILON = 1e-5
_MOMENTUM = 0.1


def linear(parameters: Arrays, name: str, x: jax.Array) -> jax.Array:
    """``x @ weight.T + bias`` on the last dimension."""
    return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]


def conv(parameters: Arrays, name: str, x: jax.Array, stride: int = 1, padding: int = 0) -> jax.Array:
    """A convolution of images [image, channel, height, width]; with a bias where there is one."""
    weight, bias = parameters[f"{name}.weight"], parameters.get(f"{name}.bias")
    y = lax.conv_general_dilated(
        x, weight, (stride, stride), [(padding, padding)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
    )
    return y if bias is None else y + bias[:, None, None]


def max_pool(x: jax.Array, size: int, stride: int, padding: int = 0) -> jax.Array:
    """The maximum of each window of images."""
    around = [(0, 0), (0, 0), (padding, padding), (padding, padding)]
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, size, size), (1, 1, stride, stride), around)


def dropout(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """Sets a share of the elements to zero and scales the others."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def layer_norm(parameters: Arrays, name: str, x: jax.Array) -> jax.Array:
    """Layer norm over the last dimension."""
    centred = x - x.mean(-1, keepdims=True)
    scale = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + _EPSILON)
    return centred * scale * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def batch_norm(parameters: Arrays, statistics: Arrays, name: str, x: jax.Array) -> jax.Array:
    """Batch norm of images, in training; writes the running statistics into ``statistics``."""
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    count = x.size // x.shape[1]
    seen = {"running_mean": mean, "running_var": variance * count / (count - 1)}
    for field, value in seen.items():
        old = statistics[f"{name}.{field}"]
        statistics[f"{name}.{field}"] = old + _MOMENTUM * (lax.stop_gradient(value) - old)
    statistics[f"{name}.num_batches_tracked"] = statistics[f"{name}.num_batches_tracked"] + 1
    scale = lax.rsqrt(variance + _EPSILON) * parameters[f"{name}.weight"]
    return (x - mean[:, None, None]) * scale[:, None, None] + parameters[f"{name}.bias"][:, None, None]


def sequential(parameters: Arrays, statistics: Arrays, x: jax.Array, key: jax.Array) -> tuple[jax.Array, Arrays]:
    """Linear layers with a relu between them: mlp, deepmlp and tiny."""
    x = x.reshape(x.shape[0], -1)
    # by number: jax gives dictionaries back sorted by name
    names = sorted([name.removesuffix(".weight") for name in parameters if name.endswith(".weight")], key=int)
    for name in names[:-1]:
        x = jax.nn.relu(linear(parameters, name, x))
    return linear(parameters, names[-1], x), statistics


def cnn(parameters: Arrays, statistics: Arrays, x: jax.Array, key: jax.Array) -> tuple[jax.Array, Arrays]:
    """`benchmarks.models.CNN`."""
    key1, key2 = jax.random.split(key)
    x = jax.nn.relu(conv(parameters, "conv1", x))
    x = jax.nn.relu(conv(parameters, "conv2", x))
    x = dropout(key1, max_pool(x, 2, 2), 0.25).reshape(x.shape[0], -1)
    x = dropout(key2, jax.nn.relu(linear(parameters, "linear1", x)), 0.5)
    return linear(parameters, "linear2", x), statistics


def resnet18(parameters: Arrays, statistics: Arrays, x: jax.Array, key: jax.Array) -> tuple[jax.Array, Arrays]:
    """`benchmarks.models.ResNet18`."""
    statistics = dict(statistics)

    def norm(name: str, x: jax.Array) -> jax.Array:
        return batch_norm(parameters, statistics, name, x)

    x = jax.nn.relu(norm("stem.1", conv(parameters, "stem.0", x, 2, 3)))
    x = max_pool(x, 3, 2, 1)
    for i, (channels, out, stride) in enumerate(RESNET18):
        layer = f"layers.{i}"
        y = jax.nn.relu(norm(f"{layer}.norm1", conv(parameters, f"{layer}.conv1", x, stride, 1)))
        y = norm(f"{layer}.norm2", conv(parameters, f"{layer}.conv2", y, 1, 1))
        if channels != out:
            x = norm(f"{layer}.around.1", conv(parameters, f"{layer}.around.0", x, stride))
        x = jax.nn.relu(x + y)
    return linear(parameters, "head", x.mean((2, 3))), statistics


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of [batch, head, length, width]."""
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1) @ v


def block(parameters: Arrays, name: str, x: jax.Array, heads: int) -> jax.Array:
    """`benchmarks.models.Block`."""
    batch, length, width = x.shape
    parts = jnp.split(linear(parameters, f"{name}.qkv", layer_norm(parameters, f"{name}.norm1", x)), 3, 2)
    q, k, v = (part.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3) for part in parts)
    y = attention(q, k, v).transpose(0, 2, 1, 3).reshape(batch, length, width)
    x = x + linear(parameters, f"{name}.out", y)
    y = linear(parameters, f"{name}.up", layer_norm(parameters, f"{name}.norm2", x))
    return x + linear(parameters, f"{name}.down", jax.nn.gelu(y, approximate=False))


def gpt(parameters: Arrays, statistics: Arrays, x: jax.Array, key: jax.Array) -> tuple[jax.Array, Arrays]:
    """`benchmarks.models.GPT`."""
    y = parameters["words.weight"][x] + parameters["places.weight"][: x.shape[1]]
    layers = sum(name.endswith(".qkv.weight") for name in parameters)
    for i in range(layers):
        y = block(parameters, f"blocks.{i}", y, heads=4)
    logits = layer_norm(parameters, "norm", y) @ parameters["head.weight"].T
    return logits.reshape(x.size, -1), statistics


MODELS: dict[str, Model] = {
    "tiny": sequential,
    "mlp": sequential,
    "deepmlp": sequential,
    "cnn": cnn,
    "resnet18": resnet18,
    "gpt": gpt,
}
