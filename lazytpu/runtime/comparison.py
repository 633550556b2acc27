"""Have ranks compare what has to be the same on all of them, and say which of them differ."""

from __future__ import annotations

import zlib
from collections import Counter
from operator import attrgetter

import jax
import numpy as np

from lazytpu.errors import WorldError
from lazytpu.location import site
from lazytpu.runtime import world
from lazytpu.runtime.ranks import named

_inputs: Counter[tuple[int, ...]] = Counter()  # how many tensors each set of ranks has compared


def name_of(members: tuple[int, ...]) -> str:
    """Return a short name of a set of ranks, alike on all of them."""
    return f"{len(members)}:{zlib.crc32(repr(members).encode()):x}"


def by_rank(texts: dict[int, str]) -> str:
    """Return one line for each thing, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    return "\n        ".join(f"{named(who)}: {text}" for text, who in ranks.items())


def compare_input(host: np.typing.NDArray[np.generic], where: jax.sharding.Sharding) -> None:
    """Have ranks compare what each of them takes for the whole contents of a tensor; nobody waits for that.

    Where they differ, the next program raises.
    """
    members = tuple(sorted({*map(attrgetter("process_index"), where.device_set)}))
    _inputs[members] += 1
    tag = f"input.{name_of(members)}.{_inputs[members]}"
    contents = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    digest = f"{zlib.crc32(contents.data):x}:{host.dtype}[{'*'.join(map(str, host.shape))}]"
    world.ranks().compare(tag, len(members), digest, str(site.line_of_read()))


def check_inputs() -> None:
    """Raise where ranks were found to differ in what `compare_input` was given.

    Raises:
        WorldError: names the ranks.
    """
    others = world.ranks()
    if others.differing:
        tag, digests = others.differing.popitem()
        types = {rank: digest.partition(":")[2].replace("*", ", ") for rank, digest in digests.items()}
        raise WorldError(
            "ranks gave different contents for a tensor that has to be the same on all of them",
            at=others.line_compared(tag),
            given=by_rank(types) if len(set(types.values())) > 1 else _odd_ones(digests),
            fix="use the same seed and the same data on all ranks, or DeviceLoader(parts=True) for parts of a batch",
        )


def _odd_ones(digests: dict[int, str]) -> str:
    """Return which ranks have other contents than most."""
    most, _ = Counter(digests.values()).most_common(1)[0]
    others = [rank for rank, digest in sorted(digests.items()) if digest != most]
    return f"other contents on {named(others)} than on {named([r for r in sorted(digests) if digests[r] == most])}"
