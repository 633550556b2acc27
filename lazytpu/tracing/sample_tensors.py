"""Sample tensors: what takes the place of an op's arguments when torch itself is asked about the op.

Torch's meta kernels give the types of results, and its CPU kernels raise what eager torch raises.  The first look at
sizes, strides and dtypes only.  The second look at contents and memory as well, so samples have contents that the ops
accept (see `CONTENTS`), and share memory where the tensors do that they take the place of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from lazytpu.ir.op_schema import ABSENT, OpOverload
from lazytpu.ir.tree import Number, Value
from lazytpu.tensors.layout import CONJ, NEG, Layout
from lazytpu.tensors.storage import Storage, resolve
from lazytpu.tensors.tensor import LazyTensor, adopt
from lazytpu.tracing.cuda_dtypes import ONLY_CUDA, SAMPLE_DTYPES

Contents = Callable[[torch.Tensor], None]
Resize = Callable[[int], int]

LARGE = 1 << 18  # elements of the largest sample whose memory is its own, where it is only read

_SCALARS: Mapping[type, complex] = {float: 2.0, int: 2, bool: True, complex: 2j}
_SCALARS_OF: Mapping[str, float] = {"low": 0, "from": 0, "p": 0.5}  # arguments whose ops refuse a 2


def _zeros(sample: torch.Tensor) -> None:
    """Fill a sample with indices into anything, boundaries in order, and points of most functions' domains."""
    sample.zero_()


def _regular(sample: torch.Tensor) -> None:
    """Fill a sample with divisors, probabilities and pivots.

    A matrix is positive definite, and none of its rows sums to zero: each holds the weights of a distribution.
    """
    if sample.dim() > 1 and (sample.is_floating_point() or sample.is_complex()):
        sample.zero_()
        sample[..., :1].fill_(0.1)
        sample.diagonal(dim1=-2, dim2=-1).fill_(1)
    else:
        sample.fill_(1)


CONTENTS: tuple[Contents, ...] = (_zeros, _regular)  # one of them suits each op that looks at contents


@dataclass(slots=True)
class _Samples:
    """The samples of one call, which share memory as the tensors do."""

    device: str
    contents: Contents | None
    resize: Resize | None
    dtypes: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    memories: dict[Storage, torch.Tensor] = field(default_factory=dict)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)  # by the identity of what they stand for

    def of(self, x: Any, name: str, written: bool) -> Any:
        """Return what takes the place of an argument: samples for tensors and scalar inputs, in lists too."""
        if isinstance(x, (list, tuple)):
            return [self.of(e, name, written) for e in x]
        if isinstance(x, torch.dtype):
            return self.dtypes.get(x, x)
        if type(x) is Value:
            return self._new(x.layout.size, x.layout.stride, x.layout.dtype, written)
        if type(x) is Number:
            dtype = x.dtype
            return self._new((), (), dtype, False) if isinstance(dtype, torch.dtype) else sample_scalar(name, dtype)
        if isinstance(x, torch.Tensor) and self.resize is None and x.device.type == LazyTensor.device_type:
            return self._in_storage(x)
        return self._new(x.shape, x.stride(), x.dtype, written) if isinstance(x, torch.Tensor) else x

    def _new(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, written: bool) -> torch.Tensor:
        dtype = self.dtypes.get(dtype, dtype)
        if self.resize is not None:
            return self._filled(torch.empty([self.resize(n) for n in size], dtype=dtype, device=self.device))
        if self.contents is not None and not written and prod(size) > LARGE:
            return self._filled(torch.empty((), dtype=dtype, device=self.device)).expand(*size)
        return self._filled(torch.empty_strided(size, stride, dtype=dtype, device=self.device))

    def _in_storage(self, x: torch.Tensor) -> torch.Tensor:
        known = self.tensors.get(id(x))
        if known is not None:  # torch asks whether it is the very tensor, not an equal view, where it has no elements
            return known
        storage, layout = resolve(adopt(x))
        if storage not in self.memories:
            self.memories[storage] = _memory(storage.layout, self.device)
        made = self._filled(sample_in_storage(storage.layout, layout, self.device, self.memories[storage]))
        self.tensors[id(x)] = made
        return made

    def _filled(self, sample: torch.Tensor) -> torch.Tensor:
        if self.contents is not None:
            with suppress(RuntimeError):  # memory that overlaps: it holds zeros
                self.contents(sample)
        return sample


def sample_scalar(name: str, kind: type) -> complex:
    """Return the scalar that takes the place of any of a kind, given for an argument of a name."""
    usual = _SCALARS[kind]
    return kind(_SCALARS_OF[name]) if name in _SCALARS_OF else usual


