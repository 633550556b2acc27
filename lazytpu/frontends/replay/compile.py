"""`compile`: a whole step as one executable, without running its Python again.

The function is recorded as usual for its first calls.  Once two calls in a row were the same program, numbers and
all, further calls *replay* it (replay.py) for as long as what the function could look at is as it was (guards.py).
What cannot be replayed keeps being recorded, which is slower and always right, and `lazytpu.explain` says why.
Optimizers that have a ``capturable`` form are switched to it, so that their step counters live on the device.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lazytpu.config import config
from lazytpu.diagnosis import events
from lazytpu.errors import ReplayError
from lazytpu.frontends.replay.capture import Capture, difference, draws_so_far
from lazytpu.frontends.replay.guards import Guards
from lazytpu.frontends.replay.numbers import Followed, first_followed, followed, settings_of, tracing
from lazytpu.frontends.replay.recorded_call import RecordedCall
from lazytpu.frontends.replay.replay import UNFIT, ReplayedProgram, grad_of
from lazytpu.ir.sharding import Sharding
from lazytpu.ir.site import UNKNOWN, Site
from lazytpu.ir.tree import trace
from lazytpu.observe import metrics, step_statistics
from lazytpu.runtime.least_recent import LeastRecent
from lazytpu.tensors import tensor
from lazytpu.tensors.storage import new_storage, resolve, storage_of
from lazytpu.tensors.tensor import LazyTensor, make
from lazytpu.torch_backend import loops
from lazytpu.tracing import cutting, record, step
from lazytpu.tracing.record import cell_of, is_device_tensor

MAX_RECORDED = 5
"""Calls of one kind that are recorded in a row before they are given up as ones that cannot be replayed."""

_MAX_KINDS = 32
_LAZY = {LazyTensor}


class _Kind:
    """Calls with arguments of the same types.

    Attributes:
        last: the latest recorded call, ``guards`` what was around it afterwards.
        followed: how the floats of its calls follow from the settings of optimizers.
        rebinds: how often tensors had been pointed at another storage by then.
        program: what is replayed as long as the guards hold.
        recorded, replays: how many calls were so in a row.
        given_up: recorded in every call from now on.
    """

    __slots__ = ("followed", "given_up", "guards", "last", "program", "rebinds", "recorded", "replays")

    def __init__(self) -> None:
        self.last: RecordedCall | None = None
        self.guards: Guards | None = None
        self.program: ReplayedProgram | None = None
        self.followed: Followed | None = None
        self.rebinds = self.recorded = self.replays = 0
        self.given_up = False


class CompiledStep:
    """A function whose calls run as one executable; made by `compile`."""

    def __init__(self, function: Callable[..., Any], verify_every: int = 0) -> None:
        functools.update_wrapper(self, function)
        self._function, self._verify_every = function, verify_every
        self._name = getattr(function, "__qualname__", repr(function))
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        self._site = Site(code.co_filename, code.co_firstlineno) if code is not None else UNKNOWN
        self._kinds: LeastRecent[object, _Kind] = LeastRecent(_MAX_KINDS)
        self._found = Guards(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if trace.forgetful:  # somebody looks at each op
            return self._plainly(args, kwargs)
        if not kwargs and {*map(type, args)} <= _LAZY:
            leaves, spec = args, None
        else:
            leaves, spec = tree_flatten((args, kwargs))  # type: ignore[assignment]
        key = self._key(leaves, spec)
        kind = self._kinds.get(key)
        if kind is None:
            kind = _Kind()
            self._kinds.keep(key, kind)
        program = kind.program
        if program is not None:
            assert kind.guards is not None  # set with the program
            if kind.rebinds == tensor.rebinds and (kind.guards.hold() or self._follow(kind, program)):
                if self._verify_every and kind.replays % self._verify_every == self._verify_every - 1:
                    return self._verify(kind, leaves, args, kwargs)
                result = self._replayed(program, leaves)
                if result is not UNFIT:
                    if program.call.counters:
                        torch._foreach_add_(program.call.counters, 1.0)
                        kind.guards.counted()
                    kind.replays += 1
                    metrics.count("step")
                    metrics.count("replay")
                    step_statistics.end_step()
                    return result
            self._end_replays(kind)
        if kind.given_up:
            return _detached(self._function(*args, **kwargs), leaves)
        return self._record(kind, leaves, args, kwargs)

    @staticmethod
    def _replayed(program: ReplayedProgram, leaves: Any) -> Any:
        """Run a program without the garbage collector.

        A run makes as many arrays as it drops.  The collector counts those made first: it would look at all of them,
        and call them old, in each run of a program with some hundred results.
        """
        collecting = gc.isenabled()
        try:
            gc.disable()
            return program.run(leaves)
        finally:
            if collecting:
                gc.enable()

    def _plainly(self, args: Any, kwargs: Any) -> Any:
        """Call the function as a step without `compile`, for debugging."""
        result = _detached(self._function(*args, **kwargs), tree_leaves((args, kwargs)))
        step.mark_step()
        return result

    def _key(self, leaves: Any, spec: object) -> Any:
        """Return what tells kinds of calls apart: types of arguments, which of them alias, flags of modules, modes."""
        parts: list[object] = []
        storages: dict[int, int] = {}
        for x in leaves:
            if is_device_tensor(x):
                storage, layout = resolve(cell_of(x))
                place = storages.setdefault(id(storage), len(storages))
                parts.append((layout, x.requires_grad, place, storage.sharding))
            else:
                parts.append(_frozen(x))
        without_grad = tuple(map(is_, map(grad_of, self._found.parameters), repeat(None)))
        return (*parts, spec, self._found.training(), without_grad, _modes())

    def _end_replays(self, kind: _Kind) -> None:
        """End the replays of a program that no longer fits."""
        assert kind.guards is not None
        kind.program, kind.recorded, kind.replays = None, 0, 0
        changes = kind.guards.changes()
        if kind.rebinds != tensor.rebinds:
            changes.append("a tensor points at other memory (x.data = y)")
        events.recorded_again(
            self._name, "; ".join(changes[:3]) or "tensors share memory, or lie on a mesh, in another way", self._site
        )

    def _follow(self, kind: _Kind, program: ReplayedProgram) -> bool:
        """Return whether only settings of optimizers have changed, and the program has the numbers for them now."""
        assert kind.guards is not None  # set with the program
        changed = kind.guards.changed_settings()
        if changed is None:
            return False
        if changed:
            if kind.followed is None or not kind.followed.seen.issuperset(changed):
                return False
            floats = kind.followed.floats(settings_of(kind.guards.optimizers))
            if floats is None or not program.follow(floats):
                return False
        kind.guards.learn()
        return True

    def _record(self, kind: _Kind, leaves: Any, args: Any, kwargs: Any) -> Any:
        guards, call, result = self._recorded(kind, leaves, args, kwargs)
        problem = call if isinstance(call, str) else call.problem
        changes = guards.changes()
        last, kind.guards, kind.rebinds = kind.last, guards, tensor.rebinds
        kind.last = None if isinstance(call, str) else call
        kind.recorded += 1
        if not problem and last is not None and not isinstance(call, str):
            problem = self._differ(kind, last, call)
            if not problem and changes:
                problem = f"the function changes something besides tensors of the device: {'; '.join(changes[:3])}"
            if not problem:
                program = ReplayedProgram(call)
                problem = "inputs that shared a buffer no longer do" if program.separates() else ""
                if not problem:
                    kind.program, kind.recorded, kind.replays = program, 0, 0
                    return result
        if changes:
            kind.guards = Guards(self._function)
        if kind.last is None or kind.recorded >= MAX_RECORDED:
            kind.given_up = True
            kind.last = kind.guards = None
            events.not_replayed(self._name, problem, self._site)
        return result

    def _differ(self, kind: _Kind, last: RecordedCall, call: RecordedCall) -> str:
        """Return why two calls are not one program; note how their numbers follow from settings of optimizers."""
        floats = call.numbers[0]
        if len(floats) != len(last.numbers[0]) or call.log.settings.keys() != last.log.settings.keys():
            kind.followed = None
            return difference(last, call)
        before = kind.followed or first_followed(last.log, last.numbers[0])
        found = followed(before, last.log, call.log, floats)
        explained = {*range(len(floats))}.difference(found.unexplained())
        problem = difference(last, call, explained)
        kind.followed = None if problem else found
        return problem

    def _recorded(self, kind: _Kind, leaves: Any, args: Any, kwargs: Any) -> tuple[Guards, RecordedCall | str, Any]:
        """Run the function; return the guards from before it, what it did (or why that is no call), and its result."""
        self._found = Guards(self._function)
        for optimizer in self._found.optimizers:
            _make_capturable(optimizer)
        guards = self._found = Guards(self._function)
        cutting.cut("lazytpu.compile")
        before, draws = trace.step, draws_so_far()
        shapes = [_shape_of(x) for x in leaves]
        counters = guards.counters()
        with loops.kept_whole(), tracing(guards.optimizers) as log:
            result = _detached(self._function(*args, **kwargs), leaves)
        if kind.last is not None and kind.last.unexplained:
            gc.collect()  # perhaps only a reference cycle keeps it
        if trace.step != before:
            return guards, "the function reads a tensor, which cuts its graph", result
        if shapes != [_shape_of(x) for x in leaves]:
            return guards, "the function changes the shape, strides or sharding of an argument", result
        with record.lock:
            capture = Capture(leaves, result, guards.parameters, draws)
            cutting.cut("lazytpu.compile", capture)
        if capture.call is not None:
            capture.call.log = log
            capture.call.shardings = [*map(_sharding_of, tree_leaves(result))]
            if counters and all(counter.item() == number + 1 for counter, number in counters):
                capture.call.counters = [counter for counter, _ in counters]
                guards.counted()
        return guards, capture.call or "the function computes nothing on the device", result

    def _verify(self, kind: _Kind, leaves: Any, args: Any, kwargs: Any) -> Any:
        """Record the call and compare it with the program."""
        assert kind.program is not None
        guards, call, result = self._recorded(kind, leaves, args, kwargs)
        problem = call if isinstance(call, str) else call.problem or difference(kind.program.call, call)
        problem = problem or "; ".join(guards.changes()[:3])
        if problem:
            kind.program = None
            raise ReplayError(
                f"{self._name} is not what was replayed in the last {kind.replays} calls",
                given=problem,
                fix="make what changes an argument, or a tensor of the device that the function updates",
            )
        if kind.guards is not None:
            kind.guards.counted()
        kind.replays += 1
        metrics.count("verified")
        return result


def _shape_of(x: object) -> object:
    """Return how a tensor lies in its memory; None for what is no tensor."""
    if not isinstance(x, torch.Tensor):
        return None
    return x.shape, x.stride(), x.storage_offset(), x.dtype, _sharding_of(x)


def _sharding_of(x: object) -> Sharding | None:
    return storage_of(cell_of(x)).sharding if is_device_tensor(x) else None


def compile(function: Callable[..., Any], *, verify_every: int = 0) -> CompiledStep:
    """Make a function of a whole training or inference step run as one executable.

    Args:
        function: takes and returns any nesting of device tensors and constants, and may update parameters,
            buffers and optimizer state that it reaches by itself.  The backward pass belongs inside: what
            it returns carries no gradient.
        verify_every: records every n-th call that could be replayed, and compares; 0 is never.

    Returns:
        A callable with the same arguments.  Its first calls are recorded; later ones with arguments of the
        same shapes, dtypes and constants do not run the function's Python, as long as nothing has changed that
        the function could look at.

    Raises:
        ReplayError: in a call of the result, when ``verify_every`` finds that the function has changed.

    Example:
        >>> @lazytpu.compile
        ... def train_step(x, y):
        ...     optimizer.zero_grad()
        ...     loss = F.cross_entropy(net(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
    """
    if verify_every < 0:
        raise ValueError(f"verify_every must be 0 or more, not {verify_every}")
    return CompiledStep(function, verify_every)


def _modes() -> Any:
    device: str = LazyTensor.device_type
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.get_default_dtype(),
        config.check_bounds,
        config.matmul_precision,
        config.lowerings,
    )


def _detached(result: Any, leaves: Sequence[Any]) -> Any:
    """Return a result whose tensors have no history; arguments (``leaves``) and leaves of autograd's as they are."""
    returned, spec = tree_flatten(result)
    known = {id(x): x for x in leaves}
    for x in returned:
        if isinstance(x, torch.Tensor) and id(x) not in known:
            known[id(x)] = x if x.is_leaf else x.detach()
    return tree_unflatten([known.get(id(x), x) for x in returned], spec)


def _frozen(x: object) -> Any:
    try:
        hash(x)
    except TypeError:
        return type(x), repr(x)
    return type(x), x


def _make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Move the step counters of an optimizer to the device, where torch has that form of it.

    Counters with the same number become one buffer, so that what is computed from them is computed once.
    """
    shared: dict[float, Any] = {}
    for group in optimizer.param_groups:
        if group.get("capturable") is not False or group.get("fused"):
            continue
        group["capturable"] = True
        for parameter in group["params"]:
            state = optimizer.state[parameter] if parameter in optimizer.state else {}
            counter = state.get("step")
            if isinstance(counter, torch.Tensor) and is_device_tensor(parameter) and not is_device_tensor(counter):
                moved = shared.get(counter.item())
                if moved is None:
                    moved = shared[counter.item()] = counter.to(parameter.device)
                    state["step"] = moved
                else:
                    source = resolve(cell_of(moved))[0]
                    source.shared = True
                    copy = new_storage(source.layout, source.buffer)
                    copy.shared = True
                    state["step"] = make(copy)
