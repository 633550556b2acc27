"""Write a dump as one HTML page that needs no network."""

from __future__ import annotations

import base64
import gzip
import json
import re
from importlib import resources
from pathlib import Path

import jinja2

from lazytpu.debug.device_times import device_times
from lazytpu.debug.folder import Dump, JsonObject
from lazytpu.debug.report.collect import graph_part, overview

_SCRIPTS = ("echarts.common.min.js", "cytoscape.min.js", "dagre.min.js", "tabulator.min.js")
_STYLES = ("tabulator_simple.min.css",)
_SOURCE_MAP = re.compile(r"^\s*(?://#|/\*#) sourceMappingURL=\S+(?: \*/)?\s*$|/\*# sourceMappingURL=\S+ \*/", re.M)


def write_report(dump: Dump, out: Path, profile: Path | None = None, title: str = "") -> None:
    """Write the page.

    Args:
        dump: what to show.
        out: the file to write.
        profile: folder of a profile of the same run, for measured times; ``times/profile`` of the dump if there is one.
        title: of the page; the name of the dump's folder when empty.
    """
    folder = profile or dump.folder / "times" / "profile"
    times = device_times(folder)
    tables = [graph_part(g, times.get(g.manifest["hlo_module"])) for g in dump.graphs]
    files = resources.files(__package__)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (files / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template("page.html.jinja").render(
        title=title or dump.folder.resolve().name,
        styles=[*map(_vendored, _STYLES), (files / "page.css").read_text(encoding="utf-8")],
        scripts=[*map(_vendored, _SCRIPTS), *[(files / n).read_text(encoding="utf-8") for n in _OWN]],
        overview=_packed(overview(dump, times, tables)),
        parts=[*map(_packed, tables)],
    )
    out.write_text(page, encoding="utf-8")


_OWN = ("panes.js", "drawing.js", "page.js")


def _vendored(name: str) -> str:
    text = (resources.files(__package__) / "vendor" / name).read_text(encoding="utf-8")
    return _SOURCE_MAP.sub("", text)


def _packed(table: JsonObject) -> str:
    """Return JSON, compressed, as text that may stand in HTML; the browser unpacks it."""
    text = json.dumps(table, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


__all__ = ["write_report"]
