"""Other processes: forked children must not use the device, workers feed it, queues carry its tensors."""

from __future__ import annotations

import os
import pickle
import sys
import textwrap
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lazytpu
from tests.support.processes import run_code

JAX_WARNS_OF_FORKS = pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")

# What a forked child tries; each has to raise at once.
USES = """
    torch.ones(2, device="tpu")
    torch.rand(2, device="tpu")
    torch.tensor([1.0], device="tpu")
    torch.ones(2).to("tpu")
    x + 1
    x * pending
    x.add_(1)
    x.fill_(1)
    x.copy_(torch.ones(2))
    x[0] + 1
    x.sum().item()
    x.tolist()
    x.cpu()
    print(x)
    pending.cpu()
    torch.equal(x, x)
    (w * 2).sum().backward()
    net(x)
    torch.optim.SGD([w], 0.1).step()
    lazytpu.mark_step()
    lazytpu.wait()
    torch.tpu.synchronize()
    torch.accelerator.synchronize()
    torch.save(x, io.BytesIO())
    copy.deepcopy(net)
    pickle.dumps(x)
    list(lazytpu.DeviceLoader([torch.ones(2)]))
    torch.load(io.BytesIO(saved))
    compiled(x)
"""


@needs_fork
def test_every_use_in_a_forked_child_raises_at_once():
    done = run_code(
        f"""
        import copy, io, os, pickle, signal, threading, warnings, torch, lazytpu
        from lazytpu.errors import ForkError
        warnings.simplefilter("ignore")
        x = torch.ones(2, device="tpu")
        w = torch.nn.Parameter(torch.ones(2, device="tpu")); w.grad = torch.ones(2, device="tpu")
        net = torch.nn.Linear(2, 2).to("tpu")
        f = io.BytesIO(); torch.save(x, f); saved = f.getvalue()
        net(x).sum().backward()
        compiled = lazytpu.compile(lambda x: x * 2)
        for _ in range(4):
            compiled(x)
        lazytpu.wait()
        pending = x * 3
        # another thread is in the middle of recording
        held, release = threading.Event(), threading.Event()
        def hold():
            with lazytpu.tracing.record.lock:
                held.set(); release.wait()
        thread = threading.Thread(target=hold); thread.start(); held.wait()
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            for use in {textwrap.dedent(USES).strip().splitlines()!r}:
                try:
                    eval(use)
                    print("no error:", use)
                except ForkError as error:
                    text = str(error)
                except BaseException as error:
                    print(type(error), error, use)
            print(text, flush=True)
            os._exit(0)
        release.set(); thread.join()
        print(os.waitpid(pid, 0)[1], pending.tolist(), (x + 1).tolist())
        """,
        loaded=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "the device cannot be used in a forked child process", done.stdout + done.stderr
    assert lines[1].startswith("  with  process ") and lines[2].startswith("  fix   keep to the CPU there")
    assert lines[3] == "0 [3.0, 3.0] [2.0, 2.0]"  # the parent goes on


@needs_fork
@JAX_WARNS_OF_FORKS
def test_torch_knows_a_forked_child(device):
    torch.ones(1, device=device).item()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        torch.manual_seed(1)  # seeds every device, and must not fail
        os.write(writer, b"yes" if torch.tpu._is_in_bad_fork() else b"no")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0 and os.read(reader, 3) == b"yes"
    assert not torch.tpu._is_in_bad_fork()


# --- DataLoader ---------------------------------------------------------------------------------------------

DATA = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))


@JAX_WARNS_OF_FORKS
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(device, workers, pin_memory):
    loader = DataLoader(DATA, batch_size=4, num_workers=workers, pin_memory=pin_memory)
    seen = []
    for x, y in loader:
        assert x.device.type == "cpu" and x.is_pinned() == pin_memory
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        seen += (x.sum(1) * y).tolist()
    assert seen == [(4 * i + 1) * i for i in range(10)]


