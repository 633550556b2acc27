"""Conditions, loops and scans.

A rule is given each body as a function ``f(*arrays, rng=None)`` that returns a list of arrays; ``rng`` is the key of
this call of the body, None where it draws nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op

from lazytpu.lowering.registry import lowers


def key_of_iteration(rng, iteration):
    """Return a key of its own for each iteration of a loop."""
    if rng is None:
        return None
    mixed = rng[0] ^ ((iteration.astype(jnp.uint64) + jnp.uint64(1)) * jnp.uint64(0x9E3779B97F4A7C15))
    return jnp.stack([mixed, rng[1]])


@lowers(cond_op)
def cond(out, pred, true_graph, false_graph, operands, *, rng=None):
    def branch(body):
        return lambda: tuple(body(*operands, rng=rng))

    return lax.cond(jnp.reshape(pred, ()) != 0, branch(true_graph), branch(false_graph))


@lowers(while_loop_op)
def while_loop(out, cond, body, carried, additional, *, rng=None):
    def goes_on(state):
        iteration, values = state
        return cond(*values, *additional, rng=key_of_iteration(rng, iteration))[0].reshape(())

    def step(state):
        iteration, values = state
        return iteration + 1, tuple(body(*values, *additional, rng=key_of_iteration(rng, iteration)))

    return lax.while_loop(goes_on, step, (jnp.int64(0), tuple(carried)))[1]


@lowers(scan_op)
def scan(out, combine, init, xs, additional, *, rng=None):
    def step(state, slices):
        iteration, carry = state
        results = combine(*carry, *slices, *additional, rng=key_of_iteration(rng, iteration))
        return (iteration + 1, tuple(results[: len(init)])), tuple(results[len(init) :])

    (_, carry), ys = lax.scan(step, (jnp.int64(0), tuple(init)), tuple(xs))
    return [*carry, *ys]


@lowers(associative_scan_op)
def associative_scan(out, combine, xs, additional, *, rng=None):
    def both(a, b):
        return tuple(combine(*a, *b, *additional, rng=rng))

    return lax.associative_scan(jax.vmap(both), tuple(xs))


@lowers(map_impl)
def map(out, f, xs, args, *, rng=None):
    def iteration(given):
        index, slices = given
        return tuple(f(*slices, *args, rng=key_of_iteration(rng, index)))

    return lax.map(iteration, (jnp.arange(xs[0].shape[0]), tuple(xs)))
