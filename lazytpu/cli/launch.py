"""``launch``: run a script in several processes, with torch's elastic launcher."""

from __future__ import annotations

import importlib
import os
from typing import Annotated

import typer

# Options end at the script's name; what follows is the script's own.
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or a module's name with `-m`.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments and options.")
    ] = None,
    processes: Annotated[
        int, typer.Option("-n", "--processes", metavar="N", help="Processes on this machine.", min=1)
    ] = 1,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    max_restarts: Annotated[
        int, typer.Option(metavar="N", help="How often all processes start again when one fails.", min=0)
    ] = 0,
    nodes: Annotated[str, typer.Option(metavar="N", help="Machines, or a range: `2:4`.")] = "1",
    rendezvous: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where several machines meet: the first of them, a free port.")
    ] = "",
    devices: Annotated[
        int, typer.Option(metavar="N", help="On CPUs: virtual devices of each process, to try a mesh out.", min=0)
    ] = 0,
) -> None:
    """Run a script in several processes that are connected, as `torchrun` does, whose launcher this uses."""
    if nodes != "1" and not rendezvous:
        raise typer.BadParameter("several machines need --rendezvous HOST:PORT", param_hint="--nodes")
    # Each of torch's threads would wait for the others of all processes.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    if devices:
        flag = f"--xla_force_host_platform_device_count={devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous] if rendezvous else ["--standalone"]
    options = ["--nproc-per-node", str(processes), "--nnodes", nodes, "--max-restarts", str(max_restarts), *where]
    importlib.import_module("torch.distributed.run").main(
        [*options, *["--module"] * module, script, *(arguments or ())]
    )
