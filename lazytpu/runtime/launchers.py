"""Which launcher started this process, and as which rank: read from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

_FIRST_PORT, _PORTS = 61_440, 4_096  # ports that are derived from the name of a job: jax takes them from here as well


@dataclass(frozen=True, slots=True)
class Place:
    """The place of this process in a world.

    Attributes:
        launcher: what started it, in words.
        rank, size: of this process, and of the world.
        local_rank, local_size: among the processes of its host.
        host, port: where the ranks meet first.
        has_store: the launcher keeps a ``TCPStore`` there; else rank 0 does.
        attempt: how often the launcher has started the world again.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    has_store: bool = False
    attempt: str = "0"

    def variables(self) -> dict[str, str]:
        """Return what torchrun sets for a process of this place, where ``init_process_group`` looks."""
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.size, "MASTER_PORT": self.port}
        numbers |= {"LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.local_size}
        return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": self.host}


def found(variables: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place of this process; None where no launcher started it, or it is alone.

    Raises:
        ValueError: a variable of a launcher is no number.
    """
    for reader in (_torchrun, _jax, _tpu, _slurm, _open_mpi, _mpich):
        place = reader(variables)
        if place is not None:
            return place if place.size > 1 else None
    return None


def _torchrun(variables: Mapping[str, str]) -> Place | None:
    """Torchrun, and whatever sets the same variables: Kubeflow's PyTorchJob, Ray Train, a script of your own."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= variables.keys():
        return None
    return Place(
        "torchrun" if "TORCHELASTIC_RUN_ID" in variables else "RANK and WORLD_SIZE",
        int(variables["RANK"]),
        int(variables["WORLD_SIZE"]),
        int(variables.get("LOCAL_RANK", 0)),
        int(variables.get("LOCAL_WORLD_SIZE", 1)),
        variables["MASTER_ADDR"],
        int(variables["MASTER_PORT"]),
        variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        variables.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _jax(variables: Mapping[str, str]) -> Place | None:
    """Kubernetes (Kubeflow's trainer and JAXJob, or your own JobSet)."""
    for prefix in ("JAX_", ""):
        names = [prefix + name for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")]
        if set(names) <= variables.keys():
            address, size, rank = (variables[name] for name in names)
            host, _, port = address.partition(":")
            port = variables.get(f"{prefix}COORDINATOR_PORT") or port or str(_FIRST_PORT)
            return Place("Kubernetes", int(rank), int(size), 0, 1, host, int(port))
    return None


def _tpu(variables: Mapping[str, str]) -> Place | None:
    """Hosts of a TPU slice, or of several, as Google's Kubernetes describes them."""
    hosts = [host for host in variables.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if "TPU_WORKER_ID" not in variables or not hosts:
        return None
    slices, this = int(variables.get("MEGASCALE_NUM_SLICES", 1)), int(variables.get("MEGASCALE_SLICE_ID", 0))
    first = variables.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0] or hosts[0]
    rank = this * len(hosts) + int(variables["TPU_WORKER_ID"])
    return Place("TPU hosts", rank, slices * len(hosts), 0, 1, first, 8_482)


def _slurm(variables: Mapping[str, str]) -> Place | None:
    """A step of srun; not a shell of salloc or sbatch, which has the number of tasks as well but is alone."""
    if not {"SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"} <= variables.keys():
        return None
    rank = int(variables["SLURM_PROCID"])
    counts = _repeated(variables.get("SLURM_STEP_TASKS_PER_NODE", variables["SLURM_STEP_NUM_TASKS"]))
    node = int(variables.get("SLURM_NODEID", 0))
    job = f"{variables['SLURM_JOB_ID']}.{variables.get('SLURM_STEP_ID', '')}"
    return Place(
        "srun",
        rank,
        int(variables["SLURM_STEP_NUM_TASKS"]),
        int(variables.get("SLURM_LOCALID", 0)),
        counts[min(node, len(counts) - 1)],
        variables.get("MASTER_ADDR") or first_host(variables["SLURM_STEP_NODELIST"]),
        int(variables.get("MASTER_PORT") or _port(job)),
        attempt=variables.get("SLURM_RESTART_COUNT", "0"),
    )


def _open_mpi(variables: Mapping[str, str]) -> Place | None:
    if not {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"} <= variables.keys():
        return None
    size, local_size = int(variables["OMPI_COMM_WORLD_SIZE"]), int(variables.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
    uri = variables.get("OMPI_MCA_orte_hnp_uri", "")
    address = re.search(r"tcp://([^,:]+)", uri)
    host = variables.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else address.group(1) if address else "")
    if not host:
        raise ValueError("mpirun does not say where rank 0 is: set MASTER_ADDR to its host (mpirun -x MASTER_ADDR=...)")
    return Place(
        "mpirun",
        int(variables["OMPI_COMM_WORLD_RANK"]),
        size,
        int(variables.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)),
        local_size,
        host,
        int(variables.get("MASTER_PORT") or _port(variables.get("PMIX_NAMESPACE") or uri.partition(";")[0])),
    )


def _mpich(variables: Mapping[str, str]) -> Place | None:
    """MPICH, Intel MPI and MVAPICH."""
    if not {"PMI_RANK", "PMI_SIZE"} <= variables.keys():
        return None
    size, local_size = int(variables["PMI_SIZE"]), int(variables.get("MPI_LOCALNRANKS", 1))
    host = variables.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else "")
    if not host and size > 1:
        raise ValueError("mpirun does not say where rank 0 is: set MASTER_ADDR to its host (mpirun -genv MASTER_ADDR)")
    job = str(os.getppid()) if local_size == size else ""  # processes of one host have one parent
    return Place(
        "mpirun",
        int(variables["PMI_RANK"]),
        size,
        int(variables.get("MPI_LOCALRANKID", 0)),
        local_size,
        host,
        int(variables.get("MASTER_PORT") or _port(job)),
    )


def first_host(nodes: str) -> str:
    """Return the first of a list of hosts as SLURM writes it: ``node[001-015],host2``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ValueError(f"no host in SLURM_STEP_NODELIST={nodes!r}")
    return "".join(part or "" for part in match.groups())


def _repeated(counts: str) -> list[int]:
    """Return the numbers that SLURM writes as ``4(x2),3``."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        found += [int(count)] * int(times or 1)
    return found or [1]


def _port(job: str) -> int:
    """Return a port that all processes of a job compute from its name."""
    return _FIRST_PORT + crc32(job.encode()) % _PORTS
