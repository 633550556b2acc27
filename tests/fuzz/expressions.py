"""Expressions of a fuzzed program: the text of a new tensor, of a view of one, of one computed from others."""

from __future__ import annotations

import random

import torch

from tests.fuzz.drawing import Scene

_MOST_PARTS = 2000  # of an unbind: XLA compiles thousands of results in the square of their number

# --- new tensors ------------------------------------------------------------------------------------------------


def _n(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def transfer(scene: Scene, shape: tuple[int, ...], dtype: str) -> str:
    """Numbers that the CPU makes and the device gets."""
    a, b, c = scene.rng.choice((5, 7, 3)), scene.rng.choice((11, 13, 5)), scene.rng.choice((0, 3, 4))
    c = 0 if dtype in ("uint8", "bool") else c
    b = 2 if dtype == "bool" else b
    text = f"(torch.arange({_n(shape)}) * {a} % {b} - {c}).view({tuple_text(shape)}).to(torch.{dtype})"
    if scene.rng.random() < 0.2 and not scene.exact and dtype in ("float32", "float64"):
        text = f"({text} * 0.3)"
    if len(shape) == 4 and scene.rng.random() < 0.4:
        text += ".contiguous(memory_format=torch.channels_last)"
    elif len(shape) > 1 and scene.rng.random() < 0.2:
        text = f"{text}.transpose(0, -1).contiguous().transpose(0, -1)"
    return f"{text}.to(device)"


def tuple_text(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape)) if len(shape) > 1 else f"({', '.join(map(str, shape))}{',' if shape else ''})"


def _cast(dtype: str) -> str:
    return "" if dtype == "float32" else f", dtype=torch.{dtype}"


def produced(scene: Scene, shape: tuple[int, ...], dtype: str) -> str:
    """Numbers that the device makes: XLA fuses what makes them with what uses them."""
    rng, n, size, cast = scene.rng, _n(shape), tuple_text(shape), _cast(dtype)
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


# --- views ------------------------------------------------------------------------------------------------------


def random_dim(rng: random.Random, t: torch.Tensor) -> int:
    return rng.randrange(-t.dim(), t.dim()) if t.dim() else 0


def _slice(rng: random.Random, n: int) -> str:
    lo, hi = rng.choice(("", "0", "1", "-2", "1")), rng.choice(("", "", str(max(n - 1, 0)), "-1", str(n)))
    step = rng.choice(("", "", "", ":2", ":3"))
    return f"{lo}:{hi}{step}"


def random_index(rng: random.Random, t: torch.Tensor) -> str:
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
    d, e, n = random_dim(rng, t), random_dim(rng, t), t.dim()
    length = t.shape[d] if n else 1
    shape = _factors(rng, t.numel()) if t.numel() else (0,)
    perm = rng.sample(range(n), n)
    start = rng.randrange(max(length, 1))
    size = [rng.randrange(1, 4) for _ in range(rng.randrange(3))]
    strides = [rng.randrange(1, 5) for _ in size]
    wide = [rng.choice((1, 2))] * rng.randrange(2) + [rng.choice((s, 3)) if s == 1 else s for s in t.shape]
    parts, part, steps = rng.randrange(1, 4), rng.randrange(2), rng.randrange(1, 4)
    texts = [
        f".view({tuple_text(shape)})",
        f".view({tuple_text(shape)})",
        f".reshape({tuple_text(shape)})",
        f".transpose({d}, {e})",
        f".permute({perm})",
        f"[{random_index(rng, t)}]",
        f"[{random_index(rng, t)}]",
        f"[{random_index(rng, t)}]",
        f".select({d}, {start})",
        f".narrow({d}, {start}, {max(length - start, 0)})",
        f".unsqueeze({d})",
        f".squeeze({rng.choice(('', str(d)))})",
        f".expand({wide})",
        f".diagonal({part}, {d}, {e})",
        f".unfold({d}, {steps}, {steps})",
        f".as_strided({size}, {strides}, {rng.randrange(4)})",
        f".chunk({parts}, {d})[{part}]",
        ".t()",
        ".mT",
        ".flatten()",
        f".unflatten({d}, (-1, 1))",
        f".movedim({d}, {e})",
        f".view_as({name})",
        ".detach()",
    ]
    if length <= _MOST_PARTS:
        texts += [f".unbind({d})[{part}]", f".split({parts}, {d})[-1]"]
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
        options.append(f"{rng.choice(enough)}.flatten()[:{t.numel()}].reshape({tuple_text(shape)})")
    if row:
        options.append(rng.choice(row))
    if not options or rng.random() < 0.3:
        options.append(f"({base(scene, shape, str(t.dtype)[6:])})")
    return rng.choice(options)


def is_number(t: torch.Tensor) -> bool:
    return t.dtype not in (torch.bool,)


def is_floating(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point


def computed(scene: Scene, name: str) -> str:
    """An expression for a new tensor of the shape of an old one."""
    rng, t = scene.rng, scene.space[name]
    d = random_dim(rng, t)
    ordered = ".contiguous()" if scene.mode in ("jit", "dynamo") else ""  # torch traces other strides than it gives
    texts = [
        f"{name}.flip({d})",
        f"{name}.roll({rng.choice((1, 1, 2, -1))}, {d}){ordered}",
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
