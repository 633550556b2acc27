"""The directive ``compat-table PACKAGE``: every name of a shim, read from its modules, and what is missing.

For a package without a shim (tensorflow): what to write for each name.
"""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from lazytpu.compat import checker
from lazytpu.compat.finder import PACKAGES


class CompatTable(SphinxDirective):
    """A table for each module: name, what it does here."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        modules: dict[str, list[list[str]]] = {}
        has_shim = self.arguments[0] in PACKAGES
        for full, verdict, doc, advice in checker.names_of(self.arguments[0]):
            module, _, name = full.rpartition(".")
            if not has_shim:
                modules.setdefault(module, []).append([name, advice.removeprefix("use instead: ")])
            elif verdict == checker.LACKS:
                modules.setdefault("Missing", []).append([full, advice])
            else:
                differs = f" Different: {advice}." if advice else ""
                modules.setdefault(module, []).append([name, doc.replace("`", "") + differs])
        made: list[nodes.Node] = []
        for module, rows in sorted(modules.items(), key=lambda entry: (entry[0] == "Missing", entry[0])):
            made += [nodes.rubric("", module), _table(rows)]
        return made


def _table(rows: list[list[str]]) -> nodes.table:
    group = nodes.tgroup("", cols=2)
    group += [nodes.colspec("", colwidth=width) for width in (35, 65)]
    body = nodes.tbody()
    for name, text in rows:
        row = nodes.row()
        row += nodes.entry("", nodes.paragraph("", "", nodes.literal("", name)))
        row += nodes.entry("", nodes.paragraph("", text))
        body += row
    group += body
    return nodes.table("", group)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("compat-table", CompatTable)
    return {"parallel_read_safe": True}
