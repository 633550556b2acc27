"""Put the commands of ``python -m lazytpu`` together."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from lazytpu.cli import cache, check, demo, info, inspect, launch, plan, report, run, run_package

PROGRAM = "lazytpu" if Path(sys.argv[0]).stem == "lazytpu" else "python -m lazytpu"  # the console script, or the module
_SETTINGS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name=PROGRAM,
    help="A lazy XLA device for PyTorch: run a script on it, and see inside the graphs it compiles.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a script's traceback is Python's own
    context_settings=_SETTINGS,
    rich_markup_mode="markdown",
)

# In the order of ``--help``.  A command is a function whose docstring is its help.
app.command("run", context_settings=run.SETTINGS | _SETTINGS)(run.run)
app.command("launch", context_settings=launch.SETTINGS | _SETTINGS)(launch.launch)
app.command("demo")(demo.demo)
app.command("check")(check.check)
app.command("inspect")(inspect.inspect)
app.command("report")(report.report)
app.command("plan", context_settings=run.SETTINGS | _SETTINGS)(plan.plan)
app.command("info")(info.info)
app.add_typer(cache.app, name="cache")
app.command("run-package")(run_package.run_package)


def main() -> None:
    """Run the command that ``sys.argv`` names, and end the process with its exit code."""
    try:
        app(prog_name=PROGRAM)
    except SystemExit as done:
        if done.code or run.chosen is None:
            raise
    if run.chosen is not None:  # outside of typer, which would turn the script's exceptions into its own
        sys.exit(run.chosen.execute())
