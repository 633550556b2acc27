"""Metrics: the costs of steps, the report and the file of steps."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazytpu
from lazytpu import observers
from lazytpu.ir.tree import trace
from lazytpu.observe import metrics_tables, step_statistics
from lazytpu.observe.metrics import MAX_SAMPLES, Series
from lazytpu.observe.metrics_tables import Step
from lazytpu.runtime import client, transfers
from lazytpu.tracing import cutting, record_time
from tests.support.processes import run_code

pytestmark = pytest.mark.usefixtures("uncounted")


def train(device: torch.device, steps: int, *, read: bool = True) -> None:
    """Steps with an upload of 96 bytes, an update in place of 48 bytes, and a read of 4 bytes."""
    weight = torch.ones(3, 4).to(device)
    lazytpu.mark_step()
    lazytpu.metrics.reset()
    for _ in range(steps):
        x = torch.ones(6, 4).to(device)
        loss = (x @ weight.t()).sum()
        weight -= loss * 0.1
        lazytpu.mark_step()
        if read:
            loss.item()


def test_a_step_is_counted(device: torch.device) -> None:
    train(device, 3)
    first, _, last = lazytpu.metrics.steps()
    assert [s["number"] for s in lazytpu.metrics.steps()] == [1, 2, 3]
    expected = {
        "ops": 5, "executions": 1, "cuts": 1, "donations": 1, "donated_bytes": 48, "fallbacks": 0,
        "transfers_in": 1, "bytes_in": 96, "compiles": 0, "cache_hits": 1, "transfers_out": 1, "bytes_out": 4,
    }  # fmt: skip
    assert {name: last[name] for name in expected} == expected
    assert (first["compiles"], first["cache_hits"], first["bytes_out"]) == (1, 0, 0)  # its loss was read after its end
    assert first["compiling_s"] > 0 and first["lowering_s"] > 0 and last["compiling_s"] == last["lowering_s"] == 0


def test_times_add_up(device: torch.device) -> None:
    train(device, 5)
    parts = (
        "python",
        "recording",
        "cutting",
        "lowering",
        "compiling",
        "loading",
        "dispatching",
        "waiting",
        "transferring",
    )
    for s in lazytpu.metrics.steps():
        assert sum(s[f"{part}_s"] or 0.0 for part in parts) == pytest.approx(s["total_s"], rel=1e-6)
        assert all((s[f"{part}_s"] or 0.0) >= 0 for part in parts)
        assert s["recording_s"] is None and s["running_s"] is None  # as it is not asked for


PAUSE_S = 0.05


class SlowBuffer:
    """A buffer that takes a while to be computed."""

    def block_until_ready(self) -> None:
        time.sleep(PAUSE_S)


@pytest.mark.parametrize(
    ("part", "owner", "name"),
    [("cutting_s", cutting, "live_storages"), ("transferring_s", client, "put"), ("python_s", None, "")],
)
def test_time_goes_where_it_was_spent(
    part: str, owner: Any, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_step() -> dict[str, float]:
        y = (x + torch.ones(3).to(device)).sum()
        if owner is None and slow:
            time.sleep(PAUSE_S)
        lazytpu.mark_step()
        del y
        return lazytpu.metrics.steps()[-1]

    x, slow = torch.ones(3).to(device), False
    one_step()
    before, slow = one_step(), True
    if owner is not None:
        monkeypatch.setattr(owner, name, slowly(getattr(owner, name)))
    after = one_step()
    grown = {k: after[k] - before[k] for k in after if k.endswith("_s") and k != "total_s" and after[k] is not None}
    assert max(grown, key=lambda k: grown[k]) == part and grown[part] > 0.8 * PAUSE_S


def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    def pausing(*args: Any, **kwargs: Any) -> Any:
        time.sleep(PAUSE_S)
        return function(*args, **kwargs)

    return pausing


def test_waiting_is_counted_as_waiting() -> None:
    lazytpu.mark_step()
    transfers.ready([SlowBuffer()])
    lazytpu.mark_step()
    last = lazytpu.metrics.steps()[-1]
    assert last["waiting_s"] >= PAUSE_S > last["python_s"]


def test_the_setting_metrics_measures_recording_and_the_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazytpu.config, "metrics", True)
    train(device, 4)
    first, *_, last = lazytpu.metrics.steps()
    assert first["recording_s"] > 0.99 * last["recording_s"] > 0 and last["running_s"] > 0
    assert last["recording_s"] < 5 * 200e-6  # five ops, each a few microseconds (generous: the machine may be busy)
    assert lazytpu.metrics.counter("compile") == 1 and trace.cursor is trace.root


def test_timing_recording_leaves_nothing_behind(device: torch.device) -> None:
    lazytpu.mark_step()
    before = trace.cursor, set(trace.root.children), list(trace.pending)
    op_s, tensor_s = record_time._costs.__wrapped__()
    assert (trace.cursor, set(trace.root.children), list(trace.pending)) == before
    assert 0 < op_s < 1e-3 and 0 <= tensor_s < 1e-3


def test_recording_is_timed_while_other_threads_record(device: torch.device) -> None:
    done, started = threading.Event(), threading.Event()
    count, y = 0, torch.zeros(3).to(device)

    def record() -> None:
        nonlocal count, y
        while not done.is_set():
            for _ in range(10):
                count, y = count + 1, y + 1
            lazytpu.mark_step()
            started.set()

    thread = threading.Thread(target=record)
    thread.start()
    started.wait()
    op_s, _ = record_time._costs.__wrapped__()
    done.set()
    thread.join()
    assert 0 < op_s < 1e-2
    assert y.tolist() == [count] * 3, "no op of the thread is lost"


def test_estimated_recording_time_is_close_to_the_measured(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a clock around the ops themselves, which also counts torch's dispatch."""
    monkeypatch.setattr(lazytpu.config, "metrics", True)
    x = torch.ones(3).to(device)
    lazytpu.mark_step()
    clocked = []
    for _ in range(12):
        start = time.perf_counter()
        y = x
        for _ in range(200):
            y = y.relu()
        clocked.append(time.perf_counter() - start)
        lazytpu.mark_step()
    estimate = lazytpu.metrics.steps()[-1]["recording_s"]
    assert 0.15 * min(clocked) < estimate < 2 * min(clocked)


