"""The directive ``dump-files``: the files of a dumped graph, read from the list that the dump itself goes by."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from lazytpu.debug.dump import FILES


class DumpFiles(SphinxDirective):
    """A definition list: each file with what it holds."""

    def run(self) -> list[nodes.Node]:
        made = nodes.definition_list()
        for name, what in FILES.items():
            term = nodes.term("", "", nodes.literal("", name))
            made += nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", what)))
        return [made]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("dump-files", DumpFiles)
    return {"parallel_read_safe": True}
