from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.builders import make_device, make_group, make_plan
from orchestrator.control.leases import LeaseBook
from orchestrator.core.plan import Plan, step_shares
from orchestrator.core.slot import StepReport


def plan_of(*shares: Iterable[int], generation: int = 1) -> Plan:
    """One single-device group a share."""
    devices = [make_device(f"d-{i}") for i in range(len(shares))]
    groups = [
        make_group([d], [0, 4], tuple(share)) for d, share in zip(devices, shares, strict=True)
    ]
    return make_plan(*groups, generation=generation)


def report(plan: Plan, step: int, group_index: int, num_samples: int) -> StepReport:
    return StepReport(
        generation=plan.generation,
        step=step,
        device_id=plan.groups[group_index].device_ids[0],
        group_index=group_index,
        num_samples=num_samples,
        started_s=float(step),
        ended_s=step + 1.0,
        step_s=1.0,
        compute_s=0.5,
        loss=2.0 if group_index == 0 else None,
    )


def book_of(num_samples: int = 100, batch_samples: int = 8) -> LeaseBook:
    return LeaseBook(batch_samples=batch_samples, num_samples=num_samples)


def test_a_step_commits_when_every_group_has_reported_it() -> None:
    book, plan = book_of(), plan_of([4, 1], [3])
    book.grant(plan)
    assert book.commit([report(plan, 0, 0, 5)]) == ()
    (step,) = book.commit([report(plan, 0, 1, 3)])
    assert (step.step, step.first_sample, step.end_sample, step.loss) == (0, 0, 8, 2.0)
    assert (book.next_step, book.samples_committed) == (1, 8)


def test_a_later_step_waits_for_the_one_before_it() -> None:
    book, plan = book_of(), plan_of([8])
    book.grant(plan)
    assert book.commit([report(plan, 1, 0, 8)]) == ()
    assert [s.step for s in book.commit([report(plan, 0, 0, 8)])] == [0, 1]


def test_reports_of_an_unknown_generation_commit_nothing() -> None:
    book, plan = book_of(), plan_of([8])
    book.grant(plan)
    assert book.commit([report(plan.with_generation(9), 0, 0, 8)]) == ()


def test_a_step_under_way_at_the_change_of_plan_commits_under_the_old_one() -> None:
    book, old, new = book_of(), plan_of([8]), plan_of([4], [4], generation=2)
    book.grant(old)
    book.grant(new)
    committed = book.commit([report(old, 0, 0, 8), report(new, 1, 0, 4), report(new, 1, 1, 4)])
    assert [(s.step, s.generation) for s in committed] == [(0, 1), (1, 2)]
    assert not book.knows(1)


def test_a_group_that_used_other_samples_than_leased_is_a_bug() -> None:
    book, plan = book_of(), plan_of([8])
    book.grant(plan)
    with pytest.raises(AssertionError, match="group 0 reports \\[7\\] samples, its lease holds 8"):
        book.commit([report(plan, 0, 0, 7)])


def test_the_last_step_may_be_short_and_leave_a_group_without_samples() -> None:
    book, plan = book_of(num_samples=12), plan_of([4], [4])
    book.grant(plan)
    reports = [report(plan, 0, g, 4) for g in (0, 1)]
    reports += [report(plan, 1, 0, 4), report(plan, 1, 1, 0)]
    assert [s.samples for s in book.commit(reports)] == [8, 4]
    assert book.samples_committed == 12


def test_a_step_applied_everywhere_commits_although_a_lost_group_never_reported_it() -> None:
    book, plan = book_of(), plan_of([4, 1], [3])
    book.grant(plan)
    assert book.commit([report(plan, 0, 0, 5)], applied_before=0) == ()
    (step,) = book.commit([report(plan, 1, 0, 5)], applied_before=1)
    assert (step.step, step.first_sample, step.end_sample) == (0, 0, 8)
    assert book.next_step == 1


def test_a_step_that_changed_nothing_counts_once_however_often_it_is_run() -> None:
    book, plan = (
        LeaseBook(batch_samples=8, num_samples=100, next_step=2, num_skipped=1),
        plan_of([8]),
    )
    book.grant(plan)
    told = [replace(report(plan, step, 0, 8), skipped=step != 3) for step in range(2, 5)]
    book.commit(told)
    assert book.num_skipped == 3
    book.restart_at(3)
    assert book.num_skipped == 2
    book.commit(told)
    assert book.num_skipped == 3


def test_a_restored_checkpoint_undoes_later_steps() -> None:
    book, plan = book_of(), plan_of([8])
    book.grant(plan)
    book.commit([report(plan, step, 0, 8) for step in range(5)])
    book.restart_at(3)
    assert (book.next_step, book.samples_committed) == (3, 24)
    assert [s.step for s in book.commit([report(plan, 3, 0, 8)])] == [3]


@given(
    seed_shares=st.lists(
        st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    epochs=st.integers(1, 3),
    data=st.data(),
)
def test_committed_samples_are_every_position_once_whatever_the_plans(
    seed_shares: list[list[int]], epochs: int, data: st.DataObject
) -> None:
    """horovod/horovod#3399, #3143: no sample lost or repeated over changes of size."""
    batch, total = 8, epochs * 13
    book = LeaseBook(batch_samples=batch, num_samples=total)
    used: Counter[int] = Counter()
    for generation, weights in enumerate(seed_shares):
        cuts = sorted(data.draw(st.lists(st.integers(1, batch - 1), max_size=len(weights) - 1)))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, batch], strict=True) if b > a]
        plan = plan_of(*([n] for n in sizes), generation=generation)
        book.grant(plan)
        for _ in range(data.draw(st.integers(0, 3))):
            step = book.next_step
            first, end = book.range_of(step)
            if first == end:
                break
            shares = step_shares(plan.groups, end - first)
            reports = [report(plan, step, g, sum(share)) for g, share in enumerate(shares)]
            for committed in book.commit(reports):
                used.update(range(committed.first_sample, committed.end_sample))
    assert sorted(used) == list(range(book.samples_committed))
    assert set(used.values()) <= {1}


@pytest.mark.parametrize("old", range(1, 5))
@pytest.mark.parametrize("new", range(1, 5))
def test_every_change_of_size_at_every_step_uses_each_sample_once_an_epoch(
    old: int, new: int
) -> None:
    """intelligent-machine-learning/dlrover#1553: padding for the old size came an epoch later."""
    size, batch = 13, 8  # two epochs: 26 positions, in steps of 8, 8, 8 and 2
    for cut in range(4):
        book = book_of(num_samples=2 * size, batch_samples=batch)
        positions: Counter[int] = Counter()
        for generation, groups, end_step in ((1, old, cut), (2, new, 4)):
            shares = [[batch // groups + (g < batch % groups)] for g in range(groups)]
            plan = plan_of(*shares, generation=generation)
            book.grant(plan)
            while book.next_step < end_step:
                step = book.next_step
                first, end = book.range_of(step)
                parts = step_shares(plan.groups, end - first)
                reports = [report(plan, step, g, sum(part)) for g, part in enumerate(parts)]
                for committed in book.commit(reports):
                    positions.update(range(committed.first_sample, committed.end_sample))
        assert positions == Counter(range(2 * size)), f"{old} -> {new} at step {cut}"
