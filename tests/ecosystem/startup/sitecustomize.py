"""Read by Python when a script of the sweep starts: writes at its end what lazytpu counted, if it was imported."""

import atexit
import os
import sys


def _write() -> None:
    lazytpu = sys.modules.get("lazytpu")
    path = os.environ.get("LAZYTPU_ECOSYSTEM_SEEN")
    if path and lazytpu is not None and hasattr(lazytpu, "metrics") and os.getpid() == _STARTED:
        import json

        seen = {"compiles": lazytpu.metrics.counter("compile"), "fallbacks": lazytpu.metrics.fallbacks()}
        with open(path, "w") as file:
            json.dump(seen, file)


_STARTED = os.getpid()
atexit.register(_write)
