"""An exported program as a SavedModel of TensorFlow, which the op ``XlaCallModule`` runs there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazytpu.export.program import StableHLOModule
    from lazytpu.export.signature import ArraySpec


def save_as_saved_model(
    module: StableHLOModule, folder: str | os.PathLike[str], *, signature_key: str = "serving_default"
) -> None:
    """Write a SavedModel whose function takes the inputs by name and returns the outputs by name.

    Args:
        module: not one that draws random numbers or changes its weights or inputs.
        folder: is made.
        signature_key: the name of the serving signature.

    Raises:
        ImportError: tensorflow is not installed.
        ValueError: the program cannot be a function of its inputs alone.
    """
    try:
        import tensorflow as tf  # type: ignore[import-untyped,import-not-found,unused-ignore]

        # TensorFlow has the op, and no other name for it
        from tensorflow.compiler.tf2xla.python import xla  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise ImportError(
            "saving as a SavedModel needs tensorflow: pip install tensorflow-cpu.  The program itself does not; "
            "save(folder) writes it for jax and for StableHLO tools"
        ) from None
    signature = module.signature
    if signature.random or signature.updates:
        raise ValueError("a program that draws random numbers or changes its weights is no SavedModel; use eval()")
    saved: Any = tf.Module()
    saved.weights = [tf.Variable(module.weights[w.name], trainable=w.kind == "parameter") for w in signature.weights]
    exported = module.exported
    types = [tf.TensorSpec(_sizes(x), x.dtype, name=x.name) for x in signature.arrays]

    def call(*inputs: Any) -> dict[str, Any]:
        arguments = [*saved.weights, *inputs]
        outputs = xla.call_module(
            [arguments[i] for i in exported.module_kept_var_idx],
            version=exported.calling_convention_version,
            module=module.bytecode(),
            Tout=[tf.as_dtype(x.dtype) for x in signature.outputs],
            Sout=[_sizes(x) for x in signature.outputs],
            platforms=[p.upper() for p in exported.platforms],
            **({"use_shardy_partitioner": True} if exported.calling_convention_version >= _SHARDY_FROM else {}),
        )
        return {x.name: y for x, y in zip(signature.outputs, outputs, strict=True)}

    saved.f = tf.function(call, input_signature=types, autograph=False)
    tf.saved_model.save(saved, os.fspath(folder), signatures={signature_key: saved.f})


_SHARDY_FROM = 10  # jax.export's calling convention, from which on the text of a program uses shardy for shardings


def _sizes(spec: ArraySpec) -> list[int | None]:
    return [n if isinstance(n, int) else None for n in spec.shape]
