"""torch's operator database on the device, with the CPU as the oracle: a sample of it, in few minutes.

Every operator runs in float32 with gradients and in one other dtype without.  All its samples are recorded,
forward, backward and in place, before one cut runs them, for the time goes into compiling.  What is known not to
pass stands in `op_status.py`.  ``LAZYTPU_TEST_SAMPLES=1000`` takes all samples instead of a few.
"""

from __future__ import annotations

import os
import random
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from op_status import NOT_REFUSED, STATUS, Key
from torch.utils._pytree import tree_leaves, tree_map

import lazytpu
from lazytpu import step
from lazytpu.errors import LazyTPUError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch's own samples, and of fallbacks, which are counted

SAMPLES = int(os.environ.get("LAZYTPU_TEST_SAMPLES", "2"))  # of an operator and dtype
OTHER_DTYPES = (torch.int64, torch.bool, torch.bfloat16, torch.complex64)

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
    torch.complex64: 2e-4,
    torch.complex128: 1e-7,
}

ENTRIES = [op for op in op_db if op.name not in NOT_A_DEVICE_OP]
Check = Callable[[], Iterator[str]]


def full_name(op: Any) -> str:
    return op.name + (f":{op.variant_test_name}" if op.variant_test_name else "")


def dtypes_of(op: Any) -> list[torch.dtype]:
    """float32, and one of the other dtypes, which the operator's name picks."""
    turn = zlib.crc32(full_name(op).encode()) % len(OTHER_DTYPES)
    others = [d for d in OTHER_DTYPES[turn:] + OTHER_DTYPES[:turn] if d in op.dtypes]
    return [d for d in (torch.float32, *others[:1]) if d in op.dtypes]


def samples_of(op: Any, dtype: torch.dtype, requires_grad: bool) -> list[Any]:
    """A few of the operator's first samples, the same each time."""
    torch.manual_seed(0)
    found = list(islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), 6 * SAMPLES))
    picks = random.Random(full_name(op)).sample(range(len(found)), min(SAMPLES, len(found)))
    return [found[i] for i in sorted(picks)]


