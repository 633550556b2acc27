"""``run``: run a script on the device, as ``python SCRIPT`` would."""

from __future__ import annotations

import os
import runpy
import sys
import types
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer

import lazytpu
from lazytpu.cli import cuda_names, late_imports, shims, spawned
from lazytpu.debug import profiler
from lazytpu.debug.passes import FLAGS
from lazytpu.ir.tree import trace
from lazytpu.torch_backend import tensor_types

# Options end at the script's name; what follows is the script's own.
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


@dataclass
class Script:
    """A script to run.

    Attributes:
        target: a file, a folder or zip with ``__main__.py``, or the name of a module.
        arguments: the script's own.
        is_module: whether ``target`` is a module's name.
        explain: whether to print `lazytpu.explain` at the end.
        profile: folder for a profile, empty for none.
        needed: shims to install first.
        on_default_device: whether tensors are made on the device where the script names none.
        for_cuda: whether ``cuda`` means the device in the script and in the modules beside it.
    """

    target: str
    arguments: list[str]
    is_module: bool = False
    explain: bool = False
    profile: str = ""
    needed: list[shims.Shim] = field(default_factory=list)
    on_default_device: bool = False
    for_cuda: bool = False
    _variables: object = field(default=None, init=False)

    def execute(self) -> int:
        """Run the script as ``__main__``; return an exit code unless the script raises."""
        if not self.is_module and not os.path.exists(self.target):
            print(f"{sys.executable}: can't open file {self.target!r}: no such file", file=sys.stderr)
            return 2
        shims.install(self.needed)
        late_imports.watch(self.needed, self.target, self.is_module)
        spawned.prepare_workers(self.needed)
        sys.argv = [self.target, *self.arguments]
        _hide_own_frames()
        if self.for_cuda:
            cuda_names.install(self.target)
        if self.on_default_device:
            torch.set_default_device(lazytpu.device())
            tensor_types.replace_those_of_torch()
        ended: SystemExit | None = None
        with profiler.trace(self.profile) if self.profile else nullcontext():
            try:
                try:
                    self._variables = self._run()  # alive until the pending graph has run
                except SystemExit as end:
                    if end.code:
                        raise
                    ended = end
                if trace.cursor.depth:  # the script left a graph pending
                    lazytpu.mark_step()
                self._variables = None
            finally:
                if self.explain:
                    print(lazytpu.explain(), file=sys.stderr)
            lazytpu.wait()
        if ended is not None:
            raise ended
        return 0

    def _run(self) -> object:
        """Run the script and return what holds its variables."""
        if self.is_module:
            return runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        if os.path.isfile(self.target) and not self.target.endswith((".zip", ".pyz", ".pyc")):
            return _run_file(self.target, self.for_cuda)
        return runpy.run_path(self.target, run_name="__main__")


chosen: Script | None = None


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or a module's name with `-m`.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments and options.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    dump: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the IR, StableHLO and HLO of every graph there.")
    ] = None,
    passes: Annotated[
        bool, typer.Option("--passes", help="With --dump: also XLA's HLO after each of its passes (large).")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print at the end why each graph was compiled and what forced each cut.")
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a profile for TensorBoard, XProf or Perfetto there.")
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what each step cost there, one JSON object a line.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Run each program once beside torch's CPU kernels; raise where they differ."),
    ] = False,
    default_device: Annotated[
        bool, typer.Option("--default-device", help="Make tensors on the device where the script names none.")
    ] = False,
    cuda: Annotated[
        bool, typer.Option("--cuda", help="Let `cuda` mean the device in the script and in the modules beside it.")
    ] = False,
    compat: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE",
            help=f"Install the shim for PACKAGE ({', '.join(shims.SHIMS)}); by default, those it imports.",
        ),
    ] = None,
) -> None:
    """Run a script on the device, as `python SCRIPT ARGS` would.

    The step that is pending when the script ends runs too. Options of lazytpu come before SCRIPT, those of the script
    after it. A script that imports `torch_xla`, `torch_mlu` or `torch_tpu` gets lazytpu's shim for it.
    """
    global chosen
    unknown = sorted(set(compat or ()) - shims.SHIMS.keys())
    if unknown:
        raise typer.BadParameter(f"there is no shim for {', '.join(unknown)}", param_hint="--compat")
    needed = [shims.SHIMS[name] for name in compat or ()] or shims.needed_by(script, module)
    shims.rename_device(needed)
    if verify:
        lazytpu.config.verify = "first"
    if dump is not None:
        lazytpu.config.dump = str(dump)
    if passes:
        _dump_passes(dump)
    if metrics is not None:
        lazytpu.config.metrics_file = str(metrics)
    chosen = Script(script, arguments or [], module, explain, str(profile or ""), needed, default_device, cuda)


def _dump_passes(dump: Path | None) -> None:
    """Make XLA write its own dump; it reads its flags when it compiles the first program."""
    if dump is None:
        raise typer.BadParameter("needs --dump", param_hint="--passes")
    flags = FLAGS.format(folder=(dump / "passes").absolute())
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def _run_file(path: str, for_cuda: bool = False) -> types.ModuleType:
    """Run a file in a new ``__main__``, which is returned and stays, as threads and exit handlers may still need it."""
    full = os.path.abspath(path)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=full, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    source = Path(path).read_bytes()
    code = cuda_names.compiled(source, full) if for_cuda else compile(source, full, "exec", dont_inherit=True)
    exec(code, main.__dict__)
    return main


def _hide_own_frames() -> None:
    """Make tracebacks begin at the script's frame, as with ``python SCRIPT``."""
    shown = sys.excepthook
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

    def show(kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
        rest = frames
        while rest is not None and rest.tb_frame.f_code.co_filename.startswith((ours, "<frozen runpy>")):
            rest = rest.tb_next
        shown(kind, error.with_traceback(rest), rest)

    sys.excepthook = show
