"""Ranks that do not do the same: in pieces where that is right, and errors that name them where it is not."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.support.worlds import run_world

PROGRAM = """
    import os, sys, time
    import torch, torch.distributed as dist
    import lazytpu
    from lazytpu.errors import LazyTPUError
    from lazytpu.ir.tree import trace
    from lazytpu.runtime import world

    dist.init_process_group()
    rank, device = dist.get_rank(), lazytpu.device()

    def step(x, how=""):
        y = x * 2
        if how == "other ops" and rank == 1:
            y = (y + 1) - 1
        dist.all_reduce(y)
        if how == "read" and rank == 0:
            print("sum", y.sum().item())
        z = torch.relu(y) / 2
        if how == "other collective" and rank == 1:
            dist.broadcast(z, 1)
        elif how == "other size":
            z = torch.cat([z, z])[: 4 + rank]
            dist.all_reduce(z)
        elif how == "late" and rank == 1:
            time.sleep(4)
        else:
            dist.all_reduce(z)
        lazytpu.mark_step()
        return z

    x = torch.ones(4).to(device) * (rank + 1)
    whole = step(x).tolist()
    for how in ("other ops", "other ops", "read", ""):
        assert step(x, how).tolist() == whole, how
    print(whole, "in pieces", lazytpu.metrics.counter("in_pieces"))
    print([line for line in lazytpu.explain().splitlines() if "| rank 1" in line][0])
    for how in ("other collective", "other size", "late"):
        if how == "late":
            lazytpu.config.collective_timeout = 1
        try:
            step(x, how).tolist()
        except LazyTPUError as error:
            print(error)
        trace.pending.clear()
        trace.next_step()
        assert x.tolist() == [rank + 1.0] * 4
    lazytpu.config.collective_timeout = 60
    if rank == 1:
        os.kill(os.getpid(), 9)
    step(x).tolist()
"""
DIFFERENT = """\
ranks exchange different things
  with  rank 0: all_reduce f32[4] sum over ranks 0-1 of 2, train.py:28
        rank 1: broadcast f32[4] 1 over ranks 0-1 of 2, train.py:21
  fix   all ranks of a group have to call the same collectives, in the same order, with equal sizes and types
ranks exchange different things
  with  rank 0: all_reduce f32[4] sum over ranks 0-1 of 2, train.py:24
        rank 1: all_reduce f32[5] sum over ranks 0-1 of 2, train.py:24
  fix   all ranks of a group have to call the same collectives, in the same order, with equal sizes and types
"""
LATE = """\
rank 0 waited 1 s for rank 1, which did not come to a collective
  at    train.py:29
  with  rank 1 is at train.py:26
  fix   all ranks have to come to the same collectives; lazytpu.config.collective_timeout has the limit
"""
DEAD = """\
lazytpu.errors.WorldError: rank 1 ended without finishing; rank 0 cannot go on alone
[rank0]:   at    train.py:29
[rank0]:   fix   see what rank 1 said last; torchrun --max-restarts starts all ranks again
"""


def test_ranks_that_differ(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    run = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    first, second = run_world(run, 2, script, LAZYTPU_DISK_CACHE="0")
    assert (first.returncode, second.returncode) == (1, -9), first.stderr + second.stderr
    head, *rest = first.stdout.splitlines(keepends=True)
    where = "2 x rank 0: lazytpu.all_reduce f32[4], train.py:16 | rank 1: aten.add.Tensor f32[4], train.py:15"
    for said, pieces in ((rest, 4), (second.stdout.splitlines(keepends=True), 3)):
        assert said[:2] == [f"[6.0, 6.0, 6.0, 6.0] in pieces {pieces}\n", f"  {where}\n"]
        assert "".join(said[2:10]) == DIFFERENT
    assert head == "sum 24.0\n" and "".join(rest[10:]) == LATE
    assert first.stderr.endswith(DEAD)
    for rank, done in enumerate((first, second)):
        assert f"lazytpu[{rank}]: ranks record different ops between their collectives" in done.stderr


def test_one_rank_compiles_for_all_and_for_the_next_run(tmp_path: Path) -> None:
    run = """
        import torch, torch.distributed as dist
        import lazytpu
        dist.init_process_group()
        pair, _ = dist.new_subgroups(2)
        x = torch.ones(4).to(lazytpu.device()) * 2
        dist.all_reduce(x, group=pair)
        print(x.tolist())
        counts = [lazytpu.metrics.counter(name) for name in ("compile", "disk_hit", "in_pieces")]
        print(*counts)
    """
    for compiled in (2, 0):  # the program of one pair is not that of the other
        ended = run_world(run, 4, LAZYTPU_DISK_CACHE="1", LAZYTPU_DISK_CACHE_DIR=str(tmp_path))
        numbers, counts = zip(*[done.stdout.splitlines() for done in ended], strict=True)
        assert numbers == ("[4.0, 4.0, 4.0, 4.0]",) * 4
        sums = [sum(map(int, of_ranks)) for of_ranks in zip(*[line.split() for line in counts], strict=True)]
        assert sums == [compiled, 4 - compiled, 0]
