"""The backend of real runs at faults that are hard to time with real processes."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from benchmarks.builders import make_cluster, make_device, make_group, make_plan, make_profile
from orchestrator.config import RunConfig
from orchestrator.control.persistence import CheckpointStore
from orchestrator.core.code import NO_CODE
from orchestrator.core.plan import Plan
from orchestrator.core.slot import (
    IDLE_ESTIMATE,
    Decision,
    DeviceJoined,
    DeviceLost,
    Observation,
    PreemptionNotice,
    Recovered,
    WorkerFailed,
)
from orchestrator.errors import ConfigError, LostWorkerError
from orchestrator.runtime.backend import RayBackend
from orchestrator.runtime.progress import Meter, RunClock
from orchestrator.runtime.rig import Rig
from tests.runtime.crew import FakeCrew, FakePresence

if TYPE_CHECKING:
    from orchestrator.runtime.crew import Crew

pytestmark = pytest.mark.runtime

DEVICES = [make_device("a-0"), make_device("b-0")]
CHAIN = make_plan(make_group(DEVICES, (0, 2, 4), (1, 1, 1, 1)))  # each layer on one device
REPLICAS = make_plan(*(make_group([d], (0, 4), (1, 1)) for d in DEVICES))
IDLE = make_plan(generation=2)

TEXT = """
run: {{name: fake, storage_path: {folder}}}
training: {{task: "m:t", global_batch: 4, microbatch: 1, steps: 10000000,
  checkpoint_every_steps: 5000000}}
cluster:
  source: emulated
  offers:
    - {{pool: a, kind: t4, count: 1, price_per_hour: 1.0}}
    - {{pool: b, kind: t4, count: 1, price_per_hour: 1.0}}
  links: [{{within: zone, latency_s: 0.0001, bandwidth_gbytes_per_s: 1}}]
budget: {{average_per_hour_usd: 4}}
control: {{slot_s: 0.05}}
failure: {{timeout_s: 1}}
"""


class Scene:
    """A backend over a fake crew, a step a look."""

    def __init__(
        self, folder: Path, leaving_s: dict[str, float], lost: tuple[str, ...] = ()
    ) -> None:
        self.config = RunConfig.parse(TEXT.format(folder=folder))
        cluster = make_cluster(DEVICES)
        self.crew = FakeCrew(d.device_id for d in DEVICES)
        self.presence = FakePresence(DEVICES, cluster.offers)
        self.presence.leaving_s = leaving_s
        for device_id in lost:
            self.crew.die(device_id)
        self.store = CheckpointStore(self.config.run.run_url)
        self.clock = RunClock()
        self.backend = RayBackend(
            self.config,
            Rig(
                crew=cast("Crew", self.crew),
                cluster=cluster,
                model=make_profile({"gpu": [1.0] * 4}),
                presence=self.presence,
                truth=None,
                num_steps=10**7,
                num_samples=4 * 10**7,
                code=NO_CODE,
            ),
            meter=Meter(self.clock),
        )
        self.first = self.backend.observe()

    def run(self, plan: Plan) -> Observation:
        """Apply a plan and let a slot pass."""
        kind = "idle" if plan.is_idle else "switch"
        self.backend.apply(Decision(kind, plan, IDLE_ESTIMATE, "a test wants it"))
        return self.backend.observe()

    def lose(self, *device_ids: str) -> None:
        """These go with their nodes."""
        for device_id in device_ids:
            del self.presence.present[device_id]
            self.crew.kill(device_id)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, {})


def kinds(seen: Observation) -> list[type]:
    return [type(event) for event in seen.events]


def test_where_all_are_under_notice_a_checkpoint_is_written_before_they_go(scene: Scene) -> None:
    """ray-project/ray#66225: all nodes are spot, and all of them are under notice."""
    scene.crew.at(7, lambda: scene.presence.leaving_s.update({"a-0": 90.0, "b-0": 90.0}))
    seen = scene.run(CHAIN)
    assert kinds(seen) == [PreemptionNotice, PreemptionNotice]
    scene.run(IDLE)
    (saved,) = scene.crew.saved
    assert saved >= 7
    assert scene.store.steps() == (saved,)
    scene.run(IDLE)
    assert scene.crew.saved == [saved]  # once is enough
    scene.lose("a-0", "b-0")
    seen = scene.backend.observe()
    assert set(kinds(seen)) == {DeviceLost}
    assert seen.devices == ()
    assert seen.next_step == saved
    manifest = scene.backend.checkpoint()  # a stop meanwhile has nothing to write, nor to lose
    assert manifest is not None
    assert manifest.step == saved


