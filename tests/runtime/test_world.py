"""Processes that a launcher started find each other when they first use the device."""

from __future__ import annotations

import jax
import pytest
import torch
from torch._C._distributed_c10d import HashStore

import lazytpu
from lazytpu.errors import WorldError
from lazytpu.runtime import world
from lazytpu.runtime.launchers import Place
from tests.support.processes import start_code
from tests.support.worlds import free_port, run_world, start_world

MEET = """
    import os, sys, time
    import torch, lazytpu
    from lazytpu.runtime import world

    assert world.size() == 3 and not world.is_connected()
    time.sleep(world.rank() / 2)
    x = torch.ones(3).to(lazytpu.device())
    import jax
    print((x + 1).cpu().tolist(), jax.process_count(), jax.local_devices()[0].process_index)
    if world.rank() == 1:
        os.kill(os.getpid(), 9)
    if world.rank() == 2:
        sys.exit()
    try:
        world.ranks().await_end(2, 10)
        world.ranks().check()
    except lazytpu.errors.WorldError as error:
        print(error)
"""


def test_processes_meet_and_hear_of_deaths() -> None:
    first, second, third = run_world(MEET, 3)
    assert [first.returncode, second.returncode, third.returncode] == [0, -9, 0], first.stderr
    head, *rest = first.stdout.splitlines()
    assert head == "[2.0, 2.0, 2.0] 3 0" and third.stdout.split()[-1] == "2"
    assert rest == [
        "rank 1 ended without finishing; rank 0 cannot go on alone",
        "  fix   see what rank 1 said last; torchrun --max-restarts starts all ranks again",
    ]
    assert first.stderr == third.stderr == ""


ALONE = "import torch, lazytpu; torch.ones(3).to(lazytpu.device()); import jax; print(jax.process_count())"


def test_a_rank_that_does_not_come_is_named() -> None:
    (running,) = start_world(ALONE, 2, without=(1,), LAZYTPU_COLLECTIVE_TIMEOUT="2")
    done = running.wait()
    message = "rank 0 of 2 waited 2 s for rank 1 to use the device or to call init_process_group\n"
    assert done.returncode == 1 and message in done.stderr and "LAZYTPU_WORLD=0" in done.stderr


def test_processes_that_are_to_be_alone_are(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "awaited", [])
    monkeypatch.setattr(lazytpu.config, "world", False)
    world.find()
    assert not world.awaited and world.size() == 1
    lazytpu.config.world = True
    world.find()
    assert [(place.rank, place.size) for place in world.awaited] == [(0, 2)]


def test_init_process_group_finds_what_any_launcher_has_set() -> None:
    code = "import lazytpu, torch.distributed as dist; dist.init_process_group(); print(dist.get_rank())"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    code = f"import os; [os.environ.pop(n) for n in {names}]; os.environ['PMI_RANK'] = os.environ.pop('OWN'); {code}"
    common = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MASTER_PORT": str(free_port())}
    running = [start_code(code, **common, **dict.fromkeys(names, "0"), OWN=rank, MPI_LOCALRANKID=rank) for rank in "01"]
    assert [r.wait().stdout for r in running] == ["0\n", "1\n"]


def test_jax_that_was_used_before_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not world.awaited and not world.is_connected() and (world.rank(), world.size()) == (0, 1)
    world.connect()  # alone: nothing to do
    torch.ones(1).to(lazytpu.device())
    with pytest.raises(WorldError, match="jax was used before the 2 processes of this world were connected"):
        world.connect(None, 0, 2)
    assert not world.awaited and world.size() == 1


def test_processes_that_are_to_share_a_device_are_told() -> None:
    on_gpus = f"import jax; jax.config.update('jax_platforms', 'cuda'); {ALONE}"
    for done in run_world(on_gpus, 2, CUDA_VISIBLE_DEVICES="7"):
        assert done.returncode == 1 and "several processes are to use GPU 7 of " in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [("4,5", "4,5", ""), ("4", "5", ""), ("4", "4", "GPU 4"), ("", "", ""), ("4,5,6", "4,5,6", "")],
)
def test_each_process_of_a_host_gets_its_part_of_the_devices(
    first: str, second: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, platforms = HashStore(), jax.config.jax_platforms
    jax.config.update("jax_platforms", "cuda")
    try:
        for rank, visible in enumerate((first, second)):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            world._note_devices(store, Place("torchrun", rank, 2, rank, 2, "localhost", 1))
    finally:
        jax.config.update("jax_platforms", platforms)
    assert store.check(["shared"]) == bool(shared)
    assert not shared or store.get("shared").decode().startswith(f"{shared} of ")
