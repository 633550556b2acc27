"""Times attention at once and some rows at a time on this machine's CPU:  python -m benchmarks.attention_blocks

For each shape the result and its gradients in eager torch, with all scores at once and in turns
(``lazytpu.config.lowerings``), in milliseconds, the best of several runs, and the megabytes of temporaries that XLA
plans.  From which size on the rule takes turns follows from these numbers, which ``--json`` keeps.
"""

import argparse

import torch
import torch.nn.functional as F

import lazytpu
from benchmarks.page import RESULTS, machine, save
from benchmarks.timing import best_ms
from lazytpu.diagnosis import events

SHAPES = [  # batch, heads, queries and keys, width, causal
    (16, 4, 128, 64, True),
    (8, 12, 256, 64, True),
    (4, 12, 512, 64, True),
    (4, 12, 512, 64, False),
    (2, 12, 1024, 64, True),
    (2, 12, 1024, 64, False),
    (1, 8, 2048, 64, True),
    (1, 8, 2048, 64, False),
]


def measure(batch, heads, length, width, causal):
    """Milliseconds by lowering, and megabytes of temporaries of the two that are ours."""
    torch.manual_seed(0)
    made = [torch.randn(batch, heads, length, width) for _ in range(4)]
    times, megabytes = {}, {}
    for how in ("eager", "whole_attention", "blocked_attention"):
        device = "cpu" if how == "eager" else lazytpu.device()
        lazytpu.config.lowerings = "auto" if how == "eager" else how
        *inputs, g = [x.to(device).requires_grad_() for x in made]

        def step(inputs=inputs, g=g):
            y = F.scaled_dot_product_attention(*inputs, is_causal=causal)
            got = torch.autograd.grad(y, inputs, g)
            lazytpu.wait()
            return got

        times[how] = best_ms(step, seconds=2.0)
        if how != "eager":
            analysis = events.compilations[-1].executable.compiled.memory_analysis()
            megabytes[how] = analysis.temp_size_in_bytes / 1e6
    lazytpu.config.lowerings = "auto"
    return times, megabytes


def main():
    """Prints one line a shape."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_blocks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="keep the figures in benchmarks/results")
    keep = parser.parse_args().json
    rows = []
    for shape in SHAPES:
        times, megabytes = measure(*shape)
        rows.append({"shape": shape, "ms": times, "temporary_mb": megabytes})
        print(shape, "  ".join(f"{n} {t:8.2f} ms" for n, t in times.items()), end="  ")
        print("  ".join(f"{n} {m:7.1f} MB" for n, m in megabytes.items()), flush=True)
    if keep:
        save(RESULTS / "attention_blocks.json", {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
