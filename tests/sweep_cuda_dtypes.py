"""Dtypes that CUDA takes and the CPU does not, on the device: ``python -m tests.sweep_cuda_dtypes``.

    python -m tests.sweep_cuda_dtypes                              # all of torch's operator database; half an hour
    python -m tests.sweep_cuda_dtypes --ops histc,fft.fft --samples 3

The CPU is asked in a wider dtype that it has: its results, cast back, are what the device has to give, and so are its
gradients.  An entry that fails is printed with its first difference; the exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import lazytpu
from tests.support.op_checks import ENTRIES, differences, error_of, full_name, has_values, tensors, to_device, weights

WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.complex32: torch.complex64,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
    torch.bool: torch.uint8,
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.float64),
}
PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

# What the wider dtype cannot tell, or the CPU does not have in any form.
NOT_COMPARED = {
    "torch.ops.aten._flash_attention_forward": "a kernel of CUDA alone, under its own name",
    "torch.ops.aten._efficient_attention_forward": "a kernel of CUDA alone, under its own name",
    "nn.functional.batch_norm:without_cudnn": "a variant of nn.functional.batch_norm, which is in the other sweep",
}


def _nan_to_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), 0, x)


def _nanmean(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _nan_to_zero(x).sum(*args, **kwargs) / (~x.isnan()).sum(*args, **kwargs)


ON_THE_CPU = {  # written in other ops where the CPU takes no wider dtype
    ("nansum", True): lambda x, *args, **kwargs: _nan_to_zero(x).sum(*args, **kwargs),
    ("nanmean", True): _nanmean,
}


def jobs(ops: str = "") -> Iterator[tuple[Any, torch.dtype]]:
    """Operators with the dtypes that CUDA has of them and the CPU lacks."""
    chosen = set(filter(None, ops.split(",")))
    for op in ENTRIES:
        if full_name(op) not in NOT_COMPARED and (not chosen or chosen & {op.name, full_name(op)}):
            for dtype in sorted(op.dtypesIfCUDA - op.dtypes, key=str):
                yield op, dtype


def cast(tree: Any, dtypes: dict[torch.dtype, torch.dtype]) -> Any:
    """Return a tree with its tensors, and the dtypes in it, replaced after a table."""

    def one(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype in dtypes:
            return x.detach().to(dtypes[x.dtype]).requires_grad_(x.requires_grad)
        return dtypes.get(x, x) if isinstance(x, torch.dtype) else x

    return tree_map(one, tree)


def widened(dtype: torch.dtype) -> dict[torch.dtype, torch.dtype]:
    """Return what stands for a dtype, and for that of its parts, on the CPU."""
    part = PARTS.get(dtype)
    return {dtype: WIDER[dtype]} | ({part: PARTS[WIDER[dtype]]} if part else {})


def narrowed(dtype: torch.dtype) -> dict[torch.dtype, torch.dtype]:
    """Return what the CPU's results are to be cast to: the other way round, with what is made of either kind."""
    back = {wide: narrow for narrow, wide in widened(dtype).items()}
    complex_of = {part: number for number, part in PARTS.items()}
    part = complex_of.get(dtype)  # complex results of floats
    return back | ({WIDER[part]: part} if part else {})


def without_overflow(got: Any, want: Any) -> tuple[Any, Any]:
    """Return both with zeros where the device's result overflowed, or something before it, and is large on the CPU."""

    def both(ours: Any, theirs: Any) -> Any:
        if not isinstance(theirs, torch.Tensor) or theirs.dtype not in (torch.float16, torch.complex32):
            return ours, theirs
        ours = ours.detach().cpu()
        parts = [torch.view_as_real(t) if t.is_complex() else t[..., None] for t in (ours, theirs.detach())]
        overflown = ~parts[0].isfinite() & (parts[1].abs() > torch.finfo(torch.float16).max / 1000)
        hidden = overflown.any(-1)
        return tuple(torch.where(hidden, torch.zeros((), dtype=t.dtype), t) for t in (ours, theirs.detach()))

    (ours, spec), theirs = tree_flatten(got), tree_leaves(want)
    pairs = [both(a, b) for a, b in zip(ours, theirs, strict=True)]
    return tree_unflatten([a for a, _ in pairs], spec), [b for _, b in pairs]


def compare(op: Any, sample: Any, dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Say what differs between the device in ``dtype`` and the CPU in a wider one, in results and gradients."""
    given = ((sample.input, *sample.args), sample.kwargs)
    args, kwargs = cast(given, widened(dtype))
    on_the_cpu = ON_THE_CPU.get((op.name, dtype.is_complex), op)
    results, refused = error_of(on_the_cpu, *args, **kwargs)
    if refused is not None:
        yield f"the CPU refuses {WIDER[dtype]}: {refused}"
        return
    device_args, device_kwargs = to_device(given, device)
    got = op(*device_args, **device_kwargs)
    if sample.output_process_fn_grad:
        got, results = sample.output_process_fn_grad(got), sample.output_process_fn_grad(results)
    values = has_values(op, sample)
    yield from differences(*without_overflow(got, cast(results, narrowed(dtype))), values, dtype)
    if values and sample.input.requires_grad:
        ours, theirs = tensors((device_args, device_kwargs)), tensors((args, kwargs))
        wanted, refused = error_of(gradients, theirs, tensors(results), tensors(got))
        if refused is None:
            given = gradients(ours, tensors(got), tensors(got))
            yield from (
                f"gradient: {text}"
                for text in differences(*without_overflow(given, cast(wanted, narrowed(dtype))), True, dtype)
            )


def gradients(inputs: list[torch.Tensor], results: list[torch.Tensor], like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of results, weighted with the random numbers that fit others of their shapes."""
    chosen = [(r, w) for r, w in zip(results, weights(like, 1), strict=True) if r.requires_grad]
    outs, given = [r for r, _ in chosen], [w.to(r.device, r.dtype) for r, w in chosen]
    found = torch.autograd.grad(outs, [t for t in inputs if t.requires_grad], given, allow_unused=True)
    return [g for g in found if g is not None]


def run(op: Any, dtype: torch.dtype, samples: int | None, device: torch.device) -> list[str]:
    """Return what is wrong with an operator in a dtype, and which of its ops ran on the CPU."""
    torch.manual_seed(0)
    lazytpu.metrics.reset()
    grad = op.supports_autograd and dtype in op.backward_dtypesIfCUDA
    grad &= dtype.is_floating_point or dtype.is_complex
    problems: list[str] = []
    for number, sample in enumerate(islice(op.sample_inputs("cpu", dtype, requires_grad=grad), samples)):
        try:
            problems += [f"sample {number}: {text}" for text in compare(op, sample, dtype, device)]
        except Exception as error:
            problems.append(f"sample {number}: {type(error).__name__}: {error}")
    return problems + [f"ran on the CPU: {name}" for name in sorted(lazytpu.metrics.fallbacks())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="names of op_db, separated by commas; all if not given")
    parser.add_argument("--samples", type=int, default=None, help="of an operator and dtype; all if not given")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    lazytpu.config.compile_after = 1  # else torch's CPU kernels interpret what comes for the first time
    entries = failed = 0
    for op, dtype in jobs(options.ops):
        problems = run(op, dtype, options.samples, lazytpu.device())
        entries += 1
        if problems:
            failed += 1
            print(f"FAIL {full_name(op)} {str(dtype)[6:]}, {len(problems)} problems: {problems[0]}", flush=True)
    print(f"{entries} entries: {failed} differ from the CPU in a wider dtype")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
