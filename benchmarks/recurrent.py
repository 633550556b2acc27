"""Times recurrent layers beside eager torch, and compiles them beside jax's scan:  python -m benchmarks.recurrent

Two layers of width 128 at batch 16, in training and inference, each in turn with eager in this process; the median of
the ratios, as other work on the machine slows both.  Then the seconds to lower and compile a training step of the LSTM
and of the same written with ``jax.lax.scan``, by length.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import nn

import lazytpu
from benchmarks.page import RESULTS, machine, save

BATCH, WIDTH, LAYERS = 16, 128, 2
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
LENGTHS = (64, 256)
TURNS = 11


def _step(module, x, train):
    if not train:
        with torch.no_grad():
            return module(x)[0]
    module.zero_grad()
    loss = module(x)[0].square().mean()
    loss.backward()
    return loss


def measure(kind, length, train):
    """Returns milliseconds of eager and of the device, and the median of the ratios."""
    torch.manual_seed(0)
    module, x = KINDS[kind](WIDTH, WIDTH, LAYERS), torch.randn(length, BATCH, WIDTH)
    sides = [(module, x), (KINDS[kind](WIDTH, WIDTH, LAYERS).to(lazytpu.device()), x.to(lazytpu.device()))]
    taken = [[], []]
    for turn in range(TURNS + 3):
        for i, (m, given) in enumerate(sides):
            start = time.perf_counter()
            result = _step(m, given, train)
            lazytpu.wait()
            del result
            if turn >= 3:  # the first ones compile
                taken[i].append((time.perf_counter() - start) * 1e3)
    eager, ours = map(statistics.median, taken)
    return {"eager_ms": eager, "ms": ours, "ratio": statistics.median(b / a for a, b in zip(*taken, strict=True))}


def _loss(weights, x):
    for i in range(0, len(weights), 4):
        of_input, of_hidden, *biases = weights[i : i + 4]

        def step(state, gates, of_hidden=of_hidden):
            h, c = state
            i, f, g, o = jnp.split(gates + h @ of_hidden.T, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((BATCH, WIDTH))
        _, x = lax.scan(step, (zero, zero), x @ of_input.T + sum(biases))
    return jnp.mean(x * x)


def compile_s(length):
    """Returns seconds to lower and compile the gradient step of an LSTM, ours and jax's."""
    module, x = nn.LSTM(WIDTH, WIDTH, LAYERS), torch.randn(length, BATCH, WIDTH)
    weights = [jnp.asarray(p.detach().numpy()) for p in module.parameters()]
    start = time.perf_counter()
    jax.jit(jax.value_and_grad(_loss)).lower(weights, jnp.asarray(x.numpy())).compile()
    theirs = time.perf_counter() - start
    module, x = module.to(lazytpu.device()), x.to(lazytpu.device())
    lazytpu.wait()
    loss = _step(module, x, train=True)
    start = time.perf_counter()
    lazytpu.mark_step()
    ours = time.perf_counter() - start
    del loss
    return {"s": ours, "jax_s": theirs, "ratio": ours / theirs}


def main():
    """Prints one line a case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recurrent", description=__doc__)
    parser.add_argument("--json", action="store_true", help="keep the figures in benchmarks/results")
    keep = parser.parse_args().json
    lazytpu.config.compile_after, lazytpu.config.disk_cache = 1, False
    rows = []
    for kind in KINDS:
        for length in LENGTHS:
            for train in (True, False):
                found = measure(kind, length, train)
                rows.append({"kind": kind, "length": length, "train": train, **found})
                what = "training" if train else "inference"
                print(f"{kind:4} {length:4} {what:9}  ", *[f"{k} {v:.2f}" for k, v in found.items()], flush=True)
    for length in (*LENGTHS, 1024):
        found = compile_s(length)
        rows.append({"kind": "lstm", "length": length, "compile": True, **found})
        print(f"compile lstm {length:4}  ", *[f"{k} {v:.2f}" for k, v in found.items()], flush=True)
    if keep:
        save(RESULTS / "recurrent.json", {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