def test_a_notice_that_came_while_nothing_ran_is_told_at_the_start(tmp_path: Path) -> None:
    """ray-project/ray#64360: a notice between a stop and the next start."""
    first = Scene(tmp_path, {"b-0": 30.0}).first
    assert first.events == (PreemptionNotice("b-0", 30.0),)
    assert first.leaving == {"b-0"}


def test_notices_that_overlap_are_told_one_by_one_and_one_may_be_called_off(scene: Scene) -> None:
    """ray-project/ray#66225: another notice comes before the first device has gone."""
    scene.crew.at(3, lambda: scene.presence.leaving_s.update({"b-0": 90.0}))
    seen = scene.run(REPLICAS)
    assert seen.events == (PreemptionNotice("b-0", 90.0),)
    scene.crew.at(scene.crew.next_step + 2, lambda: scene.presence.leaving_s.update({"a-0": 80.0}))
    seen = scene.run(REPLICAS)
    assert seen.events == (PreemptionNotice("a-0", 80.0),)
    assert seen.leaving == {"a-0", "b-0"}
    del scene.presence.leaving_s["a-0"]
    seen = scene.run(REPLICAS)
    assert seen.events == (DeviceJoined(DEVICES[0]),)
    assert seen.leaving == {"b-0"}


def test_a_notice_to_replicas_of_those_that_stay_needs_no_checkpoint(scene: Scene) -> None:
    scene.crew.at(7, lambda: scene.presence.leaving_s.update({"a-0": 90.0}))
    assert kinds(scene.run(REPLICAS)) == [PreemptionNotice]
    scene.run(IDLE)
    assert scene.crew.saved == []


def test_after_all_have_gone_the_run_goes_on_with_whoever_comes(scene: Scene) -> None:
    """SymbioticLab/Oobleck#23: nothing fits the nodes that are left, and training ends."""
    present = dict(scene.presence.present)
    scene.crew.at(7, lambda: scene.lose("a-0", "b-0"))
    seen = scene.run(CHAIN)
    assert kinds(seen) == [DeviceLost, DeviceLost, Recovered]
    assert all(event.preempted for event in seen.events if isinstance(event, DeviceLost))
    assert (seen.devices, seen.next_step) == ((), 0)
    seen = scene.run(IDLE)
    assert seen.usage == ()
    scene.presence.present.update(present)
    while {d.device_id for d in seen.devices} != {"a-0", "b-0"}:
        seen = scene.backend.observe()
        assert set(kinds(seen)) <= {DeviceJoined, Recovered}
    again = make_plan(*CHAIN.groups, generation=3)
    seen = scene.run(again)
    while not seen.reports:
        seen = scene.run(again)
    assert seen.reports[0].step == 0


def test_a_worker_that_takes_a_lost_ones_place_is_joined_first(scene: Scene) -> None:
    """horovod/horovod#2652: joining happens at a change of plan, and is waited for by nobody."""
    alone = make_plan(make_group(DEVICES[:1], (0, 4), (1, 1, 1, 1)))
    scene.run(alone)
    scene.crew.kill("b-0")  # idle, and the last in the order of ranks: its follower is, too
    seen = scene.backend.observe()
    while DeviceJoined not in kinds(seen):
        seen = scene.backend.observe()
    assert not scene.crew.is_joined
    seen = scene.run(make_plan(*REPLICAS.groups, generation=3))
    assert scene.crew.installed[-1].first_step > 0
    assert seen.reports[-1].generation == 3
    assert Recovered not in kinds(seen)


def test_a_device_that_does_not_reach_the_others_does_not_join_and_disturbs_nobody(
    scene: Scene,
) -> None:
    scene.run(make_plan(make_group(DEVICES[:1], (0, 4), (1, 1, 1, 1))))
    scene.crew.out_of_reach = {"b-0"}
    scene.crew.kill("b-0")
    seen = [scene.backend.observe() for _ in range(6)]
    told = [event for each in seen for event in each.events]
    assert {type(event) for event in told} == {DeviceLost}  # every time that it tried
    assert len(told) >= 2
    assert {d.device_id for each in seen for d in each.devices} == {"a-0"}
    assert seen[-1].next_step > seen[0].next_step
    assert len(scene.crew.installed) == 1
    scene.crew.out_of_reach = set()
    while DeviceJoined not in kinds(scene.backend.observe()):
        pass


