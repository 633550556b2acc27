"""What a program may do: each function gives the text of a statement that suits the scene, or None."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from tests.fuzz.drawing import Draw, Scene

# --- new tensors ------------------------------------------------------------------------------------------------


def _n(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def transfer(scene: Scene, shape: tuple[int, ...], dtype: str) -> str:
    """Numbers that the CPU makes and the device gets."""
    a, b, c = scene.rng.choice((5, 7, 3)), scene.rng.choice((11, 13, 5)), scene.rng.choice((0, 3, 4))
    c = 0 if dtype in ("uint8", "bool") else c
    b = 2 if dtype == "bool" else b
    text = f"(torch.arange({_n(shape)}) * {a} % {b} - {c}).view({_tuple(shape)}).to(torch.{dtype})"
    if scene.rng.random() < 0.2 and not scene.exact and dtype in ("float32", "float64"):
        text = f"({text} * 0.3)"
    if len(shape) == 4 and scene.rng.random() < 0.4:
        text += ".contiguous(memory_format=torch.channels_last)"
    elif len(shape) > 1 and scene.rng.random() < 0.2:
        text = f"{text}.transpose(0, -1).contiguous().transpose(0, -1)"
    return f"{text}.to(device)"


def _tuple(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape)) if len(shape) > 1 else f"({', '.join(map(str, shape))}{',' if shape else ''})"


def _cast(dtype: str) -> str:
    return "" if dtype == "float32" else f", dtype=torch.{dtype}"


def produced(scene: Scene, shape: tuple[int, ...], dtype: str) -> str:
    """Numbers that the device makes: XLA fuses what makes them with what uses them."""
    rng, n, size, cast = scene.rng, _n(shape), _tuple(shape), _cast(dtype)
    if dtype in ("bool", "complex64", "uint8") or n > 200:
        small = f"(torch.arange({n}, device=device) % {rng.choice((2, 7, 5))}).view({size}).to(torch.{dtype})"
        return rng.choice(
            (small, small, f"torch.ones({size}, device=device{cast})", f"torch.zeros({size}, device=device{cast})")
        )
    dot = "." if dtype.startswith(("float", "bfloat")) else ""
    texts = [
        f"torch.arange({n}{dot}, device=device{cast}).view({size})",
        f"torch.arange({n}{dot}, device=device{cast}).reshape({size})",
        f"torch.arange({n - 1}, -1, -1, device=device{cast}).view({size})",
        f"torch.full(({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''}), 3, device=device{cast})",
    ]
    if dot:
        texts.append(f"torch.linspace(0, {max(n - 1, 1)}, {n}, device=device{cast}).view({size})")
    if shape:
        last = shape[-1]
        texts.append(f"torch.zeros({size}, device=device{cast}) + torch.arange({last}, device=device{cast})")
        texts.append(f"torch.arange({last}, device=device{cast}).expand({size})")
        texts.append(f"torch.ones({size}, device=device{cast}).cumsum({rng.randrange(len(shape))}{cast})")
    if len(shape) == 2:
        m, k = shape
        texts.append(f"torch.arange({m}, device=device{cast})[:, None] * torch.arange({k}, device=device{cast})")
        texts.append(f"torch.arange({m}{dot}, device=device{cast}).outer(torch.arange({k}{dot}, device=device{cast}))")
        if dot and m and k:
            texts.append(
                f"torch.ones({m}, 3, device=device{cast}) @ torch.arange({3 * k}., device=device{cast}).view(3, {k})"
            )
            texts.append(f"torch.eye({m}, {k}, device=device{cast})")
    return rng.choice(texts)


def base(scene: Scene, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> str:
    shape = scene.shape() if shape is None else shape
    dtype = dtype or scene.dtype()
    text = (transfer if scene.rng.random() < 0.35 else produced)(scene, shape, dtype)
    if len(shape) > 1 and scene.rng.random() < 0.15:
        text += ".t().clone()" if len(shape) == 2 else f".transpose(0, {len(shape) - 1}).contiguous()"
    return text


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


# --- views ------------------------------------------------------------------------------------------------------


def _dim(rng: random.Random, t: torch.Tensor) -> int:
    return rng.randrange(-t.dim(), t.dim()) if t.dim() else 0


def _slice(rng: random.Random, n: int) -> str:
    lo, hi = rng.choice(("", "0", "1", "-2", "1")), rng.choice(("", "", str(max(n - 1, 0)), "-1", str(n)))
    step = rng.choice(("", "", "", ":2", ":3"))
    return f"{lo}:{hi}{step}"


def _index(rng: random.Random, t: torch.Tensor) -> str:
    items = [rng.choice((_slice(rng, n), _slice(rng, n), ":", "0", "-1")) for n in t.shape]
    items = items[: rng.randrange(1, len(items) + 1)] if items else ["..."]
    if rng.random() < 0.1:
        items.append("None")
    return ", ".join(items)


def _factors(rng: random.Random, n: int) -> tuple[int, ...]:
    sizes: list[int] = []
    while n > 1 and len(sizes) < 5:
        small = [d for d in range(2, min(n, 2000) + 1) if n % d == 0] or [n]
        sizes.append(rng.choice([*small, n]))
        n //= sizes[-1]
    if n > 1:
        sizes.append(n)
    if rng.random() < 0.25:
        sizes.insert(rng.randrange(len(sizes) + 1), 1)
    rng.shuffle(sizes)
    return tuple(sizes)


def view_of(scene: Scene, name: str) -> str:
    """A view of a tensor, as an expression."""
    rng, t = scene.rng, scene.space[name]
    d, e, n = _dim(rng, t), _dim(rng, t), t.dim()
    length = t.shape[d] if n else 1
    shape = _factors(rng, t.numel()) if t.numel() else (0,)
    perm = rng.sample(range(n), n)
    start = rng.randrange(max(length, 1))
    size = [rng.randrange(1, 4) for _ in range(rng.randrange(3))]
    strides = [rng.randrange(1, 5) for _ in size]
    wide = [rng.choice((1, 2))] * rng.randrange(2) + [rng.choice((s, 3)) if s == 1 else s for s in t.shape]
    parts, part, steps = rng.randrange(1, 4), rng.randrange(2), rng.randrange(1, 4)
    texts = [
        f".view({_tuple(shape)})",
        f".view({_tuple(shape)})",
        f".reshape({_tuple(shape)})",
        f".transpose({d}, {e})",
        f".permute({perm})",
        f"[{_index(rng, t)}]",
        f"[{_index(rng, t)}]",
        f"[{_index(rng, t)}]",
        f".select({d}, {start})",
        f".narrow({d}, {start}, {max(length - start, 0)})",
        f".unsqueeze({d})",
        f".squeeze({rng.choice(('', str(d)))})",
        f".expand({wide})",
        f".diagonal({part}, {d}, {e})",
        f".unfold({d}, {steps}, {steps})",
        f".as_strided({size}, {strides}, {rng.randrange(4)})",
        f".chunk({parts}, {d})[{part}]",
        f".unbind({d})[{part}]",
        f".split({parts}, {d})[-1]",
        ".t()",
        ".mT",
        ".flatten()",
        f".unflatten({d}, (-1, 1))",
        f".movedim({d}, {e})",
        f".view_as({name})",
        ".detach()",
    ]
    if scene.mode == "trace":
        texts.append(".data")
    if t.is_complex():
        texts += [".real", ".imag", ".conj()"]
        return rng.choice((f"torch.view_as_real({name})", f"{name}{rng.choice(texts)}"))
    if t.dtype in (torch.int64, torch.int32, torch.uint8) and rng.random() < 0.1:
        return f"{name}.view(torch.{rng.choice(('int32', 'int64', 'int16', 'uint8'))})"
    if t.dtype == torch.float32 and rng.random() < 0.03:
        return f"torch.view_as_complex({name})"
    return name + rng.choice(texts)


def view(scene: Scene) -> str | None:
    name = scene.pick()
    return name and f"{scene.new_name()} = {view_of(scene, name)}"


# --- operands ---------------------------------------------------------------------------------------------------


def fitting(scene: Scene, t: torch.Tensor) -> str:
    """An expression for a tensor that has the shape of ``t``, or one that broadcasts to it."""
    rng, shape = scene.rng, tuple(t.shape)
    same = scene.tensors(lambda x: tuple(x.shape) == shape)
    enough = scene.tensors(lambda x: x.numel() >= t.numel())
    row = scene.tensors(lambda x: shape and tuple(x.shape) in ((shape[-1],), (1, shape[-1]), ()))
    options: list[str] = []
    if same:
        options += [rng.choice(same) for _ in range(3)]
    if enough:
        options.append(f"{rng.choice(enough)}.flatten()[:{t.numel()}].reshape({_tuple(shape)})")
    if row:
        options.append(rng.choice(row))
    if not options or rng.random() < 0.3:
        options.append(f"({base(scene, shape, str(t.dtype)[6:])})")
    return rng.choice(options)


def _is_number(t: torch.Tensor) -> bool:
    return t.dtype not in (torch.bool,)


def _floats(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point


def computed(scene: Scene, name: str) -> str:
    """An expression for a new tensor of the shape of an old one."""
    rng, t = scene.rng, scene.space[name]
    d = _dim(rng, t)
    texts = [
        f"{name}.flip({d})",
        f"{name}.roll({rng.choice((1, 1, 2, -1))}, {d})",
        f"{name}.clone()",
        f"{name}.contiguous()",
    ]
    if not t.dim():
        texts = [f"{name}.clone()"]
    if t.dtype == torch.bool:
        return rng.choice([*texts, f"~{name}", f"{name} ^ {fitting(scene, t)}"])
    other = fitting(scene, t)
    texts += [
        f"{name} * 2 - 1",
        f"{name} + 1",
        f"-{name}",
        f"{name} * {other}",
        f"{name} + {other}",
        f"{name} - {other}",
    ]
    if not t.is_complex():
        texts += [
            f"{name}.abs()",
            f"{name}.clamp(-2, 9)",
            f"torch.where({fitting(scene, t)} > 2, {name}, {other})" if scene.exact else f"torch.relu({name})",
            f"torch.maximum({name}, {other})",
            f"{name}.cumsum({d})" if t.dtype != torch.uint8 else f"{name}.flip({d})" if t.dim() else name,
            f"{name}.sort({d}, stable=True).values" if t.dim() else f"{name}.abs()",
        ]
    if t.dtype in (torch.float32, torch.float64) and not scene.exact:
        texts += [f"{name}.{f}()" for f in ("sin", "tanh", "sigmoid", "exp", "cos", "atan", "square")]
        texts += [f"({name}.abs() + 1).log()", f"({name}.abs() + 1).sqrt()", f"{name} / ({other}.abs() + 1)"]
        texts += [f"torch.softmax({name}, {d})", f"torch.nn.functional.gelu({name})"]
    return rng.choice(texts)


def compute(scene: Scene) -> str | None:
    rng = scene.rng
    name = scene.pick()
    if name is None:
        return None
    t = scene.space[name]
    text = computed(scene, name)
    if rng.random() < 0.3:
        dtype = scene.dtype()
        text = f"{name}.to(torch.{dtype})" if not t.is_complex() and (scene.exact or not _floats(t)) else text
    elif rng.random() < 0.2 and t.dim():
        d = rng.randrange(t.dim())
        text = rng.choice((f"torch.cat([{name}, {fitting(scene, t)}], {d})", f"torch.stack([{name}, {name}], {d})"))
        text = rng.choice((text, f"{name}.repeat({_tuple(tuple(rng.choice((1, 2)) for _ in t.shape))})"))
    return f"{scene.new_name()} = {text}"


def reduce(scene: Scene) -> str | None:
    """A reduction, mostly of a product."""
    rng = scene.rng
    name = (
        scene.pick(_is_number)
        if not scene.large
        else scene.pick(lambda t: _is_number(t) and t.numel() > 500) or scene.pick()
    )
    if name is None:
        return None
    t = scene.space[name]
    d = _dim(rng, t)
    x = rng.choice((name, f"({name} * {fitting(scene, t)})", f"({computed(scene, name)})"))
    kinds = [f".sum({d})", f".sum({d})", ".sum()", f".sum({d}, keepdim=True)"]
    if t.dim() > 1:
        kinds.append(f".sum({rng.sample(range(t.dim()), 2)})")
    if t.dim() == 2 and _floats(t) and rng.random() < 0.7:
        k = rng.randrange(1, 10)
        small = transfer(scene, (k, t.shape[0]), str(t.dtype)[6:])
        other = transfer(scene, (t.shape[1], k), str(t.dtype)[6:])
        if t.shape[0] <= 16:
            x = f"({small} @ {name})"
        elif t.shape[1] <= 16:
            x = rng.choice((f"({name} @ {other})", f"({other}.t() @ {name}.t())"))
        else:
            x = f"({name}.t() @ {name})" if t.shape[1] < 50 else name
    if not t.is_complex() and t.numel():
        kinds += [f".amax({d})", f".amin({d})", f".cumsum({d})", f".max({d}).values"]
        if scene.exact:
            kinds += [f".argmax({d})", f".argmin({d})"]
        if _floats(t):
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
            f"{name}[{index}]" if d == 0 else f"{name}[..., {index}]" if d == t.dim() - 1 else f"{name}[:, {index}]",
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
    part = f"{name}[{_index(rng, t)}]" if t.dim() and rng.random() < 0.4 else name
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
            f"{name}.cumsum_({_dim(rng, t)})",
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
    d = _dim(rng, t)
    texts = [f"torch.add({x}, {y}, out={name})", f"torch.mul({x}, {y}, out={name})", f"torch.add({x}, 1, out={name})"]
    if t.dim():
        texts.append(f"torch.sum({name}.clone(), {d}, out={name}.select({d}, 0))")
        texts.append(f"torch.cat([{name}[1:] * 1, {name}[:1] * 1], out={name})")
        texts += [f"torch.index_select({x}, 0, torch.arange({t.shape[0]}, device=device), out={name})"]
    return rng.choice(texts)


def move(scene: Scene) -> str | None:
    """Another place in memory for a tensor."""
    rng = scene.rng
    name = scene.pick(lambda t: not t.requires_grad)
    if name is None:
        return None
    t = scene.space[name]
    d, e = _dim(rng, t), _dim(rng, t)
    size = [rng.randrange(1, 4) for _ in range(rng.randrange(3))]
    texts = [
        f"{name}.t_()",
        f"{name}.transpose_({d}, {e})",
        f"{name}.squeeze_()",
        f"{name}.unsqueeze_({d})",
        f"{name}.as_strided_({size}, {[rng.randrange(1, 5) for _ in size]}, {rng.randrange(3)})",
    ]
    if scene.mode == "trace" and not t.is_conj() and not t.is_neg():
        shape = tuple(rng.sample(t.shape, t.dim()))
        texts.append(f"{name}.resize_({_tuple(shape)})")
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
    able = scene.tensors(lambda t: t.requires_grad and _floats(t) and not t.is_leaf)
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
