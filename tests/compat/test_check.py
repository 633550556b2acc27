"""`python -m lazytpu check`, and the tables of the migration guides: what becomes of each name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lazytpu.cli.app import app
from lazytpu.compat import checker, names
from lazytpu.compat.checker import DIFFERS, LACKS, WORKS

SCRIPT = """\
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
from torch_xla.core.xla_model import mark_step as cut, send
from torch_mlu.core import mlu_model as ct
import torch_xla.distributed.data_parallel as dp

def main(index):
    device = xm.xla_device()
    x = torch.ones(2, device=device).cuda()
    xm.no_such_thing()
    xm.mark_step.__name__
    cut()
    print(torch.tpu.memory_allocated(), torch.tpu.no_such_thing, torch.cuda.is_available(), index.xm.foo)

xmp.spawn(main)
ct.set_core_number(4)
"""


def test_each_name_has_a_verdict() -> None:
    found = [(f.line, f.name, f.verdict) for f in checker.check_source(SCRIPT)]
    xm = "torch_xla.core.xla_model"
    assert found == [
        (2, "torch_xla", WORKS),
        (3, xm, WORKS),
        (4, "torch_xla.distributed.xla_multiprocessing", WORKS),
        (5, f"{xm}.mark_step", WORKS),
        (5, f"{xm}.send", LACKS),
        (6, "torch_mlu.core.mlu_model", WORKS),
        (7, "torch_xla.distributed.data_parallel", LACKS),
        (10, f"{xm}.xla_device", WORKS),
        (11, ".cuda()", LACKS),
        (12, f"{xm}.no_such_thing", LACKS),
        (13, f"{xm}.mark_step.__name__", WORKS),
        (14, f"{xm}.mark_step", WORKS),
        (15, "torch.cuda.is_available", LACKS),
        (15, "torch.tpu.memory_allocated", WORKS),
        (15, "torch.tpu.no_such_thing", LACKS),
        (17, "torch_xla.distributed.xla_multiprocessing.spawn", DIFFERS),
        (18, "torch_mlu.core.mlu_model.set_core_number", DIFFERS),
    ]
    assert all(f.advice for f in checker.check_source(SCRIPT) if f.verdict == DIFFERS)


ROUNDABOUT = """\
import torch_xla as tx
import torch_xla.runtime
from torch_xla.core.xla_model import *
from torch_xla.core import xla_model as m

other = m
top = torch_xla

class Trainer:
    def __init__(self):
        self.xm = other

    def run(self):
        mark_step()
        self.xm.send(1)
        m.recv(2)
        other.DeviceContext
        top.runtime.world_size()
        tx.core.xla_model.check_view_sharing
        send(2)
other = None
"""


def test_names_are_followed_through_assignments() -> None:
    found = {(f.line, f.name, f.verdict) for f in checker.check_source(ROUNDABOUT)}
    xm = "torch_xla.core.xla_model"
    assert {(line, name) for line, name, verdict in found if verdict == LACKS} == {
        (15, f"{xm}.send"),
        (16, f"{xm}.recv"),
        (17, f"{xm}.DeviceContext"),
        (19, f"{xm}.check_view_sharing"),
        (20, f"{xm}.send"),
    }
    assert {(3, xm, WORKS), (14, f"{xm}.mark_step", WORKS), (18, "torch_xla.runtime.world_size", WORKS)} <= found


TENSORFLOW = """\
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras.layers import Dense

tf.debugging.set_log_device_placement(True)
model = keras.Sequential([Dense(10), keras.layers.GaussianNoise(0.1)])

@tf.function(jit_compile=True)
def forward(x):
    return tf.no_such_thing(model(x))

forward.experimental_get_compiler_ir(tf.zeros(2))(stage="hlo")
"""


def test_each_name_of_tensorflow_has_a_counterpart() -> None:
    found = {
        (f.line, f.name): (f.verdict, f.advice.removeprefix("use instead: ")) for f in checker.check_source(TENSORFLOW)
    }
    assert {verdict for verdict, _ in found.values()} == {LACKS}
    advice = {at: text for at, (_, text) in found.items()}
    assert advice[1, "tensorflow"].startswith("torch")
    assert "torch.nn.Linear" in advice[3, "tensorflow.keras.layers.Dense"]
    assert "LAZYTPU_LOG=placement" in advice[5, "tensorflow.debugging.set_log_device_placement"]
    assert advice[6, "tensorflow.keras.Sequential"] == "torch.nn.Sequential"
    assert advice[6, "tensorflow.keras.layers.GaussianNoise"] == "the module of the same name in torch.nn"
    assert "lazytpu.jit" in advice[8, "tensorflow.function"]
    assert "same name in torch" in advice[10, "tensorflow.no_such_thing"]
    assert "lazytpu.hlo_text" in advice[12, ".experimental_get_compiler_ir()"]


def test_what_is_said_to_differ_is_there() -> None:
    for name in names.DIFFERENT:
        assert checker.verdict_of(name)[0] == DIFFERS, name


def test_what_is_said_to_be_missing_is_missing() -> None:
    for name, use in names.MISSING.items():
        if not name.startswith("tensorflow."):
            verdict, advice = checker.verdict_of(name)
            assert verdict == LACKS, name
            assert use in advice


@pytest.mark.parametrize("package", ["torch_xla", "torch_tpu", "torch_mlu", "tensorflow"])
def test_the_table_of_names_has_a_text_for_each(package: str) -> None:
    rows = list(checker.names_of(package))
    assert len(rows) > (50 if package == "torch_xla" else 0)
    assert [name for name, verdict, doc, advice in rows if not (doc or advice)] == []


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "script.py"

    def check(*options: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["check", *options, str(script)])
        return done.exit_code, done.output

    script.write_text(SCRIPT)
    code, text = check("--json")
    assert code == 1
    assert json.loads(text)[4]["verdict"] == LACKS
    code, text = check()
    assert "9 works, 2 differs, 6 lacks" in text
    assert "xla_device" not in text
    script.write_text("def f(:")
    assert check()[0] == 2
