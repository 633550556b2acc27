"""Compiling takes long, and says so."""

from __future__ import annotations

import time

import pytest
import torch

import lazytpu
from lazytpu.config import config
from lazytpu.runtime import compiler
from tests.support.logged import Logged


def test_a_long_compile_is_logged_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: Logged, device: torch.device
) -> None:
    monkeypatch.setattr(config, "log", "info")
    monkeypatch.setattr(compiler, "_LOGGED_AFTER_S", 0.05)
    real = compiler.lower

    def slow(graph: object) -> object:
        time.sleep(0.4)
        return real(graph)

    monkeypatch.setattr(compiler, "lower", slow)
    x = torch.ones(5).to(device) * 3
    lazytpu.mark_step()
    logged = [r.getMessage() for r in caplog.records if "so far" in r.getMessage()]
    assert 2 <= len(logged) <= 5 and "compiling a graph of 1 ops, the first at test_compiler.py:" in logged[0]
    assert x.tolist() == [3.0] * 5
