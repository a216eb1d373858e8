"""Runs the Programs of a step on a virtual clock; where no link is shared, equal to event.py."""

from collections.abc import Generator
from dataclasses import dataclass, field

import simpy

from orchestrator.core.plan import Group, Plan
from orchestrator.core.schedule import FORWARD, Instruction, Program, build_program
from orchestrator.core.slot import StepEstimate
from orchestrator.planning.cost import CostModel
from orchestrator.simulation.network import Network

Arrivals = dict[tuple[int, str, int], simpy.Event]  # (stage, op, microbatch) -> its input is there


def run_step(cost: CostModel, plan: Plan) -> StepEstimate:
    """Execute one step of a plan and return what it took.

    The cluster of ``cost.problem`` is the truth: its slow-downs and links count. Gradient sums
    follow the pipelines on idle links, as the cost model lists them.

    Raises:
        ValueError: If a Program cannot run.
    """
    env = simpy.Environment()
    network = Network(env, cost.problem.cluster)
    runs = [_GroupRun(env, network, cost, group, plan.schedule) for group in plan.groups]
    env.run()
    return cost.evaluate(
        plan.groups, plan.schedule, stage_ends_s=[tuple(run.ends_s) for run in runs]
    )


@dataclass(slots=True)
class _GroupRun:
    """One group's stages as processes that wait for their inputs and for nothing else."""

    env: simpy.Environment
    network: Network
    cost: CostModel
    group: Group
    schedule: str
    ends_s: list[float] = field(default_factory=list)  # per stage, of its last instruction
    arrivals: Arrivals = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.cost.problem.model.sizes[0].boundary_bytes_per_sample
        program = build_program(self.group, self.schedule, sizes)
        self.ends_s = [0.0] * len(program)
        for stage, todo in enumerate(program):
            for instruction in todo:
                if instruction.source is not None:
                    key = (stage, instruction.op, instruction.microbatch)
                    self.arrivals[key] = self.env.event()
        for stage in range(len(program)):
            self.env.process(self._stage(program, stage))

    def _stage(self, program: Program, index: int) -> Generator[simpy.Event, object, None]:
        stage = self.group.stages[index]
        for instruction in program[index]:
            if instruction.source is not None:
                yield self.arrivals[index, instruction.op, instruction.microbatch]
            size = self.group.microbatches[instruction.microbatch]
            forward_s, backward_s = self.cost.seconds_of(stage, size)
            yield self.env.timeout(forward_s if instruction.op == FORWARD else backward_s)
            if instruction.target is not None:
                self.env.process(self._send(index, instruction.target, instruction))
        self.ends_s[index] = float(self.env.now)

    def _send(
        self, source: int, target: int, sent: Instruction
    ) -> Generator[simpy.Event, object, None]:
        ends = [self.cost.device(self.group.stages[i].team) for i in (source, target)]
        yield from self.network.carry(ends[0], ends[1], sent.size_bytes)
        self.arrivals[target, sent.op, sent.microbatch].succeed()