def sample_in_storage(
    root: Layout, layout: Layout, device: str = "meta", memory: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a sample that lies as ``layout`` in ``memory``, or in new memory for a storage of layout ``root``."""
    memory = _memory(root, device) if memory is None else memory
    sample = torch.empty(0, dtype=layout.dtype, device=device)
    sample.set_(memory.untyped_storage(), layout.offset, layout.size, layout.stride)
    sample = sample.conj() if layout.bits & CONJ else sample
    return torch._neg_view(sample) if layout.bits & NEG else sample


def _memory(root: Layout, device: str) -> torch.Tensor:
    return torch.zeros(root.nbytes, dtype=torch.uint8, device=device)


@cache
def argument_names(overload: OpOverload) -> tuple[str, ...]:
    """Return the names of the arguments of a schema."""
    return tuple([a.name for a in overload._schema.arguments])


@cache
def written_names(overload: OpOverload) -> frozenset[str]:
    """Return the names of the arguments that an op writes to."""
    written = [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return frozenset(written)


def named_arguments(overload: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> dict[str, object]:
    """Return the arguments of a call by their names in the schema, without those that were not given."""
    names = argument_names(overload)
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: x for name, x in named.items() if x is not ABSENT and name in names}


def call_with_samples(
    overload: OpOverload,
    named: Mapping[str, object],
    device: str = "meta",
    contents: Contents | None = None,
    resize: Resize | None = None,
    dtypes: Mapping[torch.dtype, torch.dtype] | None = None,
) -> object:
    """Call an op with samples in place of its arguments, and return its results.

    Args:
        overload: what is called; arguments that it does not have are left out.
        named: arguments by name: samples replace values, scalar inputs and tensors.
        device: where the samples lie: ``meta`` or ``cpu``.
        contents: fills each sample.
        resize: gives the sizes of samples, which are contiguous then; None makes them lie as the tensors do, but for
            large ones that are filled and only read, which take no memory.
        dtypes: which ones samples have in place of some.
    """
    samples, written = _Samples(device, contents, resize, dtypes or {}), written_names(overload)
    names = argument_names(overload)
    with torch.no_grad(), torch._C.DisableTorchFunction(), _outside_forward_ad():
        given = {name: samples.of(x, name, name in written) for name, x in named.items() if name in names}
        if "device" in names:
            given["device"] = torch.device(device)
        if "generator" in names:
            given["generator"] = None  # some overloads have to be given one
        return overload(**given)


def dry_run(overload: OpOverload, named: Mapping[str, object], resize: Resize | None = None) -> object:
    """Call the CPU's kernel of an op as in `call_with_samples`, with no warning and no use of random numbers.

    Raises:
        What the kernel raises whatever the samples hold.
    """
    state = torch.get_rng_state()
    only_cuda = _dtypes_of_cuda(overload)
    dtypes = {d: SAMPLE_DTYPES[d] for d in only_cuda.intersection(_dtypes_in(named.values()))} if only_cuda else {}
    error: Exception
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for contents in CONTENTS:
                try:
                    return call_with_samples(overload, named, "cpu", contents, resize, dtypes)
                except Exception as refused:
                    error = refused.with_traceback(None)
                    if isinstance(refused, NotImplementedError):
                        break
    finally:
        torch.set_rng_state(state)
    try:
        raise error
    finally:
        del error  # a cycle of it and this frame would hold the frames that called, and the tensors in them


@cache
def _dtypes_of_cuda(overload: OpOverload) -> frozenset[torch.dtype]:
    """Return the dtypes of which CUDA has a kernel of an op, and the CPU none."""
    name = overload._schema.name.removeprefix("aten::").rstrip("_")
    return frozenset(ONLY_CUDA.get(name.removesuffix("_backward").removesuffix("_functional"), ()))


def _dtypes_in(x: Iterable[object]) -> Iterator[torch.dtype]:
    """Return the dtypes among arguments, and those of their tensors."""
    for e in x:
        if isinstance(e, (list, tuple)):
            yield from _dtypes_in(e)
        elif type(e) is Value:
            yield e.layout.dtype
        elif isinstance(e, torch.dtype):
            yield e
        elif isinstance(e, torch.Tensor) or type(e) is Number and isinstance(e.dtype, torch.dtype):
            yield e.dtype


def error_of(overload: OpOverload, named: Mapping[str, object], resize: Resize | None = None) -> Exception | None:
    """Return what `dry_run` raises, None if it raises nothing or the CPU has no kernel of the op at all."""
    try:
        dry_run(overload, named, resize)
    except Exception as error:
        return None if is_of_another_device(error) else error.with_traceback(None)
    return None


def is_of_another_device(error: Exception) -> bool:
    """Return whether an error of a dry run says that the CPU has no kernel of an op at all."""
    if not isinstance(error, NotImplementedError):
        return False
    return str(error).startswith("Could not run") or "privateuse1 backends" in str(error)


@contextmanager
def _outside_forward_ad() -> Iterator[None]:
    """Hide the level of forward AD: torch prints tensors to find an overload, and their tangents fail in a kernel."""
    level, forward_ad._current_level = forward_ad._current_level, -1
    try:
        yield
    finally:
        forward_ad._current_level = level
