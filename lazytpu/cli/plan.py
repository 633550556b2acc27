"""``plan``: record a script without running it, and say what its step needs on a TPU pod."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lazytpu.cli import run, shims
from lazytpu.runtime import described
from lazytpu.spmd.plan import plan as planned


@dataclass
class PlannedScript(run.Script):
    """A script to plan.

    Attributes:
        topology: what for.
        steps: how many steps are recorded.
        as_json, hlo: files to write.
    """

    topology: str = ""
    steps: int = 3
    as_json: Path | None = None
    hlo: Path | None = None

    def execute(self) -> int:
        """Record the script and print the plan; return 1 where its step does not fit."""
        found = planned(self._record, self.topology, steps=self.steps)
        print(found)
        if self.as_json is not None:
            self.as_json.write_text(json.dumps(found.as_json(), indent=1) + "\n")
        if self.hlo is not None:
            self.hlo.write_text("\n".join(program.compiled.text for program in found.programs))
        return 0 if found.fits else 1

    def _record(self) -> None:
        run.Script.execute(self)


def plan(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or a module's name with `-m`.")],
    topology: Annotated[
        str, typer.Option("-t", "--topology", metavar="KIND:SIDES", help="The chips: v5e:16x16, v5p:8x8x16, h100:16x8.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments and options.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps to record; the last one is compiled.")] = 3,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the plan as JSON, too.")] = None,
    hlo: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the program of one chip, as HLO.")] = None,
    default_device: Annotated[
        bool, typer.Option("--default-device", help="Make tensors on the device where the script names none.")
    ] = False,
) -> None:
    """Say what a script's step needs on a TPU pod, without one: memory, collectives, FLOPs, least time.

    The script is recorded and computes nothing: what it reads is zeros. It ends after some steps. Options of lazytpu
    come before SCRIPT, those of the script after it.
    """
    needed = shims.needed_by(script, module)
    shims.rename_device(needed)
    try:
        described.topology(topology)
    except (ModuleNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--topology") from None
    run.chosen = PlannedScript(
        script,
        arguments or [],
        module,
        needed=needed,
        on_default_device=default_device,
        topology=topology,
        steps=steps,
        as_json=as_json,
        hlo=hlo,
    )
