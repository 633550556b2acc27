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
from lazytpu.dispatch.exchange import Group, Reduction, group_of
from lazytpu.distributed import ddp, unused_parameters
from lazytpu.distributed.work import Awaited, Patient, done
from lazytpu.errors import LazyTPUError
from lazytpu.ir.op_schema import Arg
from lazytpu.tensors.tensor import LazyTensor
from lazytpu.tracing.step import wait

Tensor = torch.Tensor
Options: TypeAlias = Arg
"""torch's options of a collective, or None, or in their place a ``ReduceOp`` or the rank of a root."""
Work: TypeAlias = Arg
"""A ``torch.distributed.Work``: torch's stubs do not say what Gloo's methods return."""
Tensors: TypeAlias = Arg
"""One tensor, or a list of them; or such a list for each of several, as torch's older forms have it."""

_REDUCTIONS = {
    getattr(dist.ReduceOp, name): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


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
        call(*([given] if outputs is inputs else [found, given]), *_given(opts)).wait()
        for target, x in zip(tree_leaves(outputs), tree_leaves(found), strict=True):
            _write(target, x)
        return done(outputs)

    def _root(self, opts: Options) -> int:
        root: int = opts if isinstance(opts, int) else 0 if opts is None else opts.rootRank
        if root not in range(self.members.size):
            raise RuntimeError(f"invalid root rank: {root}")  # as Gloo says
        return root

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
        tensors = _listed(tensors)
        if not _on_device(tensors):
            if unused_parameters.is_map(tensors[0]):
                return Patient(self._gloo.allreduce(tensors, *_given(opts)), tensors)
            return self._host.allreduce(tensors, *_given(opts))
        reduction = _reduction(opts)
        for x in tensors:
            _write(x, exchange.all_reduce(_read(x), reduction, self.members))
        return done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Options = None) -> Work:
        if not _on_device(tensors):
            return self._host.allreduce_coalesced(tensors, *_given(opts))
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Options = None, op: Options = None, timeout: Options = None) -> Work:
        tensors = _listed(tensors)
        if not _on_device(tensors):
            return self._host.reduce(tensors, *_given(opts))
        reduction, root = _reduction(op if isinstance(opts, int) else opts), self._root(opts)
        for x in tensors:
            found = exchange.all_reduce(_read(x), reduction, self.members)
            if self.members.place == root:
                _write(x, found)
        return done(tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        if not _on_device([output, input]):
            return _named(self._host, "reduce_scatter_single", "_reduce_scatter_base")(output, input, *_given(opts))
        rows = _read(input).reshape(self.members.size, -1)
        _write(output, exchange.reduce_scatter(rows, _reduction(opts), self.members).reshape(output.shape))
        return done([output])

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, opts: Options = None, timeout: Options = None) -> Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if not _on_device(outputs):
            return self._host.reduce_scatter(outputs, inputs, *_given(opts))
        for output, parts in zip(outputs, inputs, strict=True):
            rows = torch.stack([_read(x).reshape(-1) for x in parts])
            _write(output, exchange.reduce_scatter(rows, _reduction(opts), self.members).reshape(output.shape))
        return done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        for output, x in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, x, opts).wait()
        return done(outputs)

    # --- gathering ----------------------------------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        if not _on_device([output, input]):
            return _named(self._host, "all_gather_single", "_allgather_base")(output, input, *_given(opts))
        _write(output, exchange.all_gather(_read(input), self.members).reshape(output.shape))
        return done([output])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> Work:
        for output, x in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, x, opts).wait()
        return done(outputs)

    def allgather(self, outputs: Tensors, inputs: Tensors, opts: Options = None, timeout: Options = None) -> Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if not _on_device(inputs):
            return self._host.allgather(outputs, inputs, *_given(opts))
        if ddp.through_host:
            return self._through_host(self._host.allgather, outputs, inputs, opts)
        for parts, x in zip(outputs, inputs, strict=True):
            _write_parts(parts, exchange.all_gather(_read(x)[None], self.members))
        return done(outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> Work:
        if not _on_device(inputs):
            return self._host.allgather_coalesced(outputs, inputs, *_given(opts))
        for i, x in enumerate(inputs):
            _write_parts([parts[i] for parts in outputs], exchange.all_gather(_read(x)[None], self.members))
        return done(outputs)

    def gather(self, outputs: Tensors, inputs: Tensors, opts: Options = None, timeout: Options = None) -> Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = ([outputs] if outputs else []), [inputs]
        if not _on_device(inputs):
            return self._host.gather(outputs, inputs, *_given(opts))
        here = self.members.place == self._root(opts)
        for i, x in enumerate(inputs):
            found = exchange.all_gather(_read(x)[None], self.members)
            if here:
                _write_parts(outputs[i], found)
        return done(outputs)

    # --- distributing -------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Options = None, timeout: Options = None) -> Work:
        tensors = _listed(tensors)
        if not _on_device(tensors):
            return self._host.broadcast(tensors, *_given(opts))
        if ddp.through_host:
            return self._through_host(self._host.broadcast, tensors, tensors, opts)
        for x in tensors:
            _write(x, exchange.broadcast(_read(x), self._root(opts), self.members))
        return done(tensors)

    def scatter(self, outputs: Tensors, inputs: Tensors, opts: Options = None, timeout: Options = None) -> Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], ([inputs] if inputs else [])
        if not _on_device(outputs):
            return self._host.scatter(outputs, inputs, *_given(opts))
        root = self._root(opts)
        for i, output in enumerate(outputs):
            if self.members.place == root:
                rows = torch.cat([_read(x).reshape(1, *output.shape) for x in inputs[i]])
            else:
                rows = output.new_zeros((self.members.size, *output.shape))
            _write(output, exchange.scatter(rows, root, self.members)[0])
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
        if not _on_device([output, input]):
            return _named(self._host, "all_to_all_single", "alltoall_base")(
                output, input, output_split_sizes, input_split_sizes, *_given(opts)
            )
        n = self.members.size
        if not output_split_sizes and not input_split_sizes:
            found = exchange.all_to_all(_read(input), self.members)
        else:
            out_rows = output_split_sizes or [len(output) // n] * n
            in_rows = input_split_sizes or [len(input) // n] * n
            found = exchange.all_to_all_in_parts(_read(input), out_rows, in_rows, self.members)
        _write(output, found.reshape(output.shape))
        return done([output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> Work:
        if not _on_device(inputs):
            return self._host.alltoall(outputs, inputs, *_given(opts))
        out_rows, in_rows = [[x.numel() for x in xs] for xs in (outputs, inputs)]
        flat = torch.cat([_read(x).reshape(-1) for x in inputs])
        found = exchange.all_to_all_in_parts(flat, out_rows, in_rows, self.members)
        for x, part in zip(outputs, found.split(out_rows), strict=True):
            _write(x, part.reshape(x.shape))
        return done(outputs)

    # --- from one to another, through the host ------------------------------------------------------------------------

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        return self._host.send([x.detach().cpu().contiguous() for x in _listed(tensors)], dstRank, tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        tensors = _listed(tensors)
        if not _on_device(tensors):
            return self._host.recv(tensors, srcRank, tag)
        hosts = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in tensors]
        return _received(self._host.recv(hosts, srcRank, tag), tensors, hosts)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        tensors = _listed(tensors)
        if not _on_device(tensors):
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
            _write(x, host)

    return Awaited([work], finish, tensors)


def _named(of: object, *names: str) -> Arg:
    """Return the method of the first of several names that there is."""
    return next(getattr(of, name) for name in names if hasattr(of, name))


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _given(opts: Options) -> list[Options]:
    return [] if opts is None else [opts]


def _on_device(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are on the device and not on the CPU.

    Raises:
        RuntimeError: some are, and some are not.
    """
    found = {x.device.type for x in tensors}
    if len(found) > 1:
        raise RuntimeError(f"a collective of tensors on {' and '.join(sorted(found))}")
    return found == {LazyTensor.device_type}


def _read(x: Tensor) -> Tensor:
    return x.detach()


def _write(target: Tensor, found: Tensor) -> None:
    """Copy, and leave the version of the target as it was: torch's collectives do."""
    target.data.copy_(found)


def _write_parts(targets: Sequence[Tensor], found: Tensor) -> None:
    for x, part in zip(targets, found.unbind(0), strict=True):
        _write(x, part.reshape(x.shape))


def _reduction(opts: Options) -> Reduction:
    op: Arg = opts if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)) else getattr(opts, "reduceOp", None)
    if op is None:
        return Reduction("sum")
    for known, name in _REDUCTIONS.items():
        if op == known:
            return Reduction(name)
    if op == dist.ReduceOp.PREMUL_SUM:
        return Reduction("sum", float(op.__getstate__()[1]))
    raise LazyTPUError(f"reductions of {op} are not supported")
