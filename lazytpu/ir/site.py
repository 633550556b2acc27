"""Where in the user's program an op was recorded: file, line and module path.  Asked on a miss only."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType

import torch

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = os.sep + "site-packages" + os.sep  # may lie inside the folder of the standard library
_CALL_CODE: CodeType = torch.nn.Module._call_impl.__code__

# Sites of forward ops by autograd sequence number, so that a backward op finds the line it came from.
_MAX_FORWARD_SITES = 65536
_forward_sites: OrderedDict[int, Site] = OrderedDict()
_newest = threading.local()  # the last number there that an op of this thread was given
_names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
_MAX_STACKS = 4096
_stacks: dict[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]] = {}


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the user's program.

    Attributes:
        file, line: the innermost frame of the user, see `is_user_file`; empty when there is none.
        module: class of the outermost ``nn.Module`` being called and the path inside it: ``CNN.c1``.
        backward: the op belongs to the gradient of the op at this place.
        stack: (file, line) of all the frames of the user, the innermost first.
        training: the ``training`` flags of the outermost and the innermost module being called; None without one.
    """

    file: str = ""
    line: int = 0
    module: str = ""
    backward: bool = False
    stack: tuple[tuple[str, int], ...] = field(default=(), compare=False, repr=False)
    training: tuple[bool, bool] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else "?"

    def describe(self) -> str:
        """``train.py:12  CNN.c1 (backward)``."""
        return "  ".join(filter(None, (str(self), self.module))) + (" (backward)" if self.backward else "")


UNKNOWN = Site()


def is_user_file(name: str) -> bool:
    """Whether a frame's file is the user's: not of torch, lazytpu or the standard library, and not made up."""
    if name.startswith((_OURS, _TORCH, "<")):
        return False
    return not name.startswith(_STDLIB) or _PACKAGES in name


def here() -> Site:
    """The site of the op that is being recorded."""
    node = torch._C._current_autograd_node()
    if node is not None:
        try:
            forward = _forward_sites.get(node._sequence_nr())
        except AttributeError:  # nodes of Python autograd functions
            forward = None
        if forward is not None:
            return replace(forward, backward=True)
    site = _of_frames(sys._getframe(1))
    if not site.file and threading.current_thread() is not threading.main_thread():
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        if main is not None:
            found = _of_frames(main)
            return replace(found, backward=node is not None)
    if node is None and torch.is_grad_enabled():
        _remember(torch.autograd._get_sequence_nr() - 1, site)
    return site


def _remember(sequence: int, site: Site) -> None:
    """Keeps the site of the op that autograd has just made a node for: its number is that of the newest node.

    An op without a gradient finds the number that the op before it has left, which is that op's.
    """
    if getattr(_newest, "sequence", None) == sequence:
        return
    _newest.sequence = sequence
    _forward_sites[sequence] = site
    if len(_forward_sites) > _MAX_FORWARD_SITES:
        _forward_sites.popitem(last=False)


def line_here() -> Site:
    """The user's line only, without the module path: for cuts, which happen in every step.

    On a thread that runs none of the user's code, such as that of the backward pass, it is the line of the main thread.
    """
    found = _innermost(sys._getframe(1))
    if found is UNKNOWN and threading.current_thread() is not threading.main_thread():
        found = _innermost(sys._current_frames().get(threading.main_thread().ident or 0))
    return found


def _innermost(frame: FrameType | None) -> Site:
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_file(name):
            return Site(name, frame.f_lineno)
        frame = frame.f_back
    return UNKNOWN


def _of_frames(frame: FrameType | None) -> Site:
    lines, modules = [], []
    while frame is not None:
        code = frame.f_code
        if code is _CALL_CODE:
            modules.append(frame.f_locals["self"])
        elif is_user_file(code.co_filename):
            lines.append((code.co_filename, frame.f_lineno))
        frame = frame.f_back
    file, line = lines[0] if lines else ("", 0)
    training = (modules[-1].training, modules[0].training) if modules else None
    return Site(file, line, _module_path(modules[::-1]), False, _interned(lines), training)


def _interned(lines: list[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """The one tuple of these lines: most ops of a step are called from few places."""
    if len(_stacks) >= _MAX_STACKS:
        _stacks.clear()
    stack = tuple(lines)
    return _stacks.setdefault(stack, stack)


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
    """``b.0.l1`` for the module ``outer.b[0].l1``; the class name when it is not inside."""
    names = _names.get(outer)
    if names is None or id(inner) not in names:
        names = _names[outer] = {id(module): name for name, module in outer.named_modules()}
    return names.get(id(inner), type(inner).__name__)
