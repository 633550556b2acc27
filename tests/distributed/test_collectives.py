"""Every function of torch.distributed on device tensors, in two processes: what Gloo gives on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import lazytpu
from lazytpu.ir.tree import trace
from lazytpu.runtime import agreement
from lazytpu.runtime.processes import OverProcesses
from tests.support.ranks import matched, on_ranks

ReduceOp = dist.ReduceOp
Device = torch.device


def given(device: Device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that is another one on each rank."""
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 7 % 5 + 1 + dist.get_rank()) % 6).reshape(shape).to(dtype).to(device)


def reduced(device: Device, op: Any, dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    x = given(device, *shape, dtype=dtype)
    dist.all_reduce(x, op)
    return x


@on_ranks(2)
def test_all_reduce_with_every_op_and_type() -> None:
    def run(device: Device) -> list[torch.Tensor]:
        found = [
            reduced(device, op, dtype, 3, 2)
            for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
            for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)
        ]
        found += [reduced(device, op, torch.int64, 5) for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)]
        found += [reduced(device, ReduceOp.SUM, dtype, 4) for dtype in (torch.float16, torch.bfloat16, torch.complex64)]
        return [*found, reduced(device, ReduceOp.SUM), reduced(device, ReduceOp.SUM, torch.float32, 0, 3)]

    matched(run)


@on_ranks(2)
def test_average_and_scaled_sum_which_gloo_has_not() -> None:
    x, device = given(Device("cpu"), 3), lazytpu.device()
    total = x.clone()
    dist.all_reduce(total)
    assert torch.equal(reduced(device, ReduceOp.AVG, torch.float32, 3).cpu(), total / 2)
    scaled = torch.distributed._make_nccl_premul_sum(0.5)
    assert torch.equal(reduced(device, scaled, torch.float32, 3).cpu(), total / 2)


@on_ranks(2)
def test_comm_debug_mode_counts_collectives_as_it_counts_those_of_gloo() -> None:
    device = lazytpu.device()
    x, parts = given(device, 4), [given(device, 2) for _ in range(2)]
    with CommDebugMode() as mode:
        dist.all_reduce(x)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.scatter(x[:2], parts if dist.get_rank() == 0 else None)
        dist.all_gather(parts, parts[0].clone())
        dist.all_gather_into_tensor(x, parts[0])
        dist.reduce_scatter_tensor(parts[1], x)
    dist.all_reduce(x)
    counts = {op.__name__: count for op, count in mode.get_comm_counts().items()}
    once = "broadcast_ scatter_ allgather_ _allgather_base_ _reduce_scatter_base_".split()
    assert counts == {"allreduce_": 2, **dict.fromkeys(once, 1)}
    assert mode.get_total_counts() == 7


@on_ranks(2)
def test_a_program_has_its_collectives_in_the_order_of_recording() -> None:
    device = lazytpu.device()
    types = (torch.float32, torch.int64, torch.float16, torch.bool, torch.complex64)
    sizes = [5000, 8, 300, 40, 77000, 6, 1200, 90, 2, 640, 20, 3400]
    gathered = []
    for i, n in enumerate(sizes):
        parts = torch.empty(2 * n, dtype=types[i % 5], device=device)
        dist.all_gather_into_tensor(parts, given(device, n, dtype=types[i % 5]))
        gathered.append(parts)
    results = [parts.logical_not() for parts in sorted(gathered, key=torch.numel)]
    text = lazytpu.hlo_text(*results, optimized=True)
    assert "is_scheduled=true" in text
    assert [int(n) for n in re.findall(r" = \w+\[(\d+)\S* all-gather\(", text)] == [2 * n for n in sizes]


@on_ranks(2)
def test_buffers_of_processes_are_parts_of_one_array_without_a_copy() -> None:
    x, total = (torch.ones(3, 2).to(lazytpu.device()) for _ in range(2))
    dist.all_reduce(total)
    starts: list[tuple[tuple[int, ...], bool]] = []
    start = OverProcesses._global

    def noted(self: OverProcesses, part: Any) -> Any:
        whole = start(self, part)
        starts.append((whole.shape, whole.addressable_data(0).unsafe_buffer_pointer() == part.unsafe_buffer_pointer()))
        return whole

    OverProcesses._global = noted  # type: ignore[method-assign]
    try:
        assert (x + total).tolist() == [[3.0, 3.0]] * 3
    finally:
        OverProcesses._global = start  # type: ignore[method-assign]
    assert ((6, 2), True) in starts and all(same for _, same in starts)


@on_ranks(2)
def test_gathering_and_reducing_in_all_forms() -> None:
    def run(device: Device) -> Any:
        n, x = dist.get_world_size(), given(device, 2, 3)
        parts = [torch.zeros_like(x) for _ in range(n)]
        dist.all_gather(parts, x)
        rows, stacked = x.new_empty(2 * n, 3), x.new_empty(n, 2, 3)
        dist.all_gather_into_tensor(rows, x)
        dist.all_gather_into_tensor(stacked, x) if device.type != "cpu" else stacked.copy_(rows.view(n, 2, 3))
        own, of_list = x.new_empty(1, 3), x.new_empty(2, 3)
        dist.reduce_scatter_tensor(own, x)
        dist.reduce_scatter(of_list, [x * i for i in range(n)])
        gathered = [torch.zeros_like(x) for _ in range(n)] if dist.get_rank() == 1 else None
        dist.gather(x, gathered, dst=1)
        total = x.clone()
        dist.reduce(total, 0)
        scalars = [torch.zeros((), device=device) for _ in range(n)]
        dist.all_gather(scalars, x.sum())
        return parts, rows, stacked, own, of_list, gathered or [], total if dist.get_rank() == 0 else [], scalars

    matched(run)


