"""How a known path ends otherwise: other results held, other donations, another cut, other settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lazytpu
from lazytpu.diagnosis.cause import KINDS
from lazytpu.runtime import executables
from lazytpu.runtime.disk_cache import lookup, serialized
from lazytpu.tracing import step
from tests.support.explanations import Explanations, kinds

explained = Explanations(__file__)


def test_first_and_first_after_the_tree_was_dropped(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    y = x.sinh()  # [sinh]
    lazytpu.mark_step()
    assert explained.last() == "1  1 ops, # s: the first graph\n   at   [sinh]"
    step.forget()
    y = x.cosh()
    lazytpu.mark_step()
    assert "the first graph since the trace tree was dropped (max_tree_nodes)\n" in explained.last()
    del y


def test_another_graph(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    y = x.sinh()  # [begin_a]
    lazytpu.mark_step()
    y = x.cosh()  # [begin_b]
    lazytpu.mark_step()
    assert (
        explained.last()
        == """\
2  1 ops, # s: diverges from graph 1 at op 1 (aten.cosh instead of aten.sinh): another graph begins here
   at   [begin_b]
   was  [begin_a]"""
    )
    del y


def test_a_graph_after_a_cut_in_the_middle(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for _ in range(2):
        y = x.sinh()
        if y.sum().item() > 0:
            y = y.cosh()  # [after_item]
        lazytpu.mark_step()
    assert kinds() == ["first", "start"]
    assert (
        ": another graph begins here, after a cut in the middle of the step\n   at   [after_item]\n" in explained.last()
    )


def test_result_that_is_held(device: torch.device) -> None:
    x, kept = torch.ones(3).to(device), []
    for keep in (False, True):
        y = x.sinh()  # [made]
        z = y.exp()  # [end]
        if keep:
            kept.append(y)
        del y
        lazytpu.mark_step()
    assert (
        explained.last()
        == """\
2  2 ops, # s: is graph 1, but the result of aten.sinh, f32[3], is held at the cut now
   at   [made]
   was  [end]
   with held by `kept[0]`
   fix  keep the same tensors in every step: what is held is computed"""
    )
    del z


def test_result_that_is_no_longer_held(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for keep in (True, False):
        y = x.sinh()
        z = y.exp()
        if not keep:
            del y
        lazytpu.mark_step()
    assert "is graph 1, but the result of aten.sinh, f32[3], is no longer held at the cut\n" in explained.last()
    del z


def test_donation(device: torch.device) -> None:
    x = torch.ones(3).to(device)  # [x]
    for shared in (False, True):
        x.sinh_()
        x._s.shared = shared  # type: ignore[attr-defined]
        lazytpu.mark_step()  # [donating]
    assert (
        explained.last()
        == """\
2  1 ops, # s: is graph 1, but input %p0, f32[3], can no longer be donated, something else holds its buffer
   at   [donating]
   with `x`, moved to the device at [x]
   fix  share its memory (copy_, to_jax, dlpack) in every step or in none"""
    )


def test_settings(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, 3).to(device)

    def product() -> None:
        y = x @ x
        lazytpu.mark_step()  # [cut_of_product]
        del y

    y = x @ x  # the same path, recorded here first
    lazytpu.mark_step()
    for _ in range(2):
        for precision in ("high", "highest"):
            monkeypatch.setattr(lazytpu.config, "matmul_precision", precision)
            product()
    assert kinds() == ["first", "setting"]
    assert (
        explained.last()
        == """\
