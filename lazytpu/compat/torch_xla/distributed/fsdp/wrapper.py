"""What the two classes of torch_xla that split a module have in common: they are the module, seen from outside."""

from __future__ import annotations

import torch
from torch import nn


class Wrapper(nn.Module):
    """A module around another one, whose attributes and elements it shows.

    Attributes:
        inner_name: of the module inside, as a part of the names of its parameters.
    """

    inner_name = "_fsdp_wrapped_module"

    @property
    def module(self) -> nn.Module:
        """The module inside."""
        found = self._modules[self.inner_name]
        assert found is not None
        return found

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self.inner_name not in self.__dict__.get("_modules", {}):
                raise
            found: torch.Tensor | nn.Module = getattr(self.module, name)
            return found

    def __getitem__(self, key: int) -> object:
        found: object = getattr(type(self.module), "__getitem__")(self.module, key)  # noqa: B009
        return found
