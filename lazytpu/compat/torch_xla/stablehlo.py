"""``torch_xla.stablehlo``: its names, arguments and folder layout, over `lazytpu.export`."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lazytpu.compat import names
from lazytpu.export.files import serialized
from lazytpu.export.loading import deserialized
from lazytpu.export.npy import from_npy, to_npy
from lazytpu.export.program import StableHLOModule, stablehlo
from lazytpu.export.signature import ArraySpec, Signature, as_dtype
from lazytpu.export.tensorflow import save_as_saved_model

__getattr__ = names.missing_from(__name__)

_NAME = "forward"


@dataclass
class StableHLOExportOptions:
    """Options of an export.

    Attributes:
        include_human_readable_text: write text beside the bytecode.
        override_tracing_arguments, override_tracing_kwargs: ignored: an exported program knows its arguments.
        save_weights, export_weights: write the weights, if both are True.
        inline_all_constant: ignored: Python numbers are constants of the program, tensors that the model holds are
            files in ``constants``.
        export_node_metadata: show the module path, op and source line of each instruction in the text.
        custom_ops_allowed_in_graph: ignored: a custom op is part of the program if it has a rule
            (`lazytpu.lowering.lowers`), else the export fails.
    """

    include_human_readable_text: bool = True
    override_tracing_arguments: tuple[object, ...] | None = None
    override_tracing_kwargs: Mapping[str, object] | None = None
    save_weights: bool = True
    export_weights: bool = True
    inline_all_constant: bool = True
    export_node_metadata: bool = False
    custom_ops_allowed_in_graph: set[str] = field(default_factory=set)


class VariableType(enum.Enum):
    """Where an argument of the program comes from."""

    INPUT_ARG = "input_arg"
    PARAMETER = "parameter"
    CONSTANT = "constant"


@dataclass
class VariableSignature:
    """The type of an argument or result; the size of a dynamic dimension is -1."""

    shape: list[int]
    dtype: str
    dynamic_dims: list[int] = field(default_factory=list)


@dataclass
class InputLocation:
    """Which input, weight or constant an argument is."""

    type_: VariableType
    position: int = -1
    name: str = ""


@dataclass
class StableHLOFunctionMeta:
    """The metadata of a function; ``input_signature`` and ``input_locations`` are in the order of its arguments."""

    name: str
    stablehlo_version: str
    input_signature: list[VariableSignature]
    output_signature: list[VariableSignature]
    input_locations: list[InputLocation]
    unused_inputs: list[object]
    input_pytree_spec: str | None = None
    output_pytree_spec: str | None = None


class StableHLOGraphModule:
    """A model as StableHLO, called with tensors as the original is.

    Attributes:
        module: the program of `lazytpu.export`.
    """

    def __init__(self, module: StableHLOModule, options: StableHLOExportOptions | None = None) -> None:
        self.module, self._options = module, options or StableHLOExportOptions()
        wanted, locations = self._options.include_human_readable_text, self._options.export_node_metadata
        self._text = module.text(locations=locations) if wanted else None

    def __call__(self, *args: object) -> object:
        return self.evaluate(_NAME, args)

    def evaluate(self, method_name: str, args: Sequence[object]) -> object:
        """Run a method; the only one is ``forward``.

        Raises:
            KeyError: there is no such method.
        """
        _check(method_name)
        return self.module(*args)

    def get_stablehlo_bytecode(self, method_name: str | None = None) -> bytes:
        """Return the program as portable StableHLO bytecode."""
        _check(method_name)
        return self.module.bytecode()

    def get_stablehlo_text(self, method_name: str | None = None) -> str | None:
        """Return the program as text; None where it was exported or saved without."""
        _check(method_name)
        return self._text

    def save(self, directory_path: str | os.PathLike[str], options: StableHLOExportOptions | None = None) -> None:
        """Write ``functions/forward.meta``, ``.bytecode`` and ``.mlir``, ``data/<weight>`` and ``constants/<number>``.

        `load` reads two more files, ``functions/forward.jax_export`` and ``functions/forward.signature``.
        """
        options = options or self._options
        folder, signature = Path(directory_path), self.module.signature
        files = {
            "meta": json.dumps(dataclasses.asdict(_meta_of(signature)), default=lambda e: e.value).encode(),
            "bytecode": self.module.bytecode(),
            "jax_export": serialized(self.module.exported),
            "signature": json.dumps(signature.to_json()).encode(),
        }
        if options.include_human_readable_text and self._text is not None:
            files["mlir"] = self._text.encode()
        written = {f"functions/{_NAME}.{kind}": data for kind, data in files.items()}
        for name, place in _places(signature).items():
            if options.save_weights and options.export_weights or place.startswith("constants"):
                written[place] = to_npy(self.module.weights[name])
        (folder / "constants").mkdir(parents=True, exist_ok=True)
        for name, data in written.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)

    @classmethod
    def load(cls, directory_path: str | os.PathLike[str]) -> StableHLOGraphModule:
        """Read what `save` wrote, without any pickle.

        Raises:
            FileNotFoundError: a file is missing; folders written by torch_xla itself cannot be loaded.
        """
        functions = Path(directory_path) / "functions"
        program = functions / f"{_NAME}.jax_export"
        if not program.exists():
            raise FileNotFoundError(f"{program}: only folders written by lazytpu can be loaded")
        signature = Signature.from_json(json.loads((functions / f"{_NAME}.signature").read_text()))
        weights = {}
        for spec in signature.weights:
            file = Path(directory_path) / _places(signature)[spec.name]
            if not file.exists():
                raise FileNotFoundError(f"{file}: the folder was saved without weights")
            weights[spec.name] = from_npy(file.read_bytes(), spec.dtype, tuple(int(n) for n in spec.shape))
        made = cls(StableHLOModule(deserialized(program.read_bytes()), signature, weights, {}))
        made._text = made._text if (functions / f"{_NAME}.mlir").exists() else None
        return made


def _check(name: str | None) -> None:
    if name not in (None, _NAME):
        raise KeyError(f"there is no method {name!r}, only {_NAME!r}")


def _places(signature: Signature) -> dict[str, str]:
    """Map the names of weights to their files."""
    constants = [w.name for w in signature.weights if w.kind == "constant"]
    return {
        w.name: f"constants/{constants.index(w.name)}" if w.kind == "constant" else f"data/{w.name}"
        for w in signature.weights
    }


def _meta_of(signature: Signature) -> StableHLOFunctionMeta:
    places = _places(signature)
    locations = [
        InputLocation(VariableType.CONSTANT, int(place.partition("/")[2]))
        if place.startswith("constants")
        else InputLocation(VariableType.PARAMETER, name=name)
        for name, place in places.items()
    ]
    locations += [
        InputLocation(VariableType.INPUT_ARG, i) for i, x in enumerate(signature.inputs) if isinstance(x, ArraySpec)
    ]
    types = [_variable(x) for x in (*signature.weights, *signature.arrays)]
    results = [_variable(signature.outputs[p]) for r in signature.results for k, p in r.items() if k != "constant"]
    return StableHLOFunctionMeta(_NAME, "0.0.0", types, results, locations, [], signature.in_spec, signature.out_spec)


def _variable(spec: ArraySpec) -> VariableSignature:
    dynamic = [i for i, n in enumerate(spec.shape) if isinstance(n, str)]
    shape = [-1 if isinstance(n, str) else n for n in spec.shape]
    return VariableSignature(shape, str(as_dtype(spec.dtype)).removeprefix("torch."), dynamic)


def exported_program_to_stablehlo(
    exported_model: torch.export.ExportedProgram, options: StableHLOExportOptions | None = None
) -> StableHLOGraphModule:
    """Convert an exported program to StableHLO.

    Example:
        >>> program = exported_program_to_stablehlo(torch.export.export(model, (x,)))  # doctest: +SKIP
        >>> print(program.get_stablehlo_text("forward"))  # doctest: +SKIP
    """
    return StableHLOGraphModule(stablehlo(exported_model), options)


def save_as_stablehlo(
    exported_model: torch.export.ExportedProgram,
    stablehlo_dir: str | os.PathLike[str],
    options: StableHLOExportOptions | None = None,
) -> None:
    """Write an exported program into a folder; `StableHLOGraphModule.load` reads it."""
    exported_program_to_stablehlo(exported_model, options).save(stablehlo_dir, options)


def save_torch_model_as_stablehlo(
    torchmodel: torch.nn.Module,
    args: tuple[object, ...],
    path: str | os.PathLike[str],
    options: StableHLOExportOptions | None = None,
) -> None:
    """Export a module with these arguments and write it into a folder."""
    save_as_stablehlo(torch.export.export(torchmodel, args), path, options)


def save_torch_module_as_tf_saved_model(
    torch_model: torch.nn.Module,
    args: tuple[object, ...],
    saved_model_dir: str | os.PathLike[str],
    serving_signature_key: str = "serving_default",
) -> None:
    """Export a module with these arguments and write it as a SavedModel.

    Raises:
        ImportError: tensorflow is not installed.
    """
    program = stablehlo(torch.export.export(torch_model, args))
    save_as_saved_model(program, saved_model_dir, signature_key=serving_signature_key)
