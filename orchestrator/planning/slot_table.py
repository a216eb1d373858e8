"""The figures by which a slot's assignment judges a candidate: one column a set of alike groups.

Shape letters: A sets of alike groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from orchestrator.core.slot import Candidate
from orchestrator.planning.alike import AlikeSet, alike_sets
from orchestrator.planning.constraints import Row, RowUse, row_use, sums_usd
from orchestrator.planning.cost import CostModel
from orchestrator.planning.waterfill import Ladder, level_s

GAIN_TOLERANCE = 1e-9
"""Relative gain in J below which other shares, or a round of the solver, bring nothing."""

LEVEL_TOLERANCE = 1e-12
"""Relative; how closely the common end is bracketed that no shares can beat."""


@dataclass(frozen=True, slots=True)
class SlotTable:
    """One candidate, per set of alike groups where a tuple.

    A step lasts ``max over sets of fixed + tau n``, n microbatches in the fullest group of the
    set; x microbatches of a set of c groups need n >= x / c.
    """

    sets: tuple[AlikeSet, ...]
    tau: tuple[float, ...]  # s
    fixed: tuple[float, ...]  # what a step lasts beyond n tau, gradient sums included, s
    size: tuple[int, ...]  # samples of a full microbatch
    cap: tuple[int, ...]  # most microbatches of a group
    usd: tuple[float, ...]  # egress of one microbatch
    step_usd: float  # egress of the gradient sums
    usd_per_s: float  # of the devices
    uses: tuple[RowUse, ...]
    worth: float  # V' X, $^2
    backlog_usd: float
    batch: int

    @property
    def count(self) -> tuple[int, ...]:
        """Groups of each set."""
        return tuple([s.count for s in self.sets])

    def score(self, totals: Sequence[int]) -> float:
        """J when the sets hold these numbers of microbatches."""
        egress_usd = self.step_usd + sum(e * x for e, x in zip(self.usd, totals, strict=True))
        worth = self.worth - self.backlog_usd * egress_usd
        return worth / self.step_s(totals) - self.backlog_usd * self.usd_per_s

    def step_s(self, totals: Sequence[int]) -> float:
        """Step time when the sets hold these numbers of microbatches."""
        return max(
            f + t * -(-x // s.count)
            for f, t, x, s in zip(self.fixed, self.tau, totals, self.sets, strict=True)
        )

    def bound(self) -> float:
        """J that no shares of this candidate exceed, whatever the user's limits.

        The shortest step by water-filling, with every sample where its egress is least.
        """
        usd_per_sample = min(e / m for e, m in zip(self.usd, self.size, strict=True))
        worth = self.worth - self.backlog_usd * (self.step_usd + usd_per_sample * self.batch)
        level = self._level_s(self._ladders()) if worth > 0 else None
        return worth / (level[0] if level else inf) - self.backlog_usd * self.usd_per_s

    def filled(self) -> tuple[int, ...] | None:
        """Microbatches of the sets that make the shortest step; None when caps forbid the batch.

        What is too many at that step time comes off the sets that end last, the dearest first.

        Source: docs/model.md, section 5.1.
        """
        ladders = self._ladders()
        level = self._level_s(ladders)
        if level is None:
            return None
        totals = [k.num_groups * k.units_by(level[1]) for k in ladders]
        surplus = sum(m * x for m, x in zip(self.size, totals, strict=True)) - self.batch

        def end(a: int) -> tuple[float, float]:
            fullest = -(-totals[a] // self.sets[a].count)
            return ladders[a].end_s(fullest), self.usd[a]

        while True:
            loose = [
                a
                for a, m in enumerate(self.size)
                if m <= surplus and totals[a] > self.sets[a].count
            ]
            if not loose:
                return tuple(totals)
            last = max(loose, key=end)
            above = (totals[last] - 1) % self.sets[last].count + 1  # until the set ends sooner
            taken = min(above, surplus // self.size[last])
            totals[last] -= taken
            surplus -= taken * self.size[last]

    def _ladders(self) -> list[Ladder]:
        """Microbatches of every set; a step lasts until the last is done."""
        return [
            Ladder(each.count, m, f + t, t, cap)
            for each, m, f, t, cap in zip(
                self.sets, self.size, self.fixed, self.tau, self.cap, strict=True
            )
        ]

    def _level_s(self, ladders: Sequence[Ladder]) -> tuple[float, float] | None:
        """The shortest step in which the batch fits, bracketed; None when caps forbid it."""
        within_s = max(k.first_s for k in ladders), max(k.end_s(k.most) for k in ladders)
        return level_s(ladders, self.batch, within_s, tolerance=LEVEL_TOLERANCE)


def slot_table(cost: CostModel, candidate: Candidate, rows: Sequence[Row]) -> SlotTable:
    """Closed form of every set, shifted so that it meets the candidate's own estimate."""
    estimate, problem, schedule = candidate.estimate, cost.problem, candidate.plan.schedule
    groups = candidate.plan.groups
    sets = alike_sets(cost, groups)
    after_s = estimate.step_s - max(estimate.group_s)
    tau, fixed, cap, usd = [], [], [], []
    for each in sets:
        stages, size = each.group.stages, each.group.microbatches[0]
        curve = cost.curve(stages, size, schedule, replicated=len(groups) > 1)
        last = max(each.members, key=lambda g: estimate.group_s[g])
        done = groups[last].num_samples / size
        tau.append(curve.period_s)
        fixed.append(estimate.group_s[last] - done * curve.period_s + after_s)
        held = max(len(groups[g].microbatches) for g in each.members)
        cap.append(max(curve.max_microbatches, held))
        usd.append(cost.egress_usd(stages, size))
    step_usd = sums_usd(cost, sets, estimate)
    return SlotTable(
        sets=sets,
        tau=tuple(tau),
        fixed=tuple(fixed),
        size=tuple(each.group.microbatches[0] for each in sets),
        cap=tuple(cap),
        usd=tuple(usd),
        step_usd=step_usd,
        usd_per_s=estimate.counted_usd_per_s - estimate.egress_usd_per_s,
        uses=tuple(row_use(cost, row, sets, step_usd) for row in rows),
        worth=problem.penalty_weight * problem.batch_samples,
        backlog_usd=problem.backlog_usd,
        batch=problem.batch_samples,
    )
