"""Kernels for the ops that FSDP2 defines: ``torch.ops.fsdp``, once it is imported."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType

import torch

from lazytpu.config import config
from lazytpu.ir.op_schema import Arg
from lazytpu.runtime import world
from lazytpu.tensors.storage import storage_of
from lazytpu.torch_backend.after_import import after_import
from lazytpu.tracing.cutting import cut
from lazytpu.tracing.record import cell_of, is_device_tensor

Tensor = torch.Tensor
_PACKAGE = "torch.distributed.fsdp._fully_shard"
_libraries: list[torch.library.Library] = []


def all_gather_copy_in(
    inputs: Sequence[Tensor], output: Tensor, sizes: Sequence[int], numel: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Return what this rank has for the others, in one piece, and where the pieces of all of them are to go.

    Torch's own writes the piece to where it will be among the others, a place that is another one on each rank.
    """
    with torch.no_grad():
        return torch.cat([x.detach().reshape(-1).to(output.dtype) for x in inputs]), output


def copy_(target: Tensor, data: Tensor) -> None:
    """Copy, and leave the version of the target to FSDP."""
    target.copy_(data)


def register() -> None:
    """Wait for FSDP2, which defines its ops when it is imported."""
    after_import(f"{_PACKAGE}._fsdp_collectives", _register_collectives)
    after_import(f"{_PACKAGE}._fsdp_param", _register_parameters)
    after_import(f"{_PACKAGE}._fsdp_state", _cut_before_first_step)
    after_import(f"{_PACKAGE}._fsdp_init", _move_models_of_the_host)
    after_import("torch.distributed.fsdp._flat_param", _keep_on_device)
    after_import("torch.distributed.fsdp._state_dict_utils", _move_whole_states)


def _library() -> torch.library.Library:
    if not _libraries:
        _libraries.append(torch.library.Library("fsdp", "IMPL"))
    return _libraries[0]


def _register_collectives(_: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its kernel is overridden
        _library().impl("all_gather_copy_in", all_gather_copy_in, "PrivateUse1", allow_override=True)


def _register_parameters(module: ModuleType) -> None:
    _library().impl("copy_", copy_, "PrivateUse1", allow_override=True)
    _keep_padded(vars(module)["FSDPParam"])


def _keep_padded(parameter: Arg) -> None:
    """Let a parameter of uneven parts stay where ``state_dict`` has seen it.

    FSDP compares the storages of plain tensors only, and would pad the part of any other again, elsewhere.
    """
    reset = parameter.reset_sharded_param

    @functools.wraps(reset)
    def call(self: Arg) -> None:
        now: Arg = getattr(self._module_info.module, self._module_info.param_name)
        both = self._sharded_param_data, now._local_tensor
        if all(map(is_device_tensor, both)) and len({storage_of(cell_of(x)) for x in both}) == 1:
            self.sharded_param, self._sharding_spec = now, now._spec
        else:
            reset(self)

    parameter.reset_sharded_param = call


def _move_models_of_the_host(module: ModuleType) -> None:
    """Let ``fully_shard`` take a model on the CPU: what it moves keeps its Python object, but not its type in C++."""
    name = "_move_states_to_device"
    move = vars(module)[name]

    @functools.wraps(move)
    def call(parameters: Sequence[Tensor], buffers: Sequence[Tensor], device: torch.device) -> None:
        for x in (*parameters, *buffers):
            if device.type == config.device_name and x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter):
                moved = x.detach().to(device)
                torch.utils.swap_tensors(
                    x, torch.nn.Parameter(moved, x.requires_grad) if type(x) is torch.nn.Parameter else moved
                )
        move(parameters, buffers, device)

    setattr(module, name, call)


def _keep_on_device(module: ModuleType) -> None:
    """Leave the whole parameters of FSDP1 where they are: ``data`` of one on the device cannot be a CPU tensor."""
    handle: Arg = vars(module)["FlatParamHandle"]
    to_cpu = handle.to_cpu
    handle.to_cpu = lambda self: nullcontext() if is_device_tensor(self.flat_param) else to_cpu(self)


def _move_whole_states(module: ModuleType) -> None:
    """Have FSDP1 move the parameters of a whole state afterwards."""
    name = "_full_post_state_dict_hook"
    hook = vars(module)[name]

    @functools.wraps(hook)
    def call(net: torch.nn.Module, state: Arg, *args: Arg) -> dict[str, Arg]:
        found: dict[str, Arg] = hook(net, state, *args)
        if state._state_dict_config.offload_to_cpu:
            found.update({key: x.cpu() for key, x in found.items() if hasattr(x, "_has_been_cloned")})
        return found

    setattr(module, name, call)


def _cut_before_first_step(module: ModuleType) -> None:
    """Cut where a model is first called: each rank has taken another part of its parameters until then."""
    state: Arg = vars(module)["FSDPState"]
    lazy_init = state._lazy_init

    @functools.wraps(lazy_init)
    def call(self: Arg) -> None:
        if self._is_root is None and world.size() > 1:
            cut("fully_shard")
        lazy_init(self)

    state._lazy_init = call