def test_data_loader_with_spawned_workers(device):
    loader = DataLoader(DATA, batch_size=5, num_workers=1, multiprocessing_context="spawn")
    assert [x.to(device).sum().item() for x, _ in loader] == [45, 145]


class OnDevice(Dataset):
    def __init__(self) -> None:
        self.data = torch.ones(4, device="tpu")

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.data[index] * 2


@needs_fork
@JAX_WARNS_OF_FORKS
def test_a_worker_that_uses_the_device_says_so():
    torch.ones(1, device="tpu").item()
    with pytest.raises(lazytpu.errors.ForkError) as caught:
        list(DataLoader(OnDevice(), num_workers=1, multiprocessing_context="fork"))
    assert "Caught ForkError in DataLoader worker process 0" in str(caught.value)
    assert "keep to the CPU there" in str(caught.value)
    assert [x.tolist() for x in DataLoader(OnDevice(), batch_size=2)] == [[2, 2], [2, 2]]


def test_pin_memory_is_a_copy(device):
    x = torch.ones(2)
    pinned = x.pin_memory()
    pinned.zero_()
    assert x.tolist() == [1, 1] and pinned.device.type == "cpu"
    assert pinned.is_pinned() and pinned[1:].is_pinned() and not x.is_pinned() and not pinned.clone().is_pinned()
    assert pinned.pin_memory() is pinned  # as FSDP relies on: it keeps a tensor and what pinning it gave
    with pytest.raises(RuntimeError, match="cannot pin 'torch.tpu.FloatTensor'"):
        x.to(device).pin_memory()
    assert not x.to(device).is_pinned()


# --- queues -------------------------------------------------------------------------------------------------


def double(given, results, done):
    tensor, parameter = given.get()
    assert isinstance(parameter, nn.Parameter) and parameter.is_tpu
    results.put((str(tensor.device), (tensor * 2 + parameter.detach()).cpu()))
    results.put(nn.Parameter(tensor + 1))
    done.wait(60)  # what is shared lives until then


def test_a_queue_carries_device_tensors_to_a_spawned_process(device):
    context = mp.get_context("spawn")
    given, results, done = context.Queue(), context.Queue(), context.Event()
    process = context.Process(target=double, args=(given, results, done))
    process.start()
    given.put((torch.arange(3.0, device=device), nn.Parameter(torch.ones(3, device=device))))
    where, doubled = results.get(timeout=240)
    assert where == "tpu:0" and doubled.tolist() == [1, 3, 5]
    back = results.get(timeout=60)
    assert isinstance(back, nn.Parameter) and back.is_tpu and back.tolist() == [1, 2, 3]
    done.set()
    process.join(60)
    assert process.exitcode == 0


def test_a_queue_refuses_what_is_no_leaf(device):
    x = torch.ones(2, device=device, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"):
        ForkingPickler.dumps(x)
    got = pickle.loads(ForkingPickler.dumps(x.detach()))
    assert got.is_tpu and got.tolist() == [2, 2]


def test_share_memory(device):
    x = torch.ones(2, device=device)
    assert x.share_memory_() is x and x.is_shared()  # as on other accelerators
    assert nn.Linear(1, 1, device=device).share_memory() is not None


def test_subprocess_is_no_forked_child(device):
    code = "import torch, lazytpu; print(torch.ones(2, device='tpu').sum().item())"
    assert run_code(code, loaded=True).stdout == "2.0\n"
    assert "tests.support.processes" in sys.modules


def test_a_backward_pass_before_the_import_is_named():
    done = run_code(
        """
        import torch
        torch.ones(2, requires_grad=True).sum().backward()
        import lazytpu
        torch.ones(2, device="tpu", requires_grad=True).sum().backward()
        """
    )
    assert done.returncode != 0
    assert "BackwardError: torch's autograd does not know the device" in done.stderr
    assert "import lazytpu before the first backward pass" in done.stderr
