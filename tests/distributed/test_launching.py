"""`lazytpu.launch` and ``python -m lazytpu launch`` start processes that are connected."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

import lazytpu
from lazytpu.distributed import launching
from lazytpu.errors import WorldError
from tests.support.processes import run_python


def of_all(power: int) -> tuple[int, float]:
    """The ranks to a power, summed over all of them."""
    import torch
    import torch.distributed as dist

    dist.init_process_group()
    x = torch.full((2,), float(dist.get_rank() + 1), device=lazytpu.device()) ** power
    dist.all_reduce(x)
    return dist.get_rank(), x[0].item()


def failing(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        raise ValueError("no data")


def test_a_function_runs_in_each_process() -> None:
    assert lazytpu.launch(of_all, 2, 3) == [(0, 9.0), (1, 9.0)]
    with pytest.raises(WorldError, match="rank 1 of 2 failed: Traceback(?s:.*)ValueError: no data"):
        lazytpu.launch(failing, 2, 1)


def test_variables_are_those_of_torchrun_and_go_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with launching._variables(1, 2, 1234):
        found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    assert found == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1234"}
    assert os.environ["RANK"] == "7" and "WORLD_SIZE" not in os.environ


def test_what_cannot_be_started_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one process, not 0"):
        lazytpu.launch(failing, 0)
    with pytest.raises(TypeError, match="define the function in a module"):
        lazytpu.launch(lambda: None, 2)


def test_the_command_runs_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, lazytpu\nfrom lazytpu import spmd\nmesh = spmd.Mesh((4,), ('data',))\n"
        "x = spmd.mark_sharding(torch.arange(8.0).to(lazytpu.device()), mesh, ('data',))\n"
        "print(sys.argv[1:], mesh.size, x.sum().item())\n"
    )
    done = run_python("-m", "lazytpu", "launch", "-n", 2, "--devices", 2, script, "--lr", 1)
    assert done.stdout == "['--lr', '1'] 4 28.0\n" * 2, done.stderr


RESUMING = """
    import os, sys
    from pathlib import Path
    import torch, torch.distributed as dist
    import lazytpu
    from lazytpu.spmd.checkpoint import CheckpointManager

    dist.init_process_group()
    manager, kept = CheckpointManager(Path(sys.argv[1])), {"x": torch.zeros(2, device=lazytpu.device())}
    begun = manager.load(kept) or 0
    for step in range(begun + 1, 6):
        total = kept["x"] * 2 + dist.get_rank() + 1
        dist.all_reduce(total)
        kept["x"] = total / 2
        manager.save(step, kept)
        if step == 3 and not begun:
            manager.wait()
            dist.barrier()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), 9)
    manager.wait()
    sys.stdout.write(f"from {begun} to {kept['x'].tolist()}\\n")  # at once, as both ranks write
"""


def test_a_world_that_is_started_again_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(RESUMING))
    done = run_python("-m", "lazytpu", "launch", "-n", 2, "--max-restarts", 1, script, tmp_path / "run")
    want = 0.0
    for _ in range(5):
        want = (2 * want + 1 + 2 * want + 2) / 2
    assert done.stdout == f"from 3 to [{want}, {want}]\n" * 2, done.stdout + done.stderr
