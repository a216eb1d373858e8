"""S13: the batch grows with the noise of the gradient; samples count by what they are worth."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.scenarios import static
from benchmarks.scenarios.files import HOUR_S, Case, ScenarioFile
from benchmarks.scenarios.rows import OURS, Role, Row
from orchestrator.core.plan import Plan
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime
from orchestrator.planning.shares import dealt_by_speed

STEP_S = 60.0
"""Length of the pieces of time in which noise and batch stand still."""

Choice = Callable[[float, int], int]
"""Noise scale and present batch to the batch that runs next."""


@dataclass(frozen=True)
class _Course:
    """One job: how its noise grows, and the rates of the batches that it may take."""

    batches: tuple[int, ...]
    last_noise: float
    first_noise: float
    hours: float
    restart_s: float

    def goodput(self, rates: dict[int, float], batch: int, noise: float) -> float:
        """Samples a second, each by its worth of one of the first batch."""
        return rates[batch] * (noise + self.batches[0]) / (noise + batch)

    def run(self, rates: dict[int, float], choose: Choice, start: int) -> tuple[float, int]:
        """Mean goodput, and how often the batch changed."""
        steps = round(self.hours * HOUR_S / STEP_S)
        batch, changes, worth, lost_s = start, 0, 0.0, 0.0
        growth = np.log(self.last_noise / self.first_noise)
        for step in range(steps):
            noise = float(self.first_noise * np.exp(growth * step / steps))
            after = choose(noise, batch)
            if after != batch:
                batch, changes, lost_s = after, changes + 1, self.restart_s
            working_s = max(0.0, STEP_S - lost_s)
            lost_s -= STEP_S - working_s
            worth += self.goodput(rates, batch, noise) * working_s
        return worth / (steps * STEP_S), changes


def run(file: ScenarioFile, options: argparse.Namespace) -> list[Row]:
    """All cases over all seeds."""
    return [row for case in file.cases(quick=options.quick) for row in _run_case(case, options)]


def _run_case(case: Case, options: argparse.Namespace) -> list[Row]:
    batches = tuple(case.get("batches"))
    contests = {b: static.contest_of(_sized(case, b), options) for b in batches}
    plans = {b: _best(contests[b]) for b in batches}
    ours = {b: plans[b][1] for b in batches}
    last, first = batches[-1], batches[0]
    rates_of_last = {b: _with_shares(contests[b], plans[last][0]) for b in batches}
    rates_of_first = {b: _with_shares(contests[b], plans[first][0]) for b in batches}
    rng, low_high = np.random.default_rng(options.seed), case.get("noise")["last"]
    courses = [
        _Course(
            batches,
            float(np.exp(rng.uniform(*np.log(low_high)))),
            float(case.get("noise")["first"]),
            float(case.get("hours")),
            float(case.get("restart_s")),
        )
        for _ in range(int(case.get("seeds", 5)))
    ]
    price = sum(
        contests[first].problem.cluster.price_usd_per_s(d.device_id)
        for d in contests[first].problem.cluster.devices
    )

    def row(name: str, role: Role, rates: dict[int, float], rule: str, start: int) -> Row:
        found = [c.run(rates, _rule(rule, c, rates), start) for c in courses]
        worth, changes = [w for w, _ in found], np.mean([n for _, n in found])
        note = f"{len(courses)} runs; {changes:.1f} changes of batch; samples by their worth"
        return Row(
            case.file.name, case.name, name, role, float(np.mean(worth)), min(worth), max(worth),
            price * HOUR_S, 1.0,
            note,
        )  # fmt: skip

    return [
        row(OURS, "ours", ours, "best", first),
        row("fixed plan of the last batch", "strong", rates_of_last, "best", first),
        row("goodput doubling, first plan", "strong", rates_of_first, "double", first),
        row("last batch from the start", "strong", ours, "stay", last),
        row("static", "baseline", ours, "stay", first),
        row("on-demand", "same", ours, "best", first),
        Row(case.file.name, case.name, "do-nothing", "baseline", 0.0),
    ]


def _rule(rule: str, course: _Course, rates: dict[int, float]) -> Choice:
    def good(batch: int, noise: float) -> float:
        return course.goodput(rates, batch, noise)

    def best(noise: float, batch: int) -> int:
        found = max(rates, key=lambda b: good(b, noise))
        # A restart must be earned back within an eighth of the run.
        earned_s = course.hours * HOUR_S / 8 * (good(found, noise) / good(batch, noise) - 1)
        return found if earned_s > course.restart_s else batch

    def double(noise: float, batch: int) -> int:
        twice = 2 * batch
        return twice if twice in rates and good(twice, noise) > good(batch, noise) else batch

    return {"best": best, "double": double, "stay": lambda noise, batch: batch}[rule]


def _sized(case: Case, batch: int) -> Case:
    return Case(case.file, {**case.row, "global_batch": batch})


def _best(contest: static.Contest) -> tuple[Plan, float]:
    found = contest.propose(OURS, contest.problem)
    best = max(found, key=lambda c: c.estimate.samples_per_s)
    return best.plan, best.estimate.samples_per_s


def _with_shares(contest: static.Contest, plan: Plan) -> float:
    """Rate of a plan's stages when another batch is dealt over them."""
    problem, cost = contest.problem, CostModel(contest.problem)
    groups = plan.groups[: problem.batch_samples]
    sizes = [min(g.microbatches[0], problem.batch_samples) for g in groups]
    curves = [cost.curve(g.stages, s, plan.schedule) for g, s in zip(groups, sizes, strict=True)]
    dealt = dealt_by_speed(cost, [g.stages for g in groups], sizes, curves, plan.schedule)
    return retime(cost, dealt, plan.schedule).samples_per_s
