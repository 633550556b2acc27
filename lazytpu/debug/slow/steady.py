"""Where the time of a steady step goes: on the host, and on the device.

Nothing is measured for it: the timers and counters of `lazytpu.metrics` are read.  A step that compiles, loads or
interprets a graph is not steady.  A program that ends no step is taken from cut to cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from lazytpu.diagnosis import events
from lazytpu.observe import metrics
from lazytpu.observe.metrics_tables import Step
from lazytpu.tracing.cutting import wait_for_last

FEWEST = 8
"""Steps since the last reset from which on anything is said."""

_MOST = 200  # steps that are looked at: the later half, and no more than these
_STEADY = 1 / 3  # of them have to be steady
# What starting a program takes by itself; more is the device that is not yet done with the steps before.
_START_S, _ARRAY_S = 3e-4, 5e-6
_BEHIND = 2.0  # steps that the device is behind the host when it is asked, from which on it is the limit
PARTS = {
    "python_s": "Python and torch",
    "recording_s": "recording",
    "cutting_s": "cutting",
    "starting_s": "starting",
    "compiling_s": "compiling",
    "interpreting_s": "running op by op",
    "transferring_s": "copying to and from the device",
    "loader_s": "waiting for the loader",
    "waiting_s": "waiting for the device",
}
_HOST = ("python_s", "recording_s", "cutting_s", "starting_s", "transferring_s")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where the time of a step goes; seconds and counts are means.

    Attributes:
        steps: how many it is the mean of.
        steady: these compiled and interpreted nothing.
        unit: ``step``, or ``cut`` where the program ends no step.
        parts: seconds by the names of `PARTS`; they add up to ``total_s``.
        device_s: how long the device works; at least so long where it is not ``measured``.
        measured: by runs that were waited for (``lazytpu.config.metrics``).
        ops: recorded.
        copies: to the device.
        executions: graphs started.
        compiles: graphs compiled.
        noted: steps, or cuts, since the last reset: what the tallies of lines are of.
    """

    steps: int
    steady: bool
    unit: str
    total_s: float
    parts: dict[str, float]
    device_s: float
    measured: bool
    ops: float
    executions: float
    compiles: float
    copies: float
    noted: int

    @property
    def host_s(self) -> float:
        """What the host works, without waiting for anything."""
        return sum(self.parts.get(name, 0.0) for name in _HOST)

    @property
    def bound(self) -> str:
        """What limits the step: ``compiler``, ``loader``, ``device`` or ``host``."""
        for name, limit in (("compiling_s", "compiler"), ("loader_s", "loader")):
            if self.parts.get(name, 0.0) > 0.5 * self.total_s:
                return limit
        return "device" if self.device_s > self.host_s else "host"

    def share(self, seconds: float) -> float:
        """Return what part of a step these seconds are."""
        return seconds / self.total_s if self.total_s else 0.0


