"""Equal layers, one after the other, as a loop: the ops of `lazytpu.scan_layers`.

``parameters`` holds the parameters of the layers, those of the first layer first.  The bodies are functions, see
control_flow.py; ``numbers`` are from Python and the same for each layer.
"""

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.control_flow import key_of_iteration

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


def _loop(iteration, state, given, layers, reverse=False):
    """Return the last state and the stacked results of ``iteration(layer, state, slices)``, which gives both.

    As `lax.scan`, with a counter of 32 bits: of a loop with one of 64, XLA for TPUs does not know how often it runs.

    Args:
        given: stacked arrays, of which each iteration takes its slices.
    """
    slices = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in given]
    _, made = jax.eval_shape(iteration, jnp.int32(0), state, slices)

    def body(carry):
        i, state, results = carry
        layer = layers - 1 - i if reverse else i
        state, found = iteration(layer, state, [lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in given])
        results = [lax.dynamic_update_index_in_dim(r, x, layer, 0) for r, x in zip(results, found, strict=True)]
        return i + 1, state, results

    start = (jnp.int32(0), state, [jnp.zeros((layers, *t.shape), t.dtype) for t in made])
    _, state, results = lax.while_loop(lambda carry: carry[0] < layers, body, start)
    return state, results


@lowers(forward_op)
def scan_layers(out, body, x, parameters, constants, numbers, layers, kept, *, rng=None):
    """Return the result of the last layer, ``kept`` stacked arrays for the backward pass, and the key."""
    numbers = [jnp.asarray(n) for n in numbers]

    def iteration(layer, x, own):
        x, *saved = body(x, *own, *constants, *numbers, rng=key_of_iteration(rng, layer))
        return x, saved[:kept]

    x, saved = _loop(iteration, x, _stacked(parameters, layers), layers)
    key = [] if rng is None else [lax.bitcast_convert_type(rng, jnp.int64)]
    return [x, *saved, *key]


@lowers(backward_op)
def scan_layers_backward(out, body, grad, saved, parameters, constants, numbers, key, layers, sums):
    """Return the gradients of the input, of the constants at ``sums``, and, stacked, of the parameters."""
    numbers = [jnp.asarray(n) for n in numbers]
    rng = None if not key else lax.bitcast_convert_type(key[0], jnp.uint64)

    def iteration(layer, state, given):
        grad, *totals = state
        saved_here, own = given[: len(saved)], given[len(saved) :]
        grad, *grads = body(grad, *saved_here, *own, *constants, *numbers, rng=key_of_iteration(rng, layer))
        totals = [total + g for total, g in zip(totals, grads[: len(sums)], strict=True)]
        return [grad, *totals], grads[len(sums) :]

    start = [grad, *[jnp.zeros_like(constants[i]) for i in sums]]
    given = [*saved, *_stacked(parameters, layers)]
    state, stacked = _loop(iteration, start, given, layers, reverse=True)
    return [*state, *stacked]
