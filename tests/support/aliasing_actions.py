"""What a random program (aliasing_programs.py) may do; importing this fills `ACTIONS`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

import lazytpu
from tests.support.aliasing_programs import ACTIONS, Pair, Program, Run, action, in_order, overlapping, shares

# --- new tensors ---------------------------------------------------------------------------------------------

SIZES = ((6,), (2, 3), (3, 4), (4, 4), (2, 3, 4), (1, 3, 1, 2), (5,), (), (0, 3), (2, 1, 4), (2, 2, 2, 3))
DTYPES = (torch.float32, torch.float32, torch.int64, torch.int32, torch.complex64)


def _pair(cpu: torch.Tensor) -> Pair:
    return cpu, cpu.to(lazytpu.device())


def _values(rng: random.Random, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    numel = torch.Size(size).numel()
    t = torch.tensor([rng.randrange(-9, 30) for _ in range(numel)], dtype=torch.float64).reshape(size)
    return torch.complex(t, t.flip(0) if t.dim() else t).to(dtype) if dtype.is_complex else t.to(dtype)


@action
def new_base(program: Program, rng: random.Random) -> None:
    t = _values(rng, rng.choice(SIZES), rng.choice(DTYPES))
    if t.dim() == 4 and rng.random() < 0.5:
        t = t.to(memory_format=torch.channels_last)
    elif t.dim() > 1 and rng.random() < 0.3:
        t = t.transpose(0, -1).clone(memory_format=torch.preserve_format)
    program.log.append("new")
    program.keep(_pair(t))


@action
def compute(program: Program, rng: random.Random) -> None:
    i = program.pick(rng)
    j = program.pick(rng)
    if i is None or j is None:
        return
    k = rng.randrange(3)
    pair = program.do(f"compute {k}", lambda t: (t[0] + 1, t[0] - t[1], t[0].clone())[k], i, j)
    program.keep(pair)


# --- views ---------------------------------------------------------------------------------------------------


def _dim(rng: random.Random, t: torch.Tensor) -> int:
    return rng.randrange(-t.dim(), t.dim()) if t.dim() else 0


def _slice(rng: random.Random, n: int) -> slice:
    return slice(
        rng.choice((None, 0, 1, -2)), rng.choice((None, None, n - 1, n, -1)), rng.choice((None, None, 1, 2, 3))
    )


def _factors(rng: random.Random, numel: int) -> tuple[int, ...]:
    size: list[int] = []
    while numel > 1:
        f = rng.choice([d for d in range(2, numel + 1) if numel % d == 0])
        size.append(f)
        numel //= f
    if rng.random() < 0.3:
        size.insert(rng.randrange(len(size) + 1), 1)
    return tuple(size)


def _strided(rng: random.Random, t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    size = tuple(rng.randrange(1, 4) for _ in range(rng.randrange(3)))
    return size, tuple(rng.randrange(1, 5) for _ in size), rng.randrange(4)


def _view_call(rng: random.Random, t: torch.Tensor) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """A view op with arguments that mostly suit ``t``."""
    d, e, n = _dim(rng, t), _dim(rng, t), t.dim()
    length = t.shape[d] if n else 0
    perm = rng.sample(range(n), n)
    items = tuple(rng.choice((_slice(rng, s), slice(None), 0, -1, ...)) for s in t.shape)
    items = tuple(x for k, x in enumerate(items) if x is not ... or ... not in items[:k])
    start, steps = rng.randrange(max(length, 1)), rng.randrange(1, 4)
    size, stride, offset = _strided(rng, t)
    shape = _factors(rng, t.numel()) if t.numel() else (0,)
    wide = tuple(rng.choice((1, 2)) for _ in range(rng.randrange(2))) + tuple(
        rng.choice((s, 3)) if s == 1 else s for s in t.shape
    )
    dtype = rng.choice((torch.int32, torch.int64, torch.int16, torch.uint8))
    parts, part = rng.randrange(1, 4), rng.randrange(2)
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        f"view{shape}": lambda x: x.view(shape),
        f"reshape{shape}": lambda x: x.reshape(shape),
        f"transpose({d},{e})": lambda x: x.transpose(d, e),
        f"permute{tuple(perm)}": lambda x: x.permute(perm),
        f"[{items}]": lambda x: x[items],
        f"select({d},{start})": lambda x: x.select(d, start),
        f"narrow({d},{start},{length - start})": lambda x: x.narrow(d, start, length - start),
        f"unsqueeze({d})": lambda x: x.unsqueeze(d),
        "squeeze": lambda x: x.squeeze(),
        f"squeeze({d})": lambda x: x.squeeze(d),
        f"expand{wide}": lambda x: x.expand(wide),
        f"diagonal({part},{d},{e})": lambda x: x.diagonal(part, d, e),
        f"unfold({d},{steps},{steps})": lambda x: x.unfold(d, steps, steps),
        f"as_strided({size},{stride},{offset})": lambda x: x.as_strided(size, stride, offset),
        f"chunk({parts},{d})[{part}]": lambda x: x.chunk(parts, d)[part],
        f"unbind({d})[{part}]": lambda x: x.unbind(d)[part],
        f"split({parts},{d})[-1]": lambda x: x.split(parts, d)[-1],
        "t": lambda x: x.t(),
        "mT": lambda x: x.mT,
        "flatten": lambda x: x.view(-1),
        "detach": lambda x: x.detach(),
        "data": lambda x: x.data,
        f"movedim({d},{e})": lambda x: x.movedim(d, e),
    }
    if t.numel() and t.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):  # checks strides, even of nothing
        calls[f"view({dtype})"] = lambda x: x.view(dtype)
    if t.is_complex():
        calls |= {
            "real": lambda x: x.real,
            "imag": lambda x: x.imag,
            "conj": lambda x: x.conj(),
            "view_as_real": lambda x: torch.view_as_real(x),
        }
    elif t.dtype == torch.float32:
        calls["view_as_complex"] = lambda x: torch.view_as_complex(x)
    name = rng.choice(list(calls))
    return name, calls[name]


@action
def view(program: Program, rng: random.Random) -> None:
    i = program.pick(rng)
    if i is None:
        return
    name, call = _view_call(rng, program.pairs[i][0])
    program.keep(program.do(name, lambda t: call(t[0]), i))


view_again = view
ACTIONS["view_again"] = view_again  # twice as likely


# --- writes --------------------------------------------------------------------------------------------------


def _write(program: Program, what: str, run: Run, *indices: int) -> None:
    if in_order(program, run, indices):
        program.do(what, run, *indices)


@action
def write_number(program: Program, rng: random.Random) -> None:
    i = program.pick(rng)
    if i is None:
        return
    k, number = rng.randrange(6), rng.randrange(-5, 6)
    t = program.pairs[i][0]
    name, call = (
        (f"add_({number})", lambda x: x.add_(number)),
        ("neg_", lambda x: x.neg_()),
        (f"mul_({number % 3})", lambda x: x.mul_(number % 3)),
        (f"clamp_(-20,{number})", lambda x: x.clamp_(-20, number)),
        (f"+={number}.0", lambda x: x.__iadd__(float(number))),
        (f"add_({number}j)", lambda x: x.add_(complex(0, number))),
    )[k]
    if not (t.is_complex() and k == 3):
        _write(program, name, lambda ts: call(ts[0]), i)


@action
def fill(program: Program, rng: random.Random) -> None:
    i = program.pick(rng)
    if i is None:
        return
    number, k = rng.randrange(-5, 6), rng.randrange(3)
    program.do(f"fill {number} {k}", lambda t: (t[0].fill_(number), t[0].zero_())[0] if k else t[0].zero_(), i)


@action
def write_tensor(program: Program, rng: random.Random) -> None:
    i, j = program.pick(rng), program.pick(rng)
    if i is None or j is None:
        return
    k = rng.randrange(3)
    name = ("add_", "sub_", "copy_")[k]
    _write(program, name, lambda t: getattr(t[0], name)(t[1]), i, j)


@action
def write_fitting(program: Program, rng: random.Random) -> None:
    """A write whose operand has the right shape: the other actions often raise."""
    i = program.pick(rng)
    j = None if i is None else program.pick(rng, lambda t: t.numel() >= program.pairs[i][0].numel())
    if i is None or j is None:
        return
    size, k = program.pairs[i][0].shape, rng.randrange(3)

    def run(t: Sequence[torch.Tensor]) -> Any:
        source = t[1].flatten()[: size.numel()].reshape(size)
        return (t[0].copy_, t[0].add_, t[0].sub_)[k](source)

    if not overlapping(program.pairs[i][0]) and not shares(program.pairs[i][0], program.pairs[j][0]):
        program.do(f"fitting {k}", run, i, j)


@action
def write_from_cpu(program: Program, rng: random.Random) -> None:
    i = program.pick(rng, lambda t: not overlapping(t))
    if i is None:
        return
    t = program.pairs[i][0]
    source = _values(rng, t.shape if rng.random() < 0.7 else t.shape[1:], rng.choice(DTYPES[:3]))
    program.do("copy_ from the CPU", lambda t: t[0].copy_(source), i)


@action
def write_masked(program: Program, rng: random.Random) -> None:
    i = program.pick(rng, lambda t: not overlapping(t))
    if i is None:
        return
    number = rng.randrange(9)
    program.do(f"masked {number}", lambda t: t[0].masked_fill_(t[0] == number, number + 1), i)


@action
def write_indexed(program: Program, rng: random.Random) -> None:
    i = program.pick(rng, lambda t: t.dim() > 0 and t.numel() > 0 and not overlapping(t))
    if i is None:
        return
    t, k = program.pairs[i][0], rng.randrange(5)
    rows = [rng.randrange(t.shape[0]) for _ in range(2)]

    def run(ts: Sequence[torch.Tensor]) -> Any:
        x = ts[0]
        index = torch.tensor(rows, device=x.device)
        zeros = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
        return (
            lambda: x.index_put_((index,), torch.tensor(7, device=x.device, dtype=x.dtype)),
            lambda: x.index_fill_(0, index, 3),
            lambda: x.scatter_(0, zeros[:1] + rows[0], 4),
            lambda: x.__setitem__(rows[0], -2),
            lambda: x.__setitem__((..., slice(None, None, 2)), 6),
        )[k]()

    program.do(f"indexed {k} {rows}", run, i)


@action
def write_out(program: Program, rng: random.Random) -> None:
    i, j = program.pick(rng, lambda t: not overlapping(t)), program.pick(rng)
    if i is None or j is None:
        return
    out, x = program.pairs[i][0], program.pairs[j][0]
    if out.shape != x.shape and out.untyped_storage()._cdata == x.untyped_storage()._cdata:
        return  # once it is resized it may lie over what is read, and the order of the elements decides
    _write(program, "out=", lambda t: torch.add(t[1], 1, out=t[0]), i, j)


@action
def write_lists(program: Program, rng: random.Random) -> None:
    i = program.pick(rng, lambda t: not overlapping(t))
    j = program.pick(rng, lambda t: not overlapping(t))
    if i is None or j is None:
        return
    program.do("foreach_add_", lambda t: torch._foreach_add_([t[0], t[1]], 1), i, j)


# --- the place in memory -------------------------------------------------------------------------------------


@action
def move(program: Program, rng: random.Random) -> None:
    i = program.pick(rng)
    if i is None:
        return
    t = program.pairs[i][0]
    d, e = _dim(rng, t), _dim(rng, t)
    size, stride, offset = _strided(rng, t)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "t_": lambda x: x.t_(),
        f"transpose_({d},{e})": lambda x: x.transpose_(d, e),
        "squeeze_": lambda x: x.squeeze_(),
        f"squeeze_({d})": lambda x: x.squeeze_(d),
        f"unsqueeze_({d})": lambda x: x.unsqueeze_(d),
        f"swapaxes_({d},{e})": lambda x: x.swapaxes_(d, e),
        f"as_strided_({size},{stride},{offset})": lambda x: x.as_strided_(size, stride, offset),
    }
    name = rng.choice(list(calls))
    program.do(name, lambda ts: None if calls[name](ts[0]) is ts[0] else 1, i)


@action
def resize(program: Program, rng: random.Random) -> None:
    i = program.pick(rng, lambda t: not t.is_conj() and not t.is_neg())
    if i is None:
        return
    t, size = program.pairs[i][0], rng.choice(SIZES)
    numel = torch.Size(size).numel()
    grows = numel > 0 and (t.storage_offset() + numel) * t.element_size() > t.untyped_storage().nbytes()

    def run(ts: Sequence[torch.Tensor]) -> Any:
        ts[0].resize_(size)
        if grows:  # what is new there is not defined
            storage = ts[0].untyped_storage()
            torch.empty(0, dtype=torch.uint8, device=ts[0].device).set_(storage).fill_(1)

    program.do(f"resize_{size}", run, i)


@action
def set_data(program: Program, rng: random.Random) -> None:
    i, j = program.pick(rng), program.pick(rng)
    if i is None or j is None:
        return
    a, b = program.pairs[i][0], program.pairs[j][0]
    if i != j and a.dtype == b.dtype and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg():
        program.do("data =", lambda t: setattr(t[0], "data", t[1]), i, j)


@action
def set_tensor(program: Program, rng: random.Random) -> None:
    i, j = program.pick(rng), program.pick(rng)
    if i is None or j is None:
        return
    a, b = program.pairs[i][0], program.pairs[j][0]
    if not any(t.is_conj() or t.is_neg() for t in (a, b)):
        program.do("set_", lambda t: None if t[0].set_(t[1]) is t[0] else 1, i, j)


# --- cuts ----------------------------------------------------------------------------------------------------


@action
def cut(program: Program, rng: random.Random) -> None:
    program.log.append("mark_step")
    lazytpu.mark_step()


@action
def read(program: Program, rng: random.Random) -> None:
    i = program.pick(rng)
    if i is not None:
        program.log.append(f"read t{i}")
        program.compare(i)


@action
def drop(program: Program, rng: random.Random) -> None:
    i = program.pick(rng)
    if i is not None and len(program.pairs) > 1:
        program.log.append(f"del t{i}")
        del program.pairs[i]
