"""From an ``ExportedProgram`` of torch to a program of jax's, through the rules of the lazy path."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
import torch
from jax import numpy as jnp
from torch._decomp import decomposition_table

from lazytpu.config import config
from lazytpu.dispatch.composites import FUSED
from lazytpu.dtypes import host_array, to_numpy
from lazytpu.errors import LazyTPUError
from lazytpu.export.signature import ArraySpec, Signature, dump_spec
from lazytpu.frontends.fx.evaluate import evaluate_size, jax_function_of
from lazytpu.lowering.registry import lowering_for, rule_of

PORTABLE = "portable"  # a platform that no rule knows, so each takes its general form
# Names of torch.export's kinds.
_WEIGHTS = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant"}
_UPDATES = {"BUFFER_MUTATION": "weight", "USER_INPUT_MUTATION": "input"}

Weights = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Converted:
    """An exported program of torch's as one of jax's.

    Attributes:
        exported: a ``jax.export.Exported``, called with (weights, *inputs).
        signature: names and types.
        weights: by name.
        call: the function it was made of, which each rule lowers for the platform that it is traced for.
        types: what ``call`` takes.
    """

    exported: Any
    signature: Signature
    weights: Weights
    call: Any
    types: tuple[Any, ...]

    @property
    def is_dynamic(self) -> bool:
        """Whether sizes of the inputs may vary."""
        return any(isinstance(n, str) for x in self.signature.arrays for n in x.shape)


def convert(program: Any, *, inline: bool, platforms: Sequence[str]) -> Converted:
    """Lower an exported program.

    Args:
        program: a ``torch.export.ExportedProgram``.
        inline: whether the weights are constants of the program.
        platforms: names of jax's that the program is to run on.

    Raises:
        UnsupportedOpError, LoweringError: an op cannot be lowered; names the user's line.
        LazyTPUError: the program takes something that is neither a tensor nor a constant.
    """
    from jax import export  # loads flatbuffers where it is installed

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*isinstance\\(treespec, LeafSpec\\)", FutureWarning)  # torch's own doing
        functional = program.run_decompositions(undecomposed())
    sizes = _symbols(functional, export)
    inputs = functional.graph_signature.input_specs
    weights = {str(s.target): _weight(functional, s) for s in inputs if s.kind.name in _WEIGHTS}
    signature = _signature(functional, sizes, weights)
    call = _function(functional, signature, weights, inline)
    if inline:
        signature = Signature(**{**vars(signature), "weights": ()})
    types = [
        [jax.ShapeDtypeStruct(s.shape, jnp.dtype(s.dtype)) for s in signature.weights],
        *[_input_type(functional, s, sizes) for s in inputs if _is_input(s)],
    ]
    if signature.random:
        types.append(jax.ShapeDtypeStruct((2,), jnp.uint64))
    with jax.enable_x64(True), jax.default_matmul_precision(config.matmul_precision), lowering_for(PORTABLE):
        exported = export.export(jax.jit(call), platforms=list(platforms))(*types)
    outputs = tuple(
        ArraySpec(s.name, tuple(n if isinstance(n, int) else str(n) for n in a.shape), a.dtype.name)
        for s, a in zip(signature.outputs, exported.out_avals, strict=True)
    )
    signature = Signature(**{**vars(signature), "outputs": outputs})
    return Converted(exported, signature, {} if inline else weights, call, tuple(types))


@cache
def undecomposed() -> dict[object, object]:
    """Return decompositions of the ops that have no rule."""
    found: dict[Any, Any] = {
        op: f
        for op, f in torch.export.default_decompositions().items()
        if isinstance(op, torch._ops.OpOverload) and rule_of(op) is None
    }
    table: dict[Any, Any] = dict(decomposition_table)
    found.update({op: f for op, f in table.items() if rule_of(op) is None and op not in found})
    found.update(FUSED)
    return found


def _symbols(program: Any, export: Any) -> dict[object, object]:
    """Return jax's symbols for torch's, with the same bounds."""
    constraints = []
    symbols = list(program.range_constraints)
    for symbol, bounds in program.range_constraints.items():
        lower, upper = (int(b) if b.is_finite else None for b in (bounds.lower, bounds.upper))
        if lower is not None and lower > 1:
            constraints.append(f"{symbol} >= {lower}")
        if upper is not None and upper < 1 << 31:
            constraints.append(f"{symbol} <= {upper}")
    if not symbols:
        return {}
    dims = export.symbolic_shape(",".join(map(str, symbols)), constraints=constraints)
    return dict(zip(symbols, dims, strict=True))


def _is(argument: Any, kind: str) -> bool:
    """Return whether an argument of a program is of this class of torch.export's."""
    return type(argument).__name__ == kind


