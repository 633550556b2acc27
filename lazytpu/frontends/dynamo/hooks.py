"""What torch._dynamo is told about the device as soon as it is imported, and not before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import _TorchCompileInductorWrapper
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor

from lazytpu.config import config
from lazytpu.dispatch import generated
from lazytpu.frontends.jax.call import call_jax
from lazytpu.observe import logs
from lazytpu.tensors.tensor import LazyTensor
from lazytpu.torch_backend.after_import import after_import
from lazytpu.tracing import cutting, infer, record

NAME = "lazytpu"


def register(backend: object) -> None:
    """Make Dynamo know the backend by its name, and device tensors as the plain tensors they are.

    It must not look into this package either, nor into jax: kernels run between the graphs of a function that breaks.
    """

    def add_backend(registry: ModuleType) -> None:
        for name in (NAME, config.device_name):
            if name not in registry._BACKENDS:  # else the package's entry point was found, and leads here
                registry.register_backend(backend, name=name)

    after_import("torch._dynamo.backends.registry", add_backend)
    after_import("torch._dynamo.variables.builder", _plain_tensors)
    after_import("torch._dynamo.trace_rules", _skipped_packages)
    after_import("torch._dynamo.eval_frame", _leave_alone)
    after_import("torch._functorch._aot_autograd.runtime_wrappers", _handled)
    _lift_on_the_host()
    _serve_the_default(backend)


def _serve_the_default(backend: Any) -> None:
    """Compile what is on the device where ``torch.compile`` is given no backend; inductor does not know the device."""
    theirs: Callable[..., Any] = _TorchCompileInductorWrapper.__call__

    def call(self: Any, model: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        made = [node.meta.get("example_value") for node in model.graph.nodes]
        if not _is_on_device([*inputs, *model.parameters(), *model.buffers(), *made]):
            return theirs(self, model, inputs, **options)
        text = "torch.compile was given no backend and takes %r, for tensors on the device %r"
        logs.note("compile", text, NAME, config.device_name)
        return backend(model, inputs)

    setattr(_TorchCompileInductorWrapper, "__call__", call)  # noqa: B010  for mypy it is a method


def _is_on_device(inputs: Sequence[object]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.device.type == config.device_name for x in inputs)


def _handled(wrappers: ModuleType) -> None:
    """Let the first call of a compiled function take device tensors where Dynamo was imported before lazytpu."""
    setattr(wrappers, "HANDLED_TYPES", proxy_tensor.HANDLED_TYPES)  # noqa: B010  it imported the tuple that was


def _skipped_packages(rules: ModuleType) -> None:
    for package in ("lazytpu", "jax", "jaxlib"):
        rules.add(package)
    rules.FORCE_SKIP_FILES.add(generated.FILE)


def _leave_alone(eval_frame: ModuleType) -> None:
    """Let Dynamo skip what is called from a cut, a transfer, a trace of jax: rules and jax functions are among it."""
    everything = eval_frame.FrameExecStrategy(eval_frame.FrameAction.SKIP, eval_frame.FrameAction.SKIP)
    for function in (cutting.cut, record.record, infer.infer, call_jax):  # `cut` is a region: its code is that of all
        eval_frame.set_code_exec_strategy(function.__code__, everything)


def _plain_tensors(builder: ModuleType) -> None:
    """Let Dynamo take device tensors as plain ones: it simulates subclasses, and this one has nothing to simulate."""
    theirs = builder.infer_subclass_type

    def infer_subclass_type(value: object) -> object:
        return None if type(value) is LazyTensor else theirs(value)

    builder.infer_subclass_type = infer_subclass_type  # type: ignore[attr-defined]


def _lift_on_the_host() -> None:
    """Make ``torch.tensor(data, device=...)`` work under a FakeTensorMode, which takes plain tensors only.

    Torch makes the tensor outside of all modes and gives it to them afterwards: by default on the device, with this
    setting, which each thread has, on the host.  The copy to the device is then an op like any other.
    """
    theirs = FakeTensorMode.__enter__

    def __enter__(mode: FakeTensorMode) -> FakeTensorMode:
        torch._C._set_only_lift_cpu_tensors(True)
        return theirs(mode)

    FakeTensorMode.__enter__ = __enter__  # type: ignore[assignment, method-assign]
