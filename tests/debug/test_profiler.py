"""Traces for TensorBoard and Perfetto, regions in torch's profiler, measured times of ops."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest
import torch

import lazytpu
from lazytpu.debug import profiler
from lazytpu.observe import regions
from lazytpu.observers import calls_of


@pytest.fixture
def net(device: torch.device) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)


def train_step(net, x):
    loss = net(x).square().mean()
    loss.backward()
    for p in net.parameters():
        p.grad = None
    lazytpu.mark_step()
    return loss.detach()


def events_of(folder):
    (path,) = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def inside(inner, outer):
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.01


def test_a_trace_has_our_regions(net, device, tmp_path):
    x = torch.ones(4, 32, device=device)
    lazytpu.tracing.step.forget()
    with profiler.trace(tmp_path):
        for _ in range(2):
            with profiler.annotate("batch", size=4):
                y = x + 0
            train_step(net, y)
        net(x).sum().item()
    assert list(tmp_path.rglob("*.xplane.pb"))
    events = events_of(tmp_path)
    named = Counter(event["name"] for event in events)
    assert named["lazytpu.step"] == 3
    assert named["lazytpu.cut: mark_step"] == 2
    assert named["lazytpu.cut: aten._local_scalar_dense"] + named["lazytpu.cut: item"] == 1
    assert {"lazytpu.lower", "lazytpu.compile", "lazytpu.dispatch", "lazytpu.wait", "lazytpu.record"} <= set(named)
    steps = [event for event in events if event["name"] == "lazytpu.step"]
    assert [event["args"]["step_num"] for event in steps] == ["1", "2", "3"]
    cuts = [event for event in events if event["name"] == "lazytpu.cut: mark_step"]
    records = [event for event in events if event["name"] == "lazytpu.record"]
    for cut, step in zip(cuts, steps, strict=False):
        assert inside(cut, step)
    assert not [1 for cut in cuts for record in records if inside(record, cut) or inside(cut, record)]
    assert [event["args"]["size"] for event in events if event["name"] == "batch"] == ["4", "4"]


def test_device_events_have_aten_and_module_names(net, device, tmp_path):
    x = torch.ones(4, 32, device=device)
    with profiler.trace(tmp_path):
        train_step(net, x)
    about = [event["args"] for event in events_of(tmp_path) if "hlo_op" in event.get("args", {})]
    found = {(args.get("aten"), args.get("module")) for args in about}
    assert {("aten.addmm", "Sequential.0"), ("aten.linear", "Sequential.2")} <= found
    assert any("test_profiler.py:" in args.get("line", "") for args in about)
    assert all({"hlo_module", "run_id"} <= set(args) for args in about if "aten" in args), "XLA's own are kept"


def test_nothing_listens_afterwards(net, device, tmp_path):
    with pytest.raises(KeyError), profiler.trace(tmp_path):
        raise KeyError
    assert not calls_of("region") and not calls_of("step_ended")
    with pytest.raises(RuntimeError, match="no trace is being taken"):
        profiler.stop_trace()


def test_one_trace_at_a_time(tmp_path):
    with profiler.trace(tmp_path), pytest.raises(RuntimeError, match="a trace is already being taken"):
        profiler.start_trace(tmp_path)


def test_times_of_ops(net, device):
    x = torch.ones(64, 32, device=device)
    times = profiler.op_times(train_step, net, x, runs=2)
    rows = {(row.op, row.module): row for row in times.rows}
    assert {("aten.addmm", "Sequential.0"), ("aten.linear", "Sequential.2")} <= set(rows)
    assert all(row.seconds >= 0 for row in times.rows)
    assert [row.seconds for row in times.rows] == sorted((row.seconds for row in times.rows), reverse=True)
    assert times.total_s == pytest.approx(sum(row.seconds for row in times.rows))
    assert 0 < times.total_s < 10
    assert rows["aten.addmm", "Sequential.0"].site.startswith("test_profiler.py:")
    lines = str(times).splitlines()
    assert lines[0].split() == ["ms", "%", "op", "module", "line", "fused", "with"]
    assert lines[-1].endswith("total, mean of 2 runs")
    assert len(lines) == len(times.rows) + 2


def test_a_dearer_op_takes_longer(device):
    x = torch.ones(512, 512, device=device)
    y = torch.ones(16, device=device)
    times = profiler.op_times(lambda: (x @ x, y.cumsum(0)))
    assert times.rows[0].op == "aten.mm"


def test_runs_are_counted(device):
    with pytest.raises(ValueError, match="runs is 1 or more, not 0"):
        profiler.op_times(lambda: None, runs=0)


def test_regions_in_torchs_profiler(net, device):
    x = torch.ones(4, 32, device=device)
    seen = []

    def ready(profile):
        seen.append(Counter(event.name for event in profile.events()))

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule, on_trace_ready=ready, acc_events=True
    ) as profile:
        for _ in range(4):
            with profiler.annotate("batch"):
                train_step(net, x)
            profile.step()
    (names,) = seen
    assert names["lazytpu.cut: mark_step"] == 2
    assert names["lazytpu.dispatch"] == 2
    assert names["batch"] == 2


def test_regions_cost_nothing_when_nobody_looks(monkeypatch):
    def entered(name):
        raise AssertionError(name)

    monkeypatch.setattr(regions, "entered", entered)
    lazytpu.mark_step()