def step_time() -> StepTime | None:
    """Return where the time of the last steps went; None where there were too few."""
    steps = metrics.last_steps()
    noted = metrics.counter("step")
    unit = "step"
    behind_s = _behind(steps)
    forced = sum(n for name, n in metrics.counters().items() if name.startswith("cut: "))
    if len(steps) < FEWEST and forced >= FEWEST + 3 * len(steps):
        steps, noted, unit = _cuts(), metrics.counter("cut"), "cut"
    if len(steps) < FEWEST:
        return None
    recent = steps[-min(_MOST, (len(steps) + 1) // 2) :]
    steady = [s for s in recent if not (s.compiles or s.interpreting_s or s.loading_s)]
    is_steady = len(steady) >= _STEADY * len(recent)
    return _mean_of(steady if is_steady else recent, is_steady, unit, behind_s, noted)


def _behind(steps: Sequence[Step]) -> float:
    """Return how far the device was behind the host at the end of the last step: what none of the steps waited for."""
    waited = metrics.timer("wait")
    before_s = waited.total
    wait_for_last()
    if 0 < len(steps) < metrics.MAX_STEPS:  # else the first of them are forgotten
        before_s = sum(s.waiting_s for s in steps)
    return max(0.0, waited.total - before_s)


def _mean_of(steps: Sequence[Step], steady: bool, unit: str, behind_s: float, noted: int) -> StepTime:
    def mean(name: str) -> float:
        return sum(getattr(s, name) or 0.0 for s in steps) / len(steps)

    total_s = mean("total_s")
    start_s, started = mean("dispatching_s"), mean("executions")
    own_s = min(start_s, started * (_START_S + _ARRAY_S * _arrays()))
    python_s, recording_s = mean("python_s"), mean("recording_s")
    taken = sum(tally.seconds for tally in events.batches.values()) / max(noted, 1)
    loader_s = min(python_s, taken)
    compiling_s = mean("lowering_s") + mean("compiling_s") + mean("loading_s")
    waiting_s, interpreting_s = mean("waiting_s") + start_s - own_s, mean("interpreting_s")
    parts = {
        "python_s": python_s - loader_s,
        "recording_s": recording_s,
        "cutting_s": mean("cutting_s"),
        "starting_s": own_s,
        "compiling_s": compiling_s,
        "interpreting_s": interpreting_s,
        "transferring_s": mean("transferring_s"),
        "loader_s": loader_s,
        "waiting_s": waiting_s,
    }
    running = [s.running_s for s in steps if s.running_s is not None]
    measured = len(running) == len(steps) and any(running)
    device_s = interpreting_s + (sum(running) / len(running) if measured else waiting_s)
    if not measured and behind_s > _BEHIND * total_s:  # it never caught up with the host
        device_s = max(device_s, total_s + behind_s / noted)
    counts = mean("ops"), mean("executions"), mean("compiles"), mean("transfers_in")
    return StepTime(len(steps), steady, unit, total_s, parts, device_s, measured, *counts, noted)


def _arrays() -> float:
    """Return how many arrays a program takes and gives, the mean of the runs of all."""
    runs = sum(e.usage.runs for e in events.compilations)
    found = sum(e.usage.runs * (len(e.graph.inputs) + len(e.graph.outputs)) for e in events.compilations)
    return found / runs if runs else 0.0


def _cuts() -> list[Step]:
    """Return the times from cut to cut as if each were a step, from the samples that the timers keep."""
    ends = [at for at, _ in metrics.timer("cut").samples][-2 * _MOST :]
    ops = metrics.counter("op") // max(1, metrics.counter("cut"))
    found = []
    for number, (start, end) in enumerate(zip(ends, ends[1:], strict=False), 2):
        spent = {name: _sampled(name, start, end) for name in _SAMPLED}
        rest = max(0.0, end - start - sum(spent.values()))
        found.append(
            _NO_STEP._replace(
                number=number,
                ended=end,
                total_s=end - start,
                python_s=rest,
                cutting_s=spent["cut"],
                lowering_s=spent["lower"],
                compiling_s=spent["compile"],
                loading_s=spent["load"],
                dispatching_s=spent["dispatch"],
                interpreting_s=spent["interpret"],
                waiting_s=spent["wait"],
                transferring_s=spent["transfer_in"] + spent["transfer_out"],
                ops=ops,
                executions=1,
                compiles=int(spent["compile"] > 0),
                transfers_in=1,
            )
        )
    return found


_NO_STEP = Step(*[0] * len(Step._fields))._replace(recording_s=None, running_s=None)
_SAMPLED = ("cut", "lower", "compile", "load", "dispatch", "interpret", "wait", "transfer_in", "transfer_out")


def _sampled(name: str, start: float, end: float) -> float:
    """Return the seconds that a timer measured in a span of time."""
    samples = metrics.timer(name).samples
    first = bisect_right(samples, start, key=_when)
    return sum(seconds for _, seconds in islice(samples, first, bisect_right(samples, end, key=_when)))


def _when(sample: tuple[float, float]) -> float:
    return sample[0]
