"""Changes of plan under running workers: what is sent, and how long nobody computes.

Forked workers on loopback with emulated devices go back and forth between two plans.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.fleet import Fleet, make_plan, make_spec, preload
from benchmarks.moved import COUNTED, layer_bytes, take_sent
from benchmarks.result import Figure, Result, main
from orchestrator.core.plan import Plan
from orchestrator.core.slot import StepReport
from workers.emulation import EmulatedStage

DEVICES = ("d0", "d1", "d2", "d3")
NUM_LAYERS, WIDTH = 8, 256
NUM_MICROBATCHES = 8
FORWARD_S, BACKWARD_S = 0.0025, 0.005  # of one layer and sample
LATENCY_S, BANDWIDTH_BYTES_PER_S = 0.0001, 1e9  # of every link
STEPS = 4  # of a plan, until the next one


@dataclass(frozen=True, slots=True)
class Pair:
    """Two plans; groups as ``make_plan`` takes them."""

    name: str
    plans: tuple[Plan, Plan]


def _plan(*groups: tuple[Sequence[tuple[str, int]], int]) -> Plan:
    return make_plan([(chain, (1,) * count) for chain, count in groups])


PAIRS = (
    Pair(
        "reassign",
        (
            _plan(([("d0", 8)], 4), ([("d1", 8)], 4)),
            _plan(([("d0", 8)], 5), ([("d1", 8)], 3)),
        ),
    ),
    Pair("border", (_plan(([("d0", 4), ("d1", 4)], 8)), _plan(([("d0", 5), ("d1", 3)], 8)))),
    Pair("swap", (_plan(([("d0", 4), ("d1", 4)], 8)), _plan(([("d0", 4), ("d2", 4)], 8)))),
    Pair(
        "groups-pipeline",
        (
            _plan(([("d0", 8)], 4), ([("d1", 8)], 4)),
            _plan(([("d0", 2), ("d1", 2), ("d2", 2), ("d3", 2)], 8)),
        ),
    ),
)


@dataclass(slots=True)
class Switch:
    """One change of plan."""

    pair: str
    pause_s: float
    step_s: float
    num_sent: int
    num_necessary: int
    sent_bytes: int
    necessary_bytes: int
    digests_differ: int
    timed: bool = field(default=True)

    @property
    def bound_s(self) -> float:
        """What must pass through a link, and one step."""
        return self.sent_bytes / BANDWIDTH_BYTES_PER_S + self.step_s


class Rig:
    """Workers that are brought from plan to plan."""

    def __init__(self, fleet: Fleet, pair: Pair) -> None:
        self._fleet, self._pair = fleet, pair
        self._step, self._generation = 0, 0
        self._plan: Plan | None = None
        self._last: list[StepReport] = []

    def go(self, plan: Plan, *, checked: bool) -> Switch:
        """Change to a plan and run it for a few steps.

        Args:
            plan: Which.
            checked: Compare the layers' bits before and after; then the pause is not measured.
        """
        fleet, before = self._fleet, self._plan
        held = before.holders if before else {}
        sizes: dict[int, int] = {}
        for part in fleet.all("ask", layer_bytes) if checked else ():
            sizes |= part
        digests = self._digests() if checked else {}
        fleet.all("ask", take_sent)
        self._generation += 1
        plan = Plan(self._generation, plan.schedule, plan.groups)
        fleet.install(
            plan,
            first_step=self._step,
            end_step=self._step + STEPS,
            emulation=_emulation(plan),
            checkpoint=False,
        )
        after = self._digests() if checked else {}
        fleet.run(plan)
        self._step += STEPS
        reports = [item for items in fleet.news() for item in items if isinstance(item, StepReport)]
        first = [r for r in reports if r.step == self._step - STEPS]
        last, self._last = self._last, [r for r in reports if r.step == self._step - 1]
        self._plan = plan
        sent = [move for moves in fleet.all("ask", take_sent) for move in moves]
        needed = [
            layer
            for layer, devices in plan.holders.items()
            for device in devices
            if held and device not in held[layer]
        ]
        return Switch(
            pair=self._pair.name,
            pause_s=min(r.started_s for r in first) - max((r.ended_s for r in last), default=0.0),
            step_s=max((r.step_s for r in last), default=0.0),
            num_sent=len(sent),
            num_necessary=len(needed),
            sent_bytes=sum(size for _, size in sent),
            necessary_bytes=sum(sizes[layer] if checked else 0 for layer in needed),
            digests_differ=sum(not after[layer] <= digests[layer] for layer in digests),
            timed=not checked,
        )

    def _digests(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for held in self._fleet.all("checksums"):
            for layer, digest in held.items():
                found.setdefault(layer, set()).add(digest)
        return found


def _emulation(plan: Plan) -> dict[str, EmulatedStage]:
    link = LATENCY_S, BANDWIDTH_BYTES_PER_S
    return {
        stage.team.device_ids[0]: EmulatedStage(
            seconds={1: (FORWARD_S * len(stage.layers), BACKWARD_S * len(stage.layers))},
            to_next=link if index < len(group.stages) - 1 else None,
            to_previous=link if index else None,
            step_end_s=0.0,
        )
        for group in plan.groups
        for index, stage in enumerate(group.stages)
    }


def measure(pair: Pair, num_switches: int) -> list[Switch]:
    """Change between the two plans of a pair; the first times with all layers compared."""
    spec_of = {
        "global_batch": NUM_MICROBATCHES,
        "steps": STEPS * (num_switches + 4),
        "task_args": {"num_layers": NUM_LAYERS, "width": WIDTH, "num_samples": 64},
        "transport": COUNTED,
    }
    with tempfile.TemporaryDirectory() as folder, Fleet(DEVICES) as fleet:
        fleet.start(make_spec("benchmarks.tasks:chain", folder, **spec_of))
        rig, (first, second) = Rig(fleet, pair), pair.plans
        rig.go(first, checked=False)
        checked = [rig.go(plan, checked=True) for plan in (second, first)]
        return checked + [
            rig.go(second if k % 2 == 0 else first, checked=False) for k in range(num_switches)
        ]


def run(options: argparse.Namespace) -> Result:
    """Every pair there and back several times."""
    preload("benchmarks.moved")
    switches = [s for pair in PAIRS for s in measure(pair, 4 if options.quick else 20)]
    checked = [s for s in switches if not s.timed]
    timed = [s for s in switches if s.timed]
    sent, needed = (sum(s.sent_bytes for s in checked), sum(s.necessary_bytes for s in checked))
    rows = []
    for pair in PAIRS:
        mine = [s for s in timed if s.pair == pair.name]
        rows.append(
            {
                "pair": pair.name,
                "moved_mb": max(s.sent_bytes for s in mine) / 1e6,
                "step_s": statistics.median(s.step_s for s in mine),
                "pause_p50_s": statistics.median(s.pause_s for s in mine),
                "pause_max_s": max(s.pause_s for s in mine),
                "bound_s": statistics.median(s.bound_s for s in mine),
                "of_bound_max": max(s.pause_s / s.bound_s for s in mine),
            }
        )
    figures = (
        Figure("moved_bytes_ratio", sent / needed, "1", "<= 1.001"),  # names and shapes
        Figure("needless_moves", sum(s.num_sent - s.num_necessary for s in switches), "1", "== 0"),
        Figure("layers_moved", sum(s.num_sent for s in switches), "1"),
        Figure("digests_differ", sum(s.digests_differ for s in checked), "1", "== 0"),
        Figure("pause_of_bound_max", max(s.pause_s / s.bound_s for s in timed), "1", "<= 1"),
        Figure("pause_p50_s", statistics.median(s.pause_s for s in timed), "s"),
        Figure("pause_max_s", max(s.pause_s for s in timed), "s"),
    )
    return Result(figures, tuple(rows))


if __name__ == "__main__":
    main("replan", run)
