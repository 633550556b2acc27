"""A small Keras model under ``tf.function(jit_compile=True)``, written for lazytpu.jit.

python examples/jit_function.py
LAZYTPU_LOG=placement python examples/jit_function.py                    # on which device each op runs
python -m lazytpu run --dump graphs --passes examples/jit_function.py    # then, what XLA's passes did to the program:
python -m lazytpu inspect graphs --passes
"""

from __future__ import annotations

import torch
from torch import nn

import lazytpu


def main() -> None:
    print(f"{lazytpu.device_count()} device, {lazytpu.device()}, on {lazytpu.platform()}")
    lazytpu.config.fallback = "cpu"  # soft placement: an op without a lowering runs on the CPU; "error" forbids it

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5), nn.Softmax(dim=-1)).to(lazytpu.device())
    inputs = torch.randn(16, 10, device=lazytpu.device())

    with torch.no_grad():
        recorded = model(inputs)  # op by op, into a graph that runs where it is read

    @lazytpu.jit
    def forward_pass(inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(inputs)

    compiled = forward_pass(inputs)  # one program; Python runs the function once
    again = forward_pass(torch.randn(16, 10, device=lazytpu.device()))

    print(f"probabilities {tuple(compiled.shape)}, rows sum to {compiled.sum(-1).mean().item():.4f}")
    print(f"largest difference to the recorded graph {(compiled - recorded).abs().max().item():.1e}")
    print(f"another batch {tuple(again.shape)}, {lazytpu.metrics.counter('fallback')} ops fell back to the CPU")


if __name__ == "__main__":
    main()
