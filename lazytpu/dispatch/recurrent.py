"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as one op with one gradient op, whatever the length of the sequences.

Torch composes them of an op or more for each step, which would be compiled step by step.  That stays for what the op
does not take: wrong arguments, about which the steps raise torch's errors, and transforms of ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from lazytpu.dispatch.composites import FUSED
from lazytpu.dispatch.general import META, Kernel, functional
from lazytpu.ir.op_schema import Arg, OpOverload, aten
from lazytpu.lowering.rules.recurrent_layers import BACKWARD, FORWARD, library
from lazytpu.lowering.support.recurrence import Stack
from lazytpu.tensors.tensor import LazyTensor

Results: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""What gives an output and the last states."""
Context: TypeAlias = Arg
"""What autograd gives a function to keep things at."""
_KEY = "PrivateUse1"
_TRACED = FakeTensor, FunctionalTensor
_libraries: list[torch.library.Library] = []


@dataclass(frozen=True, slots=True)
class Layers:
    """What the layers of a call are, besides their tensors; see `Stack`."""

    kind: str
    has_biases: bool
    count: int
    bidirectional: bool

    def stack(self, params: Sequence[Tensor]) -> Stack:
        """Return the layers in the words of the rules."""
        return Stack.of(self.kind, params, self.has_biases, self.count, self.bidirectional)

    def forward(
        self, x: Tensor, sizes: Tensor | None, states: Sequence[Tensor], params: Sequence[Tensor], keep: bool = False
    ) -> list[Tensor]:
        """Call the op: return the output, the last states, and what the gradient op takes, if ``keep``."""
        settings = self.has_biases, self.count, self.bidirectional
        op = _RECORDED[self.kind] if type(x) is LazyTensor else FORWARD[self.kind]
        found: list[Tensor] = op(x, sizes, states, params, *settings, keep)
        return found

    def composed(
        self, x: Tensor, batch_sizes: Tensor | None, states: Sequence[Tensor], params: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run the layers step by step, as torch composes them."""
        hx = states if self.kind == "lstm" else states[0]
        settings = self.has_biases, self.count, 0.0, False, self.bidirectional
        packet = getattr(aten, self.kind)
        if batch_sizes is None:
            return list(_composed(packet.input, x, hx, params, *settings, False))
        return list(_composed(packet.data, x, batch_sizes, hx, params, *settings))


def _composed(overload: OpOverload, *args: object) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = overload.redispatch(META, *args)  # the kernel for devices that have none of their own
    return found