@on_ranks(2)
def test_broadcast_scatter_and_all_to_all() -> None:
    def run(device: Device) -> Any:
        rank, n = dist.get_rank(), dist.get_world_size()
        sent = given(device, 2, 2)
        dist.broadcast(sent, 1)
        exact = torch.tensor([-0.0, float("nan"), float("inf"), 1e-45]).to(device) * (1 if rank == 0 else 2)
        dist.broadcast(exact, 0)
        flags = torch.tensor([rank == 0, True]).to(device)
        dist.broadcast(flags, 0)
        got = torch.zeros(2, device=device)
        dist.scatter(got, [torch.full((2,), 3.0 + i, device=device) for i in range(n)] if rank == 1 else None, src=1)
        even, x = torch.zeros(4, 2, device=device), given(device, 4, 2)
        dist.all_to_all_single(even, x)
        splits = [[1, 3], [2, 1]][rank]
        uneven = torch.zeros(3 if rank == 0 else 4, device=device)
        dist.all_to_all_single(uneven, given(device, sum(splits)), [[1, 2], [3, 1]][rank], splits)
        parts = [torch.zeros(3, device=device) for _ in range(n)]
        dist.all_to_all(parts, [given(device, 3) + i for i in range(n)])
        assert sent._version == got._version == even._version == 0, "a collective is no write that autograd counts"
        return sent, torch.signbit(exact), exact.nan_to_num(5.0), flags, got, even, uneven, parts

    matched(run)


@on_ranks(2)
def test_a_root_that_is_no_member_is_refused() -> None:
    for device in (torch.device("cpu"), lazytpu.device()):
        x = torch.ones(2, device=device)
        for call in (dist.broadcast, dist.reduce, lambda x, root: dist.gather(x, dst=root)):
            with pytest.raises(RuntimeError, match="invalid root rank: 5"):
                call(x, 5)


@on_ranks(2)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_recorded() -> None:
    device, rank = lazytpu.device(), dist.get_rank()
    x, three = given(device, 4), [torch.zeros(4, device=device) for _ in range(3)]
    calls: list[Callable[[], object]] = [
        lambda: dist.all_gather_into_tensor(three[0], x),
        lambda: dist.all_gather(three, x),
        lambda: dist.all_gather(three[:2], x[:2]),
        lambda: dist.all_gather_coalesced([[three[0]], [three[1][1:]]], [x]),
        lambda: dist.reduce_scatter_tensor(three[0], x),
        lambda: dist.reduce_scatter(three[0][:3], [x, x]),
        lambda: dist.gather(x, three if rank == 0 else None),
        lambda: dist.scatter(x, three if rank == 0 else None),
        lambda: dist.all_to_all_single(x[:3], x[1:]),
        lambda: dist.all_to_all_single(x[:2], x),
        lambda: dist.all_to_all(three[:2], [x[:3], x[:3]]),
    ]
    for i, call in enumerate(calls):
        if i in (6, 7) and rank:  # only the root has lists
            continue
        with pytest.raises(RuntimeError, match=r"among 2 processes: |does not divide equally|cannot hold"):
            call()
    assert not trace.exchanges
    matched(lambda device: reduced(device, ReduceOp.SUM, torch.float32, 3))


@on_ranks(2)
def test_all_to_all_of_lists_of_other_sizes_which_gloo_has_not() -> None:
    device, rank = lazytpu.device(), dist.get_rank()
    parts = [torch.zeros(i + rank + 1, device=device) for i in range(2)]
    dist.all_to_all(parts, [torch.full((i + rank + 1,), 10.0 * rank + i, device=device) for i in range(2)])
    assert [x.tolist() for x in parts] == [[10.0 * i + rank] * (i + rank + 1) for i in range(2)]


@on_ranks(2)
def test_gathering_and_reducing_lists_of_other_sizes_which_gloo_has_not() -> None:
    device, rank = lazytpu.device(), dist.get_rank()
    parts = [torch.zeros(i + 1, 2, device=device) for i in range(2)]
    dist.all_gather(parts, torch.full((rank + 1, 2), float(rank), device=device))
    assert [x.tolist() for x in parts] == [[[0.0, 0.0]], [[1.0, 1.0]] * 2]
    own = torch.zeros(3 - rank, device=device)
    dist.reduce_scatter(own, [torch.full((3 - i,), rank + i + 1.0, device=device) for i in range(2)])
    assert own.tolist() == [[3.0] * 3, [5.0] * 2][rank]


