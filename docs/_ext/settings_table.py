"""The directive ``settings-table``: the fields of ``lazytpu.config``, read from the class itself."""

from __future__ import annotations

from dataclasses import fields

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from lazytpu.config import Config


class SettingsTable(SphinxDirective):
    """A definition list: each field with its variable, default, choices and meaning."""

    def run(self) -> list[nodes.Node]:
        made = nodes.definition_list()
        for spec in fields(Config):
            term = nodes.term("", "", nodes.literal("", spec.name))
            target = f"config-{spec.name}"
            term["ids"].append(target)
            facts = nodes.paragraph("", "default ", nodes.literal("", repr(spec.default)))
            facts += [nodes.Text(", variable "), nodes.literal("", f"LAZYTPU_{spec.name.upper()}")]
            for i, choice in enumerate(spec.metadata["choices"]):
                several = "any, with commas, of" if spec.metadata["several"] else "one of"
                facts += [nodes.Text(f", {several} " if i == 0 else " "), nodes.literal("", repr(choice))]
            meaning = nodes.paragraph("", _sentence(spec.metadata["doc"]))
            made += nodes.definition_list_item("", term, nodes.definition("", meaning, facts))
        return [made]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("settings-table", SettingsTable)
    return {"parallel_read_safe": True}
