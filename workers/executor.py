"""Runs a stage's part of a Program: receives, computes, sends on, and times each instruction."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from torch import Tensor

from orchestrator.core.plan import Group, Plan
from orchestrator.core.plan import Stage as PlannedStage
from orchestrator.core.schedule import FORWARD, Instruction, build_program
from orchestrator.core.slot import Transfer
from workers.clock import Clock
from workers.failures import user_code
from workers.faults import Injector
from workers.feed import Feed
from workers.stage import Stage
from workers.transport import Message, Ticket, Transport

LEAST_TIMED_BYTES = 1 << 16
"""Smaller messages say more of this machine than of a link."""

_TAGS = 1 << 30  # step tags lie below, the tags of layer moves above; gloo ends at 2**31


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands in a plan: its stage, and the ranks of its group's stages."""

    group: Group
    group_index: int
    stage_index: int
    stage_ranks: tuple[int, ...]
    schedule: str
    tag_stride: int  # more than any group's tags in one step

    @property
    def stage(self) -> PlannedStage:
        """The stage of this worker."""
        return self.group.stages[self.stage_index]

    @property
    def is_first(self) -> bool:
        """Whether it draws the input."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it takes the loss."""
        return self.stage_index == len(self.stage_ranks) - 1


def make_place(plan: Plan, device_id: str, ranks: Mapping[str, int]) -> Place:
    """Place of a device that the plan uses."""
    found = plan.stage_of(device_id)
    assert found is not None, f"{device_id} is idle"
    group_index, stage_index = found
    group = plan.groups[group_index]
    return Place(
        group=group,
        group_index=group_index,
        stage_index=stage_index,
        stage_ranks=tuple(ranks[stage.team.device_ids[0]] for stage in group.stages),
        schedule=plan.schedule,
        tag_stride=2 * max(len(g.microbatches) for g in plan.groups),
    )


@dataclass(frozen=True, slots=True)
class StepShare:
    """A group's part of one step: consecutive samples from ``first_sample`` on, in microbatches."""

    step: int
    first_sample: int
    microbatches: tuple[int, ...]
    num_samples: int  # of the whole step, all groups

    def positions(self, microbatch: int) -> range:
        """Positions in the run of one microbatch's samples."""
        return self.all_positions()[microbatch]

    def all_positions(self) -> tuple[range, ...]:
        """Those of every microbatch, in order."""
        bounds = accumulate(self.microbatches, initial=self.first_sample)
        return tuple(range(first, end) for first, end in pairwise(bounds))


@dataclass(frozen=True, slots=True)
class Patience:
    """How long others are waited for in one step: all waits end with it, whenever they begin.

    Who waits at its end would else outlast the head, which counts from the step's start: the head
    would end all of them, and not only the one that they wait for.
    """

    deadline_s: float  # of the step, by the monotonic clock
    least_s: float
    """Of each wait: who was slow itself is not alone in that, and the others come late as well."""

    def left_s(self, now_s: float) -> float:
        """How long a wait that begins now may take."""
        return max(self.least_s, self.deadline_s - now_s)