def _is_input(spec: Any) -> bool:
    return spec.kind.name == "USER_INPUT" and not _is(spec.arg, "ConstantArgument")


def _weight(program: Any, spec: Any) -> np.ndarray[Any, Any]:
    target = spec.target
    kept = program.state_dict if target in program.state_dict else program.constants
    return host_array(kept[target])


def _meta(program: Any, name: str) -> Any:
    return next(node.meta["val"] for node in program.graph.nodes if node.name == name)


def _input_type(program: Any, spec: Any, sizes: Mapping[Any, Any]) -> jax.ShapeDtypeStruct:
    if not _is(spec.arg, "TensorArgument"):
        raise LazyTPUError(
            f"input {spec.arg.name} is a {type(spec.arg).__name__.removesuffix('Argument')}, and only tensors and "
            "constants can be inputs of an exported program",
            fix="give it as a tensor, or keep it constant",
        )
    meta = _meta(program, spec.arg.name)
    shape = tuple([evaluate_size(n, dict(sizes)) for n in meta.shape])
    return jax.ShapeDtypeStruct(shape, to_numpy(meta.dtype))


def _signature(program: Any, sizes: Mapping[object, object], weights: Weights) -> Signature:
    inputs: list[ArraySpec | dict[str, Any]] = []
    kinds: list[ArraySpec] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind.name in _WEIGHTS:
            array = weights[str(spec.target)]
            kinds.append(ArraySpec(str(spec.target), array.shape, array.dtype.name, _WEIGHTS[spec.kind.name]))
        elif spec.kind.name != "USER_INPUT":
            raise LazyTPUError(f"an exported program cannot take {spec.arg}, a {spec.kind.name.lower()}")
        elif _is(spec.arg, "ConstantArgument"):
            inputs.append({"constant": spec.arg.value})
        else:
            t = _input_type(program, spec, sizes)
            shape = tuple(n if isinstance(n, int) else str(n) for n in t.shape)
            inputs.append(ArraySpec(spec.arg.name, shape, t.dtype.name))
    outputs: list[ArraySpec] = []
    results: list[dict[str, Any]] = []
    updates: dict[int, dict[str, str]] = {}
    for out in program.graph_signature.output_specs:
        if out.kind.name in _UPDATES:
            updates[len(outputs)] = {_UPDATES[out.kind.name]: str(out.target)}
        elif out.kind.name != "USER_OUTPUT":
            raise LazyTPUError(f"an exported program cannot give {out.arg}, a {out.kind.name.lower()}")
        elif _is(out.arg, "ConstantArgument"):
            results.append({"constant": out.arg.value})
            continue
        else:
            results.append({"size" if _is(out.arg, "SymIntArgument") else "output": len(outputs)})
        outputs.append(ArraySpec(out.arg.name, (), "float32"))  # its type is known when the program is traced
    draws = any(
        isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags
        for graph in program.graph_module.modules()
        if isinstance(graph, torch.fx.GraphModule)
        for n in graph.graph.nodes
    )
    in_spec, out_spec = dump_spec(program.call_spec.in_spec), dump_spec(program.call_spec.out_spec)
    return Signature(tuple(kinds), tuple(inputs), draws, tuple(outputs), tuple(results), updates, in_spec, out_spec)


def _function(program: Any, signature: Signature, weights: Weights, inline: bool) -> Any:
    """Return the program as a function of (weights, *inputs) that returns the list of outputs."""
    run = jax_function_of(program.graph_module)
    specs = program.graph_signature.input_specs
    constant_outputs = [_is(s.arg, "ConstantArgument") for s in program.graph_signature.output_specs]

    def forward(held: list[jax.Array], *inputs: jax.Array) -> list[jax.Array]:
        rng = inputs[-1] if signature.random else None
        known = {n: jnp.asarray(a) for n, a in weights.items()} if inline else dict(zip(weights, held, strict=True))
        given = iter(inputs)
        placeholders = []
        for s in specs:
            if s.kind.name in _WEIGHTS:
                placeholders.append(known[str(s.target)])
            else:
                placeholders.append(next(given) if _is_input(s) else s.arg.value)
        results = run(*placeholders, rng=rng)
        return [jnp.asarray(x) for x, constant in zip(results, constant_outputs, strict=True) if not constant]

    return forward
