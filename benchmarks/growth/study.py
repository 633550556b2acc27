"""What a study of growth finds, and how a shape is judged."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something holds.

    Attributes:
        what: what should hold.
        found: what was measured.
        limit: the most it may be.
    """

    what: str
    found: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether it does."""
        return self.found <= self.limit


@dataclass(frozen=True, slots=True)
class Study:
    """A plot and its verdicts.

    Attributes:
        name: of the plot's file.
        title, x, y: of the plot and its axes, with units.
        series: label to points.
        logarithmic: whether both axes are.
        verdicts: what should hold.
    """

    name: str
    title: str
    x: str
    y: str
    series: dict[str, Points]
    logarithmic: bool
    verdicts: list[Verdict]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self)
        found["series"] = {label: [[x, round(y, 6)] for x, y in points] for label, points in self.series.items()}
        found["verdicts"] = [{**asdict(v), "found": round(v.found, 4), "holds": v.holds} for v in self.verdicts]
        return found


def study_of(found: dict[str, Any]) -> Study:
    """The inverse of `Study.as_dict`."""
    series: dict[str, Points] = {label: [(x, y) for x, y in points] for label, points in found["series"].items()}
    verdicts = [Verdict(v["what"], v["found"], v["limit"]) for v in found["verdicts"]]
    return Study(**{**found, "series": series, "verdicts": verdicts})


def ratio_of_rates(points: Points) -> float:
    """Time by item at the largest size, over the median of that at the other sizes within a factor of 100 of it.

    1 for what is linear; smaller sizes are left out, since what a step costs in any case counts there.
    """
    (largest, last), others = points[-1], points[:-1]
    rates = [y / x for x, y in others if x * 100 >= largest]
    return (last / largest) / statistics.median(rates)


def growth_in_second_half(points: Points) -> float:
    """By how much the largest value of the last quarter exceeds the largest of the second."""
    quarter = len(points) // 4
    values = [y for _, y in points]
    return max(values[-quarter:]) - max(values[quarter : 2 * quarter])


def spread(values: Sequence[float]) -> float:
    """The largest less the smallest."""
    return max(values) - min(values)
