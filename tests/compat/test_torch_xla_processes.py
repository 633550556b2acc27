"""Scripts of torch_xla in several processes, which exchange what they have."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from lazytpu import compat

compat.install("torch_xla")

import torch_xla  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.core.xla_model as xm  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.distributed.xla_multiprocessing as xmp  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.runtime as xr  # type: ignore[import-not-found]  # noqa: E402

PAIRS, ALONE = [[0, 1]], [[0], [1]]


def exchanges(index: int, folder: str) -> None:
    """Write down what a process of two gets."""
    x = (torch.arange(4.0) + 10 * index).to(torch_xla.device())
    net = torch.nn.Linear(2, 1, bias=False).to(torch_xla.device())
    torch.nn.init.constant_(net.weight, index + 1.0)
    xm.broadcast_master_param(net)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    net(x.reshape(2, 2)).sum().backward()
    xm.optimizer_step(optimizer)
    both = [x.clone(), x * 2]
    xm.all_reduce(xm.REDUCE_SUM, both, 0.5)
    found = {
        "places": [index, xr.global_ordinal(), xm.get_ordinal(), xr.process_index(), xr.local_ordinal()],
        "sizes": [xr.world_size(), xm.xrt_world_size(), xr.process_count(), xr.local_process_count()],
        "weight": net.weight.tolist(),
        "both": [y.tolist() for y in both],
        "most": xm.all_reduce(xm.REDUCE_MAX, x, groups=PAIRS).tolist(),
        "alone": xm.all_reduce(xm.REDUCE_SUM, x, groups=ALONE).tolist(),
        "gathered": xm.all_gather(x.reshape(2, 2), 1).tolist(),
        "scattered": xm.reduce_scatter(xm.REDUCE_SUM, x.reshape(2, 2), 1.0, 1, 2).tolist(),
        "exchanged": xm.all_to_all(x.reshape(2, 2), 1, 0, 2).tolist(),
        "moved": xm.collective_permute(x, [[0, 1]]).tolist(),
        "met": [payload.decode() for payload in xm.rendezvous("here", str(index).encode())],
        "total": xm.mesh_reduce("total", x, lambda every: sum(y.sum().item() for y in every)),
    }
    xm.do_on_ordinals(lambda: found.update(first=True), ordinals=(0,))
    Path(folder, f"{index}.json").write_text(json.dumps(found))


def test_two_processes_exchange_what_they_have(tmp_path: Path) -> None:
    xmp.spawn(exchanges, args=(str(tmp_path),), nprocs=2)
    found = [json.loads(Path(tmp_path, f"{index}.json").read_text()) for index in range(2)]
    assert [one["places"] for one in found] == [[0] * 5, [1] * 5]
    assert [one.pop("first", False) for one in found] == [True, False]
    assert found[0]["moved"] == [0.0] * 4 and found[1]["moved"] == [0.0, 1.0, 2.0, 3.0]
    assert found[0]["scattered"] == [[10.0], [14.0]] and found[1]["scattered"] == [[12.0], [16.0]]
    assert found[0]["exchanged"] == [[0.0], [2.0], [10.0], [12.0]]
    assert found[1]["exchanged"] == [[1.0], [3.0], [11.0], [13.0]]
    assert found[0]["alone"] == [0.0, 1.0, 2.0, 3.0] and found[1]["alone"] == [10.0, 11.0, 12.0, 13.0]
    for one in found:
        assert one["sizes"] == [2, 2, 2, 2] and one["met"] == ["0", "1"] and one["total"] == 52.0
        assert one["weight"] == [[-11.0, -13.0]]  # of the first process: 1 - (2 + 22) / 2, 1 - (4 + 24) / 2
        assert one["both"] == [[5.0, 6.0, 7.0, 8.0], [10.0, 12.0, 14.0, 16.0]]
        assert one["most"] == [10.0, 11.0, 12.0, 13.0]
        assert one["gathered"] == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]
