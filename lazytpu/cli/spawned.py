"""Let the worker processes of a script know the device and the shims, as the script does.

A process that Python starts anew (``spawn``, ``forkserver``) imports the script's file, without the runner.  Here
it imports this module instead, which does what the runner does, then runs the script's file.
"""

from __future__ import annotations

import multiprocessing.spawn
import runpy
import sys

from lazytpu.cli import shims

_MARK = "\0lazytpu run"
_prepared = multiprocessing.spawn.get_preparation_data


def prepare_workers(known: list[shims.Shim]) -> None:
    """Make the processes that are started from now on know the device and these shims."""

    def prepared(name: str) -> dict[str, object]:
        data: dict[str, object] = _prepared(name)
        main = {k: str(data.pop(k)) for k in ("init_main_from_name", "init_main_from_path") if k in data}
        packages = {shim.package for shim in known} | shims.SHIMS.keys() & sys.modules.keys()
        for how, target in main.items():  # at most one; without, there is nothing to import
            data["init_main_from_name"] = __spec__.name
            data["sys_argv"] = [*sys.argv, _MARK, how, target, ",".join(sorted(packages))]
        return data

    multiprocessing.spawn.get_preparation_data = prepared


def _become_the_script() -> dict[str, object]:
    """Run the script's file in a process that was started anew; return its names."""
    at = sys.argv.index(_MARK)
    how, target, packages = sys.argv[at + 1 :]
    del sys.argv[at:]
    known = [shims.SHIMS[package] for package in packages.split(",") if package]
    shims.install(known)
    prepare_workers(known)
    if how == "init_main_from_path":
        return runpy.run_path(target, run_name=__name__)
    return runpy.run_module(target, run_name=__name__, alter_sys=True)


if __name__ == "__mp_main__":
    globals().update(_become_the_script())
