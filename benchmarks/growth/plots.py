"""Draw studies as small SVG files, with matplotlib."""

from __future__ import annotations

from pathlib import Path

from benchmarks.growth.study import Points, Study

_POINTS = 20


def draw(studies: list[Study], folder: Path) -> list[Path]:
    """Write ``growth-NAME.svg`` for each study.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'lazytpu[docs]', or pip install matplotlib") from None
    matplotlib.use("svg")
    # The same studies give the same file, whenever they are drawn.
    matplotlib.rcParams.update({"svg.hashsalt": "lazytpu", "svg.fonttype": "none", "font.size": 9, "axes.grid": True})
    matplotlib.rcParams.update({"grid.alpha": 0.3, "font.sans-serif": ["DejaVu Sans"]})
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(study, folder / f"growth-{study.name}.svg") for study in studies]


def thinned(points: Points) -> Points:
    """Return at most `_POINTS` of the points, evenly spread, the last among them."""
    every = -(-len(points) // _POINTS)
    return points[::-1][::every][::-1]


def _draw(study: Study, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for label, points in study.series.items():
        axes.plot(*zip(*thinned(points), strict=True), marker="o", markersize=3, linewidth=1.2, label=label)
    if study.logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.minorticks_off()  # of logarithmic axes
    axes.set(title=study.title, xlabel=study.x, ylabel=study.y)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
