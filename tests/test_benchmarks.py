"""The programs of ``benchmarks/`` run, in their smallest form."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import jax
import pytest
import torch

import lazytpu
from lazytpu.runtime import meshes

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from benchmarks import __main__ as everything
from benchmarks import (
    allocation,
    compare,
    integer_conv,
    jax_models,
    jax_step,
    metrics_cost,
    models,
    page,
    record,
    scale,
    scaling_page,
    sort_lowerings,
    torch_step,
)
from benchmarks.growth import cutting, plots, process, recording, scan, training, tree
from benchmarks.growth.study import Study, Verdict, ratio_of_rates, study_of


def test_every_backend_begins_with_the_same_loss():
    timings = {
        name: torch_step.time_model("tiny", torch_step.backend(name), run_s=0.001)
        for name in ("eager", "lazytpu", "lazytpu-compile")
    }
    timings["jax"] = jax_step.time_model("tiny", run_s=0.001)
    expected = timings["eager"].first_loss
    assert {name: t.first_loss for name, t in timings.items()} == pytest.approx(dict.fromkeys(timings, expected))
    assert all(t.step_ms > 0 and t.first_s > 0 for t in timings.values())
    assert timings["lazytpu"].compiles > 0


def test_jax_runs_layers_in_order_where_their_names_are_numbers_of_two_digits():
    net = torch.nn.Sequential(*[m for n in range(3, 14) for m in (torch.nn.Linear(n, n + 1), torch.nn.ReLU())][:-1])
    arrays = {name: jax.numpy.asarray(p.detach().numpy()) for name, p in net.named_parameters()}
    x = torch.randn(2, 3)
    logits, _ = jax.jit(jax_models.sequential)(arrays, {}, x.numpy(), jax.random.key(0))
    torch.testing.assert_close(torch.tensor(logits), net(x))


def test_models_have_a_twin_in_jax():
    assert set(models.SMALL) <= set(jax_models.MODELS)
    with pytest.raises(ValueError, match="one of mlp"):
        models.make("mpl")


def run(model, backend, number, step_ms, **fields):
    """A measurement as `compare.measure_all` gives it."""
    fields = {"host_ms": 1.0, "first_s": 2.0, "rss_mb": 100, "first_loss": 1.0, **fields}
    return {"model": model, "backend": backend, "round": number, "step_ms": step_ms, **fields}


RUNS = [
    run("mlp", "lazytpu", 0, 2.0, second_s=0.3),
    run("mlp", "lazytpu", 1, 8.0, second_s=0.3),
    run("mlp", "torch_xla", 0, 4.0),
    run("mlp", "torch_xla", 1, 20.0),
    run("mlp", "eager", 0, 1.0, first_loss=1.1),
    {"model": "mlp", "backend": "jax", "round": 0, "error": "not here"},
]


def test_ratios_are_taken_within_a_round():
    compared = compare.Comparison(RUNS)
    assert compared.ratio("mlp", "lazytpu", "torch_xla") == pytest.approx(0.45)
    assert compared.ratio("mlp", "lazytpu", "jax") is None
    assert compared.ratio("mlp", "lazytpu", "lazytpu", "second_s") == pytest.approx(0.15)
    found = {(goal.field, goal.peer): ratio <= goal.limit for goal, ratio in compared.goals()}
    assert found == {("step_ms", "torch_xla"): True, ("second_s", "lazytpu"): True, ("host_ms", "eager"): True}
    (wrong,) = compared.wrong_losses()
    assert wrong.startswith("mlp: lazytpu 1.00000, eager 1.10000")


def test_the_table_of_the_page_is_rewritten(tmp_path, capsys):
    saved, written = tmp_path / "compare.json", tmp_path / "page.md"
    page.save(saved, {"machine": page.machine(), "rounds": 2, "runs": RUNS})
    assert compare.main(["--from-json", str(saved)]) == 1  # a measurement failed
    written.write_text("before\n<!-- begin: compare -->\nold\n<!-- end: compare -->\nafter\n")
    for _ in range(2):
        page.write_part(written, "compare", compare.markdown(json.loads(saved.read_text())))
    text = written.read_text()
    assert text.startswith("before\n<!-- begin: compare -->\n\nMedians of 2 rounds.")
    assert "| mlp | lazytpu | 5.00 | 1.00 | 2.00 | 0.30 | 100 | " in text
    assert text.endswith("Not measured: mlp jax: not here\n\n<!-- end: compare -->\nafter\n")
    assert "Training steps" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has no part"):
        page.write_part(written, "growth", "")


def test_the_pages_show_the_saved_results(tmp_path, monkeypatch):
    for name in ("PAGE", "TABLES"):
        copied = tmp_path / getattr(page, name).name
        copied.write_text(getattr(page, name).read_text())
        monkeypatch.setattr(everything, name, copied)
    everything.write_pages()
    assert everything.PAGE.read_text() == page.PAGE.read_text()
    assert everything.TABLES.read_text() == page.TABLES.read_text()
    assert len(page.PAGE.read_text().splitlines()) <= 150


def test_plots_are_small():
    assert sum(plot.stat().st_size for plot in (ROOT / "docs/_static").glob("growth-*.svg")) < 100_000


def test_goals_of_scale_are_met_or_not(tmp_path, capsys, monkeypatch):
    rows = {"bytes": [Verdict("a part", 0.125, 0.13)], "cost": [Verdict("a step", 1.2, 1.1)]}
    monkeypatch.setattr(scale, "measured", rows.get)
    assert scale.main(["--only", "bytes", "--json", str(tmp_path / "scale.json")]) == 0
    assert scale.main(["--only", "cost", "--json", str(tmp_path / "scale.json")]) == 1
    printed = capsys.readouterr().out
    assert "| a part | 0.13 | 0.125 | yes |" in printed and "| a step | 1.1 | 1.2 | no |" in printed
    assert json.loads((tmp_path / "scale.json").read_text())["cost"] == [{"what": "a step", "found": 1.2, "limit": 1.1}]


def test_models_of_scale_train():
    training = scale.Training("tiny", "one", 1)
    first, second = training.step().item(), training.step().item()
    assert second < first < 2


@pytest.mark.parametrize("name", ["gpt", "transformer", "resnet18-f64"])
def test_layers_that_scale_splits_are_there(name):
    net = scale.workload(name).net.to(lazytpu.device())
    mesh, spec = scale.spread(name, "TP", net, 1)
    assert spec == () and any(lazytpu.spmd.sharding_of(p) is not None for p in net.parameters())
    meshes.used.clear()  # as in a process that has marked nothing: the other tests are of one device


def test_recording_is_timed():
    found = record.measure("lazytpu", rounds=1)
    assert set(found) >= {"x + y", "chain", "cut"}
    assert all(us > 0 for us in found.values())


def test_ways_of_integer_convolutions_agree():
    found = integer_conv.measure(integer_conv.Shape(2, 4, 6, 4, 3, 1, 1), "int8", 0.001)
    assert set(found) == {"patches", "xla", "float"}


def test_ways_to_sort_agree():
    assert set(sort_lowerings.measure_sort((2, 40), "int64", 0.001)) >= {"eager", "two arrays", "packed"}
    assert set(sort_lowerings.measure_topk((2, 40), 3, 0.001)) == {"eager", "kernel", "packed"}


def test_allocation_has_both_ways():
    rows = [{"model": "cnn", "way": "reuse_pages on", "page_faults": 0, "cpu_ms": 1, "step_ms": 1, "rss_mb": 1}]
    assert allocation.table(rows) == [["cnn", "reuse_pages on", "0", "1", "1", "1"]]
    assert {"reuse_pages on", "reuse_pages off"} <= set(allocation.WAYS)


def test_studies_of_growth_run(monkeypatch):
    monkeypatch.setattr(training, "_SAMPLES", 2)
    monkeypatch.setattr(tree, "_SAMPLES", 4)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # slow where tests have left much
    studies = [recording.study((10, 20)), cutting.study((2, 4)), tree.study(40)]
    for study in studies:
        assert study.verdicts and all(len(points) > 1 for points in study.series.values())
        assert study_of(json.loads(json.dumps(study.as_dict()))).name == study.name
    assert [step for step, _ in training.train(4, compiled=False)] == [2, 4]
    assert scan.first_step(2, scan.recomputed) > 0


def test_shapes_are_judged():
    assert ratio_of_rates([(x, 3.0 * x) for x in (1, 10, 100)]) == pytest.approx(1)
    assert ratio_of_rates([(x, 3.0 * x * x) for x in (1, 10, 100)]) > 10
    assert Verdict("", 1.0, 1.0).holds and not Verdict("", 1.1, 1.0).holds


def test_what_is_held_is_seen(device):
    lazytpu.wait()
    before = process.held()
    kept = [torch.ones(4).to(device) + i for i in range(50)]
    lazytpu.mark_step(wait=True)
    after = process.held()
    assert after.buffers - before.buffers >= len(kept) - 1


def test_plots_need_matplotlib(tmp_path, monkeypatch):
    study = Study("name", "title", "x", "y", {"a": [(1.0, 2.0), (2.0, 3.0)]}, False, [])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install"):
        plots.draw([study], tmp_path)


def test_the_cost_of_metrics_is_measured(tmp_path):
    for compiled in (False, True):
        switches = metrics_cost.switches(tmp_path)
        found = metrics_cost.cost(metrics_cost.trainer("tiny", compiled), switches["metrics_file"], 3, 0.01)
        assert found.cpu > 0 and found.wall > 0
    assert not lazytpu.config.metrics_file and (tmp_path / "steps.jsonl").read_text()


def test_pods_send_what_the_formulas_say_and_are_not_promised_less_than_was_measured() -> None:
    cases = {case.name: case for case in scaling_page.saved()}
    sizes = (8, 64, 256, 1024, 4096)
    assert all(f"{model}-fsdp-v5p-{chips}" in cases for model in scaling_page.MODELS for chips in sizes)
    for case in cases.values():
        assert scaling_page.sent(case) == pytest.approx(scaling_page.formula(case), rel=0.02), case.name
        assert case.utilization(case.time_s("compute")) < 80
    for name, _, _, mfu in scaling_page.PUBLISHED:
        case = cases[name]
        assert case.utilization(case.least_s) > mfu, name
    measured = 100 * scaling_page.TORCHTITAN[1] / scaling_page.TORCHTITAN[0]
    found = scaling_page.efficiency(cases["8b-fsdp-h100-8"], cases["8b-fsdp-h100-128"])
    assert all(abs(x - measured) < 5 for x in found)
    page = scaling_page.PAGE.read_text()
    assert all("| " + " | ".join(row) + " |" in page for row in scaling_page.byte_rows([*cases.values()]))
    assert sum(plot.stat().st_size for plot in (ROOT / "docs/_static").glob("scaling-*.svg")) < 100_000
