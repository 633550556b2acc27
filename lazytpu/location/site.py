"""Find where in the user's program an op was recorded: file, line and module path.  Asked on a miss only."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import weakref
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from types import CodeType, FrameType

import torch
import typing_extensions
from torch.autograd.graph import Node as GradNode

from lazytpu.config import config
from lazytpu.ir.op_schema import Op
from lazytpu.ir.site import UNKNOWN, Site
from lazytpu.location import backward_sites

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_AUTOCAST = os.path.join(_OURS, "dispatch", "autocast.py")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DEPRECATING = typing_extensions.__file__  # it wraps functions of torch that are to go
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = os.sep + "site-packages" + os.sep  # may lie inside the folder of the standard library
_CALL_CODE: CodeType = torch.nn.Module._call_impl.__code__
_WRAPPED_CODE: CodeType = torch.nn.Module._wrapped_call_impl.__code__
_BACKWARD_CODE: CodeType = torch.autograd.graph._engine_run_backward.__code__

_names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
_CODE, _INSTRUCTION = attrgetter("f_code"), attrgetter("f_lasti")
_MAX_STACKS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """What all stacks of frames have in common that stand at the same instructions of the same codes.

    Attributes:
        lines: file and line of the user's frames, the innermost first.
        modules: the frames in which an ``nn.Module`` is being called.
        casts: the dispatcher of ``torch.autocast`` is among them.
        codes: of the frames, kept so that their identities are no others' later.
    """

    lines: tuple[tuple[str, int], ...]
    modules: tuple[int, ...]
    casts: bool
    codes: list[CodeType]


_stacks: dict[tuple[int, ...], _Stack] = {}
_lines: dict[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]] = {}
# By a stack, the modules being called and their modes: their site, and the modules.
_sites: dict[tuple[object, ...], tuple[Site, tuple[weakref.ref[torch.nn.Module], ...]]] = {}


def is_ours(name: str) -> bool:
    """Return whether a frame's file is of this package, or a kernel that it has written."""
    return name.startswith((_OURS, "<lazytpu"))


@cache
def is_user_file(name: str) -> bool:
    """Return whether a frame's file is the user's: not of torch, lazytpu or the standard library, and not made up."""
    if name.startswith((_OURS, _TORCH, _DEPRECATING, "<")):
        return False
    return not name.startswith(_STDLIB) or _PACKAGES in name


def inside(name: str) -> str:
    """Return `` inside torch`` for a file of torch, the like for the standard library, empty for the user's files."""
    if is_user_file(name) or name.startswith("<"):
        return ""
    return " inside torch" if name.startswith(_TORCH) else " inside Python's library"


def here(before: Site | None = None, op: Op | None = None) -> Site:
    """Return the site of the op that is being recorded.

    Args:
        before: that of the op before it.
        op: what is recorded, if anything is.
    """
    node = torch._C._current_autograd_node()
    site = _of_op(node, before, sys._getframe(1))
    if op is not None and not op.is_view and torch.is_grad_enabled():  # a view is recorded where it is read
        backward_sites.note(site, op.name)
    return site


def _of_op(node: GradNode | None, before: Site | None, frame: FrameType | None) -> Site:
    if node is not None and not _in_hook(frame):
        return _in_backward(node, before)
    site = _of_frames(frame)
    if not site.file and threading.current_thread() is not threading.main_thread():
        return _of_frames(_frame_of_main())
    return site


