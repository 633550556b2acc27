"""Times a training step written by hand for jax.jit, buffers donated:  python -m benchmarks.jax_step MODEL

What a user of jax gets.  Weights and inputs are torch's, so that the losses can be compared.  Prints one line of
JSON, the fields of `benchmarks.timing.Timing`.  `benchmarks.compare` runs it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.jax_models import MODELS, Arrays, Model
from benchmarks.models import ADAMW_DECAY, ADAMW_LR, SGD_LR, SGD_MOMENTUM, make
from benchmarks.timing import Timing, time_steps

Update = Callable[[Arrays, Arrays, Any], tuple[Arrays, Any]]


def sgd(parameters: Arrays, gradients: Arrays, momenta: Arrays) -> tuple[Arrays, Arrays]:
    """SGD with momentum, as `torch.optim.SGD` does it."""
    momenta = jax.tree.map(lambda m, g: SGD_MOMENTUM * m + g, momenta, gradients)
    return jax.tree.map(lambda p, m: p - SGD_LR * m, parameters, momenta), momenta


def adamw(parameters: Arrays, gradients: Arrays, state: Any) -> tuple[Arrays, Any]:
    """AdamW, as `torch.optim.AdamW` does it."""
    mean, square, count = state
    count = count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradients)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, square, gradients)
    of_mean, of_square = 1 - 0.9**count, 1 - 0.999**count

    def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        kept = 1 - ADAMW_LR * ADAMW_DECAY
        return p * kept - ADAMW_LR * (m / of_mean) / (jnp.sqrt(v / of_square) + 1e-8)

    return jax.tree.map(updated, parameters, mean, square), (mean, square, count)


def optimizer(kind: str, parameters: Arrays) -> tuple[Update, Any]:
    """The update of a workload's optimizer, and its state before the first."""

    def zeros() -> Arrays:
        return jax.tree.map(jnp.zeros_like, parameters)

    return (sgd, zeros()) if kind == "sgd" else (adamw, (zeros(), zeros(), jnp.zeros((), jnp.float32)))


def training_step(model: Model, update: Update) -> Callable[..., Any]:
    """The whole step, jitted: new parameters, statistics, optimizer state and key, then the loss."""

    def loss_of(
        parameters: Arrays, statistics: Arrays, x: jax.Array, target: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, Arrays]:
        logits, statistics = model(parameters, statistics, x, key)
        logs = jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], 1)
        return -logs.mean(), statistics

    def step(
        parameters: Arrays, statistics: Arrays, state: Any, key: jax.Array, x: jax.Array, target: jax.Array
    ) -> Any:
        key, now = jax.random.split(key)
        graded = jax.value_and_grad(loss_of, has_aux=True)
        (loss, statistics), gradients = graded(parameters, statistics, x, target, now)
        parameters, state = update(parameters, gradients, state)
        return (parameters, statistics, state, key), loss

    return jax.jit(step, donate_argnums=(0, 1, 2, 3))


def time_model(name: str, first_only: bool = False, run_s: float = 1.0) -> Timing:
    """Times the training step of a model."""
    work = make(name)
    parameters = {name: jnp.asarray(p.detach().numpy()) for name, p in work.net.named_parameters()}
    statistics = {name: jnp.asarray(b.numpy()) for name, b in work.net.named_buffers()}
    x, target = jnp.asarray(work.x.numpy()), jnp.asarray(work.target.numpy())
    update, state = optimizer(work.optimizer, parameters)
    run = training_step(MODELS[name], update)
    carried: Any = (parameters, statistics, state, jax.random.key(0))
    last: Any = None
    del work, parameters, statistics, state

    def step() -> jax.Array:
        nonlocal carried, last
        carried, last = run(*carried, x, target)
        return last

    return time_steps(step, lambda: jax.block_until_ready((carried, last)), lambda: 1, first_only, run_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--first-only", action="store_true", help="stop after the first step")
    parser.add_argument("--run-s", type=float, default=1.0, help="seconds of each of the seven runs")
    options = parser.parse_args()
    timing = time_model(options.model, options.first_only, options.run_s)
    print(json.dumps({**timing.as_dict(), "versions": {"jax": jax.__version__}}))


if __name__ == "__main__":
    main()
