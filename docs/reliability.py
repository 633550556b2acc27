"""Write explanation/reliability.md from what the sweeps have recorded:  python docs/reliability.py

The sweeps put their results into `RECORD` with ``--record`` (tests/faults, tests/fuzz); the figures of the databases
are added by hand, from sweeps of a whole database.  Nothing else is on the page: what was not tried has no line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.resolve()
RECORD = DOCS / "_data/reliability.json"
PAGE = DOCS / "explanation/reliability.md"

HEAD = """\
# What was tried

What the project does to break the device, beside its tests, and what came of it when it was last tried. The sweeps
write this page ([how to run them](../how-to/run-the-sweeps.md)); it has figures that were seen, and no others.
"""

FAULTS = """\
## Faults

`python -m tests.faults` tries each of these. Nothing may crash, be lost or be wrong, and what raises has to say why.
"""

KNOWN = """\
## Known differences

Operators of torch's database that are known not to pass, and why. [Sharp edges](../sharp-edges.md) has what else
differs from the CPU.

```{known-table}
```
"""


def section(text: str, heads: tuple[str, ...], values: Iterator[tuple[object, ...]], after: str = "") -> str:
    """A section with a table; nothing where the table would be empty."""
    found = [heads, ("---",) * len(heads), *values]
    table = "".join("| " + " | ".join(map(str, row)) + " |\n" for row in found)
    return f"{text}\n{table}{after}" if len(found) > 2 else ""


def count(n: float) -> str:
    """A number as it is read."""
    return f"{n:,.0f}"


def databases(record: dict[str, Any]) -> str:
    """The databases of operators, modules and optimizers, by dtype."""
    found = record.get("databases", [])
    text = "## Databases of torch\n\nSamples of each entry, compared with the CPU.\n"
    heads = ("database", "dtype", "samples of each", "entries", "passed at that time", "date", "torch")
    each = (
        (d["database"], d["dtype"], d.get("samples", "all"), d["entries"], d["passed"], d["date"], d["torch"])
        for d in found
    )
    return section(text, heads, each, "\nWhat had not passed was fixed afterwards, or is known to differ.\n")


def fuzzed(record: dict[str, Any]) -> str:
    """Random programs."""
    text = "## Random programs\n\n`python -m tests.fuzz`: each program on the CPU and on the device."
    text += " What differed was looked at, and most of it mended, after the run.\n"
    heads = ("what", "seeds", "number", "minutes", "differed", "date")
    each = (
        (
            f["what"] + {"": "", "both": ", interpreted and compiled"}.get(f.get("effort", ""), ""),
            f"from {f['first seed']:,}",
            count(f["ended"]),
            f"{f['seconds'] / 60:.1f}",
            len(f["differ"]),
            f["date"],
        )
        for f in record.get("fuzz", [])
    )
    return section(text, heads, each)


def faults(record: dict[str, Any]) -> str:
    """Faults."""
    heads = ("fault", "tried", "of what", "went wrong", "seconds", "date")
    each = (
        (f["title"], count(f["tried"]), f["what"], len(f["found"]), count(f["seconds"]), f["date"])
        for f in record.get("faults", {}).values()
    )
    return section(FAULTS, heads, each)


def flat(record: dict[str, Any]) -> str:
    """What long runs hold on to."""
    heads = ("run", "after", "memory, MB", "file handles", "threads")

    def each() -> Iterator[tuple[object, ...]]:
        for name in ("steps", "shapes"):
            found = record.get("faults", {}).get(name)
            if found is None:
                continue
            more = found["more"]
            chosen = sorted({0, *(len(more["done"]) * k // 10 for k in (1, 3, 5, 7)), len(more["done"]) - 1})
            for i in chosen:
                done, mb = more["done"][i], more["mb"][i]
                yield found["what"], count(done), count(mb), count(more["handles"][i]), count(more["threads"][i])

    text = "## Long runs\n\nWhat the process holds while it works. With distinct shapes, that grows until the trace"
    text += (
        " tree has `max_tree_nodes`\nnodes and `max_executables` programs are kept; of each 100 shapes, the tree holds"
    )
    text += " 1.3 MB.\n"
    return section(text, heads, each())


def main() -> None:
    record = json.loads(RECORD.read_text())
    parts = [HEAD, databases(record), fuzzed(record), faults(record), flat(record), KNOWN]
    PAGE.write_text("\n".join(part.rstrip("\n") + "\n" for part in parts if part))


if __name__ == "__main__":
    main()