@pytest.mark.parametrize(("plan", "undone"), [(REPLICAS, False), (CHAIN, True)])
def test_a_device_lost_while_the_last_checkpoint_is_written_is_survived(
    scene: Scene, plan: Plan, undone: bool
) -> None:
    """ray-project/ray#24875: what is lost while something else goes on is made up for as well."""
    scene.run(plan)
    scene.crew.dies_in_save = "a-0"
    manifest = scene.backend.checkpoint()
    last = scene.backend.observe()
    assert (manifest is None) == undone  # nobody holds a-0's layers, and nothing was written yet
    assert [e.device_id for e in last.events if isinstance(e, DeviceLost)] == ["a-0"]
    (recovered,) = [e for e in last.events if isinstance(e, Recovered)]
    assert (recovered.source == "start") == undone
    assert last.next_step == (0 if undone else scene.crew.saved[-1])


def test_a_device_lost_while_a_plan_is_installed_is_told_and_nothing_runs(scene: Scene) -> None:
    scene.run(REPLICAS)
    scene.crew.dies_in_install = "b-0"
    seen = scene.run(make_plan(*CHAIN.groups, generation=3))
    assert kinds(seen) == [DeviceLost, Recovered]
    alone = make_plan(make_group(DEVICES[:1], (0, 4), (1, 1, 1, 1)), generation=4)
    assert scene.run(alone).reports[0].step == seen.next_step


def test_whoever_reaches_no_boundary_is_lost_and_the_others_go_on_where_they_stand(
    scene: Scene,
) -> None:
    scene.run(REPLICAS)
    scene.crew.stuck = "b-0"
    seen = scene.run(make_plan(*CHAIN.groups, generation=3))
    lost, recovered = seen.events
    assert isinstance(lost, DeviceLost)
    assert lost.device_id == "b-0"
    # Which is seen first, that it does not stand or that no step ends any more, is a race.
    assert re.match("it (reached no step boundary|finished no step) within", lost.reason)
    assert isinstance(recovered, Recovered)
    assert (recovered.source, recovered.num_undone) == ("replica", 0)
    alone = make_plan(make_group(DEVICES[:1], (0, 4), (1, 1, 1, 1)), generation=4)
    assert scene.run(alone).reports[0].step == seen.next_step


def test_a_device_lost_while_another_is_made_up_for_costs_no_step(scene: Scene) -> None:
    """ray-project/ray#62483: a second node dies while the first one is being replaced."""
    regroup = scene.crew.regroup

    def both_go(watch: object) -> object:
        scene.crew.regroup = regroup  # type: ignore[method-assign]
        scene.crew.kill("b-0")
        return regroup(watch)  # type: ignore[arg-type]

    scene.run(REPLICAS)
    scene.backend.checkpoint()
    (saved,) = scene.crew.saved
    scene.run(make_plan(*REPLICAS.groups, generation=3))
    scene.crew.regroup = both_go  # type: ignore[assignment,method-assign]
    scene.crew.kill("a-0")
    seen = scene.backend.observe()
    assert {e.device_id for e in seen.events if isinstance(e, DeviceLost)} == {"a-0", "b-0"}
    (recovered,) = [e for e in seen.events if isinstance(e, Recovered)]
    assert (recovered.source, recovered.next_step) == ("checkpoint", saved)


def test_what_a_run_cost_that_nobody_can_go_on_with_is_observed_before_it_ends(
    scene: Scene,
) -> None:
    scene.crew.comes_back = False
    scene.crew.at(7, lambda: [scene.crew.kill(d) for d in ("a-0", "b-0")] and None)
    seen = scene.run(CHAIN)
    assert {usage.device_id for usage in seen.usage} == {"a-0", "b-0"}
    assert [e.device_id for e in seen.events if isinstance(e, DeviceLost)] == ["a-0", "b-0"]
    with pytest.raises(LostWorkerError, match="every worker is lost, and none came back"):
        scene.run(IDLE)