def to_device(tree: Any, device: torch.device) -> Any:
    """A twin of a sample on the device; tensors that share memory share it there too."""
    memories: dict[Any, torch.Tensor] = {}

    def move(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return _twin(x.detach(), device, memories).requires_grad_(x.requires_grad)
        return device if x == "cpu" or isinstance(x, torch.device) else x

    return tree_map(move, tree)


def _twin(x: torch.Tensor, device: torch.device, memories: dict[Any, torch.Tensor]) -> torch.Tensor:
    """``x`` on the device, on the twin of its memory unless it is all there is of it."""
    key, whole = (x.untyped_storage().data_ptr(), x.dtype), x.untyped_storage().nbytes() // x.element_size()
    if not x.numel() or x.is_conj() or x.is_neg():
        return x.to(device)
    if key not in memories and whole == x.numel():
        memories[key] = x.to(device)
        return memories[key]
    if key not in memories:
        memories[key] = torch.as_strided(x, (whole,), (1,), 0).to(device)
    return memories[key].detach().as_strided(x.shape, x.stride(), x.storage_offset())


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def differences(got: Any, want: Any, values: bool, what: str) -> Iterator[str]:
    """What differs between the results of the device and those of the CPU."""
    ours, theirs = tree_leaves(got), tree_leaves(want)
    if len(ours) != len(theirs):
        yield f"{what}: {len(ours)} results, not {len(theirs)}"
    for a, b in zip(ours, theirs, strict=False):
        if not isinstance(b, torch.Tensor):
            if values and isinstance(b, (int, float)) and a != pytest.approx(b, rel=1e-4, nan_ok=True):
                yield f"{what}: {a}, not {b}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{what}: {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        elif values:
            tolerance = TOLERANCE.get(b.dtype, 0)
            try:
                torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
            except AssertionError as error:
                yield f"{what}: {error}"


def record(op: Any, sample: Any, device: torch.device, grad: bool) -> Iterable[Check]:
    """Records a sample and returns what to compare once it has run; nothing if the CPU refuses the sample."""
    values = op.name not in SHAPES_ONLY and not _drops_out(op, sample)
    args, kwargs = (sample.input, *sample.args), sample.kwargs
    try:
        want = op(*args, **kwargs)
    except Exception:
        return []
    device_args, device_kwargs = to_device(args, device), kwargs if op.name == "to" else to_device(kwargs, device)
    got = op(*device_args, **device_kwargs)
    if values and sample.output_process_fn_grad:
        got, want = sample.output_process_fn_grad(got), sample.output_process_fn_grad(want)
    checks: list[Check] = [lambda: differences(got, want, values, "forward")]
    if grad and values:
        checks += _record_backward(tensors((args, kwargs)), want, tensors((device_args, device_kwargs)), got, device)
    if op.inplace_variant and values and isinstance(sample.input, torch.Tensor) and not sample.broadcasts_input:
        checks += _record_in_place(op.inplace_variant, args, kwargs, device)
    return checks


def _drops_out(op: Any, sample: Any) -> bool:
    """Whether the sample asks for dropout, which ``multi_head_attention_forward`` takes as its 11th argument."""
    positional = op.name == "nn.functional.multi_head_attention_forward" and sample.args[9]
    return bool(positional or sample.kwargs.get("dropout_p"))


def _record_backward(inputs: Any, want: Any, device_inputs: Any, got: Any, device: torch.device) -> Iterable[Check]:
    inputs, device_inputs = ([t for t in ts if t.requires_grad] for ts in (inputs, device_inputs))
    want, got = ([t for t in tensors(ts) if t.requires_grad] for ts in (want, got))
    assert len(got) == len(want), f"{len(got)} results require a gradient, not {len(want)}"
    if not want or not inputs:
        return []
    torch.manual_seed(1)
    seeds = [torch.randn_like(t) for t in want]
    try:
        wanted = torch.autograd.grad(want, inputs, seeds, allow_unused=True)
    except Exception:  # no derivative on the CPU
        return []
    given = torch.autograd.grad(got, device_inputs, [s.to(device) for s in seeds], allow_unused=True)
    assert [g is None for g in given] == [g is None for g in wanted], "other gradients are unused"
    return [lambda: differences(tensors(given), tensors(wanted), True, "backward")]


def _record_in_place(variant: Any, args: Any, kwargs: Any, device: torch.device) -> Iterable[Check]:
    ours, theirs = (to_device((args[0].detach().clone(), *args[1:]), d) for d in (device, torch.device("cpu")))
    with torch.no_grad():
        try:
            want = variant(*theirs, **kwargs)
        except Exception:
            return []
        got = variant(*ours, **to_device(kwargs, device))
    return [lambda: differences((got, ours[0]), (want, theirs[0]), True, "in place")]


def problems(op: Any, dtypes: Iterable[torch.dtype], device: torch.device) -> dict[torch.dtype, list[str]]:
    """What goes wrong with an operator, by dtype; everything is in one graph."""
    found: dict[torch.dtype, list[str]] = {dtype: [] for dtype in dtypes}
    checks: list[tuple[torch.dtype, str, Check]] = []
    for dtype in found:
        lazytpu.metrics.reset()
        grad = dtype is torch.float32 and op.supports_autograd
        for number, sample in enumerate(samples_of(op, dtype, grad)):
            try:
                checks += [(dtype, f"sample {number}", check) for check in record(op, sample, device, grad)]
            except Exception as error:
                found[dtype].append(f"sample {number}: {type(error).__name__}: {error}")
        found[dtype] += [f"ran on the CPU: {name}" for name in lazytpu.metrics.fallbacks()]
    try:
        lazytpu.mark_step()
    except LazyTPUError as error:
        step._next_step()  # or the next test would meet the same graph
        return {dtype: [*others, str(error)] for dtype, others in found.items()}
    for dtype, sample_name, check in checks:
        found[dtype] += [f"{sample_name}: {text}" for text in check()]
    return found


def key_of(op: Any, dtype: torch.dtype) -> Key:
    return op.name, op.variant_test_name, dtype


@pytest.mark.parametrize("op", ENTRIES, ids=full_name)
def test_operator(op: Any, device: torch.device) -> None:
    dtypes = dtypes_of(op)
    known = [dtype for dtype in dtypes if key_of(op, dtype) in STATUS]
    batches = [[dtype] for dtype in dtypes] if known else [dtypes]  # what fails to compile fails alone
    texts = []
    for batch in batches:
        for dtype, found in problems(op, batch, device).items():
            if dtype not in known:
                texts += [f"{dtype}, {text}" for text in found]
            elif not found:
                texts.append(f"{dtype} passes: remove it from op_status.py ({STATUS[key_of(op, dtype)]})")
    assert not texts, "\n".join(texts)


def test_the_status_table_names_operators_that_are_tested() -> None:
    tested = {key_of(op, dtype) for op in ENTRIES for dtype in dtypes_of(op)}
    assert not [key for key in STATUS if key not in tested]
    assert all(STATUS.values())
    assert not set(NOT_REFUSED) - {full_name(op) for op in REFUSERS}


# --- wrong arguments --------------------------------------------------------------------------------------

REFUSING = """
    pow atan2 fmod remainder lerp clamp addcmul addmm addbmm baddbmm addmv addr mm bmm mv dot matmul sum mean amax
    aminmax argmax cumsum logcumsumexp kthvalue mode sort topk unique cat stack hstack vstack dstack split reshape
    permute transpose squeeze unsqueeze expand flip roll rot90 movedim narrow select diagonal gather scatter
    scatter_add index_add index_fill index_select take take_along_dim masked_fill masked_select masked_scatter
    tril_indices arange eye linspace full repeat tensor_split unfold triangular_solve cross histc cdist einsum diff
    trace renorm linalg.cross linalg.vander linalg.norm linalg.solve linalg.multi_dot linalg.lstsq
    nn.functional.conv1d nn.functional.conv2d nn.functional.max_pool2d nn.functional.avg_pool2d
    nn.functional.adaptive_avg_pool2d nn.functional.embedding nn.functional.layer_norm nn.functional.group_norm
    nn.functional.one_hot nn.functional.pixel_shuffle nn.functional.nll_loss nn.functional.cross_entropy
    nn.functional.binary_cross_entropy nn.functional.l1_loss nn.functional.gaussian_nll_loss
    nn.functional.hinge_embedding_loss nn.functional.margin_ranking_loss nn.functional.softshrink nn.functional.glu
    nn.functional.prelu nn.functional.elu nn.functional.rrelu nn.functional.threshold
""".split()
ERROR_SAMPLES = 6
BY_VALUE = re.compile(r"index -?\d+ is out of bounds")  # a graph does not look at the values of indices
REFUSERS = [op for op in ENTRIES if op.name in REFUSING and op.error_inputs_func is not None]


@pytest.mark.parametrize("op", REFUSERS, ids=full_name)
def test_wrong_arguments_raise_what_they_raise_on_the_cpu(op: Any, device: torch.device) -> None:
    tried, texts = 0, []
    for wrong in islice(op.error_inputs("cpu"), ERROR_SAMPLES):
        sample = wrong.sample_input
        expected = _error_of(op, (sample.input, *sample.args), sample.kwargs)
        if expected is None or BY_VALUE.match(str(expected)) or _dims(sample.input) > 64:
            continue
        tried += 1
        got = _error_of(op, *to_device(((sample.input, *sample.args), sample.kwargs), device))
        if type(got) is not type(expected):
            texts.append(f"{got!r}, not {expected!r}")
    assert tried
    known = NOT_REFUSED.get(full_name(op))
    assert bool(texts) == bool(known), "\n".join(texts) or f"passes: remove it from op_status.py ({known})"


def _dims(x: Any) -> int:
    return x.dim() if isinstance(x, torch.Tensor) else 0


def _error_of(op: Any, args: Any, kwargs: Any) -> Exception | None:
    try:
        op(*args, **kwargs)
    except Exception as error:
        return error
    return None
