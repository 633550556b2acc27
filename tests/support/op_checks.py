"""How an operator is compared with the CPU: samples, twins on the device, and one function a check.

A check records what it is about and returns a function that compares, to be called once the graph has run: many
samples share one graph, for the time goes into compiling.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import lazytpu
from lazytpu.errors import LazyTPUError
from lazytpu.tracing import cutting

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

# For each sample they read the source of the whole stack, to find a TestCase that is not there.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None

SAMPLES = int(os.environ.get("LAZYTPU_TEST_SAMPLES", "2"))  # of an operator and dtype

NOT_A_DEVICE_OP = {"to_sparse", "sparse.sampled_addmm", "sparse.mm"}
SHAPES_ONLY = {
    # random: each device has a generator of its own
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "uniform"),
    *("rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "pca_lowrank", "svd_lowrank"),
    *(f"nn.functional.{name}" for name in ("dropout", "dropout2d", "dropout3d", "alpha_dropout")),
    *(f"nn.functional.{name}" for name in ("feature_alpha_dropout", "rrelu")),
    *(f"nn.functional.{name}" for name in ("fractional_max_pool2d", "fractional_max_pool3d")),
    # not initialised
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("resize_", "resize_as_"),
    # not unique: the signs of vectors, the order of equal pivots
    *("linalg.eig", "linalg.eigh", "linalg.svd", "svd", "geqrf", "linalg.householder_product"),
    *("linalg.lu_factor", "linalg.lu_factor_ex", "linalg.ldl_factor", "linalg.ldl_factor_ex"),
}
TOLERANCE = {  # relative and absolute; what is not here has to be equal
    torch.float32: 2e-4,
    torch.float64: 1e-7,
    torch.bfloat16: 2e-2,
    torch.float16: 5e-3,
    torch.complex32: 5e-2,  # as on CUDA, each step of a composed op rounds
    torch.complex64: 2e-4,
    torch.complex128: 1e-7,
}

ENTRIES = [op for op in op_db if op.name not in NOT_A_DEVICE_OP]
Compare = Callable[[], Iterator[str]]
Check = Callable[[Any, Any, torch.device], list[Compare]]  # operator, sample, device


def full_name(op: Any) -> str:
    return op.name + (f":{op.variant_test_name}" if op.variant_test_name else "")


def samples_of(op: Any, dtype: torch.dtype, requires_grad: bool) -> list[Any]:
    """A few of the operator's first samples, the same each time."""
    torch.manual_seed(0)
    found = list(islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), 6 * SAMPLES))
    picks = random.Random(full_name(op)).sample(range(len(found)), min(SAMPLES, len(found)))
    return [found[i] for i in sorted(picks)]


