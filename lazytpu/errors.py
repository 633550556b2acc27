"""The errors lazytpu raises itself.  Each says what happened, where, with what, and what to do."""

from __future__ import annotations


class LazyTPUError(RuntimeError):
    """Base of every error of this package; mistakes that torch itself detects raise torch's own errors."""

    def __init__(self, what: str, *, at: str = "", given: str = "", do: str = "") -> None:
        lines = [what]
        lines += [f"  {label:<5} {text}" for label, text in (("at", at), ("with", given), ("do", do)) if text]
        super().__init__("\n".join(lines))


class VersionError(LazyTPUError, ImportError):
    """The installed torch or jax is outside the supported range, or the device slot is taken."""


class UnsupportedOpError(LazyTPUError, NotImplementedError):
    """An aten op has no lowering and no decomposition, and the CPU fallback is switched off."""


class LoweringError(LazyTPUError):
    """A lowering rule failed, or gave a type other than the one torch predicted."""


class CompileError(LazyTPUError):
    """XLA could not compile a graph."""


class ExecutionError(LazyTPUError):
    """A compiled graph failed while it ran."""


class DonatedBufferError(LazyTPUError):
    """A buffer was read after its memory went to the outputs of a graph."""


class ForkError(LazyTPUError):
    """The device was used in a forked child process."""


class CompileBudgetError(LazyTPUError):
    """More graphs were compiled than ``lazytpu.config.max_compiles`` allows."""
