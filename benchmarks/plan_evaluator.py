"""Step time and memory of a plan, written from docs/model.md, section 3, alone.

It reads plans and profiles in the form of their files and shares no line with planning/: the
pipelines are simulated event by event, the gradient sums are rings in which the members of a
team share the link between two nodes. A second opinion on what the cost model says.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from orchestrator.core.cluster import ClusterState, Link
from orchestrator.core.model import profile_to_json
from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.reports.records import plan_data

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """What a plan takes, and what is wrong with it."""

    step_s: float
    pipelines_s: float
    sums_s: float
    update_s: float
    problems: tuple[str, ...]


def evaluate_candidate(problem: PlanningProblem, candidate: Candidate) -> Evaluation:
    """Evaluate a proposal as ``lyray plan --json`` would write it."""
    return evaluate(
        plan_data(candidate.plan, [d.device_id for d in problem.cluster.devices]),
        [[stage.inflight for stage in group.stages] for group in candidate.plan.groups],
        json.loads(json.dumps(profile_to_json(problem.model))),
        problem.cluster,
        batch_samples=problem.batch_samples,
        overlap=problem.overlap,
    )


def evaluate(
    plan: Json,
    inflight: Sequence[Sequence[int]],
    profile: Json,
    cluster: ClusterState,
    *,
    batch_samples: int,
    overlap: bool = False,
) -> Evaluation:
    """Evaluate a plan in the form of ``lyray plan --json``, with K of every stage."""
    groups = [
        _Group(group, group_inflight, profile, cluster)
        for group, group_inflight in zip(plan["groups"], inflight, strict=True)
    ]
    ends = [group.backward_ends_s() for group in groups]
    pipelines_s = max(max(stages) for stages in ends)
    sums_s = 0.0
    if len(groups) > 1:
        sums_s = max(0.0, _sums_end_s(groups, ends, profile, cluster, overlap) - pipelines_s)
    update_s = max(stage.update_s for group in groups for stage in group.stages)
    return Evaluation(
        pipelines_s + sums_s + update_s, pipelines_s, sums_s, update_s,
        tuple(_problems(plan, groups, cluster, batch_samples, len(profile["layers"]))),
    )  # fmt: skip


class _Stage:
    slowdown: float

    def __init__(self, stage: Json, inflight: int, profile: Json, cluster: ClusterState) -> None:
        self.devices = [cluster.device(device) for device in stage["devices"]]
        self.size = len(self.devices)
        self.first, self.end, self.inflight = stage["first_layer"], stage["end_layer"], inflight
        self.recompute = stage.get("recompute", False)
        self.kind = self.devices[0].kind
        self.slowdown = max(device.slowdown for device in self.devices)
        self._rows = sorted(
            (t for t in profile["times"] if (t["kind"], t["team"]) == (self.kind, self.size)),
            key=lambda t: int(t["microbatch"]),
        )
        self.update_s = self.slowdown * sum(self._rows[-1]["update_s"][self.first : self.end])
        self.sizes = next(s for s in profile["sizes"] if s["team"] == self.size)

    def seconds(self, name: str, samples: int) -> float:
        """Forward or backward of one microbatch, on the line between two measured ones.

        Where the stage recomputes, backward begins with forward of all but the model's last layer.
        """
        if name == "backward_s" and self.recompute:
            last = min(self.end, len(self.sizes["param_bytes"]) - 1)
            again_s = self._seconds("forward_s", samples, slice(self.first, last))
            return self._seconds(name, samples, slice(self.first, self.end)) + again_s
        return self._seconds(name, samples, slice(self.first, self.end))

    def _seconds(self, name: str, samples: int, layers: slice) -> float:
        measured: dict[int, float] = {r["microbatch"]: sum(r[name][layers]) for r in self._rows}
        if samples in measured:
            return self.slowdown * measured[samples]
        below = [m for m in measured if m < samples]
        above = [m for m in measured if m > samples]
        if not below or not above:
            nearest = max(below) if below else min(above)
            return self.slowdown * measured[nearest] * samples / nearest
        low, high = max(below), min(above)
        weight = (samples - low) / (high - low)
        return self.slowdown * (measured[low] + weight * (measured[high] - measured[low]))

    def peak_bytes(
        self, samples: int, count: int, borders: tuple[float, float], state: float, sums: bool,
        ahead: int,
    ) -> float:  # fmt: skip
        """Of its fullest member.

        Args:
            samples: Of a microbatch.
            count: Of microbatches.
            borders: Bytes per sample into the stage and out of it.
            state: Bytes that a parameter byte needs in all.
            sums: Whether gradients are packed for a sum.
            ahead: How many more microbatches the stage before holds.
        """
        params = sum(self.sizes["param_bytes"][self.first : self.end])
        stash = self.sizes["stash_bytes_per_sample"]
        into, out = (border * samples for border in borders)
        held = min(count, self.inflight)
        kept = [stash[k] * samples for k in range(self.first, self.end)]
        running = out
        if self.recompute:
            sizes = self.sizes["boundary_bytes_per_sample"]
            entry = [self.sizes.get("input_bytes_per_sample", 0.0), *sizes]
            full, kept, peak = kept, [], 0.0
            for k, whole in zip(range(self.first, self.end), full, strict=True):
                last = k + 1 == len(stash)
                mine = entry[k] * samples
                more = mine + whole + (0.0 if last else sizes[k] * samples)
                peak = max(peak, sum(kept) + more + (out if k + 1 < self.end else 0.0))
                kept.append(whole if last or not mine else mine)
            running = max(0.0, peak - sum(kept))
        busy = held * sum(kept) + running + into * (1 + max(0, ahead)) + out * (held - 1)
        return float(params * state + max(busy, params if sums else 0.0))


class _Group:
    def __init__(
        self, group: Json, inflight: Sequence[int], profile: Json, cluster: ClusterState
    ) -> None:
        self.samples: list[int] = group["microbatches"]
        self.stages = [
            _Stage(stage, k, profile, cluster)
            for stage, k in zip(group["stages"], inflight, strict=True)
        ]
        whole = next(s for s in profile["sizes"] if s["team"] == 1)
        self.borders = [whole["boundary_bytes_per_sample"][s.end - 1] for s in self.stages[:-1]]
        ends = [stage.devices[0] for stage in self.stages]
        self.down = [cluster.link(a, b) for a, b in pairwise(ends)]
        self.up = [cluster.link(b, a) for a, b in pairwise(ends)]
        self.state = 1 + profile["optimizer_bytes_per_param_byte"]

    def backward_ends_s(self) -> list[float]:
        """When the last backward of every stage ends, under 1F1B with K of each stage."""
        count, last = len(self.samples), len(self.stages) - 1
        orders = [_one_f_one_b(stage.inflight, count) for stage in self.stages]
        at, free_s = [0] * (last + 1), [0.0] * (last + 1)
        busy_s: dict[tuple[str, int], float] = {}
        there_s = {(0, "F", k): 0.0 for k in range(count)}
        done_s: dict[tuple[int, str, int], float] = {}
        while any(at[s] < len(orders[s]) for s in range(last + 1)):
            progress = False
            for s, stage in enumerate(self.stages):
                while at[s] < len(orders[s]):
                    op, k = orders[s][at[s]]
                    ready = there_s.get((s, op, k))
                    if op == "B" and s == last:
                        ready = done_s.get((s, "F", k))
                    if ready is None:
                        break
                    name = "forward_s" if op == "F" else "backward_s"
                    end = max(free_s[s], ready) + stage.seconds(name, self.samples[k])
                    free_s[s] = done_s[s, op, k] = end
                    at[s], progress = at[s] + 1, True
                    to = s + 1 if op == "F" else s - 1
                    if not 0 <= to <= last:
                        continue
                    border = min(s, to)
                    link = self.down[border] if op == "F" else self.up[border]
                    size = self.borders[border] * self.samples[k]
                    sent = max(busy_s.get((op, border), 0.0), end) + size / _rate(link, size)
                    busy_s[op, border] = sent
                    there_s[to, op, k] = sent + link.latency_s
            assert progress, "the pipeline is stuck"
        return [done_s[s, "B", count - 1] for s in range(last + 1)]

    def owner(self, layer: int) -> int:
        return next(s for s, stage in enumerate(self.stages) if stage.first <= layer < stage.end)


def _one_f_one_b(inflight: int, count: int) -> list[tuple[str, int]]:
    ahead = min(inflight, count)
    order = [("F", k) for k in range(ahead)]
    for k in range(count):
        order.append(("B", k))
        if ahead + k < count:
            order.append(("F", ahead + k))
    return order


def _rate(link: Link, size_bytes: float) -> float:
    return link.rate_bytes_per_s(size_bytes) if size_bytes else 1.0


def _sums_end_s(
    groups: Sequence[_Group],
    ends_s: Sequence[Sequence[float]],
    profile: Json,
    cluster: ClusterState,
    overlap: bool,
) -> float:
    """When the last segment of the gradient is summed; segments are queued as released."""
    borders = sorted({stage.end for group in groups for stage in group.stages} | {0})
    whole = next(s for s in profile["sizes"] if s["team"] == 1)["param_bytes"]
    pipelines_s = max(max(stages) for stages in ends_s)
    waiting = []
    for first, end in pairwise(borders):
        owners = [group.owner(first) for group in groups]
        teams = [group.stages[s] for group, s in zip(groups, owners, strict=True)]
        released = pipelines_s
        if overlap:
            released = max(stages[s] for stages, s in zip(ends_s, owners, strict=True))
        waiting.append((released, first, owners, _ring_s(teams, sum(whole[first:end]), cluster)))
    free_s: dict[tuple[int, int], float] = {}
    for released, _, owners, seconds in sorted(waiting, key=lambda z: z[:2]):
        start = max([released, *(free_s.get(owner, 0.0) for owner in enumerate(owners))])
        free_s |= dict.fromkeys(enumerate(owners), start + seconds)
    return max(free_s.values())


def _ring_s(teams: Sequence[_Stage], size_bytes: float, cluster: ClusterState) -> float:
    """2 (G-1)/G W over the slowest hop; a team has q devices' links in a node, one to another."""
    order = sorted(
        teams, key=lambda t: (t.devices[0].zone, t.devices[0].node_id, t.devices[0].device_id)
    )
    count = len(order)
    chunk, rates, latency_s = size_bytes / count, [], 0.0
    for a, b in zip(order, [*order[1:], order[0]], strict=True):
        link = cluster.link(a.devices[0], b.devices[0])
        ways = min(a.size, b.size) if a.devices[0].node_id == b.devices[0].node_id else 1
        rates.append(ways * link.rate_bytes_per_s(chunk / ways))
        latency_s = max(latency_s, link.latency_s)
    seconds = 2 * (count - 1) * (chunk / min(rates) + latency_s)
    if len({team.size for team in teams}) > 1:  # parts meet parts of another size
        seconds += max(
            (t.size - 1)
            / t.size
            * size_bytes
            / cluster.link(*t.devices[:2]).rate_bytes_per_s(size_bytes)
            for t in teams
            if t.size > 1
        )
    return seconds


