"""Some of the scripts of `tests.distributed.scripts`; ``python -m tests.distributed.scripts`` runs all of them."""

from __future__ import annotations

import importlib
import threading

import torch
import torch.distributed as dist
from torch import nn

import lazytpu
from lazytpu.ir.tree import trace
from tests.distributed.scripts.training import batches, scripts, tolerances
from tests.support.ranks import matched, on_ranks


def same_as_cpu(module: str, name: str) -> None:
    """Run a script; its module is imported here, as the process of the suite has no use for it."""
    importlib.import_module(f"tests.distributed.scripts.{module}")
    matched(scripts[name], rtol=tolerances[name], atol=tolerances[name] / 10)


@on_ranks(2)
def test_ddp_of_parameters_that_other_ranks_do_not_use() -> None:
    same_as_cpu("ddp", "DDP: find_unused_parameters, others on each rank")


@on_ranks(2)
def test_ddp_of_a_static_graph() -> None:
    same_as_cpu("ddp", "DDP: static_graph")


@on_ranks(2)
def test_batch_norms_over_all_ranks() -> None:
    same_as_cpu("ddp", "DDP: SyncBatchNorm")


@on_ranks(2)
def test_batch_norms_of_no_batch_and_of_images_without_weights() -> None:
    """On a rank that has none, and in half precision."""
    rank, device = dist.get_rank(), lazytpu.device()
    norm = nn.SyncBatchNorm(3, affine=False, momentum=None).to(device)
    whole = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    x = (whole if rank == 0 else whole[:0]).to(device).requires_grad_()
    out = norm(x)
    (out * out * out).sum().backward()
    plain, given = nn.BatchNorm2d(3, affine=False, momentum=None), whole.clone().requires_grad_()
    want = plain(given)
    (want * want * want).sum().backward()
    if rank == 0:
        torch.testing.assert_close(out.cpu(), want)
        torch.testing.assert_close(x.grad.cpu(), given.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(norm.running_var.cpu(), plain.running_var)
    assert norm(x.detach().bfloat16()).dtype is torch.bfloat16


@on_ranks(2)
def test_compression_to_bfloat16() -> None:
    same_as_cpu("ddp", "DDP: hook bf16_compress")


@on_ranks(2)
def test_zero_the_first_fsdp_and_offloaded_parameters() -> None:
    same_as_cpu("ddp", "ZeroRedundancyOptimizer")
    same_as_cpu("fsdp", "FSDP1")
    same_as_cpu("fsdp", "FSDP2: CPUOffloadPolicy")


@on_ranks(2)
def test_pipelines() -> None:
    same_as_cpu("pipelines", "Pipeline: 1F1B")


@on_ranks(2)
def test_attention_by_the_heads_and_by_the_sequence() -> None:
    same_as_cpu("attention", "DTensor: attention, split by batch, by heads and not at all")
    same_as_cpu("attention", "Context parallel: keys and values gathered, causal, in balance")


@on_ranks(2)
def test_a_rank_that_waits_on_the_host_starts_what_is_recorded() -> None:
    """Rank 0 needs rank 1 for the sum that it reads, and rank 1 is on its way to something on the host."""
    rank, found = dist.get_rank(), [None, None]
    gloo = dist.new_group(backend="gloo")
    for group in (None, gloo):
        x = torch.ones(3, device=lazytpu.device()) * (rank + 1)
        dist.all_reduce(x)
        if rank == 0:
            assert x.tolist() == [3.0] * 3
        dist.all_gather_object(found, rank, group=group)
        assert found == [0, 1]


@on_ranks(2)
def test_a_thread_that_records_nothing_does_not_start_what_is_recorded() -> None:
    """One that saves a checkpoint, say: where the main thread is by then is another place on each rank."""
    rank, found = dist.get_rank(), [None, None]
    gloo = dist.new_group(backend="gloo")

    def on_host() -> None:
        dist.all_gather_object(found, rank, group=gloo)

    def train_and_go_on_host() -> None:
        x = torch.ones(3, device=lazytpu.device())
        lazytpu.mark_step()
        dist.all_reduce(x)
        on_host()
        assert not trace.exchanges
        found.append(x.tolist())

    x = torch.ones(3, device=lazytpu.device()) * (rank + 1)
    dist.all_reduce(x)
    for target in (on_host, train_and_go_on_host):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        assert found[:2] == [0, 1]
        assert (target is on_host) == bool(trace.exchanges), "the thread that trains cuts"
    assert x.tolist() == [3.0] * 3 and found[2] == [2.0] * 3


@on_ranks(2)
def test_numbers_that_differ_by_rank_become_inputs() -> None:
    rank, device = dist.get_rank(), lazytpu.device()
    counts = []
    x, into = torch.arange(8.0).to(device), torch.zeros(6, device=device)
    for _ in range(5):
        y = x[4 * rank : 4 * rank + 4] * (rank + 1)
        dist.all_reduce(y)
        into[rank + 1 : rank + 3] = y[rank]
        into[2 * rank] += 1.0
        dist.all_reduce(into)
        into /= 2
        lazytpu.mark_step()
        counts.append([lazytpu.metrics.counter(name) for name in ("in_pieces", "compile", "execute")])
    steps = torch.tensor(counts).diff(dim=0).tolist()
    assert steps[-2:] == [[0, 0, 1]] * 2, f"{counts}\n{lazytpu.explain()}"

    want = torch.zeros(6)
    for _ in range(5):
        parts = [want.clone(), want.clone()]
        summed = torch.arange(4.0) + 2 * torch.arange(4.0, 8.0)
        for r, part in enumerate(parts):
            part[r + 1 : r + 3] = summed[r]
            part[2 * r] += 1.0
        want = (parts[0] + parts[1]) / 2
    assert into.tolist() == want.tolist()


@on_ranks(2)
def test_batches_reach_every_rank() -> None:
    """The scripts would prove little if ranks had the same."""
    own = torch.stack([x for x, _ in batches(torch.device("cpu"))])
    every = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(every, own)
    assert not torch.equal(every[0], every[1])