2  1 ops, # s: is graph 1, but lazytpu.config.matmul_precision was 'highest' and is 'high'
   at   [cut_of_product]
   fix  none needed, each setting has its graph"""
    )
    del y


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("check_bounds", True, "was False and is True"), ("donate", False, "was True and is False")],
)
def test_settings_that_change_the_cut(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, value: bool, text: str
) -> None:
    x, i = torch.ones(3).to(device), torch.tensor([1]).to(device)
    for changed in (False, True):
        if changed:
            monkeypatch.setattr(lazytpu.config, name, value)
        x.sinh_()
        y = x[i]
        lazytpu.mark_step()
        del y
    assert f"is graph 1, but lazytpu.config.{name} {text}" in explained.last()


def test_settings_of_a_captured_graph(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, 3).to(device)
    compiled = torch.compile(lambda x: x @ x, backend="lazytpu")
    compiled(x)
    monkeypatch.setattr(lazytpu.config, "matmul_precision", "high")
    compiled(x)  # [called_with_high]
    assert kinds() == ["first", "setting"]
    assert "is graph 1, but lazytpu.config.matmul_precision was 'highest' and is 'high'" in explained.last()
    assert "   at   [called_with_high]\n" in explained.last()


def test_another_version_on_disk(device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lazytpu.config, "disk_cache", True)
    monkeypatch.setattr(lazytpu.config, "disk_cache_dir", str(tmp_path / "cache"))
    x = torch.ones(3).to(device)

    def again() -> None:
        y = x.sinh()
        lazytpu.mark_step()
        lookup.settle()
        del y
        step.forget()

    now = serialized._versions()
    monkeypatch.setattr(serialized, "_versions", lambda: (*now[:2], "0.9.0", *now[3:]))
    again()
    monkeypatch.setattr(serialized, "_versions", lambda: now)
    again()
    assert kinds() == ["first", "version"]
    assert f"; the disk cache has it, but jax was 0.9.0 and is {now[2]}\n" in explained.last()


# --- longer and shorter -------------------------------------------------------------------------------------


def test_longer(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    y = x.sinh()
    lazytpu.mark_step()  # [there]
    y = x.sinh()
    y = y.cosh()  # [further]
    lazytpu.mark_step()
    assert (
        explained.last()
        == """\
2  2 ops, # s: is graph 1, but goes on with aten.cosh after op 1, where it was cut before
   at   [further]
   was  [there]
   fix  cut at the same place in every step"""
    )
    del y


def test_shorter(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    y = x.sinh()
    y = y.cosh()  # [on]
    lazytpu.mark_step()
    y = x.sinh()
    lazytpu.mark_step()  # [stop]
    assert (
        explained.last()
        == """\
2  1 ops, # s: is graph 1, but is cut after op 1, where it went on with aten.cosh before
   at   [stop]
   was  [on]
   fix  cut at the same place in every step"""
    )
    del y


def both_lengths(f: Callable[[torch.Tensor, int], torch.Tensor], device: torch.device) -> str:
    x = torch.ones(3).to(device)
    for flag in (0, 1):
        y = f(x, flag)
        lazytpu.mark_step()
        del y
    return explained.last()


def test_longer_and_shorter_by_a_read(device: torch.device) -> None:
    def f(x: torch.Tensor, flag: int) -> torch.Tensor:
        y = x.sinh()
        if not flag:  # [if_read]
            y.sum().item()  # [read_now_and_then]
        return y.sum().cosh()  # [goes_on]

    text = both_lengths(f, device)
    assert "op 3 (aten.cosh instead of a cut): `if not flag:` at [if_read] took another control path\n" in text
    assert "   at   [goes_on]\n   was  [read_now_and_then]\n" in text


def test_more_ops_before_the_same_cut(device: torch.device) -> None:
    def f(x: torch.Tensor, flag: int) -> torch.Tensor:
        y = x.sinh()
        if flag:
            y = y.cosh()  # [more]
        return y

    text = both_lengths(f, device)
    assert kinds() == ["first", "longer"] and "   at   [more]\n" in text
    assert text.endswith(f"fix  {KINDS['branch'].fix}"), "each control path has its graph"


def test_evicted(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for _ in range(2):
        y = x.sinh()
        lazytpu.mark_step()
        executables.forget_executables()
    assert "the graph was compiled before and evicted since\n" in explained.last()
    assert kinds() == ["first", "forgotten"]
    del y


def test_recorded_but_never_compiled(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for keep in (False, True):
        y = x.sinh()
        if not keep:
            del y
        lazytpu.mark_step()
    assert kinds() == ["unfinished"]
    del y


def test_every_kind_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/logging.md").read_text()
    assert [kind for kind, (meaning, *_) in KINDS.items() if f"| `{kind}` | {meaning} |" not in page] == []