def test_what_was_held_while_a_plan_could_not_be_installed_is_observed_at_once(
    scene: Scene,
) -> None:
    scene.run(REPLICAS)

    def refuse(order: object) -> bool:
        raise ConfigError("the checkpoint is another model's")

    scene.crew.install = refuse  # type: ignore[assignment,method-assign]
    started_s = scene.backend.now_s()
    with pytest.raises(ConfigError):
        scene.backend.apply(
            Decision("switch", make_plan(*CHAIN.groups, generation=3), IDLE_ESTIMATE, "a test")
        )
    seen = scene.backend.observe()
    assert {usage.device_id for usage in seen.usage} == {"a-0", "b-0"}
    assert seen.now_s > started_s
    assert all(usage.to_s == seen.now_s for usage in seen.usage)
    assert scene.backend.observe().now_s - seen.now_s < scene.config.control.slot_s


def test_workers_that_lose_each_other_although_all_are_there_are_told_of(scene: Scene) -> None:
    told = {d: WorkerFailed(d, 7, "lost contact with the other") for d in ("a-0", "b-0")}
    scene.crew.at(7, lambda: scene.crew.failures.update(told))
    seen = scene.run(CHAIN)
    assert kinds(seen) == [WorkerFailed, WorkerFailed]
    assert seen.next_step == 7
    assert scene.run(make_plan(*CHAIN.groups, generation=3)).reports[0].step == 7


def test_a_stop_while_nobody_is_left_is_heard_at_once_and_can_be_resumed(scene: Scene) -> None:
    muster = scene.crew.muster
    scene.run(REPLICAS)
    scene.backend.checkpoint()
    (saved,) = scene.crew.saved
    scene.run(make_plan(*REPLICAS.groups, generation=3))
    scene.crew.comes_back = False
    looks: list[float] = []

    def stop_at_the_second_look(longest_s: float) -> object:
        looks.append(longest_s)
        if len(looks) == 2:
            scene.backend.interrupt()
        return muster(longest_s)

    scene.crew.muster = stop_at_the_second_look  # type: ignore[assignment,method-assign]
    for device in DEVICES:
        scene.crew.kill(device.device_id)
    seen = scene.backend.observe()
    assert {e.device_id for e in seen.events if isinstance(e, DeviceLost)} == {"a-0", "b-0"}
    assert seen.next_step == saved
    manifest = scene.backend.checkpoint()
    assert manifest is not None
    assert manifest.step == saved
    assert scene.backend.observe().next_step == saved
    assert len(looks) <= 4


def test_a_device_lost_while_plans_are_tried_out_is_told_of_and_the_run_goes_on(
    scene: Scene,
) -> None:
    assert len(scene.backend.measure(REPLICAS, 3)) == 6
    scene.crew.next_step = 0
    scene.crew.at(1, lambda: scene.crew.kill("b-0"))
    assert scene.backend.measure(REPLICAS, 3) == ()
    assert scene.backend.measure(CHAIN, 3) == ()  # b-0 is in this one, too
    alone = make_plan(make_group(DEVICES[:1], (0, 4), (1, 1, 1, 1)))
    assert len(scene.backend.measure(alone, 3)) == 3
    first = scene.backend.observe()
    assert kinds(first) == [DeviceLost]
    assert [device.device_id for device in first.devices] == ["a-0"]
    assert first.next_step == 0
    seen = scene.run(make_plan(*alone.groups, generation=3))
    while not seen.reports:
        seen = scene.backend.observe()
    assert seen.reports[0].step == 0


def test_whoever_was_lost_before_the_first_step_is_told_and_gets_another_worker(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, {}, lost=("b-0",))
    (lost,) = scene.first.events
    assert isinstance(lost, DeviceLost)
    assert lost.device_id == "b-0"
    assert [device.device_id for device in scene.first.devices] == ["a-0"]
    seen = scene.run(make_plan(make_group(DEVICES[:1], (0, 4), (1, 1, 1, 1))))
    while DeviceJoined not in kinds(seen):
        seen = scene.backend.observe()
    assert {device.device_id for device in seen.devices} == {"a-0", "b-0"}


def test_devices_that_die_again_and_again_come_back_at_once_where_nobody_else_is_left(
    scene: Scene,
) -> None:
    for generation in (3, 4, 5):
        seen = scene.run(make_plan(*CHAIN.groups, generation=generation))
        while not seen.reports:
            seen = scene.backend.observe()
        for device in DEVICES:
            scene.crew.kill(device.device_id)
        seen = scene.backend.observe()
        assert [e.device_id for e in seen.events if isinstance(e, DeviceLost)] == ["a-0", "b-0"]
        assert DeviceJoined in kinds(seen)
