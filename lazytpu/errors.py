"""The errors lazytpu raises itself.  Each says what happened, where, with what, and how to fix it."""

from __future__ import annotations


class LazyTPUError(RuntimeError):
    """Base of every error of this package; mistakes that torch itself detects raise torch's own errors."""

    def __init__(self, what: str, *, at: str = "", given: str = "", fix: str = "") -> None:
        lines = [what]
        lines += [f"  {label:<5} {text}" for label, text in (("at", at), ("with", given), ("fix", fix)) if text]
        super().__init__("\n".join(lines))


class VersionError(LazyTPUError, ImportError):
    """The installed torch or jax is outside the supported range, or the device slot is taken."""


class UnsupportedOpError(LazyTPUError, NotImplementedError):
    """An aten op has no lowering and no decomposition, and the CPU fallback is switched off."""


class LoweringError(LazyTPUError):
    """A lowering rule failed, or gave a type other than the one torch predicted."""


class GraphBreakError(LazyTPUError):
    """A function given to ``lazytpu.jit`` does something that cannot be part of one program."""


class CompileError(LazyTPUError):
    """XLA could not compile a graph."""


class ExecutionError(LazyTPUError):
    """A compiled graph failed while it ran."""


class VerificationError(LazyTPUError):
    """A compiled graph computes something else than torch's CPU kernels (``lazytpu.config.verify``)."""


class DonatedBufferError(LazyTPUError):
    """A buffer was read after its memory went to the outputs of a graph."""


class OutOfBoundsError(LazyTPUError, IndexError):
    """A position was out of range in a graph that ran with ``lazytpu.config.check_bounds``."""


class DivisionByZeroError(LazyTPUError, ZeroDivisionError):
    """A whole number was divided by zero in a graph that ran with ``lazytpu.config.check_bounds``."""


class RefusedValueError(LazyTPUError):
    """An op got values that eager refuses in a graph that ran with ``lazytpu.config.check_bounds``."""


class BackwardError(LazyTPUError):
    """Torch's autograd was started before the device was there, and has no thread for it."""


class WorldError(LazyTPUError):
    """The processes of a world could not connect, one of them died, or they do not do the same."""


class ForkError(LazyTPUError):
    """The device was used in a forked child process."""


class CompileBudgetError(LazyTPUError):
    """More graphs were compiled than ``lazytpu.config.max_compiles`` allows."""


class ReplayError(LazyTPUError):
    """A function given to `lazytpu.compile` does something else than what is replayed for it."""


class ArtifactError(LazyTPUError):
    """A file of an exported program is missing, damaged, changed, or of another version."""