def test_steps_of_compiled_functions_count(device: torch.device) -> None:
    @lazytpu.compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sinh()

    x = torch.ones(3).to(device)
    for _ in range(5):
        f(x)
    replayed = [s for s in lazytpu.metrics.steps() if s["ops"] == 0 and s["executions"] == 1]
    assert replayed


def test_reset(device: torch.device) -> None:
    train(device, 2)
    lazytpu.metrics.reset()
    assert lazytpu.metrics.steps() == [] and lazytpu.metrics.counters() == {} and lazytpu.metrics.timers() == {}
    x = torch.ones(3).to(device) + 1
    lazytpu.mark_step()
    (only,) = lazytpu.metrics.steps()
    assert only["number"] == 1 and only["ops"] == 1
    del x


def test_only_the_last_steps_are_kept() -> None:
    for _ in range(lazytpu.metrics.MAX_STEPS + 5):
        step_statistics.end_step()
    found = lazytpu.metrics.steps()
    assert len(found) == lazytpu.metrics.MAX_STEPS and found[-1]["number"] == lazytpu.metrics.MAX_STEPS + 5


def test_observers_are_notified_of_each_step(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Step] = []
    monkeypatch.setitem(observers._calls, "step_ended", [seen.append])
    train(device, 2)
    assert [s._asdict() for s in seen[-2:]] == lazytpu.metrics.steps()


