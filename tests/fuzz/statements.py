"""Statements of a fuzzed program: each function gives the text of one that suits the scene, or None."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.fuzz.drawing import Draw, Scene
from tests.fuzz.expressions import (
    base,
    computed,
    fitting,
    is_floating,
    is_number,
    random_dim,
    random_index,
    transfer,
    tuple_text,
    view_of,
)


def add_input(scene: Scene) -> None:
    name = f"a{len(scene.inputs)}"
    dtype = scene.dtype()
    if scene.grad and not scene.inputs and not dtype.startswith(("float", "bfloat")):
        dtype = "float32"
    text = base(scene, dtype=dtype)
    if scene.grad and dtype.startswith(("float", "bfloat")):
        text = f"({text}).detach().requires_grad_()"
    scene.add(f"{name} = {text}", "inputs")


def new_base(scene: Scene) -> str:
    like = scene.pick()
    if like is not None and scene.rng.random() < 0.5:
        t = scene.space[like]
        return f"{scene.new_name()} = {base(scene, tuple(t.shape), str(t.dtype)[6:])}"
    return f"{scene.new_name()} = {base(scene)}"


def view(scene: Scene) -> str | None:
    name = scene.pick()
    return name and f"{scene.new_name()} = {view_of(scene, name)}"


def compute(scene: Scene) -> str | None:
    rng = scene.rng
    name = scene.pick()
    if name is None:
        return None
    t = scene.space[name]
    text = computed(scene, name)
    if rng.random() < 0.3:
        dtype = scene.dtype()
        text = f"{name}.to(torch.{dtype})" if not t.is_complex() and (scene.exact or not is_floating(t)) else text
    elif rng.random() < 0.2 and t.dim():
        d = rng.randrange(t.dim())
        text = rng.choice((f"torch.cat([{name}, {fitting(scene, t)}], {d})", f"torch.stack([{name}, {name}], {d})"))
        text = rng.choice((text, f"{name}.repeat({tuple_text(tuple(rng.choice((1, 2)) for _ in t.shape))})"))
    return f"{scene.new_name()} = {text}"


def reduce(scene: Scene) -> str | None:
    """A reduction, mostly of a product."""
    rng = scene.rng
    name = (
        scene.pick(is_number)
        if not scene.large
        else scene.pick(lambda t: is_number(t) and t.numel() > 500) or scene.pick()
    )
    if name is None:
        return None
    t = scene.space[name]
    d = random_dim(rng, t)
    x = rng.choice((name, f"({name} * {fitting(scene, t)})", f"({computed(scene, name)})"))
    kinds = [f".sum({d})", f".sum({d})", ".sum()", f".sum({d}, keepdim=True)"]
    if t.dim() > 1:
        kinds.append(f".sum({rng.sample(range(t.dim()), 2)})")
    if t.dim() == 2 and is_floating(t) and rng.random() < 0.7:
        k = rng.randrange(1, 10)
        small = transfer(scene, (k, t.shape[0]), str(t.dtype)[6:])
        other = transfer(scene, (t.shape[1], k), str(t.dtype)[6:])
        if t.shape[0] <= 16:
            x = f"({small} @ {name})"
        elif t.shape[1] <= 16:
            x = rng.choice((f"({name} @ {other})", f"({other}.t() @ {name}.t())"))
        else:
            x = f"({name}.t() @ {name})" if t.shape[1] < 50 else name
    if not scene.exact and rng.random() < 0.5:
        x = f"{x}.detach()"  # which of elements that are equal but for rounding gets the gradient is not defined
    if not t.is_complex() and t.numel():
        if scene.exact or x.endswith(".detach()"):
            kinds += [f".amax({d})", f".amin({d})", f".max({d}).values"]
        kinds += [f".cumsum({d})"]
        if scene.exact:
            kinds += [f".argmax({d})", f".argmin({d})"]
        if is_floating(t):
            kinds += [f".mean({d})", f".norm(dim={d})"] if not scene.exact else []
            kinds += [f".square().sum({d})"]
    return f"{scene.new_name()} = {x}{rng.choice(kinds)}"


def _indices(scene: Scene, rows: list[int]) -> str:
    """A tensor of some integers, made on the device or brought to it."""
    return scene.rng.choice((f"torch.tensor({rows}, device=device)", _arithmetic(rows), _arithmetic(rows)))


def _arithmetic(rows: list[int]) -> str:
    digits = sum(r * 100**i for i, r in enumerate(rows))
    return f"({digits} // 100 ** torch.arange({len(rows)}, device=device) % 100)"


def gather(scene: Scene) -> str | None:
    rng = scene.rng
    name = scene.pick(lambda t: t.dim() > 0 and t.numel() > 0)
    if name is None:
        return None
    t = scene.space[name]
    d = rng.randrange(t.dim())
    rows = [rng.randrange(min(t.shape[d], 100)) for _ in range(rng.randrange(1, 4))]
    index = _indices(scene, rows)
    text = rng.choice(
        (
            f"{name}.index_select({d}, {index})",
            f"{name}[..., {index}]" if 0 < d == t.dim() - 1 else f"{name}[{':, ' * d}{index}]",
            f"torch.take_along_dim({name}, {name}.argsort({d}, stable=True), {d})"
            if scene.exact and not t.is_complex()
            else name,
        )
    )
    return f"{scene.new_name()} = {text}"


# --- writes -----------------------------------------------------------------------------------------------------


def _target(scene: Scene) -> str | None:
    return scene.pick(lambda t: not (t.requires_grad and t.is_leaf) or scene.rng.random() < 0.02)


def write_shifted(scene: Scene) -> str | None:
    """A write to a part of a tensor that reads it in another order."""
    rng = scene.rng
    name = _target(scene)
    if name is None:
        return None
    t = scene.space[name]
    if not t.dim() or rng.random() < 0.1:
        return f"{name}.copy_({computed(scene, name)})"
    d = 0 if rng.random() < 0.6 else rng.randrange(t.dim())
    at = ":, " * d
    n = max(t.shape[d], 1)
    i, j = rng.randrange(n), rng.randrange(n)
    row = rng.choice(("", ".flip(-1)", ".roll(1, -1)", " * 2", ".clone()", ".clone()"))
    row = "" if t.dtype == torch.bool and "*" in row else "" if t.dim() == 1 and "-1" in row else row
    pairs = [("1:", ":-1"), (":-1", "1:"), ("1:", ":-1"), ("::2", f"{n % 2}::2") if n % 2 == 0 else ("1::2", ":-1:2")]
    to, source = rng.choice(pairs)
    rest = ".clone()" if rng.random() < 0.8 else rng.choice((".flip(0)", " + 0", ".contiguous()"))
    if t.dtype == torch.bool and "+" in rest:
        rest = ".clone()"
    texts = [
        f"{name}[{at}{to}] = {name}[{at}{source}]{rest}",
        f"{name}[{at}{to}] = {name}[{at}{source}]{rest}",
        f"{name}[{at}1:] = {name}.roll(1, {d})[{at}1:]",
        f"{name}[{at}{i}] = {name}[{at}{j}]{row}",
        f"{name}.copy_({name}.flip({d}))",
        f"{name}[...] = {name}.roll({rng.choice((1, -1, 2))}, {d})",
        f"{name}[{at}{i}], {name}[{at}{j}] = {name}[{at}{j}].clone(), {name}[{at}{i}].clone()",
        f"{name}.copy_({computed(scene, name)})",
        f"{name}[{at}{to}].copy_({name}[{at}{source}]{rest})",
    ]
    if t.dtype != torch.bool:
        flip = ".flip(-1)" if t.dim() > 1 else ".clone()"
        texts += [
            f"{name}[{at}{i}].add_({name}[{at}{j}]{flip}, alpha=2)",
            f"{name}[{at}{to}] += {name}[{at}{source}].clone()",
            f"{name}[{at}{to}] -= {name}[{at}{source}]{rest}",
            f"{name} += {name}.roll(1, {d})",
            f"{name}[{at}{i}] = {name}.sum({d})",
            f"{name}[{at}{i}] = {name}[{at}{j}] * {name}[{at}{i}]",
        ]
    return rng.choice(texts)


def write_in_place(scene: Scene) -> str | None:
    rng = scene.rng
    name = _target(scene)
    if name is None:
        return None
    t = scene.space[name]
    number = rng.randrange(-5, 6) if t.dtype not in (torch.uint8, torch.bool) else rng.randrange(2)
    part = f"{name}[{random_index(rng, t)}]" if t.dim() and rng.random() < 0.4 else name
    other = fitting(scene, t)
    texts = [f"{part}.fill_({number})", f"{part}.zero_()", f"{name}.copy_({other})", f"{name}.copy_({other})"]
    texts += [
        f"{name}.masked_fill_({name} == {number}, {rng.randrange(2)})" if scene.exact else f"{part}.fill_({number})"
    ]
    if t.dtype == torch.bool:
        return rng.choice([*texts, f"{part}.logical_not_()", f"{name}.logical_xor_({other})"])
    texts += [
        f"{part}.add_({number})",
        f"{part}.mul_({rng.choice((2, -1, 0, 3))})",
        f"{part}.neg_()",
        f"{name}.add_({other})",
        f"{name}.sub_({other}, alpha=2)",
        f"{name}.mul_({other})",
        f"{name}.addcmul_({other}, {fitting(scene, t)})",
        f"torch._foreach_add_([{name}], 1)",
    ]
    if not t.is_complex():
        texts += [
            f"{part}.clamp_(-20, {number})",
            f"{part}.abs_()",
            f"{part} += {number}",
            f"{name}.cumsum_({random_dim(rng, t)})",
        ]
        if t.dim() == 2:
            texts += [f"{name}.tril_()", f"{name}.triu_(1)", f"{name}.fill_diagonal_({number})"]
    if t.dtype in (torch.float32, torch.float64) and not scene.exact:
        texts += [f"{part}.{f}_()" for f in ("sin", "tanh", "sigmoid", "cos")] + [f"{name}.lerp_({other}, 0.25)"]
    return rng.choice(texts)


def write_indexed(scene: Scene) -> str | None:
    rng = scene.rng
    name = scene.pick(lambda t: t.dim() > 0 and t.numel() > 0 and not (t.requires_grad and t.is_leaf))
    if name is None:
        return None
    t = scene.space[name]
    d = rng.randrange(t.dim())
    n = t.shape[d]
    rows = rng.sample(range(min(n, 100)), min(n, rng.randrange(1, 4)))
    index = _indices(scene, rows)
    source = f"{name}.index_select({d}, {_indices(scene, rows[::-1])})"
    other = fitting(scene, t)
    at = ":, " * d
    texts = [
        f"{name}.index_copy_({d}, {index}, {source})",
        f"{name}.index_fill_({d}, {index}, 1)",
        f"{name}[{at}{index}] = {source}",
        f"{name}[{at}{rows}] = {name}[{at}{rows[::-1]}]",
        f"{name}[{at}{index}] = torch.ones((), device=device, dtype={t.dtype})",
        f"{name}.scatter_({d}, {name}.argsort({d}, stable=True), {name}.clone())"
        if scene.exact and not t.is_complex()
        else f"{name}.index_fill_({d}, {index}, 0)",
        f"{name}.masked_scatter_(torch.ones_like({name}, dtype=torch.bool), {name}.flip({d}))",
    ]
    if t.dtype != torch.bool:
        texts += [
            f"{name}.index_add_({d}, {index}, {source})",
            f"{name}.index_put_(({index},), {name}[:{len(rows)}].clone(), accumulate=True)"
            if d == 0
            else f"{name}.index_add_({d}, {index}, {source}, alpha=2)",
        ]
    if scene.mode == "trace" and scene.exact and not t.is_complex():
        texts += [f"{name}[{name} > 1] = 0", f"{name}[{name} == 1] = {name}[{name} == 1].clone()"]
    if scene.exact and not t.is_complex():
        texts += [f"{name}.copy_(torch.where({name} > 1, {name}, {other}))"]
    return rng.choice(texts)


def write_out(scene: Scene) -> str | None:
    rng = scene.rng
    name = scene.pick(lambda t: not t.requires_grad and t.dtype != torch.bool)
    if name is None:
        return None
    t = scene.space[name]
    x, y = fitting(scene, t), fitting(scene, t)
    d = random_dim(rng, t)
    texts = [f"torch.add({x}, {y}, out={name})", f"torch.mul({x}, {y}, out={name})", f"torch.add({x}, 1, out={name})"]
    if t.dim():
        texts.append(f"torch.sum({name}.clone(), {d}, out={name}.select({d}, 0))")
        texts.append(f"torch.cat([{name}[1:] * 1, {name}[:1] * 1], out={name})")
        if t.numel():  # where it raises, torch has made `out` larger before
            rows = f"torch.broadcast_to({x}, {tuple_text(t.shape)})"
            texts.append(f"torch.index_select({rows}, 0, torch.arange({t.shape[0]}, device=device), out={name})")
    return rng.choice(texts)


def move(scene: Scene) -> str | None:
    """Another place in memory for a tensor."""
    rng = scene.rng
    name = scene.pick(lambda t: not t.requires_grad)
    if name is None:
        return None
    t = scene.space[name]
    d, e = random_dim(rng, t), random_dim(rng, t)
    size = [rng.randrange(1, 4) for _ in range(rng.randrange(3))]
    texts = [
        f"{name}.t_()",
        f"{name}.transpose_({d}, {e})",
        f"{name}.squeeze_()",
        f"{name}.unsqueeze_({d})",
        f"{name}.as_strided_({size}, {[rng.randrange(1, 5) for _ in size]}, {rng.randrange(3)})",
    ]
    if scene.mode == "trace" and not t.is_conj() and not t.is_neg():
        if (t.storage_offset() + t.numel()) * t.itemsize <= t.untyped_storage().nbytes():  # no new memory
            texts.append(f"{name}.resize_({tuple_text(tuple(rng.sample(t.shape, t.dim())))})")
        other = scene.pick(lambda x: x.dtype == t.dtype and not x.is_conj() and not x.is_neg() and not x.requires_grad)
        if other:
            texts += [f"{name}.data = {other}", f"{name}.set_({other})"]
    return rng.choice(texts)


# --- cuts -------------------------------------------------------------------------------------------------------


def cut(scene: Scene) -> str | None:
    if scene.mode != "trace":
        return None
    name = scene.pick()
    choices = ["lazytpu.mark_step()", "lazytpu.mark_step()"]
    if name is not None:
        choices.append(f"see({name})")
        if len(scene.tensors()) > 2:
            choices.append(f"del {name}")
    return scene.rng.choice(choices)


def loss(scene: Scene) -> str | None:
    """What the backward pass starts from."""
    after_call = scene.mode not in ("trace", "compile")
    able = scene.tensors(lambda t: t.requires_grad and is_floating(t) and not t.is_leaf)
    able = [name for name in able if not after_call or name.startswith("t")]
    if not able:
        return None
    name = scene.rng.choice(able)
    return scene.rng.choice((f"{name}.sum()", f"({name} * 2).sum()", f"({name} * {name}.detach()).sum()"))


_WEIGHTS: dict[Draw, int] = {
    new_base: 8,
    view: 26,
    compute: 12,
    reduce: 8,
    gather: 3,
    write_shifted: 20,
    write_in_place: 14,
    write_indexed: 9,
    write_out: 5,
    move: 4,
    cut: 8,
}
_OF_LARGE: dict[Draw, int] = {new_base: 4, view: 6, compute: 4, reduce: 14, write_shifted: 6, write_in_place: 4, cut: 2}


def choose(scene: Scene) -> str | None:
    """The next statement of a program."""
    weights = _OF_LARGE if scene.large else _WEIGHTS
    choice: Callable[[Scene], str | None] = scene.rng.choices(list(weights), list(weights.values()))[0]
    return choice(scene)
