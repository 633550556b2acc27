"""Logistic regression by Newton's method; one step is one program, made by lazytpu.jit.

python examples/jit_newton.py
"""

from __future__ import annotations

import torch

import lazytpu


@lazytpu.jit
def newton(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, damping: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One step; ``damping`` may change from call to call, and compiles nothing."""
    p = torch.sigmoid(x @ w)
    gradient = x.T @ (p - y)
    curvature = (x * (p * (1 - p))[:, None]).T @ x + damping * torch.eye(len(w), device=w.device)
    # conjugate gradients, a fixed number of turns: they are unrolled
    direction = torch.zeros_like(w)
    residual = gradient
    search = residual
    for _ in range(8):
        product = curvature @ search
        rate = residual.dot(residual) / (search.dot(product) + 1e-12)
        direction = direction + rate * search
        following = residual - rate * product
        search = following + following.dot(following) / (residual.dot(residual) + 1e-12) * search
        residual = following
    return w - direction, gradient.norm()


def main() -> None:
    torch.manual_seed(0)
    device = lazytpu.device()
    truth = torch.randn(6)
    x = torch.randn(500, 6)
    y = (torch.rand(500) < torch.sigmoid(x @ truth)).float()
    x, y, w = x.to(device), y.to(device), torch.zeros(6).to(device)
    for step in range(6):
        w, gradient = newton(w, x, y, 1.0 / (1 + step))
        print(f"step {step}  gradient {gradient.item():9.5f}")


if __name__ == "__main__":
    main()
