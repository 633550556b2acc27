"""DeviceLoader: order and contents, steps, overlap, errors, and that nothing ever hangs."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lazytpu
from tests.support.processes import run_code

DATA = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))
Pair = namedtuple("Pair", "left right")


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "lazytpu.DeviceLoader"]


def wait_for(condition) -> None:
    """Waits until a condition holds, for at most ten seconds."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    wait_for(lambda: threads() == [])


def test_batches_arrive_in_order_and_whole():
    loader = lazytpu.DeviceLoader(DataLoader(DATA, batch_size=3))
    assert len(loader) == 4
    for _ in range(2):  # a loader is used again each epoch
        batches = list(loader)
        assert all(x.is_tpu and y.is_tpu for x, y in batches)
        assert torch.cat([x for x, _ in batches]).cpu().equal(DATA.tensors[0])
        assert [y.tolist() for _, y in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_a_step_ends_with_its_batch():
    steps = lazytpu.metrics.counter("step")
    results, counts = [], []
    for x, _ in lazytpu.DeviceLoader(DataLoader(DATA, batch_size=5)):
        results.append(x.sum() * 2)
        counts.append((lazytpu.metrics.counter("step") - steps, lazytpu.metrics.counter("execute")))
    assert [n for n, _ in counts] == [0, 1] and lazytpu.metrics.counter("step") - steps == 2
    assert counts[1][1] == counts[0][1] + 1  # the first batch ran when the second was asked for
    executed = lazytpu.metrics.counter("execute")
    assert [r.item() for r in results] == [90, 290] and lazytpu.metrics.counter("execute") == executed


NESTS = {
    "tensor": lambda d: torch.ones(2, device=d),
    "tuple": lambda d: (torch.ones(1, device=d), torch.zeros(1, device=d)),
    "list": lambda d: [torch.ones(1, device=d), [torch.zeros(1, device=d)]],
    "dict": lambda d: {"x": torch.ones(1, device=d), "deep": {"y": (torch.zeros(2, device=d),)}},
    "ordered": lambda d: OrderedDict(a=torch.ones(1, device=d)),
    "namedtuple": lambda d: Pair(torch.ones(1, device=d), 3),
    "mixed": lambda d: {"x": torch.ones(1, device=d), "name": "text", "n": 3, "none": None},
    "nothing": lambda d: "no tensor",
}


@pytest.mark.parametrize("nest", NESTS)
def test_any_nest(nest):
    (got,) = lazytpu.DeviceLoader([NESTS[nest]("cpu")])
    expected = NESTS[nest]("tpu")
    assert type(got) is type(expected)
    flat_got, spec_got = torch.utils._pytree.tree_flatten(got)
    flat_expected, spec_expected = torch.utils._pytree.tree_flatten(expected)
    assert spec_got == spec_expected
    for g, e in zip(flat_got, flat_expected, strict=True):
        if isinstance(e, torch.Tensor):
            assert g.is_tpu and torch.equal(g, e)
        else:
            assert g == e


class Record:
    """A batch that is no pytree but can be moved, as many libraries have."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Record(self.x.to(device))


def test_what_can_move_itself():
    packed = pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    (got, record), label = next(iter(lazytpu.DeviceLoader([((packed, Record(torch.ones(1))), torch.ones(1))])))
    assert isinstance(got, PackedSequence) and got.data.is_tpu and got.batch_sizes.device.type == "cpu"
    assert record.x.is_tpu and label.is_tpu


def test_other_device():
    (got,) = lazytpu.DeviceLoader([torch.ones(1)], device="cpu")
    assert got.device.type == "cpu"


def test_the_next_batch_is_on_the_device_while_this_one_is_used():
    asked = []

    def source():
        for i in range(6):
            asked.append(i)
            yield torch.full((1,), float(i))

    batches = iter(lazytpu.DeviceLoader(source(), prefetch=2))
    assert next(batches).item() == 0
    wait_for(lambda: asked == [0, 1, 2, 3])  # one in use, two in line, one waits for its place
    time.sleep(0.05)
    assert asked == [0, 1, 2, 3]
    assert [b.item() for b in batches] == [1, 2, 3, 4, 5]


def test_transfer_overlaps_with_the_work_on_a_batch():
    def slow():
        for i in range(5):
            time.sleep(0.1)
            yield torch.full((1,), float(i))

    start = time.monotonic()
    for _ in lazytpu.DeviceLoader(slow()):
        time.sleep(0.1)
    assert time.monotonic() - start < 0.9  # one after the other takes a second


def test_generators_have_no_length():
    loader = lazytpu.DeviceLoader(torch.ones(1) for _ in range(3))
    with pytest.raises(TypeError, match="the loader, a generator, has no length"):
        len(loader)
    assert sum(b.item() for b in loader) == 3 and list(loader) == []


@pytest.mark.parametrize("prefetch", [0, -1])
def test_prefetch_is_positive(prefetch):
    with pytest.raises(ValueError, match=f"prefetch must be at least 1, not {prefetch}"):
        lazytpu.DeviceLoader([], prefetch=prefetch)


def test_empty():
    assert list(lazytpu.DeviceLoader([])) == []


# --- random numbers -----------------------------------------------------------------------------------------


def test_shuffling_is_that_of_the_loader_alone():
    def order(wrap):
        torch.manual_seed(7)
        torch.rand(3)
        seen = [y.tolist() for _, y in wrap(DataLoader(DATA, batch_size=3, shuffle=True))]
        return seen, torch.rand(1).item()

    assert order(lazytpu.DeviceLoader) == order(lambda loader: loader)


# --- errors -------------------------------------------------------------------------------------------------


class Broken(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3:
            raise KeyError("sample 3 is broken")
        return torch.tensor(index)


def test_an_error_of_the_loader_arrives_with_its_traceback():
    seen = []
    with pytest.raises(KeyError, match="sample 3 is broken") as caught:
        for x in lazytpu.DeviceLoader(DataLoader(Broken(), batch_size=2)):
            seen.append(x.tolist())
    assert seen == [[0, 1]]
    assert "__getitem__" in [entry.name for entry in caught.traceback]


@pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning")
def test_an_error_of_a_worker_arrives_with_its_traceback():
    with pytest.raises(KeyError) as caught:
        list(lazytpu.DeviceLoader(DataLoader(Broken(), batch_size=2, num_workers=1)))
    assert "Caught KeyError in DataLoader worker process 0" in str(caught.value)
    assert "sample 3 is broken" in str(caught.value) and "__getitem__" in str(caught.value)


def test_an_error_of_the_transfer_arrives():
    opaque = torch.eye(2).to_mkldnn()
    with pytest.raises(NotImplementedError):
        list(lazytpu.DeviceLoader([torch.ones(1), opaque]))


def test_after_an_error_the_pass_is_over():
    batches = iter(lazytpu.DeviceLoader(DataLoader(Broken(), batch_size=6)))
    with pytest.raises(KeyError):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_stop_iteration_inside_a_dataset_is_an_end_not_a_hang():
    class Short(IterableDataset):
        def __iter__(self):
            yield torch.ones(1)

    assert len(list(lazytpu.DeviceLoader(DataLoader(Short())))) == 1


# --- leaving early ------------------------------------------------------------------------------------------


def endless():
    while True:
        yield torch.ones(1)


def test_break_stops_the_thread():
    for _ in lazytpu.DeviceLoader(endless()):
        break
    gc.collect()
    wait_for(lambda: threads() == [])


def test_a_forgotten_iterator_stops_its_thread():
    batches = iter(lazytpu.DeviceLoader(endless()))
    next(batches)
    assert threads() == ["lazytpu.DeviceLoader"]
    del batches
    gc.collect()
    wait_for(lambda: threads() == [])


def test_an_exception_in_the_loop_stops_the_thread():
    with pytest.raises(ZeroDivisionError):
        for _ in lazytpu.DeviceLoader(endless()):
            raise ZeroDivisionError
    gc.collect()
    wait_for(lambda: threads() == [])


def test_no_thread_before_the_first_batch():
    batches = iter(lazytpu.DeviceLoader(endless()))
    assert threads() == []
    del batches


@pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning")
def test_break_and_start_again_with_persistent_workers():
    loader = lazytpu.DeviceLoader(DataLoader(DATA, batch_size=2, num_workers=2, persistent_workers=True))
    for _ in range(3):
        for _, y in loader:
            assert y.tolist() == [0, 1]
            break
    assert [y.tolist() for _, y in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_two_passes_at_once():
    loader = lazytpu.DeviceLoader(DataLoader(DATA, batch_size=5))
    pairs = [(a.tolist(), b.tolist()) for _, a in loader for _, b in loader]
    assert len(pairs) == 4 and pairs[1] == ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])


@pytest.mark.parametrize("leave", ["", "sys.exit(0)"])
def test_the_process_ends_while_batches_arrive(leave):
    done = run_code(
        f"""
        import sys, torch, lazytpu
        def endless():
            while True:
                yield torch.ones(1 << 20)
        batches = iter(lazytpu.DeviceLoader(endless()))
        print(next(batches).sum().item())
        {leave}
        """,
        loaded=True,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("1048576.0\n", "", 0)


# --- progress -----------------------------------------------------------------------------------------------


def test_progress(capsys):
    for kind in (DataLoader(DATA, batch_size=3), (torch.ones(1) for _ in range(4))):
        loader = lazytpu.DeviceLoader(kind, progress=True)
        assert sum(1 for _ in loader) == 4
    assert "batches" in capsys.readouterr().out
    for _ in lazytpu.DeviceLoader(endless(), progress=True):
        break
    gc.collect()


def test_progress_needs_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ModuleNotFoundError, match="pip install rich"):
        lazytpu.DeviceLoader([], progress=True)


# --- a model trains with it ---------------------------------------------------------------------------------


def test_training_with_it_is_training_without_it():
    def train(device, wrap):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        losses = []
        for _ in range(3):
            for x, y in wrap(DataLoader(DATA, batch_size=5)):
                loss = torch.nn.functional.mse_loss(model(x).squeeze(1), y.float())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return torch.stack(losses).cpu()

    compiled = lazytpu.metrics.counter("compile")
    got = train("tpu", lazytpu.DeviceLoader)
    torch.testing.assert_close(got, train("cpu", lambda loader: loader), rtol=1e-4, atol=1e-5)
    # the first step makes momentum buffers, the others repeat one graph; the last stacks the losses
    assert lazytpu.metrics.counter("compile") - compiled <= 4
