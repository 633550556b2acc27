"""``torch_xla.distributed.fsdp.wrap``: policies that say which submodules are wrapped, and what asks them."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Protocol

from torch import nn
from torch.distributed.fsdp import wrap as torchs

from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)


class Policy(Protocol):
    """Says whether to look into a module (``recurse``), and whether to wrap it."""

    def __call__(self, *, module: nn.Module, recurse: bool, unwrapped_params: int) -> bool: ...


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """Return True: each submodule is wrapped."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Return whether a function says so of the module."""
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, transformer_layer_cls: Set[type[nn.Module]]
) -> bool:
    """Return whether a module is of one of several classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Set[type[nn.Module]] | None = None,
    exclude_wrap_modules: Set[type[nn.Module]] | None = None,
) -> bool:
    """Return whether a module has at least so many elements in parameters that no submodule of it has taken."""
    return torchs.size_based_auto_wrap_policy(
        module,
        recurse,
        unwrapped_params,
        min_num_params,
        None if force_leaf_modules is None else set(force_leaf_modules),
        None if exclude_wrap_modules is None else set(exclude_wrap_modules),
    )


def wrap_submodules(root: nn.Module, policy: Policy, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Replace submodules by what wraps them, where a policy says so; innermost first, the root itself stays."""
    for name, inner in list(root.named_children()):
        setattr(root, name, _wrapped(inner, policy, wrap)[0])


def _wrapped(module: nn.Module, policy: Policy, wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, int]:
    """Return a module, or what wraps it, and how many elements are wrapped."""
    elements = sum(p.numel() for p in module.parameters())
    if not policy(module=module, recurse=True, unwrapped_params=elements):
        return module, 0
    taken = 0
    for name, inner in list(module.named_children()):
        made, count = _wrapped(inner, policy, wrap)
        setattr(module, name, made)
        taken += count
    if policy(module=module, recurse=False, unwrapped_params=elements - taken):
        return wrap(module), elements
    return module, taken
