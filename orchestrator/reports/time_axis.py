"""The axis of billed time that the pictures of a run share, so that what stands above is then."""

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.reports import figures
from orchestrator.reports.svg import element, text, ticks

LEFT, RIGHT, WIDTH = 124, 20, 1080  # pixels

_UNITS = ((2 * 60.0, 1.0, "seconds"), (2 * 3600.0, 60.0, "minutes"),
          (4 * 86400.0, 3600.0, "hours"), (float("inf"), 86400.0, "days"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """From the start of a run to ``end_s`` billed seconds."""

    end_s: float

    @property
    def unit(self) -> tuple[float, str]:
        """Seconds of the unit in which it is marked, and the unit's name."""
        return next((size, name) for most, size, name in _UNITS if self.end_s <= most)

    @property
    def title(self) -> str:
        """What stands at the axis."""
        return f"billed {self.unit[1]}"

    @property
    def told(self) -> str:
        """How long it is."""
        return f"{figures.number(self.end_s / self.unit[0])} {self.title}"

    def at(self, time_s: float) -> str:
        """A moment, in words."""
        return f"at {time_s / self.unit[0]:.4g} {self.title}"

    def span(self, from_s: float, to_s: float) -> str:
        """A stretch of time, in words."""
        return f"{from_s / self.unit[0]:.4g} to {to_s / self.unit[0]:.4g} {self.title}"

    def units(self, time_s: float) -> float:
        """A moment in the axis' unit."""
        return time_s / self.unit[0]

    def x(self, time_s: float) -> float:
        """Where a moment is, in pixels; what came after the last slot stands at the end."""
        return LEFT + (WIDTH - LEFT - RIGHT) * min(time_s, self.end_s) / (self.end_s or 1.0)

    def grid(self, top: float, bottom: float) -> Iterator[str]:
        """Upright lines."""
        for at in self._ticks():
            x = self.x(at * self.unit[0])
            yield element("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid")

    def labels(self, bottom: float) -> Iterator[str]:
        """Figures and title below the picture."""
        for at in self._ticks():
            x = self.x(at * self.unit[0])
            yield text(x, bottom + 16, f"{at:,.10g}", class_="soft", text_anchor="middle")
        yield text(WIDTH - RIGHT, bottom + 34, self.title, class_="soft", text_anchor="end")

    def _ticks(self) -> tuple[float, ...]:
        return ticks(0.0, self.units(self.end_s), 8)