def to_device(tree: Any, device: torch.device) -> Any:
    """A twin of a sample on the device; tensors that share memory share it there too."""
    memories: dict[Any, torch.Tensor] = {}
    twins: dict[int, torch.Tensor] = {}

    def move(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if id(x) not in twins:
                twins[id(x)] = _twin(x.detach(), device, memories).requires_grad_(x.requires_grad)
            return twins[id(x)]
        return device if x == "cpu" or isinstance(x, torch.device) else x

    return tree_map(move, tree)


def _twin(x: torch.Tensor, device: torch.device, memories: dict[Any, torch.Tensor]) -> torch.Tensor:
    """``x`` on the device, on the twin of its memory unless it is all there is of it."""
    if x.is_conj() or x.is_neg() or x.is_meta or not x.untyped_storage().nbytes():
        return x if x.is_meta else x.to(device)
    key, whole = (x.untyped_storage().data_ptr(), x.dtype), x.untyped_storage().nbytes() // x.element_size()
    if key not in memories and whole == x.numel():
        memories[key] = x.to(device)
        return memories[key]
    if key not in memories:
        memories[key] = torch.as_strided(x, (whole,), (1,), 0).to(device)
    return memories[key].detach().as_strided(x.shape, x.stride(), x.storage_offset())


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def differences(got: Any, want: Any, values: bool, dtype: torch.dtype | None = None) -> Iterator[str]:
    """What differs between the results of the device and those of the CPU, by the tolerance of their dtypes or one."""
    ours, theirs = tree_leaves(got), tree_leaves(want)
    if len(ours) != len(theirs):
        yield f"{len(ours)} results, not {len(theirs)}"
    for a, b in zip(ours, theirs, strict=False):
        if not isinstance(b, torch.Tensor):
            if values and isinstance(b, (int, float)) and a != pytest.approx(b, rel=1e-4, nan_ok=True):
                yield f"{a}, not {b}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        elif values:
            tolerance = TOLERANCE.get(dtype or b.dtype, 0)
            try:
                torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
            except AssertionError as error:
                yield str(error)


def arguments(op: Any, sample: Any, device: torch.device) -> tuple[Any, Any, Any, Any]:
    """Positional and keyword arguments of a sample, on the CPU and on the device."""
    args, kwargs = (sample.input, *sample.args), sample.kwargs
    device_args, device_kwargs = to_device((args, kwargs), device)
    return args, kwargs, device_args, kwargs if op.name == "to" else device_kwargs


def has_values(op: Any, sample: Any) -> bool:
    """Whether the results of a sample are the same on each device."""
    return op.name not in SHAPES_ONLY and not _drops_out(op, sample)


def _drops_out(op: Any, sample: Any) -> bool:
    """Whether the sample asks for dropout, which ``multi_head_attention_forward`` takes as its 11th argument."""
    positional = op.name == "nn.functional.multi_head_attention_forward" and sample.args[9]
    return bool(positional or sample.kwargs.get("dropout_p"))


def error_of(f: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
    """What a function returns, and what it raises."""
    try:
        return f(*args, **kwargs), None
    except Exception as error:
        return None, error


# --- the checks -------------------------------------------------------------------------------------------


def forward(op: Any, sample: Any, device: torch.device) -> list[Compare]:
    """The results."""
    return forward_and_backward(op, sample, device, gradients=False)[0]


def forward_and_backward(
    op: Any, sample: Any, device: torch.device, *, gradients: bool = True
) -> tuple[list[Compare], list[Compare]]:
    """The results, and the gradients, of one call."""
    args, kwargs, device_args, device_kwargs = arguments(op, sample, device)
    want, refused = error_of(op, *args, **kwargs)
    if refused is not None:
        return [], []
    got = op(*device_args, **device_kwargs)
    values = has_values(op, sample)
    if values and sample.output_process_fn_grad:
        got, want = sample.output_process_fn_grad(got), sample.output_process_fn_grad(want)
    compare = [lambda: differences(got, want, values)]
    if not values or not gradients:
        return compare, []
    return compare, _compare_gradients(tensors((args, kwargs)), want, tensors((device_args, device_kwargs)), got)


def _compare_gradients(inputs: Any, want: Any, device_inputs: Any, got: Any) -> list[Compare]:
    wanted, refused = error_of(_gradients, inputs, want)
    if refused is not None or wanted is None:
        return []
    given, error = error_of(_gradients, device_inputs, got)

    def compare() -> Iterator[str]:
        if error is not None or given is None:
            yield f"raises {error!r}" if error is not None else "no result requires a gradient"
        elif [g is None for g in given] != [g is None for g in wanted]:
            yield "other gradients are unused"
        else:
            yield from differences(tensors(given), tensors(wanted), True)

    return [compare]


def _gradients(inputs: list[torch.Tensor], results: Any, create_graph: bool = False) -> Any:
    """Gradients of the results, weighted with the same random numbers on each device; None if there are none."""
    outs = [t for t in tensors(results) if t.requires_grad]
    inputs = [t for t in inputs if t.requires_grad]
    if not outs or not inputs:
        return None
    return torch.autograd.grad(outs, inputs, weights(outs, 1), allow_unused=True, create_graph=create_graph)


def weights(like: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Random numbers of the shapes and dtypes of tensors, the same ones on each device."""
    torch.manual_seed(seed)
    return [torch.randn(t.shape, dtype=t.dtype, device="cpu").to(t.device) for t in like]


def gradgrad(op: Any, sample: Any, device: torch.device) -> list[Compare]:
    """The gradients of the gradients."""
    if not has_values(op, sample) or not op.supports_gradgrad:
        return []
    args, kwargs, device_args, device_kwargs = arguments(op, sample, device)
    wanted, refused = error_of(_second_gradients, op, sample, args, kwargs)
    if refused is not None or wanted is None:
        return []
    given = _second_gradients(op, sample, device_args, device_kwargs)
    assert given is not None and [g is None for g in given] == [g is None for g in wanted], "others are unused"
    return [lambda: differences(tensors(given), tensors(wanted), True)]


def _second_gradients(op: Any, sample: Any, args: Any, kwargs: Any) -> Any:
    results = op(*args, **kwargs)
    results = sample.output_process_fn_grad(results) if sample.output_process_fn_grad else results
    inputs = [t for t in tensors((args, kwargs)) if t.requires_grad]
    first = [g for g in _gradients(inputs, results, create_graph=True) or () if g is not None and g.requires_grad]
    if not first:
        return None
    return torch.autograd.grad(first, inputs, weights(first, 2), allow_unused=True)


def in_place(op: Any, sample: Any, device: torch.device) -> list[Compare]:
    """The in-place form: what it returns and what it wrote."""
    variant = op.inplace_variant
    if not variant or not has_values(op, sample) or sample.broadcasts_input or not _is_tensor(sample.input):
        return []
    args = (sample.input.detach().clone(), *sample.args)
    ours, theirs = to_device(args, device), to_device(args, torch.device("cpu"))
    with torch.no_grad():
        want, refused = error_of(variant, *theirs, **sample.kwargs)
        if refused is not None:
            return []
        got = variant(*ours, **to_device(sample.kwargs, device))
    return [lambda: differences((got, ours[0]), (want, theirs[0]), True)]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def out(op: Any, sample: Any, device: torch.device) -> list[Compare]:
    """The ``out=`` form, into tensors of the right shape, of none, and with gaps in memory."""
    if not op.supports_out or not has_values(op, sample):
        return []
    compares: list[Compare] = []
    args, kwargs, device_args, device_kwargs = arguments(op, sample, device)
    with torch.no_grad():
        results, refused = error_of(op, *args, **kwargs)
        if refused is not None or not tensors(results):
            return []
        for make in (torch.empty_like, _without_elements, _with_gaps):
            theirs = tree_map(make, results)
            ours = to_device(theirs, device)
            want, refused = error_of(op, *args, **{**kwargs, "out": theirs})
            got, error = error_of(op, *device_args, **{**device_kwargs, "out": ours})
            compares.append(_same_results_or_errors((got, ours), error, (want, theirs), refused))
    return compares


def _without_elements(t: torch.Tensor) -> torch.Tensor:
    return t.new_empty(0)


def _with_gaps(t: torch.Tensor) -> torch.Tensor:
    return t.new_zeros((*t.shape, 2))[..., 1]


def _same_results_or_errors(got: Any, error: Exception | None, want: Any, refused: Exception | None) -> Compare:
    def compare() -> Iterator[str]:
        if type(error) is not type(refused):
            yield f"raises {error!r}, not {refused!r}"
        elif error is None:
            yield from differences(got, want, True)

    return compare


def strided(op: Any, sample: Any, device: torch.device) -> list[Compare]:
    """Results and gradients for tensors with gaps in memory."""
    apart, refused = error_of(lambda: sample.noncontiguous())
    if refused is not None:
        return []
    return sum(forward_and_backward(op, apart, device), [])


def empty(op: Any, sample: Any, device: torch.device) -> list[Compare]:
    """Results, or the error, for tensors without elements."""
    if not _is_tensor(sample.input) or not sample.input.dim() or not has_values(op, sample):
        return []
    length = sample.input.shape[0]

    def cut(x: Any) -> Any:
        return x.detach()[:0] if _is_tensor(x) and x.dim() and x.shape[0] == length else x

    args, kwargs = tree_map(cut, ((sample.input, *sample.args), sample.kwargs))
    device_args, device_kwargs = to_device((args, kwargs), device)
    want, refused = error_of(op, *args, **kwargs)
    got, error = error_of(op, *device_args, **(kwargs if op.name == "to" else device_kwargs))
    return [_same_results_or_errors(got, error, want, refused)]


def jvp(op: Any, sample: Any, device: torch.device) -> list[Compare]:
    """Forward-mode derivatives, through ``torch.func.jvp``."""
    if not op.supports_forward_ad or not has_values(op, sample):
        return []
    return _as_on_the_cpu(_jvp, op, sample, device)


def _as_on_the_cpu(transform: Callable[..., Any], op: Any, sample: Any, device: torch.device) -> list[Compare]:
    """What a transform gives on both, where the CPU does not refuse it."""
    args, kwargs, device_args, device_kwargs = arguments(op, sample, device)
    want, refused = error_of(transform, op, sample, args, kwargs)
    if refused is not None or want is None:
        return []
    got = transform(op, sample, device_args, device_kwargs)
    return [lambda: differences(got, want, True)]


def _jvp(op: Any, sample: Any, args: Any, kwargs: Any) -> Any:
    leaves, call = _function_of_tensors(op, sample, args, kwargs, lambda t: t.requires_grad)
    if not leaves:
        return None
    return torch.func.jvp(call, tuple(leaves), tuple(weights(leaves, 3)))


def vmap(op: Any, sample: Any, device: torch.device) -> list[Compare]:
    """A batch of two, through ``torch.func.vmap``."""
    if not has_values(op, sample):
        return []
    return _as_on_the_cpu(_vmap, op, sample, device)


def _vmap(op: Any, sample: Any, args: Any, kwargs: Any) -> Any:
    leaves, call = _function_of_tensors(op, sample, args, kwargs, lambda t: True)
    if not leaves:
        return None
    batches = [torch.stack([t, t.flip(0) if t.dim() else t]) for t in leaves[:1]]
    batches += [torch.stack([t, t]) for t in leaves[1:]]
    return torch.func.vmap(call, randomness="different")(*batches)


def _function_of_tensors(op: Any, sample: Any, args: Any, kwargs: Any, chosen: Callable[[torch.Tensor], bool]) -> Any:
    """The tensors of a sample, and a function of them that gives the operator's floating-point results."""
    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    positions = [i for i, x in enumerate(leaves) if _is_tensor(x) and chosen(x)]

    def call(*given: torch.Tensor) -> Any:
        full = list(leaves)
        for i, t in zip(positions, given, strict=True):
            full[i] = t
        its_args, its_kwargs = torch.utils._pytree.tree_unflatten(full, spec)
        results = op(*its_args, **its_kwargs)
        results = sample.output_process_fn_grad(results) if sample.output_process_fn_grad else results
        return tuple([t for t in tensors(results) if t.is_floating_point() or t.is_complex()])

    return [leaves[i].detach() for i in positions], call


CHECK_OF: dict[str, Check] = {
    "forward": forward,  # with "backward", which is recorded with it
    "in place": in_place,
    "out": out,
    "strided": strided,
    "empty": empty,
    "jvp": jvp,
    "vmap": vmap,
    "gradgrad": gradgrad,
}


# --- running them -----------------------------------------------------------------------------------------

Found = dict[str, list[str]]  # check to what is wrong


def problems(op: Any, samples: Iterable[Any], checks: Iterable[str], device: torch.device, per_graph: int) -> Found:
    """What is wrong with an operator, by check; ``lowered`` lists what ran on the CPU.

    Args:
        op: an entry of op_db.
        samples: its samples, of one dtype.
        checks: names of `op_status.CHECKS`.
        device: the lazy device.
        per_graph: how many samples share a graph.
    """
    found: Found = {check: [] for check in checks}
    lazytpu.metrics.reset()
    numbered = enumerate(samples)
    while some := list(islice(numbered, per_graph)):
        compares = _recorded(op, some, found, device)
        if not _cut(found, compares):  # again one by one, to know which it is
            for one in some:
                for check in found:
                    alone: Found = {check: []}
                    compares = _recorded(op, [one], alone, device)
                    if _cut(alone, compares, final=True):
                        _compare(alone, compares)
                    found[check] += alone[check]
        else:
            _compare(found, compares)
    if "lowered" in found:
        found["lowered"] += sorted(lazytpu.metrics.fallbacks())
    return found


Recorded = list[tuple[str, str, Compare]]  # check, sample, comparison


def _recorded(op: Any, samples: list[tuple[int, Any]], found: Found, device: torch.device) -> Recorded:
    compares: Recorded = []
    for number, sample in samples:
        where = f"sample {number}"
        for check in found:
            if check == "backward" and "forward" not in found:
                made, error = error_of(lambda s=sample: forward_and_backward(op, s, device)[1])
                compares += [(check, where, compare) for compare in made or ()]
            elif check == "forward" and "backward" in found:
                made, error = error_of(forward_and_backward, op, sample, device)
                for name, several in zip(("forward", "backward"), made or (), strict=False):
                    compares += [(name, where, compare) for compare in several]
            elif check in CHECK_OF:
                made, error = error_of(CHECK_OF[check], op, sample, device)
                compares += [(check, where, compare) for compare in made or ()]
            else:
                error = None
            if error is not None:
                found[check].append(f"{where}: {type(error).__name__}: {error}")
    return compares


def _cut(found: Found, compares: Recorded, final: bool = False) -> bool:
    """Runs what is recorded.  False if that failed, with the error noted if it is ``final``; the graph is dropped."""
    try:
        lazytpu.mark_step()
        return True
    except LazyTPUError as error:
        compares.clear()
        cutting.next_step()  # or the next test would meet the same graph
        if final:
            for texts in found.values():
                texts.append(str(error))
        return False


def _compare(found: Found, compares: Recorded) -> None:
    for check, where, compare in compares:
        found[check] += [f"{where}: {text}" for text in compare()]
