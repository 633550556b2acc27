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
    "torch_xla.experimental.assume_pure": "lazytpu.compile, or lazytpu.call_jax",
    "torch_xla.experimental.xla_quantized_matmul": "lazytpu.quantization",
    "torch_xla.core.xla_builder": "lazytpu.call_jax with a function of jax.lax",
    "torch_xla.core.xla_op_registry": "lazytpu.call_jax with a function of jax.lax",
    "torch_xla.core.functions": "torch.distributed's functional collectives",
    "torch_xla.core.dynamo_bridge": 'torch.compile(backend="lazytpu")',
    "torch_xla.distributed.data_parallel": "one device; call the model itself",
    "torch_xla.distributed.xla_backend": "one process needs no process group",
    "torch_xla.distributed.zero_redundancy_optimizer": "the optimizer itself: one device holds all of its state",
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
    "torch_xla._XLAC._get_xla_sharding_spec": "nothing: one device holds whole tensors",
    "torch_xla._XLAC._get_xla_sharding_type": "nothing: one device holds whole tensors",
    "torch_xla._XLAC._xla_mark_sharding": "nothing: one device holds whole tensors",
    "torch_xla._XLAC.OpSharding": "nothing: one device holds whole tensors",
    "torch_xla._XLAC._get_xla_tensor_debug_info": "lazytpu.ir_text(tensor)",
    "torch_xla._XLAC._get_xla_tensor_shape_type": "tensor.dtype and tensor.shape",
    "torch_xla._XLAC._get_graph_hash": "lazytpu.ir_text(tensor), whose head has the graph's key",
    "torch_xla._XLAC._set_buffer_donation": "nothing: memory of what a step overwrites is used again by itself",
    "torch_xla._XLAC._get_buffer_donation": "nothing: memory of what a step overwrites is used again by itself",
    "torch_xla._XLAC._set_ir_debug": "nothing: the IR always has the Python lines",
    "torch_xla._XLAC._get_ir_debug": "nothing: the IR always has the Python lines",
    "torch_xla._XLAC._xla_mark_dynamic": "torch.export with dynamic_shapes, then lazytpu.export",
    "torch_xla._XLAC._xla_get_tensor_id": "id(tensor)",
    "torch_xla._XLAC._xla_tpu_custom_call": "lazytpu.call_jax with the Pallas kernel",
    "torch_xla._XLAC._xla_custom_call": "lazytpu.call_jax",
    "torch_xla._XLAC._xla_dot_general": "torch.einsum, or lazytpu.call_jax with jax.lax.dot_general",
    "torch_xla._XLAC._get_tensors_handle": "lazytpu.to_jax(tensor)",
    "torch_xla._XLAC._xla_warm_up_cache": "torch_xla.sync()",
    "torch_xla._XLAC._run_cached_graph": 'torch.compile(backend="lazytpu")',
    "torch_xla._XLAC.lowering": "lazytpu.stablehlo_text, lazytpu.hlo_text",
    "torch_xla._XLAC._get_xla_tensor_dimension_size": "tensor.shape: sizes are known",
    "torch_xla._dynamo": 'torch.compile(backend="lazytpu")',
    "torch_xla._internal": "nothing: it is private there; torch_xla.runtime has what is public",
    "torch_xla._patched_functions": "torch's own functions, which work here as they are",
    "torch_xla.amp.syncfree._functional": "torch_xla.amp.syncfree",
    "torch_xla.amp.syncfree.adam": "torch_xla.amp.syncfree.Adam",
    "torch_xla.amp.syncfree.adamw": "torch_xla.amp.syncfree.AdamW",
    "torch_xla.amp.syncfree.sgd": "torch_xla.amp.syncfree.SGD",
    "torch_xla.core.xla_model.DeviceContext": "torch_xla.device()",
    "torch_xla.core.xla_model.ShardingSpec": "nothing: one device holds whole tensors",
    "torch_xla.debug.frame_parser_util": "lazytpu.explain()",
    "torch_xla.debug.profiler.get_tracer_marked_step": "lazytpu.profiler",
    "torch_xla.debug.profiler.maybe_get_jax": "import jax",
    "torch_xla.debug.profiler.set_tracer_marked_step": "lazytpu.profiler",
    "torch_xla.distributed.parallel_loader.PerDeviceQueue": "MpDeviceLoader, or lazytpu.DeviceLoader",
    "torch_xla.distributed.xla_multiprocessing.device_kind_handler_dict": "nothing: jax knows the kinds of devices",
    "torch_xla.experimental.callback": "lazytpu.wait(), or xm.add_step_closure",
    "torch_xla.experimental.deprecation": "nothing: it is private there",
    "torch_xla.experimental.dynamo_mark_sharding": "nothing: one device holds whole tensors",
    "torch_xla.experimental.dynamo_set_buffer_donor": "nothing: memory of what a step overwrites is used again",
    "torch_xla.experimental.gru": "torch.nn.GRU, which is one loop here",
    "torch_xla.experimental.mark_pattern_utils": "lazytpu.call_jax",
    "torch_xla.experimental.pallas_kernels": "lazytpu.call_jax with a Pallas kernel",
    "torch_xla.experimental.pytreeify": "torch.autograd.Function with torch.utils._pytree",
    "torch_xla.experimental.quantized": "lazytpu.quantization",
    "torch_xla.experimental.unbounded_dynamism_export": "torch.export with dynamic_shapes, then lazytpu.export",
    "torch_xla.experimental.xla_dynamic_reshape_ops": "torch.export with dynamic_shapes, then lazytpu.export",
    "torch_xla.experimental.xla_mlir_debuginfo": "lazytpu.stablehlo_text, which has the lines of the script",
    "torch_xla.stablehlo.StableHLOFunc": "StableHLOGraphModule, which has the function",
    "torch_xla.stablehlo.StableHLOJSONSerializer": "StableHLOGraphModule.save",
    "torch_xla.stablehlo.StableHLOModelBundle": "StableHLOGraphModule, or lazytpu.export",
    "torch_xla.stablehlo.XLAExportInterpreter": "exported_program_to_stablehlo",
    "torch_xla.stablehlo.stablehlo_obj_hook": "StableHLOGraphModule.load",
    "torch_xla.test": "lazytpu.debug.check, which compares each op with the CPU",
    "torch_xla.torch_xla": "torch_xla",
    "torch_xla.utils.checkpoint_tagger": "torch.utils.checkpoint",
    "torch_xla.utils.closures": "xm.add_step_closure",
    "torch_xla.utils.keyd_queue": "queue.Queue",
    "torch_xla.utils.serialization.TensorReference": "torch.save and torch.load",
    "torch_xla.utils.stablehlo_test_utils": "lazytpu.export.load",
    "torch_xla.utils.utils.Cleaner": "contextlib.ExitStack",
    "torch_xla.utils.utils.DataWrapper": "torch.utils._pytree",
    "torch_xla.utils.utils.LazyProperty": "functools.cached_property",
    "torch_xla.utils.utils.flatten_nested_tuple": "torch.utils._pytree.tree_leaves",
    "torch_xla.utils.utils.for_each_instance_rewrite": "torch.utils._pytree.tree_map",
    "torch_xla.utils.utils.get_free_tcp_ports": "socket.create_server",
    "torch_xla.utils.utils.list_copy_append": "[*values, value]",
    "torch_xla.utils.utils.parallel_work": "concurrent.futures.ThreadPoolExecutor",
    "torch_xla.utils.utils.shape": "numpy.shape",
    "create_optimized_replica_groups": "nothing: a machine with one device has one group",
    "exported_program_has_symbolic_input_shape": "torch.export with dynamic_shapes, then lazytpu.export",
    "extract_custom_call_outputs_shape_dtype": "lazytpu.call_jax",
    "process_exported_program_with_symbolic_input": "torch.export with dynamic_shapes, then lazytpu.export",
    "stablehlo_custom_call": "lazytpu.call_jax",
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
