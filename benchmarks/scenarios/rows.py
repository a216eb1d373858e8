"""One line of the table of results, alike for all scenarios, and the figures over them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from benchmarks.result import Figure

OURS = "joint"
LEVEL_PCT = 0.1
"""Rates that differ by less are level: the search itself is held to 0.1 % of the optimum."""

SEVERAL_SEARCHES = ("cheapest", "slot-cap", "tuned-rate-cap", "tuned-price-cap", "frozen-price")
MORE_TIME = 5.0
"""Strategies that search at several prices of money in every slot, and so get more time."""

Role = Literal["ours", "baseline", "strong", "same", "reference"]
"""``same``: where money does not bind, the joint search under another name. ``reference``: knows
more than a strategy may. Neither is a rival."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one strategy fared in one case; rates are at equal cost."""

    scenario: str
    case: str
    strategy: str
    role: Role
    samples_per_s: float
    low: float = 0.0  # over seeds or offsets
    high: float = 0.0
    usd_per_hour: float = 0.0
    duty: float = 1.0  # share of the time that the budget lets it run
    note: str = ""

    @property
    def usd_per_million(self) -> float:
        """Dollars for a million samples; 0 where nothing was done."""
        if not self.samples_per_s:
            return 0.0
        return self.usd_per_hour * self.duty / 3600.0 / self.samples_per_s * 1e6


def table(rows: Sequence[Row]) -> tuple[dict[str, object], ...]:
    """As printed: best first within a case, each beside ours."""
    cases = dict.fromkeys((row.scenario, row.case) for row in rows)
    found: list[dict[str, object]] = []
    for key in cases:
        of_case = [row for row in rows if (row.scenario, row.case) == key]
        ours = _ours(of_case)
        for row in sorted(of_case, key=lambda row: -row.samples_per_s):
            cells = asdict(row)
            note = cells.pop("note")
            share = 100.0 * row.samples_per_s / ours if ours else 0.0
            found.append(
                {**cells, "of_ours_pct": share, "usd_per_million": row.usd_per_million,
                 "note": note}
            )  # fmt: skip
    return tuple(found)


def figures(rows: Sequence[Row]) -> Iterable[Figure]:
    """Per scenario: ours over the best rival, least and mean over its cases, and lost cases."""
    for scenario in dict.fromkeys(row.scenario for row in rows):
        leads = []
        for case in dict.fromkeys(row.case for row in rows if row.scenario == scenario):
            of_case = [r for r in rows if (r.scenario, r.case) == (scenario, case)]
            ours = _ours(of_case)
            best = max(r.samples_per_s for r in of_case if r.role in ("baseline", "strong"))
            if best > 0:
                leads.append(100.0 * (ours / best - 1.0))
        if not leads:
            continue
        yield Figure(f"{scenario}_over_best_least_pct", min(leads), "%")
        yield Figure(f"{scenario}_over_best_mean_pct", sum(leads) / len(leads), "%")
        yield Figure(f"{scenario}_cases", len(leads), "cases")
        yield Figure(f"{scenario}_lost", sum(lead < -LEVEL_PCT for lead in leads), "cases")


def _ours(rows: Iterable[Row]) -> float:
    return max((row.samples_per_s for row in rows if row.role == "ours"), default=0.0)
