"""What an exported program takes and gives: names, types and nesting, as data that JSON holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jax import numpy as jnp
from torch.utils._pytree import TreeSpec, tree_flatten, treespec_dumps, treespec_loads

from lazytpu.dtypes import short_name, to_torch
from lazytpu.runtime.disk_cache.serialized import Typed


@dataclass(frozen=True)
class ArraySpec:
    """One array.

    Attributes:
        name: of a weight the name in the state dict, of an input that of the argument.
        shape: a size that may vary is an expression of names, such as ``"batch"`` or ``"2*batch"``.
        dtype: numpy's name, or ``bfloat16`` and the like.
        kind: of a weight ``parameter``, ``buffer`` or ``constant``; else empty.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    kind: str = ""

    def describe(self) -> str:
        """Return ``f32[batch,3]``."""
        return f"{short_name(to_torch(jnp.dtype(self.dtype)))}[{','.join(map(str, self.shape))}]"

    def accepts(self, shape: Sequence[int], dtype: Any) -> bool:
        """Return whether an array is of this type, as far as the fixed sizes go."""
        fixed = all(n == m or isinstance(m, str) for n, m in zip(shape, self.shape, strict=False))
        return len(shape) == len(self.shape) and fixed and jnp.dtype(dtype) == jnp.dtype(self.dtype)


@dataclass(frozen=True)
class Signature:
    """How a program is called: ``program(weights, *inputs)`` returns a list of arrays.

    Attributes:
        weights: arrays that the program takes first, as a list; empty where they are part of it.
        inputs: for each leaf of the arguments, in order, an array, or ``{"constant": value}`` for what was no tensor
            and is part of the program.
        random: whether a key ``u64[2]`` (seed, counter) follows the inputs.
        outputs: the arrays that the program returns.
        results: for each leaf of what the original returned ``{"output": position}``, ``{"size": position}`` for a
            Python int that is computed, or ``{"constant": value}``.
        updates: positions of outputs to the weight (``{"weight": name}``) or input (``{"input": name}``) that they are
            the new contents of.
        in_spec, out_spec: how the leaves nest, as `torch.utils._pytree.treespec_dumps` writes it.
    """

    weights: tuple[ArraySpec, ...]
    inputs: tuple[ArraySpec | dict[str, Any], ...]
    random: bool
    outputs: tuple[ArraySpec, ...]
    results: tuple[dict[str, Any], ...]
    updates: dict[int, dict[str, str]]
    in_spec: str
    out_spec: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Signature:
        """Return what `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it did not.
        """
        return cls(
            tuple(_spec(x) for x in data["weights"]),
            tuple(x if "constant" in x else _spec(x) for x in data["inputs"]),
            bool(data["random"]),
            tuple(_spec(x) for x in data["outputs"]),
            tuple(data["results"]),
            {int(k): v for k, v in data["updates"].items()},
            data["in_spec"],
            data["out_spec"],
        )

    @property
    def arrays(self) -> list[ArraySpec]:
        """The inputs that are arrays."""
        return [x for x in self.inputs if isinstance(x, ArraySpec)]

    def flatten(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Any]:
        """Return the arrays among the arguments of a call, checked.

        Raises:
            TypeError, ValueError: the arguments nest otherwise than those of the export, or one has another type.
        """
        expected = load_spec(self.in_spec)
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        if spec != expected:
            names = ", ".join(x.name if isinstance(x, ArraySpec) else repr(x["constant"]) for x in self.inputs)
            raise TypeError(
                f"the program takes {len(self.inputs)} inputs ({names}), nested as {expected}, not as {spec}"
            )
        found = []
        for x, given in zip(self.inputs, leaves, strict=True):
            if isinstance(x, ArraySpec):
                found.append(given)
            elif type(given) is not type(x["constant"]) or given != x["constant"]:
                raise ValueError(f"the program was made for {x['constant']!r} in this place, not {given!r}")
        return found

    def check(self, arrays: Sequence[Typed]) -> None:
        """Compare arrays with what the program takes.

        Raises:
            ValueError: names the input and both types.
        """
        for spec, x in zip(self.arrays, arrays, strict=True):
            if not spec.accepts(x.shape, x.dtype):
                got = f"{short_name(to_torch(x.dtype))}[{','.join(map(str, x.shape))}]"
                raise ValueError(f"input {spec.name} is {spec.describe()}, not {got}")


def _spec(data: Mapping[str, Any]) -> ArraySpec:
    shape = tuple(n if isinstance(n, str) else int(n) for n in data["shape"])
    return ArraySpec(str(data["name"]), shape, str(data["dtype"]), str(data.get("kind", "")))


def dump_spec(spec: TreeSpec) -> str:
    """Return a pytree's structure as text.

    Raises:
        TypeError: it contains a class that torch cannot write down.
    """
    try:
        return treespec_dumps(spec)
    except NotImplementedError as error:
        raise TypeError(f"arguments or results hold a pytree class that cannot be saved: {error}") from None


def load_spec(text: str) -> TreeSpec:
    """Return the structure that `dump_spec` wrote."""
    return treespec_loads(text)


def as_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of an array's."""
    return to_torch(jnp.dtype(name))
