"""torch_xla's metrics report: its format, and our measurements under its names."""

from __future__ import annotations

import re

import pytest
import torch

import lazytpu
from lazytpu.compat.torch_xla import metrics_format
from lazytpu.observe.metrics import Series

pytestmark = pytest.mark.usefixtures("uncounted")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "000.000us"),
        (972e-9, "000.972us"),
        (0.013_884, "013ms884.000us"),
        (4.589_590_976, "04s589ms590.976us"),
        (184.242_643_649, "03m04s242ms643.649us"),
        (90_061.5, "01d01h01m01s500ms000.000us"),
    ],
)
def test_times_have_torch_xlas_format(seconds: float, text: str) -> None:
    assert metrics_format.time_text(seconds) == text


def test_sizes_have_torch_xlas_format() -> None:
    sizes = [0, 4, 1023, 1024, 3.44 * 1024, 20.98 * 1024**2, 1024**3, 1024**5]
    shown = ["0.00B", "4.00B", "1023.00B", "1.00KB", "3.44KB", "20.98MB", "1.00GB", "1.00PB"]
    assert [metrics_format.size_text(s) for s in sizes] == shown


def test_the_report_has_torch_xlas_format() -> None:
    series = Series()
    for i in range(1, 5):
        series.add(i * 1e-3)
    series.samples = type(series.samples)([(float(i), v) for i, (_, v) in enumerate(series.samples)])
    aliases = Series()
    aliases.add(2)
    assert (
        metrics_format.text_of(
            {"compile": series},
            {},
            {"compile": 4, "step": 9},
            {"aten.foo.out": 2, "aten.foo": 1},
            {},
            {"InputOutputAliasCount": aliases},
        )
        == """\
Metric: CompileTime
  TotalSamples: 4
  Accumulator: 010ms000.000us
  ValueRate: 003ms333.333us / second
  Rate: 1.33333 / second
  Percentiles: 1%=001ms000.000us; 5%=001ms000.000us; 10%=001ms000.000us; 20%=001ms000.000us; 50%=003ms000.000us; \
80%=004ms000.000us; 90%=004ms000.000us; 95%=004ms000.000us; 99%=004ms000.000us
Metric: InputOutputAliasCount
  TotalSamples: 1
  Accumulator: 2.00
  Percentiles: 1%=2.00; 5%=2.00; 10%=2.00; 20%=2.00; 50%=2.00; 80%=2.00; 90%=2.00; 95%=2.00; 99%=2.00
Counter: MarkStep
  Value: 9
Counter: UncachedCompile
  Value: 4
Counter: aten::foo
  Value: 3
"""
    )


def test_the_report_of_a_run(device: torch.device) -> None:
    weight = torch.ones(3, 4).to(device)
    lazytpu.mark_step()
    lazytpu.metrics.reset()
    for _ in range(3):
        loss = (torch.ones(6, 4).to(device) @ weight.t()).sum()
        weight -= loss * 0.1
        lazytpu.mark_step()
        loss.item()
    report = metrics_format.report()
    values = dict(re.findall(r"Counter: (\S+)\n  Value: (\d+)", report))
    assert (values["UncachedCompile"], values["CachedCompile"], values["MarkStep"]) == ("1", "2", "3")
    assert (values["xla::mm"], values["xla::mul"]) == ("3", "3")
    names = re.findall(r"Metric: (\S+)", report)
    assert {"CompileTime", "ExecuteTime", "TransferFromDeviceTime", "TransferToDeviceTime"} <= set(names)
    assert "Metric: InboundData\n  TotalSamples: 3\n  Accumulator: 12.00B\n" in report
    assert "Metric: OutboundData\n  TotalSamples: 3\n  Accumulator: 288.00B\n" in report
