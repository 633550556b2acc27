"""A torch model with a jax layer, trained by torch; the same model trained by jax.

python examples/jax_in_torch.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from torch import nn

import lazytpu


def gated(x: jax.Array, gate: jax.Array) -> jax.Array:
    """A gated activation, in jax."""
    return jax.nn.gelu(x) * jax.nn.sigmoid(gate)


class Gated(nn.Module):
    """A layer whose activation is a jax function."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner, self.gate, self.outer = nn.Linear(2, size), nn.Linear(2, size), nn.Linear(size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(lazytpu.call_jax(gated, self.inner(x), self.gate(x)))


def spiral(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane and which of two arms they belong to."""
    t = torch.linspace(0.2, 2.5, n)
    arm = torch.arange(n) % 2
    angle = 2.5 * t + torch.pi * arm
    return torch.stack([t * angle.cos(), t * angle.sin()], 1), arm.float()[:, None]


def train_in_torch(steps: int = 200) -> list[float]:
    """Losses of a model on the device; the jax function is part of each step's graph."""
    torch.manual_seed(0)
    device = lazytpu.device()
    points, arms = (t.to(device) for t in spiral(128))
    model = Gated(32).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(points), arms)
        loss.backward()
        optimizer.step()
        lazytpu.mark_step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def train_in_jax(steps: int = 200) -> list[float]:
    """Losses of a plain torch model trained by a jitted jax step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    function, params = lazytpu.as_jax_function(model)
    points, arms = (jnp.asarray(t.numpy()) for t in spiral(128))

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        logits = function(params, points)
        return jnp.mean(jnp.logaddexp(0, logits) - arms * logits)

    @jax.jit
    def step(params: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), loss

    losses = []
    for _ in range(steps):
        params, loss = step(params)
        losses.append(float(loss))
    return losses


def main() -> None:
    """Trains both and prints the first and last loss."""
    for name, train in (("torch, with a jax layer", train_in_torch), ("jax, with a torch model", train_in_jax)):
        losses = train()
        print(f"{name:<24} loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
