"""A recurrence of a thousand steps and a loop until convergence, each one node of the graph.

python examples/control_flow.py
"""

from __future__ import annotations

import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import lazytpu


def main() -> None:
    torch.manual_seed(0)
    device = lazytpu.device()

    signal = torch.randn(1000, 8).to(device)
    decay = torch.full((8,), 0.9).to(device).requires_grad_()

    def filtered(state: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = state * decay + value
        return state, state.tanh()

    last, outputs = scan(filtered, torch.zeros(8).to(device), signal)
    outputs.square().mean().backward()
    norms = last.detach().norm().item(), decay.grad.norm().item()
    print(f"scan over {len(signal)} steps: last {norms[0]:.3f}, gradient {norms[1]:.3f}")

    matrix = torch.rand(6, 6).to(device)
    start = torch.ones(6).to(device)

    def moves(turn: torch.Tensor, v: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return (change > 1e-6) & (turn < 500)

    def turn(turn: torch.Tensor, v: torch.Tensor, change: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w = matrix @ v
        w = w / w.norm()
        return turn + 1, w, (w - v).norm()

    turns, vector, _ = while_loop(moves, turn, (torch.tensor(0).to(device), start, torch.tensor(1.0).to(device)))
    value = (matrix @ vector).norm()
    print(f"power iteration: eigenvalue {value.item():.4f} after {turns.item()} turns")


if __name__ == "__main__":
    main()
