"""What to write for the names of TensorFlow, whose programs are rewritten: it has counterparts, not a stand-in."""

from __future__ import annotations

_DEVICES = {
    "config.list_physical_devices": "lazytpu.device_count(), lazytpu.platform()",
    "config.list_logical_devices": "lazytpu.device_count(), lazytpu.platform()",
    "config.experimental": "jax's variables, such as XLA_PYTHON_CLIENT_PREALLOCATE=false",
    "config.set_visible_devices": "JAX_PLATFORMS, before jax is imported",
    "config.set_soft_device_placement": 'lazytpu.config.fallback = "cpu" for on, "error" for off',
    "config.get_soft_device_placement": "lazytpu.config.fallback",
    "debugging.set_log_device_placement": 'LAZYTPU_LOG=placement, or lazytpu.config.log = "placement"',
    "device": "the device argument of what makes a tensor, or .to(lazytpu.device())",
    "distribute": "one process and one device; leave the strategy out",
    "test.is_gpu_available": "lazytpu.platform()",
}
_COMPILING = {
    "function": "lazytpu.jit, for a function that is one program; other ops are recorded and compiled without it",
    "config.optimizer.set_jit": "nothing: XLA compiles every graph",
    "config.optimizer.get_jit": "nothing: XLA compiles every graph",
    "config.run_functions_eagerly": "lazytpu.config.eager = True",
    "xla.experimental": "lazytpu.jit",
    "autograph": "Python as it is; torch.cond and torch.while_loop where a tensor decides",
    "cond": "torch.cond",
    "while_loop": "torch.while_loop",
    "scan": "torch._higher_order_ops.scan",
    "map_fn": "torch.vmap",
    "vectorized_map": "torch.vmap",
    "py_function": "take it out of the compiled function",
    "numpy_function": "take it out of the compiled function",
    "TensorSpec": "nothing: each set of types compiles one program",
    "GradientTape": "loss.backward(), or torch.func.grad",
    "gradients": "torch.autograd.grad",
    "stop_gradient": "tensor.detach()",
    "custom_gradient": "torch.autograd.Function",
    "debugging.enable_check_numerics": "lazytpu.debug.find_nan",
    "profiler": "lazytpu.profiler",
    "summary": "torch.utils.tensorboard",
    "print": "print: reading a tensor runs what is pending",
}
_TENSORS = {
    "constant": "torch.tensor",
    "convert_to_tensor": "torch.as_tensor",
    "Variable": "torch.nn.Parameter, or a tensor",
    "Tensor": "torch.Tensor",
    "cast": "tensor.to(dtype)",
    "random.normal": "torch.randn",
    "random.uniform": "torch.rand",
    "random.set_seed": "torch.manual_seed",
    "random.Generator": "torch.Generator",
    "random": "torch.rand and its kin",
    "reduce_sum": "torch.sum",
    "reduce_mean": "torch.mean",
    "reduce_max": "torch.amax",
    "concat": "torch.cat",
    "expand_dims": "tensor.unsqueeze",
    "matmul": "torch.matmul",
    "einsum": "torch.einsum",
    "nn": "torch.nn.functional",
    "math": "the function of the same name in torch",
    "linalg": "torch.linalg",
    "signal": "torch.fft",
    "image": "torchvision.transforms, or torch.nn.functional.interpolate",
    "data": "torch.utils.data.DataLoader, with lazytpu.DeviceLoader around it",
    "saved_model": "lazytpu.export.package, lazytpu.load",
    "train.Checkpoint": "torch.save, torch.load",
    "lite": "lazytpu.export",
    "TensorArray": "a list and torch.stack",
    "float32": "torch.float32",
    "float16": "torch.float16",
    "bfloat16": "torch.bfloat16",
    "int32": "torch.int32",
    "int64": "torch.int64",
}
_KERAS = {
    "Sequential": "torch.nn.Sequential",
    "Model": "torch.nn.Module",
    "Input": "nothing: a module takes what it is called with",
    "layers.Dense": "torch.nn.Linear, which needs the size of its input; activations are modules of their own",
    "layers.Conv1D": "torch.nn.Conv1d, channels first",
    "layers.Conv2D": "torch.nn.Conv2d, channels first",
    "layers.Conv3D": "torch.nn.Conv3d, channels first",
    "layers.MaxPooling2D": "torch.nn.MaxPool2d",
    "layers.AveragePooling2D": "torch.nn.AvgPool2d",
    "layers.GlobalAveragePooling2D": "torch.nn.AdaptiveAvgPool2d(1)",
    "layers.BatchNormalization": "torch.nn.BatchNorm2d; its momentum is one minus that of Keras",
    "layers.LayerNormalization": "torch.nn.LayerNorm",
    "layers.MultiHeadAttention": "torch.nn.MultiheadAttention",
    "layers.LSTM": "torch.nn.LSTM(batch_first=True)",
    "layers.GRU": "torch.nn.GRU(batch_first=True)",
    "layers": "the module of the same name in torch.nn",
    "activations": "torch.nn.functional",
    "initializers": "torch.nn.init",
    "regularizers": "weight_decay of the optimizer",
    "losses": "torch.nn: CrossEntropyLoss takes logits, not probabilities",
    "metrics": "a few lines of torch",
    "optimizers.schedules": "torch.optim.lr_scheduler",
    "optimizers": "torch.optim",
    "callbacks": "the training loop itself",
    "datasets": "torchvision.datasets",
    "applications": "torchvision.models",
    "preprocessing": "torchvision.transforms",
    "mixed_precision": "torch.autocast(lazytpu.device().type, torch.bfloat16)",
    "backend": "torch",
    "utils": "torch",
}

INSTEAD = {
    **{f"tensorflow.{name}": use for part in (_DEVICES, _COMPILING, _TENSORS) for name, use in part.items()},
    **{f"tensorflow.keras.{name}": use for name, use in _KERAS.items()},
}
"""Name in full, or the beginning of one, to what to write."""

_REST = "the function of the same name in torch, if there is one"


def instead_of(name: str) -> str:
    """What to write for a name of TensorFlow or Keras; of names that begin alike, the longest that is known counts.

    Args:
        name: ``tensorflow.function``, ``keras.layers.Dense``.
    """
    parts = name.removeprefix("tensorflow.").split(".")
    if parts in (["tensorflow"], ["keras"]):
        return "torch, with import lazytpu"
    known = (INSTEAD.get(".".join(["tensorflow", *parts[:n]])) for n in range(len(parts), 0, -1))
    return next((use for use in known if use), _REST)