def _problems(
    plan: Json, groups: Sequence[_Group], cluster: ClusterState, batch_samples: int, layers: int
) -> list[str]:
    found = []
    used = [d for g in plan["groups"] for s in g["stages"] for d in s["devices"]]
    if sorted([*used, *plan["idle"]]) != sorted(d.device_id for d in cluster.devices):
        found.append("devices are missing or used twice")
    if sum(sum(group.samples) for group in groups) != batch_samples:
        found.append("the samples are not the batch")
    for g, group in enumerate(groups):
        edges = [0, *(stage.end for stage in group.stages)]
        starts = [stage.first for stage in group.stages]
        if starts != edges[:-1] or edges[-1] != layers or any(b <= a for a, b in pairwise(edges)):
            found.append(f"stages of group {g} do not tile the model")
        borders, before = [0.0, *group.borders, 0.0], 0
        for stage, pair in zip(group.stages, pairwise(borders), strict=True):
            held = min(len(group.samples), stage.inflight)
            found += _stage_problems(group, stage, pair, len(groups) > 1, before - held)
            before = held
    return found


def _stage_problems(
    group: _Group, stage: _Stage, borders: tuple[float, float], sums: bool, ahead: int
) -> list[str]:
    name = "+".join(device.device_id for device in stage.devices)
    found = []
    if len({(d.kind, d.node_id) for d in stage.devices}) > 1:
        found.append(f"{name} are not alike")
    samples = max(group.samples)
    peak = stage.peak_bytes(samples, len(group.samples), borders, group.state, sums, ahead)
    memory = min(device.memory_bytes for device in stage.devices)
    if peak > 0.9 * memory * (1 + 1e-9):
        found.append(f"{name} needs {peak:,.0f} bytes of {0.9 * memory:,.0f}")
    return found
