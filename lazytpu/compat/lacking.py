"""Names of the other packages that have no counterpart here, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

INSTEAD = {
    "torch_xla.distributed.fsdp": "one device holds the whole model here; leave the wrapper out",
    "torch_xla.distributed.spmd": "one device holds the whole model here; leave the shardings out",
    "torch_xla.experimental.spmd_fully_sharded_data_parallel": "one device holds the whole model here",
    "torch_xla.experimental.custom_kernel": "lazytpu.call_jax with the Pallas kernel",
    "torch_xla.experimental.splash_attention": "torch.nn.functional.scaled_dot_product_attention",
    "torch_xla.experimental.scan": "torch._higher_order_ops.scan",
    "torch_xla.experimental.scan_layers": "lazytpu.scan_layers",
    "torch_xla.experimental.fori_loop": "torch._higher_order_ops.while_loop",
    "torch_xla.experimental.assume_pure": "lazytpu.compile, or lazytpu.call_jax",
    "torch_xla.experimental.xla_quantized_matmul": "lazytpu.quantization",
    "torch_xla.core.xla_builder": "lazytpu.call_jax with a function of jax.lax",
    "torch_xla.core.xla_op_registry": "lazytpu.call_jax with a function of jax.lax",
    "torch_xla.core.functions": "torch.distributed's functional collectives",
    "torch_xla.core.dynamo_bridge": 'torch.compile(backend="lazytpu")',
    "torch_xla.distributed.data_parallel": "one device; call the model itself",
    "torch_xla.distributed.xla_backend": "one process needs no process group",
    "torch_xla.distributed.zero_redundancy_optimizer": "the optimizer itself: one device holds all of its state",
    "torch_xla.utils.checkpoint": "torch.utils.checkpoint",
    "torch_xla.utils.dlpack": "torch.from_dlpack",
    "torch_xla.tf_saved_model_integration": "lazytpu.export",
    "torch_mlu.core.mlu_model.save_as_cambricon": "lazytpu.export.package",
    "torch_mlu.core.mlu_model.dump_enable": "lazytpu.config.dump",
    "torch_xla.experimental.distributed_checkpoint": "torch.save and torch.load: one process holds all",
    "torch_xla.experimental.gradient_accumulation": "a loop over backward(), with lazytpu.mark_step() at its end",
    "torch_xla.experimental.pjrt": "torch_xla.runtime",
    "torch_xla.experimental.pjrt_backend": "one process needs no process group",
    "torch_xla.experimental.plugins": "jax's plugins: install one, and jax finds the device",
    "torch_xla.experimental.stablehlo_custom_call": "lazytpu.call_jax",
    "torch_xla.experimental.xla_marker": "lazytpu.call_jax",
    "torch_xla.debug.graph_saver": "lazytpu.config.dump, or XLA_SAVE_TENSORS_FILE",
    "torch_xla.debug.metrics_saver": "XLA_METRICS_FILE, or lazytpu.config.metrics_file",
    "torch_xla.debug.metrics_compare_utils": "lazytpu.config.metrics_file, a line of JSON for each step",
    "torch_xla.debug.model_comparator": "lazytpu.debug.check, which compares each op with the CPU",
    "torch_xla.plugins": "jax's plugins: install one, and jax finds the device",
    "torch_xla.debug.profiler.trace": "start_trace and stop_trace, or lazytpu.profiler.trace",
    "torch_xla.debug.profiler.trace_detached": "start_trace and stop_trace, or lazytpu.profiler.trace",
    "torch_xla.core.xla_model.set_replication": "one device; there is nothing to replicate",
    "torch_xla.core.xla_model.xla_replication_devices": "one device; there is nothing to replicate",
    "torch_xla.core.xla_model.check_view_sharing": "views share memory on the device as they do on the CPU",
    "torch_xla.core.xla_model.ToXlaTensorArena": "xm.send_cpu_data_to_device",
    "torch_xla.set_custom_compile_options": "the variable XLA_FLAGS, before jax is imported",
    "torch_xla.utils.buffer_donor_context": "nothing: memory of what a step overwrites is used again by itself",
    "torch_xla._XLAC._set_allow_execution": "torch_xla.compile(full_graph=True), or lazytpu.config.log = 'cut'",
    "torch_xla._XLAC._get_xla_tensor_dimension_size": "tensor.shape: sizes are known",
    "send": "a machine with one device has nobody to send to",
    "recv": "a machine with one device has nobody to receive from",
    "spawn_threads": "torch_xla.launch",
}
"""Full module name, or the name of a function, to what to use."""


def message(name: str) -> str:
    """The text of the error for a module or name that is not there."""
    parts = name.split(".")
    known = next((INSTEAD[key] for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in INSTEAD), None)
    text = f"lazytpu's stand-in for {parts[0]} has no {name}"
    return f"{text}; use instead: {known}" if known else f"{text}; see the migration guide of {parts[0]}"


def names_of(module: str) -> Callable[[str], NoReturn]:
    """A module's ``__getattr__``: what is lacking raises an ImportError that says what to use instead."""

    shown = module.removeprefix("lazytpu.compat.")

    def __getattr__(name: str) -> Any:
        instead = INSTEAD.get(f"{shown}.{name}") or INSTEAD.get(name)
        if instead:
            raise ImportError(f"lazytpu's stand-in has no {shown}.{name}; use instead: {instead}", name=name)
        raise AttributeError(f"lazytpu's stand-in has no {shown}.{name}; see the migration guide")

    return __getattr__