@on_ranks(2)
def test_works_futures_and_coalescing() -> None:
    def run(device: Device) -> Any:
        x, y = given(device, 3), given(device, 2)
        works = [dist.all_reduce(x, async_op=True), dist.broadcast(y, 0, async_op=True)]
        assert all(work.wait() for work in works) and all(work.is_completed() for work in works)
        z = given(device, 2)
        future = dist.all_reduce(z, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
        a, b = given(device, 2), given(device, 3)
        with dist._coalescing_manager(device=device):
            dist.all_reduce(a)
            dist.all_reduce(b)
        return x, y, future.wait(), a, b

    matched(run)


@on_ranks(2)
def test_from_one_to_another() -> None:
    def run(device: Device) -> Any:
        rank = dist.get_rank()
        x, y = given(device, 3), torch.zeros(3, device=device)
        dist.send(x, 1) if rank == 0 else dist.recv(y, 0)
        z = torch.zeros(3, device=device)
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, z, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return y, z

    matched(run)


@on_ranks(2)
def test_objects_sub_groups_and_barriers() -> None:
    rank, device = dist.get_rank(), lazytpu.device()
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": 0}, {"rank": 1}]
    named = [{"x": rank}]
    dist.broadcast_object_list(named, src=1)
    assert named == [{"x": 1}]
    groups = [dist.new_group([0]), dist.new_group([1])]
    x = torch.ones(2, device=device) * (rank + 1)
    dist.all_reduce(x, group=groups[rank])
    assert x.tolist() == [rank + 1.0] * 2
    both = dist.new_group([0, 1])
    dist.all_reduce(x, group=both)
    assert x.tolist() == [3.0, 3.0]
    dist.barrier()
    assert dist.get_backend() == "lazytpu" or "lazytpu" in str(dist.get_backend_config())


@on_ranks(2)
def test_functional_collectives_and_their_gradients() -> None:
    from torch.distributed import _functional_collectives as collectives

    def with_gradient(call: Callable[[torch.Tensor], torch.Tensor], device: Device) -> Any:
        x = given(device, 4, 2).requires_grad_()
        out = call(x)
        (out * out).sum().backward()
        return out, x.grad

    def run(device: Device) -> Any:
        group, x = dist.group.WORLD, given(device, 4, 2)
        return (
            collectives.all_reduce(x, "sum", group) + 1,
            collectives.all_gather_tensor(x, 1, group) + 1,
            collectives.reduce_scatter_tensor(x, "sum", 1, group) + 1,
            collectives.broadcast(x, 1, group) + 1,
            with_gradient(lambda x: collectives.all_gather_tensor_autograd(x, 0, group), device),
            with_gradient(lambda x: collectives.reduce_scatter_tensor_autograd(x, "sum", 0, group), device),
            with_gradient(lambda x: collectives.all_to_all_single_autograd(x, [2, 2], [2, 2], group), device),
        )

    matched(run)


@on_ranks(2)
def test_functional_sends_have_arrived_when_they_are_waited_for() -> None:
    functional, name, other = torch.ops._c10d_functional, dist.group.WORLD.group_name, 1 - dist.get_rank()

    def run(device: Device) -> list[torch.Tensor]:
        received, sent = torch.zeros(3, device=device), given(device, 3)
        for work in (functional.irecv(received, other, 0, name), functional.isend(sent, other, 0, name)):
            functional.wait_tensor(work)
        both = [torch.zeros(2, device=device), given(device, 2)]
        for work in functional.batch_p2p_ops(["irecv", "isend"], [other, other], [0, 0], both, name):
            functional.wait_tensor(work)
        return [received + 1, *both]

    matched(run)


@on_ranks(2)
def test_a_collective_runs_where_nobody_needs_its_result() -> None:
    x = torch.ones(3, device=lazytpu.device()) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        assert x.tolist() == [3.0, 3.0, 3.0]
    del x
    lazytpu.mark_step()
    y = torch.ones(1, device=lazytpu.device())
    dist.all_reduce(y)
    assert y.item() == 2.0


@on_ranks(2)
def test_what_xla_has_put_into_another_order_on_a_rank_runs_in_pieces() -> None:
    pattern, pieces = agreement._EXCHANGE, lazytpu.metrics.counter("in_pieces")
    agreement._EXCHANGE = re.compile("HloModule") if dist.get_rank() else pattern
    try:
        x, y = (torch.ones(5, device=lazytpu.device()) * (dist.get_rank() + i) for i in range(2))
        dist.all_reduce(x)
        dist.all_reduce(y, ReduceOp.MAX)
        assert (x - 2 * y).tolist() == [-3.0] * 5
    finally:
        agreement._EXCHANGE = pattern
    assert lazytpu.metrics.counter("in_pieces") == pieces + 1


@on_ranks(2)
def test_a_group_of_another_backend_is_refused() -> None:
    gloo = dist.new_group([0, 1], backend="gloo")
    try:
        torch.ops._c10d_functional.all_reduce(torch.ones(2, device=lazytpu.device()), "sum", gloo.group_name)
    except lazytpu.errors.LazyTPUError as error:
        assert "in a group of another backend" in str(error)
    else:
        raise AssertionError("it was not refused")
