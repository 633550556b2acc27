"""Each launcher's variables give the place of the process."""

from __future__ import annotations

import dataclasses

import pytest

from lazytpu.runtime.launchers import Place, first_host, found

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
ELASTIC = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "15.0;tcp://10.0.0.1,10.1.0.1:34911",
    "MASTER_PORT": "29500",
}
JAX = {"JAX_COORDINATOR_ADDRESS": "job-0:3389", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
TPU = {
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "a-0.job,a-1.job",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "first.job:8081",
}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (TORCHRUN, Place("RANK and WORLD_SIZE", 5, 8, 1, 4, "node0", 29500)),
        (TORCHRUN | ELASTIC, Place("torchrun", 5, 8, 1, 4, "node0", 29500, True, "2")),
        (SLURM, Place("srun", 5, 7, 1, 3, "node003", 29500)),
        (OPEN_MPI, Place("mpirun", 1, 2, 0, 1, "10.0.0.1", 29500)),
        (JAX, Place("Kubernetes", 3, 4, 0, 1, "job-0", 3389)),
        (TPU, Place("TPU hosts", 3, 4, 0, 1, "first.job", 8482)),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        (
            {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NUM_TASKS"} | {"SLURM_NTASKS": "7"},
            None,
        ),
        ({}, None),
    ],
)
def test_places(variables: dict[str, str], place: Place | None) -> None:
    assert found(variables) == place


def test_a_place_is_found_again_under_the_names_of_torchrun() -> None:
    place = found(SLURM)
    assert place is not None
    assert found(place.variables()) == dataclasses.replace(place, launcher="RANK and WORLD_SIZE")


def test_processes_of_a_job_derive_one_port() -> None:
    one, other = ({**SLURM, "SLURM_PROCID": rank} for rank in "03")
    for variables in (one, other):
        del variables["MASTER_PORT"]
    first, second = found(one), found(other)
    assert first is not None and second is not None and first.port == second.port > 61_439


def test_mpirun_over_hosts_has_to_say_where_rank_0_is() -> None:
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        found({name: value for name, value in OPEN_MPI.items() if "uri" not in name})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node001", "node001"), ("a,b", "a"), ("n[3-5,9],m", "n3"), ("n[07,9]", "n07"), ("rack[1-2]-x", "rack1-x")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
