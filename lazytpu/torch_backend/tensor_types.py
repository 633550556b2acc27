"""``torch.tpu.FloatTensor`` and its like: the types of tensors by which older scripts name device and dtype.

``torch.cuda.FloatTensor(4, 3)`` and ``x.type(torch.cuda.FloatTensor)`` are still common.  Torch makes these types for
its own devices only.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import ClassVar, cast

import torch

from lazytpu.config import config

_KINDS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")


class _Type(type):
    """The class of the types, whose names have dots: torch reads device and dtype of a type from its name in C."""

    dtype: torch.dtype
    on_cpu: type[torch.Tensor]

    def __repr__(cls) -> str:
        return f"<class '{cls.__name__}'>"

    def __instancecheck__(cls, instance: object) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.device.type == config.device_name
            and (instance.dtype, instance.layout) == (cls.dtype, torch.strided)
        )

    def __call__(cls, *args: object, **kwargs: object) -> torch.Tensor:
        """Make a tensor as torch's type of this name does on the CPU: of sizes, of data, or an alias of a tensor."""
        data = args[0] if args else kwargs.get("other")
        made: torch.Tensor
        if isinstance(data, torch.Tensor):
            if not isinstance(data, cls):
                raise TypeError(
                    f"{cls.__name__} takes a tensor of its own device and dtype, not a {data.type()}: "
                    "use x.to(device, dtype)"
                )
            made = torch.ops.aten.alias(data)
        elif isinstance(data, (int, torch.Size)) or not (args or kwargs):
            sizes = cast("tuple[int, ...]", data if isinstance(data, torch.Size) else args or (0,))
            made = torch.empty(sizes, dtype=cls.dtype, device=config.device_name)
        else:
            with torch.device("cpu"):
                made = cast(Callable[..., torch.Tensor], cls.on_cpu)(*args, **kwargs).to(config.device_name)
        return made


class _TypeOfBoth(_Type):
    """The class of types that make tensors on the device and recognize those of the CPU too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, cls.on_cpu)


def types(module: str, kind: type[_Type] = _Type) -> dict[str, type]:
    """Return the types by their names.

    Args:
        module: where they are found: ``torch.tpu``.
        kind: their class.
    """
    made: dict[str, type] = {}
    for name in (f"{dtype}Tensor" for dtype in _KINDS):
        on_cpu = getattr(torch, name)
        members = {"__module__": module, "__qualname__": name, "layout": torch.strided, "on_cpu": on_cpu}
        made[name] = kind(f"{module}.{name}", (), members | {"dtype": on_cpu.dtype})
    return made


def replace_those_of_torch() -> None:
    """Let ``torch.FloatTensor`` and its like make tensors on the device: they do not ask for torch's default device."""
    vars(torch).update(types(f"torch.{config.device_name}", _TypeOfBoth))


class _Default:
    """``torch.set_default_tensor_type``, which takes these types too."""

    torch_sets: ClassVar[Callable[[type[torch.Tensor] | str], None]] = torch.set_default_tensor_type
    here: ClassVar[bool] = False  # the default device is this one, through a type


def _set_default_tensor_type(t: type[torch.Tensor] | str) -> None:
    """Set the default dtype, and the device where tensors are made, to those of a type."""
    own: object = t
    if isinstance(t, str) and t.startswith(f"torch.{config.device_name}."):
        own = vars(getattr(torch, config.device_name)).get(t.rpartition(".")[2], t)
    if isinstance(own, _Type):
        if not own.dtype.is_floating_point:
            raise TypeError("invalid type object: only floating-point types are supported as the default type")
        torch.set_default_dtype(own.dtype)
        torch.set_default_device(config.device_name)
        _Default.here = True
        return
    _Default.torch_sets(t)
    if _Default.here:
        torch.set_default_device(None)
        _Default.here = False


def register(module: ModuleType) -> None:
    """Put the types into the module of the device, and let torch's default be one of them."""
    vars(module).update(types(f"torch.{config.device_name}"))
    torch.set_default_tensor_type = _set_default_tensor_type
