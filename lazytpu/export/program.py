"""`StableHLOModule`: an exported program that is text, bytes, files, and a function."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np
import torch
from jax import numpy as jnp
from torch.utils._pytree import tree_unflatten

from lazytpu import random
from lazytpu.dtypes import host_array, to_numpy
from lazytpu.export import files
from lazytpu.export.signature import ArraySpec, Signature, load_spec
from lazytpu.export.tensorflow import save_as_saved_model
from lazytpu.export.to_jax import Converted, Weights, convert
from lazytpu.frontends.jax.arrays import from_jax
from lazytpu.frontends.jax.call import call_jax
from lazytpu.location.site import line_here
from lazytpu.observe import metrics
from lazytpu.runtime import client, transfers
from lazytpu.tracing.record import is_device_tensor

PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


class StableHLOModule:
    """A program in StableHLO with its weights; made by `stablehlo` and `load`.

    Attributes:
        exported: the ``jax.export.Exported``, called with ``(weights, *inputs)`` where weights is a list of arrays.
        signature: names and types of weights, inputs and outputs.
        weights: name to numpy array, in the order the program takes them.  Calls use what is here, and write to it
            what the program changes (BatchNorm's statistics in training mode).
        metadata: versions of what made it, the platforms, and what the caller added.
    """

    def __init__(self, exported: Any, signature: Signature, weights: Weights, metadata: dict[str, Any]) -> None:
        self.exported, self.signature, self.weights, self.metadata = exported, signature, weights, metadata
        self._on_device: dict[str, tuple[object, tuple[jax.Array, torch.Tensor]]] = {}
        self._compiled = jax.jit(self._call)

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs that are arrays."""
        return [x.name for x in self.signature.arrays]

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs that the call returns."""
        outputs = self.signature.outputs
        return [outputs[p].name for r in self.signature.results for k, p in r.items() if k != "constant"]

    def text(self, *, locations: bool = False) -> str:
        """Return the program as StableHLO text.

        Args:
            locations: with the module path, op and source line that each instruction comes from.
        """
        text: str = self.exported.mlir_module()
        return text if locations else without_locations(text)

    def bytecode(self) -> bytes:
        """Return portable StableHLO bytecode: any later StableHLO reads it for five years, and an earlier one
        for two, as StableHLO promises."""
        return bytes(self.exported.mlir_module_serialized)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the program and its weights into a folder, which is made; `load` reads it.

        There are ``manifest.json`` (signature, versions, sha256 of each file), ``module.jax_export`` (for jax),
        ``module.stablehlo.bc`` and ``module.mlir`` (for other tools) and ``weights/*.npy``.

        Raises:
            FileExistsError: the folder has files of another kind in it.
            ImportError: the package flatbuffers is missing, with which jax writes programs.
        """
        files.save(self, folder)

    def save_as_saved_model(self, folder: str | os.PathLike[str], *, signature_key: str = "serving_default") -> None:
        """Write the program as a SavedModel of TensorFlow.

        Raises:
            ImportError: tensorflow is not installed.
            ValueError: the program draws random numbers or changes its weights.
        """
        save_as_saved_model(self, folder, signature_key=signature_key)

    def _call(self, weights: list[Any], *inputs: Any) -> Any:
        return self.exported.call(weights, *inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program.

        Args:
            args, kwargs: as for the original module: tensors on the device (the call is recorded as one op) or on
                the CPU, or arrays of jax or numpy.

        Returns:
            What the original returns, with tensors where the inputs were tensors, on the same device, else with jax
            arrays.

        Raises:
            TypeError, ValueError: the inputs are not those of the export; nothing has run.
        """
        given = self.signature.flatten(args, kwargs)
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        lazy = any(is_device_tensor(x) for x in tensors)
        self.signature.check([_typed(x) for x in given])
        if lazy:
            outputs = self._run_lazily(given)
        else:
            outputs = self._run([host_array(x) if isinstance(x, torch.Tensor) else x for x in given])
            if tensors or not given:
                outputs = [transfers.to_host(x).clone() for x in outputs]
        self._update(given, outputs)
        return tree_unflatten([_result(r, outputs) for r in self.signature.results], load_spec(self.signature.out_spec))

    def _run(self, inputs: list[Any]) -> list[Any]:
        with jax.enable_x64(True):
            arrays = [jnp.asarray(x) for x in inputs]
            if self.signature.random:
                arrays.append(jnp.asarray(random.default_generator.next_key(), jnp.uint64))
            return self._execute([self._weight(n)[0] for n in self._names()], arrays)

    def _execute(self, weights: list[Any], inputs: list[Any]) -> list[Any]:
        return list(self._compiled(weights, *inputs))

    def _run_lazily(self, inputs: list[Any]) -> list[Any]:
        tensors = [x.to(device_of(inputs)) if isinstance(x, torch.Tensor) else from_jax(jnp.asarray(x)) for x in inputs]
        if self.signature.random:
            with jax.enable_x64(True):
                tensors.append(from_jax(jnp.asarray(random.default_generator.next_key(), jnp.uint64)))
        return list(call_jax(self._call, [self._weight(n)[1] for n in self._names()], *tensors))

    def _names(self) -> list[str]:
        return [w.name for w in self.signature.weights]

    def _weight(self, name: str) -> tuple[jax.Array, torch.Tensor]:
        """Return a weight as an array and as a tensor on the device; made again when ``weights`` has another."""
        host = self.weights[name]
        known = self._on_device.get(name)
        if known is None or known[0] is not host:
            with jax.enable_x64(True):
                array = jax.device_put(np.array(host, copy=True), client.device())
            known = self._on_device[name] = (host, (array, from_jax(array)))
        return known[1]

    def _update(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        for position, target in self.signature.updates.items():
            new = outputs[position]
            if "weight" in target:
                self._store(target["weight"], new)
                continue
            given = inputs[[x.name for x in self.signature.arrays].index(target["input"])]
            if not isinstance(given, torch.Tensor):
                raise TypeError(f"the program writes to input {target['input']}, so it has to be a tensor")
            given.copy_(new)

    def _store(self, name: str, new: Any) -> None:
        metrics.count("exported_update")
        host = host_array(new) if isinstance(new, torch.Tensor) else np.asarray(new)
        self.weights[name] = host

    def __repr__(self) -> str:
        ins = ", ".join(f"{x.name}: {x.describe()}" for x in self.signature.arrays)
        outs = ", ".join(f"{n}: {self.output(n).describe()}" for n in self.output_names)
        return f"StableHLOModule(({ins}) -> ({outs}), {len(self.weights)} weights)"

    def output(self, name: str) -> ArraySpec:
        """Return the type of an output."""
        return next(x for x in self.signature.outputs if x.name == name)


def device_of(inputs: Sequence[Any]) -> torch.device:
    """Return the device of the first device tensor."""
    found: torch.device = next(x.device for x in inputs if is_device_tensor(x))
    return found


class _Typed:
    """Shape and numpy dtype of an input."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype


def _typed(x: object) -> _Typed:
    if isinstance(x, torch.Tensor):
        return _Typed(tuple(x.shape), to_numpy(x.dtype))
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"the program takes an array here, not {x!r}")
    return _Typed(tuple(x.shape), x.dtype)


def _result(result: dict[str, Any], outputs: Sequence[Any]) -> Any:
    if "constant" in result:
        return result["constant"]
    return int(outputs[result["size"]]) if "size" in result else outputs[result["output"]]


def without_locations(text: str) -> str:
    """Return MLIR text without the lines it came from."""
    from jax.extend.mlir import ir
    from jax.interpreters import mlir

    with mlir.make_ir_context():
        return str(ir.Module.parse(text).operation.get_asm(enable_debug_info=False))


def stablehlo(
    exported_program: torch.export.ExportedProgram,
    *,
    inline_weights: bool = False,
    platforms: Sequence[str] | None = None,
    metadata: dict[str, Any] | None = None,
) -> StableHLOModule:
    """Lower what ``torch.export.export`` gives to StableHLO, by the rules of the lazy device.

    Dynamic dimensions (``torch.export.Dim``) become symbolic dimensions of ``jax.export`` with the same bounds.

    Args:
        exported_program: of a module on the CPU or the device.
        inline_weights: whether parameters, buffers and constants are constants of the program, instead of arguments.
        platforms: where it is to run: of ``cpu``, ``cuda``, ``rocm`` and ``tpu``; None for where this process runs.
            A program for several takes the number of the platform as its first argument.
        metadata: anything JSON holds, kept with it.

    Raises:
        TypeError: it is no exported program.
        UnsupportedOpError, LoweringError: an op cannot be lowered; names the user's line.

    Example:
        >>> m = lazytpu.export.stablehlo(torch.export.export(model, (x,)))  # doctest: +SKIP
        >>> print(m.text())  # doctest: +SKIP
    """
    if not isinstance(exported_program, torch.export.ExportedProgram):
        raise TypeError(
            f"stablehlo takes what torch.export.export(module, args) returns, not a {type(exported_program).__name__}"
        )
    made = converted(exported_program, inline_weights, tuple(platforms or (PLATFORMS[client.platform()],)))
    return StableHLOModule(made.exported, made.signature, made.weights, notes(made, metadata))


def converted(program: torch.export.ExportedProgram, inline: bool, platforms: Sequence[str]) -> Converted:
    """Convert a program, and count it."""
    with metrics.timed("export"):
        made = convert(program, inline=inline, platforms=platforms)
    metrics.count("export")
    return made


def notes(made: Converted, more: Mapping[str, object] | None) -> dict[str, Any]:
    """Return the metadata of a program that was made just now."""
    where = {"platforms": list(made.exported.platforms), "exported_at": str(line_here())}
    return {"versions": _versions(), **where, **(more or {})}


def _versions() -> dict[str, str]:
    """Return package to version, for all that decides what a saved program is."""
    try:
        own = version("lazytpu")
    except PackageNotFoundError:  # run from the source tree
        own = "source"
    return {"lazytpu": own, "torch": torch.__version__, "jax": jax.__version__, "jaxlib": version("jaxlib")}
