"""Random numbers: a key (seed, counter) that advances with each random op recorded.

The key is an input of the graph, so a step that draws new numbers is the same graph.  Same seed, same
order of ops, same numbers, on every platform.
"""

from __future__ import annotations

import os

import torch

_MASK = (1 << 64) - 1


class Generator:
    """The state of the device's default generator."""

    __slots__ = ("counter", "seed")

    def __init__(self, seed: int) -> None:
        self.seed, self.counter = seed & _MASK, 0

    def next_key(self) -> tuple[int, int]:
        """Return the key of the next random op."""
        self.counter += 1
        return self.seed, self.counter


default_generator = Generator(torch.initial_seed())


def manual_seed(seed: int) -> None:
    """Start the sequence of ``seed`` from its beginning; ``torch.manual_seed`` calls this too."""
    default_generator.seed, default_generator.counter = int(seed) & _MASK, 0


def seed() -> int:
    """Set a seed from the system's entropy and return it."""
    manual_seed(int.from_bytes(os.urandom(8), "little"))
    return default_generator.seed


def initial_seed() -> int:
    """Return the seed in force."""
    return default_generator.seed


def get_rng_state() -> torch.Tensor:
    """Seed and counter as a CPU ``uint8`` tensor of 16 bytes."""
    raw = default_generator.seed.to_bytes(8, "little") + default_generator.counter.to_bytes(8, "little")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor) -> None:
    """Restore what `get_rng_state` returned.

    Raises:
        ValueError: ``state`` is not a ``uint8`` tensor of 16 elements.
    """
    if state.dtype != torch.uint8 or state.numel() != 16:
        raise ValueError(f"the RNG state must be a uint8 tensor of 16 elements, not {state.dtype} of {state.numel()}")
    raw = bytes(state.cpu().tolist())
    default_generator.seed = int.from_bytes(raw[:8], "little")
    default_generator.counter = int.from_bytes(raw[8:], "little")


def key_from(generator: torch.Generator | None) -> tuple[int, int]:
    """Return the key of a random op: from the default generator, or drawn from a ``torch.Generator``."""
    if generator is None:
        return default_generator.next_key()
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator)) & _MASK, 0
