"""A process that has imported torch, jax and more, and forks for each program: most of a start saved.

It imports lazytpu, which reads the environment then, only where its arguments name it.
It answers each line of JSON on its standard input with one on its standard output: a program to start with its
process id, a process id with the exit status of the process.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import signal
import sys
import types
from typing import Any

_TIMEOUT_S = 300
# What lazytpu imports, or the first program.
_COMMON = ("jax", "jax.experimental.multihost_utils", "jax.extend", "jax.scipy.special", "jaxlib.mlir.dialects.builtin")
_COMMON += ("jaxlib.mlir.dialects.mhlo", "rich.table", "torch.utils.flop_counter")
_COMMON += ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.utils.module_tracker")
_forked: list[dict[str, Any]] = []  # what modules of the arguments want to be called at forks


def serve() -> dict[str, Any]:
    """Answer requests; return, in a forked child, the program to run, and never in the server."""
    for name in _COMMON:
        importlib.import_module(name)
    register, os.register_at_fork = os.register_at_fork, lambda **calls: _forked.append(calls)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    os.register_at_fork = register
    gc.freeze()  # or the collector of each child would copy the pages of all modules
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                return request
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


def become(request: dict[str, Any]) -> dict[str, Any]:
    """Take the folder, the variables and the streams of a program; return the namespace that it runs in."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, file in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(request["streams"], file), os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    for calls in _forked:  # this fork is a start to them
        os.register_at_fork(**calls)
    if "lazytpu" in sys.modules:
        sys.modules["lazytpu.torch_backend.fork"]._home_process = os.getpid()
        settings = sys.modules["lazytpu.config"]
        for name, value in dataclasses.asdict(settings._from_environment()).items():
            setattr(settings.config, name, value)
    signal.alarm(_TIMEOUT_S)
    sys.argv = ["-c", *request["arguments"]]
    sys.path[0] = ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    return vars(main)


if __name__ == "__main__":
    request = serve()  # returns in children, which end as any program of Python ends
    exec(compile(request["code"], "<string>", "exec"), become(request))