def _of_padded(kind: str, overload: OpOverload) -> Results:
    """Return the kernel for sequences of one length."""

    def kernel(
        x: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        layers, states = Layers(kind, has_biases, num_layers, bidirectional), _states(hx)
        steps = x.transpose(0, 1) if batch_first and x.dim() == 3 else x
        if not _is_one_op(layers, steps, None, states, params):
            settings = has_biases, num_layers, dropout, train, bidirectional, batch_first
            return _composed(overload, x, hx, params, *settings)
        output, *last = _with_dropout(layers, steps, None, states, params, dropout if train else 0.0)
        return (output.transpose(0, 1) if batch_first else output, *last)

    return kernel


def _of_packed(kind: str, overload: OpOverload) -> Results:
    """Return the kernel for packed sequences."""

    def kernel(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Tensor, ...]:
        layers, states = Layers(kind, has_biases, num_layers, bidirectional), _states(hx)
        if not _is_one_op(layers, data, batch_sizes, states, params):
            settings = has_biases, num_layers, dropout, train, bidirectional
            return _composed(overload, data, batch_sizes, hx, params, *settings)
        return tuple(_with_dropout(layers, data, batch_sizes, states, params, dropout if train else 0.0))

    return kernel


TRACED: dict[Kernel, Results] = {}
"""Functions of torch to what torch's tracers are to call for tensors of any device, which would get the steps."""


def _of_any(kind: str, input: Results, data: Results) -> Results:
    def called(*args: object) -> tuple[Tensor, ...]:
        return (input if isinstance(args[3], bool) else data)(*args)

    called.__name__ = called.__qualname__ = kind  # for the code of graphs that call it
    return called


class TracedAsOne(TorchFunctionMode):
    """Has recurrent layers that are called inside traced as one op."""

    def __torch_function__(
        self, func: Kernel, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        """Call what is in `TRACED`, or the function itself."""
        return TRACED.get(func, func)(*args, **(kwargs or {}))


def _states(hx: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [hx] if isinstance(hx, Tensor) else list(hx)


def _is_one_op(
    layers: Layers, x: Tensor, batch_sizes: Tensor | None, states: Sequence[Tensor], params: Sequence[Tensor]
) -> bool:
    """Return whether the op takes these: tensors of the device of one floating type whose sizes fit."""
    tensors = (x, *states, *params)
    if forward_ad._current_level >= 0 or not params or not all(map(_is_taken, tensors)):
        return False
    if not x.is_floating_point() or any(t.dtype != x.dtype for t in tensors):
        return False
    stack = layers.stack(params)
    if len(states) != stack.cell.states or len(params) != layers.count * stack.directions * stack.params:
        return False
    if x.dim() != (3 if batch_sizes is None else 2) or not all(x.shape) or any(s.dim() != 3 for s in states):
        return False
    batch = states[0].shape[1]
    fits = x.shape[1] == batch if batch_sizes is None else _is_packing(batch_sizes, x.shape[0], batch)
    return fits and _sizes_fit(layers, stack, x, states, params)


def _is_taken(tensor: Tensor) -> bool:
    """Return whether a tensor is one of the device, or stands for one while torch traces."""
    return type(tensor) is LazyTensor or isinstance(tensor, _TRACED)


def _sizes_fit(layers: Layers, stack: Stack, x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    units, batch, width = states[0].shape
    hidden = states[-1].shape[2]
    rows = stack.cell.gates * hidden
    wanted = [(units, batch, width), (units, batch, hidden)][: len(states)]
    if (
        units != layers.count * stack.directions
        or not batch
        or any(tuple(s.shape) != w for s, w in zip(states, wanted, strict=True))
    ):
        return False
    if (width != hidden) > stack.projected:
        return False
    features = x.shape[-1]
    for unit, weights in enumerate(stack.weights(params)):
        if unit == stack.directions:
            features = width * stack.directions
        shapes = [(rows, features), (rows, width), *[(rows,)] * len(weights.biases)]
        shapes += [(width, hidden)] if stack.projected else []
        if any(tuple(p.shape) != s for p, s in zip(weights.all, shapes, strict=True)):
            return False
    return True


def _is_packing(batch_sizes: Tensor, rows: int, batch: int) -> bool:
    """Return whether these are the numbers of sequences that go on at each time, of ``batch`` at first."""
    if batch_sizes.dim() != 1 or batch_sizes.device.type != "cpu" or batch_sizes.dtype != torch.int64:
        return False
    if isinstance(batch_sizes, _TRACED):
        return True  # its values are not known
    sizes = batch_sizes.tolist()
    descending = all(a >= b for a, b in pairwise([batch, *sizes, 1]))
    return bool(descending and sizes[:1] == [batch] and sum(sizes) == rows)


def _with_dropout(
    layers: Layers,
    x: Tensor,
    batch_sizes: Tensor | None,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    dropout: float,
) -> list[Tensor]:
    """Return the output and the last states; with dropout between layers, each of them is an op."""
    if not dropout or layers.count == 1:
        return _differentiable(layers, x, batch_sizes, states, params)
    each, directions = len(params) // layers.count, 2 if layers.bidirectional else 1
    one = Layers(layers.kind, layers.has_biases, 1, layers.bidirectional)
    last: list[list[Tensor]] = []
    for i in range(layers.count):
        if i:
            x = torch.dropout(x, dropout, train=True)
        first = [s[i * directions : (i + 1) * directions] for s in states]
        x, *found = _differentiable(one, x, batch_sizes, first, params[i * each : (i + 1) * each])
        last.append(found)
    return [x, *[torch.cat(parts) for parts in zip(*last, strict=True)]]


def _differentiable(
    layers: Layers, x: Tensor, batch_sizes: Tensor | None, states: Sequence[Tensor], params: Sequence[Tensor]
) -> list[Tensor]:
    """Return the output and the last states, with their place in autograd."""
    sizes = None if batch_sizes is None else batch_sizes.to(x.device)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *states, *params)):
        return list(_APPLY[layers.kind](layers, batch_sizes, sizes, x, *states, *params))
    return list(layers.forward(x, sizes, states, params)[: 1 + len(states)])


class _Function(torch.autograd.Function):
    """The gradient of a call."""

    @staticmethod
    def forward(
        ctx: Context, layers: Layers, batch_sizes: Tensor | None, sizes: Tensor | None, x: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        n = 2 if layers.kind == "lstm" else 1
        states, params = rest[:n], rest[n:]
        with torch.set_grad_enabled(type(x) is LazyTensor):  # for its recorder notes the line for the gradient then
            output, *others = layers.forward(x, sizes, states, params, keep=True)
        last, kept = others[:n], others[n:]
        stack = layers.stack(params)
        if _keeps_output(layers, stack, output, sizes):
            kept[-stack.kept] = output
        ctx.layers, ctx.batch_sizes, ctx.n = layers, batch_sizes, n
        ctx.save_for_backward(x, sizes, *rest, *kept)
        ctx.set_materialize_grads(False)
        return (output, *last)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, sizes, *saved = ctx.saved_tensors
        needed, n = ctx.needs_input_grad[3:], ctx.n
        rest, kept = saved[: len(needed) - 1], saved[len(needed) - 1 :]
        if all(g is None for g in grads):
            return (None,) * (3 + len(needed))
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            return None, None, None, *_gradients_of_steps(ctx, grads, [x, *rest])
        layers, states, params = ctx.layers, rest[:n], rest[n:]
        settings = layers.has_biases, layers.count, layers.bidirectional
        found = BACKWARD[layers.kind](grads, x, sizes, states, params, kept, *settings)
        return None, None, None, *[g if need else None for g, need in zip(found, needed, strict=True)]


_RECORDED = {kind: cast("Callable[..., list[Tensor]]", functional(op)) for kind, op in FORWARD.items()}
_APPLY: dict[str, Results] = {kind: attrgetter("apply")(type(kind, (_Function,), {})) for kind in FORWARD}
"""Kind to what calls its function, whose name is that of the nodes of autograd."""


def _keeps_output(layers: Layers, stack: Stack, output: Tensor, sizes: Tensor | None) -> bool:
    """Return whether the CPU keeps the output itself for the gradient, so that writing to it is an error."""
    alone = layers.kind == "lstm" and sizes is None and output.dtype == torch.float32
    return alone and stack.directions == 1 and not stack.projected


def _gradients_of_steps(ctx: Context, grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return gradients that can be differentiated, from running the layers again step by step."""
    needed = ctx.needs_input_grad[3:]
    with torch.enable_grad():
        x, *rest = [t.view_as(t) if need else t for t, need in zip(inputs, needed, strict=True)]
        outputs = ctx.layers.composed(x, ctx.batch_sizes, rest[: ctx.n], rest[ctx.n :])
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        wanted = [t for t, need in zip((x, *rest), needed, strict=True) if need]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g for _, g in pairs], create_graph=True, allow_unused=True
            )
        )
    return [next(found) if need else None for need in needed]


def _types(kind: str) -> Callable[..., list[Tensor]]:
    """Return the meta kernel of the op."""

    def types(
        x: Tensor,
        sizes: Tensor | None,
        states: Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        bidirectional: bool,
        keep: bool = False,
    ) -> list[Tensor]:
        stack = Stack.of(kind, params, has_biases, num_layers, bidirectional)
        _, batch, width = states[0].shape
        results = [x.new_empty((*x.shape[:-1], stack.directions * width)), *[s.new_empty(s.shape) for s in states]]
        if keep:
            time = (x if sizes is None else sizes).shape[0]
            widths = [*[s.shape[2] for s in states], *[states[-1].shape[2]] * stack.cell.kept]
            results += [x.new_empty((time, batch, w)) for w in widths * (num_layers * stack.directions)]
        return results

    return types


def _gradient_types(
    grads: Sequence[Tensor | None],
    x: Tensor,
    sizes: Tensor | None,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    *rest: object,
) -> list[Tensor]:
    """Return the results of the gradient op: each is like what it is of."""
    return [t.new_empty(t.shape) for t in (x, *states, *params)]


def register() -> None:
    """Give torch's ops kernels for the device, and ours the rest; called once, by ``import lazytpu``."""
    torch_library = torch.library.Library("aten", "IMPL")
    _libraries.append(torch_library)
    for kind in FORWARD:
        packet = getattr(aten, kind)
        kernels = {"input": _of_padded(kind, packet.input), "data": _of_packed(kind, packet.data)}
        TRACED[getattr(torch, kind)] = _of_any(kind, **kernels)
        for name, kernel in kernels.items():
            for key in (_KEY, f"Autograd{_KEY}"):
                torch_library.impl(f"{kind}.{name}", kernel, key)
            getattr(packet, name).py_impl(DispatchKey.AutogradPrivateUse1)(kernel)
            FUSED[getattr(packet, name)] = kernel
        library.impl(kind, _RECORDED[kind], _KEY)
        library.impl(kind, _types(kind), "Meta")
        library.impl(f"{kind}_backward", functional(BACKWARD[kind]), _KEY)
        library.impl(f"{kind}_backward", _gradient_types, "Meta")