class Executor:
    """Runs the instructions of one stage, step by step."""

    def __init__(
        self,
        place: Place,
        stage: Stage,
        transport: Transport,
        feed: Feed | None,
        faults: Injector,
    ) -> None:
        """Run ``stage`` at its place; ``feed``: of the first and of the last stage."""
        self.faults, self.feed = faults, feed
        self._place, self._stage, self._transport = place, stage, transport
        self._patience = Patience(0.0, 0.0)
        self._programs: dict[tuple[int, ...], tuple[Instruction, ...]] = {}
        self._tickets: dict[tuple[str, int], Ticket] = {}
        self.data_s = 0.0
        self.receive_s = 0.0
        self._came: dict[int, Transfer] = {}  # by the stage that it came from

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What came in the last step, by the wall clock."""
        return tuple(self._came.values())

    def run(self, share: StepShare, clock: Clock, patience: Patience) -> None:
        """Run one step's forwards and backwards; sums of loss and weight stay in the stage.

        Raises:
            UserCodeError: If layers, loss, dataset or collate raise.
            PeerLostError: If a neighbour is gone.
            TimeoutError: If one is silent for too long.
        """
        self._patience = patience
        self._stage.start_step()
        self.receive_s = 0.0
        waited_s = self.feed.waited_s if self.feed else 0.0
        self._came.clear()
        program = self._program(share.microbatches)
        self._tickets = {
            (i.op, i.microbatch): self._transport.expect(
                self._place.stage_ranks[i.source], self._tag(share.step, i.source_tag)
            )
            for i in program
            if i.source is not None
        }
        for instruction in program:
            if instruction.op == FORWARD:
                self._forward(instruction, share, clock)
            else:
                self._backward(instruction, share, clock)
        if self.feed:
            self.data_s = self.feed.waited_s - waited_s
        # What the process waited for while the device was still at work held up nothing.
        idle_ratio = clock.end_work(self.data_s + self.receive_s)
        self._stage.tally(share.step)
        self.data_s *= idle_ratio
        self.receive_s *= idle_ratio

    def _program(self, microbatches: tuple[int, ...]) -> tuple[Instruction, ...]:
        if not microbatches:
            return ()  # a short last step left nothing for this group
        if microbatches not in self._programs:
            group = replace(self._place.group, microbatches=microbatches)
            program = build_program(group, self._place.schedule)
            self._programs[microbatches] = program[self._place.stage_index]
        return self._programs[microbatches]

    def _tag(self, step: int, tag: int) -> int:
        return (step * self._place.tag_stride + tag) % _TAGS

    def _forward(self, instruction: Instruction, share: StepShare, clock: Clock) -> None:
        k, step, positions = (
            instruction.microbatch,
            share.step,
            share.positions(instruction.microbatch),
        )
        message = self._receive(instruction)
        batch = None
        if self.feed:
            batch = self.feed.take(step, positions)
        self.faults.reach(step, "forward")
        clock.start(instruction.op, len(positions), message.vtime if message else 0.0)
        if message:
            value = self._stage.receive(k, message.tensors)
        else:
            assert self.feed, "the first stage has one"
            with user_code(f"step {step}: Task.inputs"):
                value = self.feed.first_input(batch, positions)
        output = self._stage.forward(k, step, positions, value)
        if self.feed:
            self.feed.resume()
        if self._place.is_last:
            self._stage.finish(k, step, output, batch, share.num_samples)
            clock.finish()
        else:
            wire = self._stage.send(k, output)
            clock.finish()
            self._send(instruction, wire, share, clock)

    def _backward(self, instruction: Instruction, share: StepShare, clock: Clock) -> None:
        k = instruction.microbatch
        message = self._receive(instruction)
        self.faults.reach(share.step, "backward")
        clock.start(instruction.op, share.microbatches[k], message.vtime if message else 0.0)
        wire = self._stage.backward(k, share.step, message.tensors if message else ())
        clock.finish()
        if instruction.target is not None:
            self._send(instruction, wire, share, clock)

    def _receive(self, instruction: Instruction) -> Message | None:
        if instruction.source is None:
            return None
        started_s = time.monotonic()
        ticket = self._tickets.pop((instruction.op, instruction.microbatch))
        message = self._transport.receive(ticket, self._patience.left_s(started_s))
        self.receive_s += time.monotonic() - started_s
        self._note(instruction.source, message)
        return message

    def _note(self, source: int, message: Message) -> None:
        """Add a message to what came from a stage."""
        size_bytes = message.size_bytes
        if size_bytes < LEAST_TIMED_BYTES:
            return
        stages = self._place.group.stages
        ends = stages[source].team.device_ids[0], self._place.stage.team.device_ids[0]
        known = self._came.get(source, Transfer(*ends, 0, 0, 0.0))
        self._came[source] = Transfer(
            *ends,
            known.num_messages + 1,
            known.size_bytes + size_bytes,
            known.busy_s + message.read_s,
        )

    def _send(
        self, instruction: Instruction, wire: tuple[Tensor, ...], share: StepShare, clock: Clock
    ) -> None:
        assert instruction.target is not None
        size_bytes = sum(t.numel() * t.element_size() for t in wire[1:])
        self._transport.send(
            wire,
            self._place.stage_ranks[instruction.target],
            self._tag(share.step, instruction.tag),
            vtime=clock.depart(instruction.op, size_bytes),
        )
