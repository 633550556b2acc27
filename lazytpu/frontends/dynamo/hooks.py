"""What torch._dynamo is told about the device as soon as it is imported, and not before."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from lazytpu.frontends.jax.call import call_jax
from lazytpu.tensors.tensor import LazyTensor
from lazytpu.torch_backend.after_import import after_import
from lazytpu.tracing import cutting, infer, record

NAME = "lazytpu"


def register(backend: Any) -> None:
    """Makes Dynamo know the backend by its name, and device tensors as the plain tensors they are.

    It must not look into this package either, nor into jax: kernels run between the graphs of a function that breaks.
    """

    def add_backend(registry: ModuleType) -> None:
        if NAME not in registry._BACKENDS:  # else the package's entry point was found, and leads here
            registry.register_backend(backend, name=NAME)

    after_import("torch._dynamo.backends.registry", add_backend)
    after_import("torch._dynamo.variables.builder", _plain_tensors)
    after_import("torch._dynamo.trace_rules", _skipped_packages)
    after_import("torch._dynamo.eval_frame", _leave_alone)


def _skipped_packages(rules: ModuleType) -> None:
    for package in ("lazytpu", "jax", "jaxlib"):
        rules.add(package)


def _leave_alone(eval_frame: ModuleType) -> None:
    """All that is called from a cut, a transfer, a trace of jax: rules and jax functions of the user are among it."""
    everything = eval_frame.FrameExecStrategy(eval_frame.FrameAction.SKIP, eval_frame.FrameAction.SKIP)
    for function in (cutting.cut, record.record, infer.infer, call_jax):  # `cut` is a region: its code is that of all
        eval_frame.set_code_exec_strategy(function.__code__, everything)


def _plain_tensors(builder: ModuleType) -> None:
    """Dynamo simulates classes derived from Tensor in Python; this one has nothing to simulate."""
    theirs = builder.infer_subclass_type

    def infer_subclass_type(value: Any) -> Any:
        return None if type(value) is LazyTensor else theirs(value)

    builder.infer_subclass_type = infer_subclass_type  # type: ignore[attr-defined]
