"""Parameter groups, frozen layers and schedules of the user's own: as in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.fleet import ChildError, Fleet, make_plan
from orchestrator.core.slot import StepReport
from orchestrator.core.training import GroupOptions, ScheduleOptions, Task
from orchestrator.errors import ConfigError
from tests.runtime.harness import make_spec
from tests.runtime.models import squares
from tests.runtime.reference import largest_difference, saved_parameters, train_alone
from workers.grouping import freeze
from workers.splitting import split

NUM_STEPS = 8
GROUPS = (
    GroupOptions(match=("*.bias", "*norm*"), arguments={"weight_decay": 0.0}),
    GroupOptions(match="0.tokens.*", lr_ratio=0.1, arguments={"betas": [0.8, 0.95]}),
    GroupOptions(match="[12].*", frozen=True),
)
ADAMW = {"name": "adamw", "lr": 0.003, "weight_decay": 0.1}
PLANS = {
    "three": make_plan(
        [([("a", 2), ("b", 1), ("c", 4)], (3, 3, 1)), ([("d", 5), ("e", 2)], (5,))], extra=1
    ),
    "two": make_plan([([("f", 4), ("e", 3)], (2, 2)), ([("a", 7)], (4, 4))], schedule="gpipe"),
}
LATER = make_plan([([("b", 3), ("f", 4)], (6,)), ([("c", 7)], (6,))], generation=2)


DEVICES = tuple("abcdef")


def language(run_url: str, groups: tuple[GroupOptions, ...], **changes: Any) -> Any:
    optimizer = {**ADAMW, "groups": groups}
    return make_spec("language", run_url, global_batch=12, optimizer=optimizer, **changes)


def difference(fleet: Fleet, spec: Any, plan: Any, num_steps: int = NUM_STEPS) -> float:
    """Largest difference of a parameter from one process after training on the plan."""
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=0)
    fleet.run_apart(plan, 0, num_steps)
    fleet.save(num_steps, num_layers=plan.num_layers)
    alone, _ = train_alone(spec, num_steps)
    return largest_difference(alone, saved_parameters(spec.run_url, num_steps, plan.num_layers))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clipped"])
def test_groups_equal_torchs_own(
    fleet: Fleet, tmp_path: Path, plan: str, tied: bool, clip: float | None
) -> None:
    args = {"tied": tied, "ragged": True}
    spec = language(str(tmp_path), GROUPS, clip_grad_norm=clip, task_args=args)
    assert difference(fleet, spec, PLANS[plan]) <= 1e-12


@pytest.mark.parametrize(
    "plan",
    [
        make_plan([([("a", 2), ("b", 5)], (3, 3)), ([("c", 3), ("d", 4)], (2, 2))]),
        make_plan([([("f", 4), ("e", 3)], (1, 1)), ([("a", 7)], (4, 4))], schedule="gpipe"),
    ],
    ids=["even", "uneven"],
)
def test_an_epoch_in_tokens_with_a_short_last_batch_equals_one_process(
    fleet: Fleet, tmp_path: Path, plan: Any
) -> None:
    spec = make_spec(
        "language", str(tmp_path), task_args={"ragged": True}, global_batch=10, clip_grad_norm=0.05,
        steps=None, epochs=1, lr_schedule=ScheduleOptions(name="wsd", decay_steps=2),
        optimizer={**ADAMW, "groups": GROUPS},
    )  # fmt: skip
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=99)
    end = fleet.run(plan)
    assert (end.next_step, end.reason) == (5, "finished")  # of 48 samples
    fleet.save(5, num_layers=7)
    alone, _ = train_alone(spec, 5)
    assert largest_difference(alone, saved_parameters(str(tmp_path), 5, 7)) <= 1e-12


def test_groups_survive_a_change_of_plan_and_may_change_on_resume(
    fleet: Fleet, tmp_path: Path
) -> None:
    spec, plan = language(str(tmp_path), GROUPS), PLANS["three"]
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=4)
    fleet.run(plan)
    fleet.install(LATER, first_step=4, end_step=NUM_STEPS)
    fleet.run(LATER)
    manifest = fleet.save(NUM_STEPS, num_layers=7)
    alone, _ = train_alone(spec, NUM_STEPS)
    assert largest_difference(alone, saved_parameters(str(tmp_path), NUM_STEPS, 7)) <= 1e-12
    # What was frozen is trained from here on, and the other way round.
    other = (GroupOptions(match="[34].*", frozen=True),)
    fleet.start(language(str(tmp_path), other))
    fleet.install(plan, first_step=NUM_STEPS, end_step=NUM_STEPS + 2, restore=manifest)
    fleet.run(plan)
    fleet.save(NUM_STEPS + 2, num_layers=7)
    before = saved_parameters(str(tmp_path), NUM_STEPS, 7)
    after = saved_parameters(str(tmp_path), NUM_STEPS + 2, 7)
    same = [
        index
        for index in range(7)
        if before[index] and all(before[index][k].equal(after[index][k]) for k in before[index])
    ]
    assert same == [3, 4]


def test_frozen_first_layers_send_no_gradient_and_take_no_memory(
    fleet: Fleet, tmp_path: Path
) -> None:
    plan = make_plan([([("a", 3), ("b", 3)], (4, 4))])
    found = {}
    for name, groups in (("all", ()), ("some", (GroupOptions(match="[012].*", frozen=True),))):
        optimizer = {"name": "adamw", "lr": 0.003, "groups": groups}
        spec = make_spec("mlp", str(tmp_path), global_batch=8, optimizer=optimizer)
        assert difference(fleet, spec, plan, 3) <= 1e-5
        (reports,) = [n for n in fleet.news() if n and n[0].device_id == "a"]
        last = [r for r in reports if isinstance(r, StepReport)][-1]
        found[name] = last.peak_memory_bytes, [t.size_bytes for t in last.transfers]
    assert found["some"][0] < 0.3 * found["all"][0]
    assert not found["some"][1]  # nothing came back


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ("tokens.*", r"groups\[0\]\.match: 'tokens\.\*' fits no parameter of the model; names "
         r"that are close: 0\.tokens\.weight"),
        ("6.out.wieght", r"fits no parameter of the model; names that are close: 6\.out\.weight"),
        ("*", "freeze every parameter that the model trains"),
    ],
)  # fmt: skip
def test_a_pattern_without_a_parameter_is_told_with_close_names(
    fleet: Fleet, tmp_path: Path, match: str, message: str
) -> None:
    with pytest.raises(ChildError, match=message):
        fleet.start(language(str(tmp_path), (GroupOptions(match=match, frozen=True),)))


def test_a_group_that_those_before_it_leave_no_parameter_is_refused() -> None:
    groups = (GroupOptions(match="*", lr_ratio=0.5), GroupOptions(match="*.bias", frozen=True))
    model = split(Task(layers=[nn.Linear(2, 2)], loss=squares, dataset=[]))
    with pytest.raises(ConfigError, match=r"groups\[1\] has no parameter: .* put it before them"):
        freeze(model, groups)
    freeze(model, groups[::-1])
    assert [p.requires_grad for p in model.layers[0].parameters()] == [True, False]


def test_names_of_a_tied_parameter_that_belong_to_unlike_groups_are_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    groups = (GroupOptions(match="0.*", lr_ratio=0.5), GroupOptions(match="6.*", lr_ratio=2.0))
    message = (
        r"several names, and they belong to unlike groups: '0\.tokens\.weight' to groups\[0\], "
        r"but '6\.out\.weight' to groups\[1\]"
    )
    with pytest.raises(ChildError, match=message):
        fleet.start(language(str(tmp_path), groups))


# Schedules of the user's own ---------------------------------------------------------------


def test_a_schedule_of_the_users_own_is_that_of_one_process(fleet: Fleet, tmp_path: Path) -> None:
    spec = make_spec(
        "scheduled", str(tmp_path), task_args={"kind": "waves"}, global_batch=8,
        optimizer={"name": "adamw", "lr": 0.003},
    )  # fmt: skip
    for plan in (
        make_plan([([("a", 2), ("b", 4)], (4, 4))]),
        make_plan([([("c", 6)], (5,)), ([("d", 1), ("e", 5)], (2, 1))]),
    ):
        assert difference(fleet, spec, plan, 6) <= 1e-12


@pytest.mark.parametrize(
    ("kind", "step", "message"),
    [
        ("raises", 0, r"step 0: Task\.lr_factor raised ZeroDivisionError: division by zero"),
        ("nan", 0, r"step 0: Task\.lr_factor raised ValueError: it returned nan; return a finite"),
        ("text", 0, r"step 0: Task\.lr_factor raised ValueError: could not convert"),
        ("late", 3, r"step 3: Task\.lr_factor raised ValueError: it returned -1\.0"),
    ],
)
def test_a_schedule_that_fails_is_the_users_error(
    fleet: Fleet, tmp_path: Path, kind: str, step: int, message: str
) -> None:
    spec = make_spec("scheduled", str(tmp_path), task_args={"kind": kind}, global_batch=8)
    plan = make_plan([([("a", 2), ("b", 4)], (4, 4))])
    if step == 0:
        with pytest.raises(ChildError, match=message):
            fleet.start(spec)
        return
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=6)
    ends = fleet.all("run", ranks=[0, 1])
    told = [item for news in fleet.news() for item in news]
    assert {(end.next_step, end.reason) for end in ends} == {(step, "failed")}
    assert max(report.step for report in told if isinstance(report, StepReport)) == step - 1
    assert any("step 3: Task.lr_factor raised" in getattr(item, "message", "") for item in told)


def test_two_schedules_are_one_too_many(fleet: Fleet, tmp_path: Path) -> None:
    spec = make_spec("scheduled", str(tmp_path), task_args={"kind": "waves"}, global_batch=8)
    schedule = ScheduleOptions(name="cosine")
    both = replace(spec, options=replace(spec.options, lr_schedule=schedule))
    with pytest.raises(ChildError, match="lr_schedule is given, and so is"):
        fleet.start(both)
