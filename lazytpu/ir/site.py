"""A place in the user's program; `lazytpu.location` finds it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the user's program.

    Attributes:
        file, line: the innermost frame of the user, see `location.site.is_user_file`; empty when there is none.
        module: class of the outermost ``nn.Module`` being called and the path inside it: ``CNN.c1``.
        backward: the op belongs to the gradient of the op at this place.
        stack: (file, line) of all the frames of the user, the innermost first.
        training: the ``training`` flags of the outermost and the innermost module being called; None without one.
        accumulates: it adds a gradient to the one that a parameter has already.
        trainable: which of the innermost module's own parameters require gradients.
        modes: whether gradients are recorded, and the dtype of ``torch.autocast``, None where it is off.
    """

    file: str = ""
    line: int = 0
    module: str = ""
    backward: bool = False
    stack: tuple[tuple[str, int], ...] = field(default=(), compare=False, repr=False)
    training: tuple[bool, bool] | None = field(default=None, compare=False, repr=False)
    accumulates: bool = field(default=False, compare=False, repr=False)
    modes: tuple[bool, torch.dtype | None] = field(default=(True, None), compare=False, repr=False)
    trainable: tuple[bool, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else "?"

    @property
    def text(self) -> str:
        """What `describe` returns; nothing for `UNKNOWN`."""
        return "" if self is UNKNOWN else self.describe()

    def describe(self) -> str:
        """Return ``train.py:12  CNN.c1 (backward)``."""
        return "  ".join(filter(None, (str(self), self.module))) + (" (backward)" if self.backward else "")


UNKNOWN = Site()
