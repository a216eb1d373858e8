"""The virtual clock: exact whatever the real work took; late work is counted."""

import math
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from orchestrator.core.cluster import Team
from orchestrator.core.plan import Group, Stage
from orchestrator.core.schedule import Program, build_program
from workers.emulation import Delay, EmulatedStage, VirtualClock
from workers.tcp import tcp_transport

pytestmark = pytest.mark.runtime
FAST_LINK = (0.0, 1e12)
UNLIKE_S = (0.020, 0.010, 0.030, 0.015)  # forward of four stages; backward takes twice that


class FakeTime:
    """A machine on which real work takes ``work_s`` and sleeping is exact."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def clock(self, stage: EmulatedStage) -> VirtualClock:
        return VirtualClock(stage, now=lambda: self.now_s, sleep=self.advance)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def one_operation(**options: object) -> EmulatedStage:
    return EmulatedStage(seconds={4: (0.010, 0.020)}, **options)  # type: ignore[arg-type]


def program_of(num_stages: int, num_microbatches: int) -> Program:
    stages = tuple(
        Stage(Team(f"d{s}", "node", "cpu", (f"d{s}",)), s, s + 1, inflight=num_stages - s)
        for s in range(num_stages)
    )
    return build_program(Group(stages, (1,) * num_microbatches), "1f1b")


def makespan_s(program: Program, clocks: list[VirtualClock]) -> float:
    """Run a Program on virtual clocks, messages delivered by hand."""
    arrival_s: dict[tuple[str, int, int], float] = {}
    todo = [list(instructions) for instructions in program]
    for clock in clocks:
        clock.begin_step(0, 0.0)
    while any(todo):
        for s, clock in enumerate(clocks):
            while todo[s]:
                i = todo[s][0]
                key = (i.op, i.microbatch, s)
                if i.source is not None and key not in arrival_s:
                    break
                clock.start(i.op, 1, arrival_s.get(key, 0.0))
                clock.finish()
                if i.target is not None:
                    arrival_s[i.op, i.microbatch, i.target] = clock.depart(i.op, 1000)
                todo[s].pop(0)
    return max(clock.times.end_s for clock in clocks)


def pipeline(
    forward_s: tuple[float, ...], link: tuple[float, float] = FAST_LINK
) -> list[VirtualClock]:
    last = len(forward_s) - 1
    return [
        FakeTime().clock(
            EmulatedStage(
                seconds={1: (f, 2 * f)},
                to_next=link if s < last else None,
                to_previous=link if s > 0 else None,
            )
        )
        for s, f in enumerate(forward_s)
    ]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 5), (3, 1), (4, 8)])
def test_equal_stages_take_the_closed_form(num_stages: int, num_microbatches: int) -> None:
    program = program_of(num_stages, num_microbatches)
    wanted_s = (num_microbatches + num_stages - 1) * (0.01 + 0.02)
    assert makespan_s(program, pipeline((0.01,) * num_stages)) == pytest.approx(wanted_s)


def test_unlike_stages_take_what_the_event_evaluation_says() -> None:
    assert makespan_s(program_of(4, 8), pipeline(UNLIKE_S)) == pytest.approx(0.825)


def test_a_link_delays_by_latency_and_keeps_results_apart_by_its_bandwidth() -> None:
    # 1000 bytes over 1e5 bytes/s occupy the link 10 ms; two results leave at 10 and 20 ms.
    clock = FakeTime().clock(
        EmulatedStage(seconds={1: (0.010, 0.0)}, to_next=(0.002, 5e4), to_previous=FAST_LINK)
    )
    clock.begin_step(0, 0.0)
    arrivals_s = []
    for _ in range(2):
        clock.start("F", 1, 0.0)
        clock.finish()
        arrivals_s.append(clock.depart("F", 1000))
    assert arrivals_s == pytest.approx([0.010 + 0.020 + 0.002, 0.030 + 0.020 + 0.002])


def test_the_two_directions_of_a_stage_do_not_share_a_link() -> None:
    clock = FakeTime().clock(
        EmulatedStage(seconds={1: (0.010, 0.010)}, to_next=(0.0, 1e3), to_previous=(0.0, 1e6))
    )
    clock.begin_step(0, 0.0)
    clock.start("F", 1, 0.0)
    assert clock.depart("F", 1000) == pytest.approx(1.010)
    clock.start("B", 1, 0.0)
    assert clock.depart("B", 1000) == pytest.approx(0.021)


def test_an_operation_waits_for_its_input_and_the_wait_is_not_compute() -> None:
    clock = FakeTime().clock(one_operation())
    clock.begin_step(0, 100.0)
    clock.start("F", 4, 100.5)
    clock.finish()
    assert clock.times.end_s == pytest.approx(100.51)
    assert clock.times.receive_s == pytest.approx(0.5)
    assert clock.times.compute_s == pytest.approx(0.010)


def test_delays_last_for_their_steps_and_are_told_apart_from_waiting() -> None:
    delays = (
        Delay(2, 4, "loader", 0.5),
        Delay(2, math.inf, "forward", 0.1),
        Delay(3, 4, "backward", 0.2),
    )
    clock = FakeTime().clock(one_operation(delays=delays, slowdowns=((2, 2.0),)))
    found = []
    for step in range(1, 5):
        clock.begin_step(step, 0.0)
        for op in "FB":
            clock.start(op, 4, 0.0)
            clock.finish()
        found.append((clock.times.data_s, clock.times.compute_s, clock.times.end_s))
    assert found == [
        pytest.approx((0.0, 0.03, 0.03)),
        pytest.approx((0.5, 0.16, 0.66)),
        pytest.approx((0.5, 0.36, 0.86)),
        pytest.approx((0.0, 0.16, 0.16)),
    ]


def test_a_link_carries_less_for_its_steps_and_says_how_long_each_message_was_on_it() -> None:
    stage = EmulatedStage(
        seconds={1: (0.010, 0.010)}, to_next=(0.002, 1e5), to_previous=(0.0, 1e6),
        narrow_next=((2, 4, 0.5), (3, math.inf, 0.5)),
    )  # fmt: skip
    clock = FakeTime().clock(stage)
    found = []
    for step in range(1, 5):
        clock.begin_step(step, 1000.0 * step)
        for op in "FB":
            clock.start(op, 1, 0.0)
            clock.depart(op, 1000)
        found.append(clock.times.sent)
    assert [sent[0] for sent in found] == [
        ("F", 1000, pytest.approx(s)) for s in (0.01, 0.02, 0.04, 0.02)
    ]
    assert [sent[1] for sent in found] == [("B", 1000, pytest.approx(0.001))] * 4


def test_late_work_is_counted_and_leaves_virtual_time_alone() -> None:
    machine = FakeTime()
    clock = machine.clock(one_operation(step_end_s=0.03))
    clock.begin_step(0, 0.0)
    for work_s in (0.004, 0.5, 0.001):  # virtual ends at 10, 20 and 30 ms
        clock.start("F", 4, 0.0)
        machine.advance(work_s)
        clock.finish()
    assert clock.times.end_s == pytest.approx(0.030)
    assert clock.end_step(1.0) == pytest.approx(1.03)
    assert machine.now_s == pytest.approx(1.03)  # caught up
    assert (clock.times.num_late, clock.times.num_operations) == (2, 4)


def test_an_end_missed_by_no_more_than_sleep_is_exact_is_on_time() -> None:
    machine = FakeTime()
    clock = machine.clock(one_operation())
    clock.begin_step(0, 0.0)
    clock.start("F", 4, 0.0)
    machine.advance(0.0105)
    clock.finish()
    assert clock.times.num_late == 0


def test_a_slowdown_holds_from_its_step_until_the_next() -> None:
    clock = FakeTime().clock(one_operation(slowdowns=((90, 2.5), (120, 1.0))))
    taken_s = []
    for step in (89, 90, 119, 120):
        clock.begin_step(step, 0.0)
        clock.start("B", 4, 0.0)
        clock.finish()
        taken_s.append(clock.times.compute_s)
    assert taken_s == pytest.approx([0.020, 0.050, 0.050, 0.020])


def test_an_unknown_microbatch_size_is_named() -> None:
    clock = FakeTime().clock(one_operation())
    clock.begin_step(0, 0.0)
    with pytest.raises(ValueError, match=r"microbatch of 3 samples; known sizes: \[4\]"):
        clock.start("F", 3, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"seconds": {}},
        {"seconds": {1: (-1.0, 0.0)}},
        {"seconds": {1: (1.0, float("inf"))}},
        {"seconds": {1: (1.0, 1.0)}, "to_next": (0.0, 0.0)},
        {"seconds": {1: (1.0, 1.0)}, "slowdowns": ((5, 2.0), (3, 1.0))},
        {"seconds": {1: (1.0, 1.0)}, "slowdowns": ((5, 0.0),)},
    ],
    ids=str,
)
def test_impossible_emulated_stages_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"emulated|slowdowns"):
        EmulatedStage(**options)


def test_an_emulated_stage_crosses_processes() -> None:
    stage = one_operation(to_next=(0.001, 1e6), slowdowns=((3, 2.0),))
    assert pickle.loads(pickle.dumps(stage)) == stage


def test_over_real_sockets_the_virtual_makespan_is_exact_and_the_wall_time_close() -> None:
    program, store = program_of(4, 8), HashStore()
    begin_s = time.monotonic() + 0.3

    def run(rank: int) -> tuple[float, float]:
        life = PrefixStore("life", store)
        transport = tcp_transport(rank, 4, life, secret=b"known", timeout_s=30)
        stage = EmulatedStage(
            {1: (UNLIKE_S[rank], 2 * UNLIKE_S[rank])}, to_next=FAST_LINK, to_previous=FAST_LINK
        )
        clock = VirtualClock(stage)
        clock.begin_step(0, begin_s)
        for i in program[rank]:
            arrival_s = 0.0
            if i.source is not None:
                ticket = transport.expect(i.source, i.source_tag)
                arrival_s = transport.receive(ticket, 30).vtime
            clock.start(i.op, 1, arrival_s)
            clock.finish()
            if i.target is not None:
                vtime = clock.depart(i.op, 0)
                transport.send((torch.zeros(64),), i.target, i.tag, vtime=vtime)
        wall_s = time.monotonic() - begin_s
        transport.flush(30)
        transport.close()
        return clock.times.end_s - begin_s, wall_s

    with ThreadPoolExecutor(4) as pool:
        virtual_s, wall_s = zip(*pool.map(run, range(4)), strict=True)
    assert max(virtual_s) == pytest.approx(0.825)
    assert max(wall_s) < 2 * 0.825
