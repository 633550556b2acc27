"""``torch_xla.distributed.fsdp.state_dict_utils``: whole states from the files of processes, of which there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from glob import glob
from pathlib import Path

import torch

from lazytpu.compat import names
from lazytpu.compat.torch_xla.distributed.fsdp.wrapper import Wrapper

__getattr__ = names.missing_from(__name__)
State = dict[str, torch.Tensor]


def consolidate_sharded_state_dicts(state_dict_list: Sequence[State], shard_metadata: Mapping[str, object]) -> State:
    """Return the state of the module inside.

    Args:
        state_dict_list: of each process, of which there is one: it has all of each tensor.
        shard_metadata: of ``get_shard_metadata()``.

    Raises:
        NotImplementedError: the states are those of several processes, which torch_xla itself has written.
    """
    if len(state_dict_list) != 1 or shard_metadata.get("world_size") != 1:
        raise NotImplementedError(
            f"{len(state_dict_list)} states of a world of {shard_metadata.get('world_size')}: "
            "consolidate what torch_xla has written with torch_xla"
        )
    return {name.replace(f"{Wrapper.inner_name}.", ""): x for name, x in state_dict_list[0].items()}


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str, ckpt_suffix: str = "*.pth", save_model: bool = True, save_path: str = ""
) -> tuple[State, str | None]:
    """Load the files of a model and return its whole state, which is also written.

    Args:
        ckpt_prefix, ckpt_suffix: of the files, each with ``{"model": state, "shard_metadata": metadata}``.
        save_model: whether to write the state.
        save_path: where; by default the prefix with ``_consolidated.pth``.

    Returns:
        The state, and where it was written, or None.

    Raises:
        FileNotFoundError: there is no such file.
        NotImplementedError: the files are those of several processes, which torch_xla itself has written.
    """
    target = Path(save_path or f"{ckpt_prefix}_consolidated.pth")
    paths = sorted(path for path in glob(ckpt_prefix + ckpt_suffix) if Path(path) != target)
    if not paths:
        raise FileNotFoundError(f"no file is named {ckpt_prefix}{ckpt_suffix}")
    found = [torch.load(path, map_location="cpu") for path in paths]
    whole = consolidate_sharded_state_dicts([x["model"] for x in found], found[0]["shard_metadata"])
    if save_model:
        torch.save({"model": whole}, target)
    return whole, str(target) if save_model else None
