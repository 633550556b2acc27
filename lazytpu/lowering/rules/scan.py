"""Equal layers, one after the other, as a loop: the ops of `lazytpu.scan_layers`.

``parameters`` holds the parameters of the layers, those of the first layer first.  The bodies are functions, see
control_flow.py; ``numbers`` are from Python and the same for each layer.
"""

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.control_flow import key_of_turn

library = torch.library.Library("lazytpu", "FRAGMENT")
# Never called by torch: these are names for nodes, which `scan.py` records itself.
library.define("scan_layers(Tensor[] operands) -> Tensor[]")
library.define("scan_layers_backward(Tensor[] operands) -> Tensor[]")
forward_op = torch.ops.lazytpu.scan_layers.default
backward_op = torch.ops.lazytpu.scan_layers_backward.default


def _stacked(parameters, layers):
    """Return for each parameter of a layer the array of all layers'."""
    each = len(parameters) // layers
    return [jnp.stack(parameters[i::each]) for i in range(each)] if each else []


def _keys(rng, iteration):
    return None if rng is None else key_of_turn(rng, iteration)


@lowers(forward_op)
def scan_layers(out, body, x, parameters, constants, numbers, layers, kept, *, rng=None):
    """Return the result of the last layer, ``kept`` stacked arrays for the backward pass, and the key."""
    numbers = [jnp.asarray(n) for n in numbers]

    def iteration(state, own):
        index, x = state
        x, *saved = body(x, *own, *constants, *numbers, rng=_keys(rng, index))
        return (index + 1, x), saved

    (_, x), saved = lax.scan(iteration, (jnp.int64(0), x), _stacked(parameters, layers), length=layers)
    key = [] if rng is None else [lax.bitcast_convert_type(rng, jnp.int64)]
    return [x, *saved[:kept], *key]


@lowers(backward_op)
def scan_layers_backward(out, body, grad, saved, parameters, constants, numbers, key, layers, sums):
    """Return the gradients of the input, of the constants at ``sums``, and, stacked, of the parameters."""
    numbers = [jnp.asarray(n) for n in numbers]
    rng = None if not key else lax.bitcast_convert_type(key[0], jnp.uint64)

    def iteration(state, own):
        index, grad, *totals = state
        saved_here, own = own
        grad, *grads = body(grad, *saved_here, *own, *constants, *numbers, rng=_keys(rng, index))
        totals = [total + g for total, g in zip(totals, grads[: len(sums)], strict=True)]
        return (index - 1, grad, *totals), grads[len(sums) :]

    zeros = [jnp.zeros_like(constants[i]) for i in sums]
    start = (jnp.int64(layers - 1), grad, *zeros)
    (_, grad, *totals), stacked = lax.scan(
        iteration, start, (list(saved), _stacked(parameters, layers)), length=layers, reverse=True
    )
    return [grad, *totals, *stacked]