def test_file_of_steps(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "steps.jsonl", tmp_path / "other.jsonl"
    monkeypatch.setattr(lazytpu.config, "metrics_file", str(path))
    train(device, 3)
    steps = lazytpu.metrics.steps()
    monkeypatch.setattr(lazytpu.config, "metrics_file", str(other))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, kept in zip(lines[-3:], steps, strict=True):
        assert line.pop("ended") == pytest.approx(kept.pop("ended"), abs=1e-6)
        assert line == pytest.approx(kept, abs=1e-9)
    assert ["number", "ended", *list(lines[-1])[1:]] == list(Step._fields)
    lazytpu.mark_step()
    monkeypatch.setattr(lazytpu.config, "metrics_file", "")
    lazytpu.mark_step()
    assert other.read_text().count("\n") == 1 and len(path.read_text().splitlines()) == len(lines)


ENDING = """
import os, signal, sys, time
import lazytpu
for _ in range(50):
    lazytpu.mark_step()
child = os.fork()
if not child:
    sys.exit(0)  # the parent writes the steps that waited at the fork
os.waitpid(child, 0)
for _ in range(7):
    lazytpu.mark_step()
if sys.argv[1] == "killed":
    time.sleep(0.1)
    lazytpu.mark_step()
    os.kill(os.getpid(), signal.SIGKILL)
raise KeyError("of the program")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize(("how", "code"), [("raises", 1), ("killed", -9)])
def test_the_file_has_each_step_once_however_the_process_ends(tmp_path: Path, how: str, code: int) -> None:
    path = tmp_path / "steps.jsonl"
    done = run_code(ENDING, how, loaded=True, LAZYTPU_METRICS_FILE=str(path))
    assert done.returncode == code, done.stderr
    numbers = [json.loads(line)["number"] for line in path.read_text().splitlines()]
    assert numbers == [*range(1, 59 if how == "killed" else 58)]


def test_lines_of_short_steps_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "steps.jsonl")
    monkeypatch.setattr(lazytpu.config, "metrics_file", path)
    file = step_statistics._File()
    sizes = []
    for number, now in enumerate((1.0, 1.01, 1.02, 1.06, 1.07)):
        file.write(path, Step(*range(len(Step._fields)))._replace(number=number), now)
        sizes.append(Path(path).read_text().count("\n"))
    assert sizes == [1, 1, 1, 4, 4]
    file.close()
    assert [json.loads(line)["number"] for line in Path(path).read_text().splitlines()] == [0, 1, 2, 3, 4]


def test_transfers_of_a_loader_count_as_background(device: torch.device) -> None:
    dataset = torch.utils.data.TensorDataset(torch.ones(12, 4))
    for (x,) in lazytpu.DeviceLoader(torch.utils.data.DataLoader(dataset, batch_size=4)):
        x.sinh()
    found = lazytpu.metrics.steps()
    assert sum(s["bytes_in"] for s in found) == 12 * 4 * 4
    assert sum(s["background_s"] for s in found) > 0
    assert sum(s["transferring_s"] for s in found) == pytest.approx(0, abs=1e-9)


# --- the report ---------------------------------------------------------------------------------------------


def made_step(number: int, **given: float) -> Step:
    nothing = dict.fromkeys(Step._fields, 0)
    return Step(**{**nothing, "number": number, "recording_s": None, "running_s": None, **given})


def test_report() -> None:
    steps = [
        made_step(1, total_s=2.5, compiling_s=1.9, python_s=0.1, ops=153, compiles=1, bytes_in=2_000_000),
        made_step(2, total_s=0.004, python_s=0.003, ops=153, running_s=0.002, executions=1),
        made_step(3, total_s=0.006, python_s=0.005, ops=153, running_s=0.004, executions=1, donated_bytes=1500),
    ]
    found = metrics_tables.tables(steps, {"compile": 1}, {"wait": (2, 0.5)}, {"aten.foo": 3})
    assert metrics_tables.text_of(found).strip("\n") == REPORT.strip("\n")


REPORT = """
 ms                   mean*   share   step 1   step 2   step 3
 ─────────────────────────────────────────────────────────────
 Python and torch      4.00    80 %   100.00     3.00     5.00
 recording                -       -        -        -        -
 cutting               0.00     0 %     0.00     0.00     0.00
 lowering              0.00     0 %     0.00     0.00     0.00
 XLA                   0.00     0 %    1,900     0.00     0.00
 disk cache            0.00     0 %     0.00     0.00     0.00
 starting              0.00     0 %     0.00     0.00     0.00
 interpreting          0.00     0 %     0.00     0.00     0.00
 waiting               0.00     0 %     0.00     0.00     0.00
 transfers             0.00     0 %     0.00     0.00     0.00

 step                  5.00   100 %    2,500     4.00     6.00
 device running        3.00    60 %        -     2.00     4.00
 loader's transfers    0.00     0 %     0.00     0.00     0.00

 ops                    153              153      153      153
 graphs run               1                0        1        1
 cuts                     0                0        0        0
 compiles                 0                1        0        0
 fallbacks                0                0        0        0
 buffers donated          0                0        0        0
 donated              750 B              0 B      0 B   1.5 KB
 bytes in               0 B             2 MB      0 B      0 B
 bytes out              0 B              0 B      0 B      0 B

* of those of the last 3 steps that compiled nothing

 counter   count
 ───────────────
 compile       1


 timer   count   seconds   ms each
 ─────────────────────────────────
 wait        2     0.500   250.000


 fallback to the CPU   count
 ───────────────────────────
 aten.foo                  3
"""


def test_report_of_a_run(device: torch.device) -> None:
    train(device, 2)
    report = lazytpu.metrics.report()
    assert re.search(r"graphs run +1 +1 +1\b", report) and re.search(r"\n execute +2\n", report)


def test_report_of_nothing() -> None:
    assert "counter" in lazytpu.metrics.report()


def test_only_recent_samples_are_kept() -> None:
    series = Series()
    for i in range(MAX_SAMPLES + 10):
        series.add(i)
    assert series.count == MAX_SAMPLES + 10 and len(series.samples) == MAX_SAMPLES
    assert series.samples[0][1] == 10