def _in_hook(frame: FrameType | None) -> bool:
    """Return whether the backward pass that runs has called a function of the user's."""
    while frame is not None and frame.f_code is not _BACKWARD_CODE:
        if is_user_file(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _in_backward(node: GradNode, before: Site | None) -> Site:
    """Return the site of an op that a node of autograd records."""
    forward = backward_sites.forward_of(node)
    if forward is not None:
        return replace(forward, backward=True)
    accumulates = backward_sites.accumulates(node)
    if (
        (accumulates or backward_sites.is_known()) and before is not None and before.backward
    ):  # belongs to what it works on
        return replace(before, accumulates=accumulates)
    return replace(_of_frames(_frame_of_main()), backward=True, accumulates=accumulates)


def _frame_of_main() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def line_here() -> Site:
    """Return the user's line only, without the module path: for what happens in every step."""
    return _innermost(sys._getframe(1))


def line_of_read() -> Site:
    """Return the line that reads or cuts; on the thread of the backward pass that of the op whose gradient reads."""
    found = _innermost(sys._getframe(1))
    if found.file or threading.current_thread() is threading.main_thread():
        return found
    forward = backward_sites.forward_of(torch._C._current_autograd_node())
    return forward or _innermost(_frame_of_main())


def line_of_main() -> Site:
    """Return the line that the main thread is at, asked by another one."""
    return _innermost(_frame_of_main())


def line_of_call() -> Site | None:
    """Return the line that calls what torch.compile has captured: not one in the code that Dynamo has written."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (not is_user_file(frame.f_code.co_filename) or _is_of_dynamo(frame.f_code)):
        frame = frame.f_back
    return None if frame is None else Site(frame.f_code.co_filename, frame.f_lineno)


def _is_of_dynamo(code: CodeType) -> bool:
    written = any(name.startswith(("__compiled_fn", "__resume_at")) for name in code.co_names)
    return written or code.co_name.startswith("torch_dynamo_resume")


def place_here() -> Site:
    """Return where the program is, with its stack and module path, although no op is recorded there."""
    return _of_frames(sys._getframe(1))


def _innermost(frame: FrameType | None) -> Site:
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_file(name):
            return Site(name, frame.f_lineno)
        frame = frame.f_back
    return UNKNOWN


def _of_frames(frame: FrameType | None) -> Site:
    """Return the site that a stack of frames leads to, the one made before where it leads to one again."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    stack = _stack_of(frames)
    modules: list[torch.nn.Module] = [frames[i].f_locals["self"] for i in stack.modules]
    training = (modules[-1].training, modules[0].training) if modules else None
    trainable = tuple([p is not None and p.requires_grad for p in modules[0]._parameters.values()]) if modules else ()
    casts = stack.casts or torch.is_autocast_enabled(config.device_name)
    modes = torch.is_grad_enabled(), torch.get_autocast_dtype(config.device_name) if casts else None
    key = stack, training, trainable, modes, *map(id, modules)
    site, owners = _sites.get(key, (None, ()))
    if site is None or any(owner() is not module for owner, module in zip(owners, modules, strict=True)):
        file, line = stack.lines[0] if stack.lines else ("", 0)
        path = _module_path(modules[::-1])
        site = Site(file, line, path, False, stack.lines, training, False, modes, trainable)
        if len(_sites) >= _MAX_STACKS:
            _sites.clear()
        _sites[key] = site, tuple(map(weakref.ref, modules))
    return site


def _stack_of(frames: list[FrameType]) -> _Stack:
    """Return what is known of frames that stand where these do."""
    codes = [*map(_CODE, frames)]
    key = (*map(id, codes), *map(_INSTRUCTION, frames))
    stack = _stacks.get(key)
    if stack is None:
        if len(_stacks) >= _MAX_STACKS:
            _stacks.clear()
            _sites.clear()
        stack = _stacks[key] = _new_stack(frames, codes)
    return stack


def _new_stack(frames: list[FrameType], codes: list[CodeType]) -> _Stack:
    lines = [(f.f_code.co_filename, f.f_lineno) for f in frames if is_user_file(f.f_code.co_filename)]
    calls = [i for i, code in enumerate(codes) if code is _CALL_CODE]
    # The caller of `_call_impl` has fewer variables to gather.
    modules = [i + 1 if codes[i + 1] is _WRAPPED_CODE else i for i in calls]
    casts = any(code.co_filename == _AUTOCAST for code in codes)  # what it calls is told that autocast is off
    return _Stack(_interned(lines), tuple(modules), casts, codes)


def _interned(lines: list[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Return the one tuple of these lines: most ops of a step are called from few places."""
    if len(_lines) >= _MAX_STACKS:
        _lines.clear()
    stack = tuple(lines)
    return _lines.setdefault(stack, stack)


def _module_path(modules: list[torch.nn.Module]) -> str:
    if not modules:
        return ""
    parts, outer = [type(modules[0]).__name__], modules[0]
    for inner in modules[1:]:
        name = _name_within(outer, inner)
        if name:
            parts.append(name)
            outer = inner
    return ".".join(parts)


def _name_within(outer: torch.nn.Module, inner: torch.nn.Module) -> str:
    """Return ``b.0.l1`` for the module ``outer.b[0].l1``; the class name when it is not inside."""
    names = _names.get(outer)
    if names is None or id(inner) not in names:
        names = _names[outer] = {id(module): name for name, module in outer.named_modules()}
    return names.get(id(inner), type(inner).__name__)
