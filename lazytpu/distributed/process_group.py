"""A process group whose collectives on device tensors are recorded; those on CPU tensors are Gloo's.

The methods are those that ``torch.distributed`` and its C++ parts call, of torch 2.10 and later: what 2.13 has renamed
has both names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.utils._pytree import tree_leaves

from lazytpu.dispatch import exchange
from lazytpu.dispatch.collectives import groups
from lazytpu.dispatch.exchange import Group, group_of
from lazytpu.distributed import ddp, unused_parameters
from lazytpu.distributed.arguments import (
    Options,
    Tensors,
    listed,
    on_device,
    padded,
    passed,
    read,
    reduction_of,
    write,
    write_parts,
)
from lazytpu.distributed.work import Awaited, Patient, done
from lazytpu.ir.op_schema import Arg
from lazytpu.tracing.step import wait

Tensor = torch.Tensor
Work: TypeAlias = Arg
"""A ``torch.distributed.Work``: torch's stubs do not say what Gloo's methods return."""


class LazyProcessGroup(dist.ProcessGroup):
    """Processes of the backend ``lazytpu``.

    Args:
        store: through which the members find each other.
        ranks: the members in the whole world; empty for all.
        place: of this process among them.
        size: how many there are.
        world: how many processes there are in all.
        timeout: of what goes through the host.
    """

    def __init__(
        self, store: Store, ranks: Sequence[int], place: int, size: int, world: int, timeout: timedelta
    ) -> None:
        super().__init__(place, size)  # type: ignore[call-arg] # the base of Python's groups
        self._gloo: Arg = dist.ProcessGroupGloo(PrefixStore("gloo", store), place, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # whose name torch 2.15 records collectives under
        self.members: Group = group_of(ranks or range(size), place, world, self._numbers_of_all)
        self._store = store

    @property
    def _host(self) -> Arg:
        """Gloo, for a collective that starts now."""
        exchange.settle()
        return self._gloo

    def _numbers_of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.members.size)]
        self._gloo.allgather([found], [own]).wait()
        return [x.tolist() for x in found]

    def _through_host(self, call: Callable[..., Work], outputs: Tensors, inputs: Tensors, opts: Options) -> Work:
        """Do a collective on copies on the host."""
        given = [x.cpu() for x in inputs]
        found = given if outputs is inputs else [[torch.empty_like(x, device="cpu") for x in xs] for xs in outputs]
        call(*([given] if outputs is inputs else [found, given]), *passed(opts)).wait()
        for target, x in zip(tree_leaves(outputs), tree_leaves(found), strict=True):
            write(target, x)
        return done(outputs)

    def _root(self, opts: Options) -> int:
        root: int = opts if isinstance(opts, int) else 0 if opts is None else opts.rootRank
        if root not in range(self.members.size):
            raise RuntimeError(f"invalid root rank: {root}")  # as Gloo says
        return root

    def _check_whole(self, what: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self.members.size:
            sizes = f"{list(whole.shape)} is not {self.members.size} times {list(part.shape)}"
            raise RuntimeError(f"{what} among {self.members.size} processes: {sizes}")

    def _check_parts(self, what: str, parts: Sequence[Tensor], own: Tensor, *, even: bool = False) -> None:
        """Refuse a list that has not a tensor for each member, or not one as large as this member's own."""
        sizes, n = [x.numel() for x in parts], own.numel()
        if len(sizes) != self.members.size or sizes[self.members.place] != n or (even and {*sizes} != {n}):
            found = f"tensors of {sizes} numbers for {n} of rank {self.members.place}"
            raise RuntimeError(f"{what} among {self.members.size} processes: {found}")

    # --- what it is ---------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "lazytpu"

    def _set_group_name(self, name: Arg) -> None:
        super()._set_group_name(name)
        groups[name] = self.members

    def _get_backend(self, device: torch.device) -> Arg:
        """Return Gloo for the CPU, and what says what this group can do for the device."""
        return self._gloo if torch.device(device).type == "cpu" else self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def get_group_store(self) -> Store:
        return self._store

    def shutdown(self) -> None:
        exchange.settle()
        self._forget()

    def abort(self) -> None:
        self._forget()

    def _forget(self) -> None:
        for name in [name for name, members in groups.items() if members is self.members]:
            del groups[name]

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: collectives of one graph are XLA's to join."""

    def _end_coalescing(self, device: torch.device) -> Work:
        return done([])

    def _wait_for_pending_works(self) -> None:
        """Do nothing: what is recorded is in order."""

    # --- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Options = None, timeout: Options = None) -> Work:
        tensors = listed(tensors)
        if not on_device(tensors):
            if unused_parameters.is_map(tensors[0]):
                return Patient(self._gloo.allreduce(tensors, *passed(opts)), tensors)
            return self._host.allreduce(tensors, *passed(opts))
        reduction = reduction_of(opts)
        for x in tensors:
            write(x, exchange.all_reduce(read(x), reduction, self.members))
        return done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Options = None) -> Work:
        if not on_device(tensors):
            return self._host.allreduce_coalesced(tensors, *passed(opts))
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Options = None, op: Options = None, timeout: Options = None) -> Work:
        tensors = listed(tensors)
        if not on_device(tensors):
            return self._host.reduce(tensors, *passed(opts))
        reduction, root = reduction_of(op if isinstance(opts, int) else opts), self._root(opts)
        for x in tensors:
            found = exchange.all_reduce(read(x), reduction, self.members)
            if self.members.place == root:
                write(x, found)
        return done(tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        if not on_device([output, input]):
            return _named(self._host, "reduce_scatter_single", "_reduce_scatter_base")(output, input, *passed(opts))
        self._check_whole("reduce_scatter", input, output)
        rows = read(input).reshape(self.members.size, -1)
        write(output, exchange.reduce_scatter(rows, reduction_of(opts), self.members).reshape(output.shape))
        return done([output])

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, opts: Options = None, timeout: Options = None) -> Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if not on_device(outputs):
            return self._host.reduce_scatter(outputs, inputs, *passed(opts))
        for output, parts in zip(outputs, inputs, strict=True):
            self._check_parts("reduce_scatter", parts, output)
            most = max(x.numel() for x in parts)
            rows = torch.stack([padded(x, most) for x in parts])
            found = exchange.reduce_scatter(rows, reduction_of(opts), self.members)
            write(output, found.reshape(-1)[: output.numel()].reshape(output.shape))
        return done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        for output, x in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, x, opts).wait()
        return done(outputs)

    # --- gathering ----------------------------------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        if not on_device([output, input]):
            return _named(self._host, "all_gather_single", "_allgather_base")(output, input, *passed(opts))
        self._check_whole("all_gather", output, input)
        write(output, exchange.all_gather(read(input), self.members).reshape(output.shape))
        return done([output])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> Work:
        for output, x in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, x, opts).wait()
        return done(outputs)

    def allgather(self, outputs: Tensors, inputs: Tensors, opts: Options = None, timeout: Options = None) -> Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if not on_device(inputs):
            return self._host.allgather(outputs, inputs, *passed(opts))
        if ddp.through_host:
            return self._through_host(self._host.allgather, outputs, inputs, opts)
        for parts, x in zip(outputs, inputs, strict=True):
            self._check_parts("all_gather", parts, x)
            most = max(part.numel() for part in parts)
            if all(part.numel() == most for part in parts):
                write_parts(parts, exchange.all_gather(read(x)[None], self.members))
                continue
            rows = exchange.all_gather(padded(x, most)[None], self.members)
            for part, row in zip(parts, rows, strict=True):
                write(part, row[: part.numel()].reshape(part.shape))
        return done(outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> Work:
        if not on_device(inputs):
            return self._host.allgather_coalesced(outputs, inputs, *passed(opts))
        for i, x in enumerate(inputs):
            of_all = [parts[i] for parts in outputs]
            self._check_parts("all_gather", of_all, x, even=True)
            write_parts(of_all, exchange.all_gather(read(x)[None], self.members))
        return done(outputs)

    def gather(self, outputs: Tensors, inputs: Tensors, opts: Options = None, timeout: Options = None) -> Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = ([outputs] if outputs else []), [inputs]
        if not on_device(inputs):
            return self._host.gather(outputs, inputs, *passed(opts))
        here = self.members.place == self._root(opts)
        for i, x in enumerate(inputs):
            if here:
                self._check_parts("gather", outputs[i], x, even=True)
            found = exchange.all_gather(read(x)[None], self.members)
            if here:
                write_parts(outputs[i], found)
        return done(outputs)

    # --- distributing -------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Options = None, timeout: Options = None) -> Work:
        tensors = listed(tensors)
        if not on_device(tensors):
            return self._host.broadcast(tensors, *passed(opts))
        if ddp.through_host:
            return self._through_host(self._host.broadcast, tensors, tensors, opts)
        for x in tensors:
            write(x, exchange.broadcast(read(x), self._root(opts), self.members))
        return done(tensors)

    def scatter(self, outputs: Tensors, inputs: Tensors, opts: Options = None, timeout: Options = None) -> Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], ([inputs] if inputs else [])
        if not on_device(outputs):
            return self._host.scatter(outputs, inputs, *passed(opts))
        root = self._root(opts)
        for i, output in enumerate(outputs):
            if self.members.place == root:
                self._check_parts("scatter", inputs[i], output, even=True)
                rows = torch.cat([read(x).reshape(1, *output.shape) for x in inputs[i]])
            else:
                rows = output.new_zeros((self.members.size, *output.shape))
            write(output, exchange.scatter(rows, root, self.members)[0])
        return done(outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Options = None,
        timeout: Options = None,
    ) -> Work:
        if not on_device([output, input]):
            return _named(self._host, "all_to_all_single", "alltoall_base")(
                output, input, output_split_sizes, input_split_sizes, *passed(opts)
            )
        n = self.members.size
        if not output_split_sizes and not input_split_sizes:
            if output.numel() != input.numel():
                raise RuntimeError(f"all_to_all: {list(output.shape)} cannot hold {list(input.shape)}")
            found = exchange.all_to_all(read(input), self.members)
        else:
            out_rows = output_split_sizes or [len(output) // n] * n
            in_rows = input_split_sizes or [len(input) // n] * n
            found = exchange.all_to_all_in_parts(read(input), out_rows, in_rows, self.members)
        write(output, found.reshape(output.shape))
        return done([output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> Work:
        if not on_device(inputs):
            return self._host.alltoall(outputs, inputs, *passed(opts))
        self._check_parts("all_to_all", outputs, inputs[self.members.place])
        out_rows, in_rows = [[x.numel() for x in xs] for xs in (outputs, inputs)]
        flat = torch.cat([read(x).reshape(-1) for x in inputs])
        found = exchange.all_to_all_in_parts(flat, out_rows, in_rows, self.members)
        for x, part in zip(outputs, found.split(out_rows), strict=True):
            write(x, part.reshape(x.shape))
        return done(outputs)

    # --- from one to another, through the host ------------------------------------------------------------------------

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        return self._host.send([x.detach().cpu().contiguous() for x in listed(tensors)], dstRank, tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        tensors = listed(tensors)
        if not on_device(tensors):
            return self._host.recv(tensors, srcRank, tag)
        hosts = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in tensors]
        return _received(self._host.recv(hosts, srcRank, tag), tensors, hosts)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        tensors = listed(tensors)
        if not on_device(tensors):
            return self._host.recv_anysource(tensors, tag)
        hosts = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in tensors]
        return _received(self._host.recv_anysource(hosts, tag), tensors, hosts)

    def barrier(self, opts: Options = None, timeout: Options = None) -> Work:
        """Run what is pending, wait for it and for the other members."""
        wait()
        return self._host.barrier()

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _received(work: Work, tensors: list[Tensor], hosts: list[Tensor]) -> Work:
    def finish() -> None:
        for x, host in zip(tensors, hosts, strict=True):
            write(x, host)

    return Awaited([work], finish, tensors)


def _named(of: object, *names: str) -> Arg:
    """Return the method of the first of several names that there is."""
    return next(getattr(of, name) for name in names if hasattr(of, name))
