"""Read XLA's passes over a program from XLA's own dump (``--xla_dump_to``, ``--xla_dump_hlo_pass_re``)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FILE = re.compile(r"module_\d+\.(?P<module>.+?)\.(?P<number>\d{4})\.(?P<pipeline>.+?)\.after_(?P<name>.+?)"
                   r"(?:\.before_(?P<next>.+))?\.txt$")  # fmt: skip
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-~]+ = ", re.M)
START = "pipeline-start"  # the file at the beginning of a group of passes
FLAGS = "--xla_dump_to={folder} --xla_dump_hlo_pass_re=.* --xla_dump_hlo_module_re=jit_lazytpu_.*"


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass that changed a program.

    Attributes:
        pipeline, name: as XLA calls them.
        before, after: instructions.
    """

    pipeline: str
    name: str
    before: int
    after: int


def passes_of(folder: Path, module: str) -> list[Pass]:
    """Return the passes that changed a module (``jit_lazytpu_<hash>``), in order; XLA writes a file after each.

    An entry called `START` is no pass; the first is XLA's input.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FILE.match(path.name)
        if match and match["module"] == module:
            found.append((int(match["number"]), match, path))
    made: list[Pass] = []
    last: int | None = None
    for _, match, path in sorted(found, key=lambda entry: entry[0]):
        count = len(_INSTRUCTION.findall(path.read_text()))
        made.append(Pass(match["pipeline"], match["name"], count if last is None else last, count))
        last = count
    return made
