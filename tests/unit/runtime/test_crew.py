"""Where workers that are left after a fault go on from, and who is joined with whom."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from benchmarks.builders import make_profile
from orchestrator.config import RunConfig
from orchestrator.core.code import Code, Module, file_digest, lyray_digest
from orchestrator.core.durable import CheckpointPart
from orchestrator.core.model import ModelProfile
from orchestrator.errors import ConfigError, LostWorkerError
from orchestrator.runtime import crew
from orchestrator.runtime.actors import Place
from orchestrator.runtime.crew import Crew
from orchestrator.runtime.setup import profiles_of
from orchestrator.runtime.trouble import Loss
from workers.orders import last_applied
from workers.update import Verdict
from workers.worker import Standing, TaskInfo

if TYPE_CHECKING:
    from orchestrator.runtime.watch import Watch


def verdict(loss_sum: float) -> Verdict:
    return Verdict(1.0, 8.0, loss_sum, finite=True, hold=False, end_step=9, end_s=0.0)


def standing(
    next_step: int, loss_sum: float, *, summed: bool = False, layers: tuple[int, ...] = (0,)
) -> Standing:
    return Standing(next_step, summed, verdict(loss_sum), layers)


def test_a_step_that_anybody_left_has_applied_is_applied_by_all() -> None:
    """meta-pytorch/torchft#192: the valid gradients of those who are left are thrown away."""
    standings = {"a": standing(4, 1.0, summed=True), "b": standing(5, 2.0)}
    assert last_applied(standings) == (5, verdict(2.0))


def test_a_step_that_nobody_left_has_applied_is_discarded() -> None:
    standings = {"a": standing(4, 1.0, summed=True), "b": standing(4, 1.0)}
    assert last_applied(standings) == (4, verdict(1.0))


@pytest.mark.parametrize("idle_at", [0, 3, 9])
def test_a_worker_without_layers_has_no_say(idle_at: int) -> None:
    standings = {"a": standing(4, 1.0), "idle": standing(idle_at, 7.0, layers=())}
    assert last_applied(standings) == (4, verdict(1.0))


class Roster:
    """A fleet of names: everybody answers."""

    def __init__(
        self, _: type, places: Sequence[Place], *others: object, **options: object
    ) -> None:
        self.device_ids = tuple(place.device_id for place in places)
        self.saved: dict[str, tuple[object, ...]] = {}
        self.dies_in: dict[str, str] = {}
        self.losses: tuple[Loss, ...] = ()
        self.missed: dict[str, tuple[str, ...]] = {}  # whom each does not reach
        self.lengths: dict[str, int | None] = {}  # of the dataset, as each sees it
        self.codes: dict[str, Code] = {}  # that each runs
        self.asked: list[str] = []
        self.checked: list[str] = []  # who was to check the task

    def greet(self, timeout_s: float) -> dict[str, object]:
        return {}

    def tell(self, method: str, *, device_ids: Iterable[str] = ()) -> None:
        pass

    def expel(self, device_id: str, reason: str) -> Loss:
        self.device_ids = tuple(d for d in self.device_ids if d != device_id)
        self.losses += (Loss(device_id, reason),)
        return self.losses[-1]

    def ask(
        self,
        method: str,
        answer: type,
        *arguments: object,
        each: Mapping[str, tuple[object, ...]] | None = None,
        device_ids: Iterable[str] | None = None,
        timeout_s: float,
        patience_s: float,
    ) -> tuple[dict[str, object], tuple[Loss, ...]]:
        waits = method in ("connect", "standing", "settle")
        assert patience_s == timeout_s or waits, "these wait for nobody"
        self.asked.append(method)
        if method == "load":
            self.checked += [d for d, (spec,) in (each or {}).items() if spec.check]  # type: ignore[attr-defined]
        asked = tuple(each or device_ids or self.device_ids)
        if self.dies_in.get(method) in asked:
            loss = Loss(self.dies_in.pop(method), "its process was killed")
            self.device_ids = tuple(d for d in self.device_ids if d != loss.device_id)
            self.losses += (loss,)
            # The others of a collective only see it vanish.
            alone = method != "connect"
            return {d: self.info(d, 8) for d in self.device_ids if alone and d in asked}, (loss,)
        if method == "save":
            self.saved |= each or {}
        if method == "reach":
            return {
                d: tuple((other, "10.0.0.1:1", "refused") for other in self.missed.get(d, ()))
                for d in asked
            }, ()
        found = {"save": CheckpointPart(0, 1, ()), "profile": tiny_profile(),
                 "standing": standing(4, 1.0), "listen": "127.0.0.1:1"}  # fmt: skip
        if method == "load":
            return {d: self.info(d, self.lengths.get(d, 8)) for d in asked}, ()
        return {d: found.get(method) for d in asked}, ()

    def info(self, device_id: str, num_samples: int | None) -> TaskInfo:
        return TaskInfo(num_samples, code=self.codes.get(device_id, Code((), lyray_digest())))

    def enlist(self, place: Place, *arguments: object) -> None:
        kept = tuple(d for d in self.device_ids if d != place.device_id)
        self.device_ids = (*kept, place.device_id)


def tiny_profile() -> ModelProfile:
    return make_profile({"cpu": [1.0]})


def crew_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Crew:
    monkeypatch.setattr(crew, "Fleet", Roster)
    config = RunConfig.parse(f"""
run: {{name: tiny, storage_path: {tmp_path}}}
training: {{task: "m:t", global_batch: 8, steps: 8}}
cluster:
  source: emulated
  offers: [{{pool: fast, kind: t4, count: 2, price_per_hour: 3.0}}]
  links: [{{within: zone, latency_s: 0.0001, bandwidth_gbytes_per_s: 1}}]
budget: {{average_per_hour_usd: 10}}
""")
    places = [Place("a-0"), Place("b-0")]
    return Crew(config, places, str(tmp_path), host="127.0.0.1", actors=None)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Crew:
    found = crew_of(tmp_path, monkeypatch)
    found.get_ready()
    found.join()
    return found


def test_a_new_worker_in_the_place_of_the_last_one_is_not_joined(two: Crew) -> None:
    """horovod/horovod#2652: whoever comes anew joins at a change of plan, and not before."""
    assert two.is_joined
    two.enlist(Place("b-0"))
    assert two.fleet.device_ids == ("a-0", "b-0")
    assert not two.is_joined


@pytest.mark.parametrize("phase", ["load", "connect"])
def test_whoever_is_lost_before_the_first_step_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    found = crew_of(tmp_path, monkeypatch)
    cast("Roster", found.fleet).dies_in = {phase: "a-0"}
    assert found.get_ready().dataset_samples == 8
    found.join()
    assert found.is_joined
    assert found.fleet.device_ids == ("b-0",)


def test_where_the_one_that_checks_the_model_is_lost_the_next_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = crew_of(tmp_path, monkeypatch)
    fleet = cast("Roster", found.fleet)
    fleet.dies_in = {"load": "a-0"}
    found.get_ready()
    assert (fleet.checked, tuple(found.infos)) == (["a-0", "b-0"], ("b-0",))
    other = crew_of(tmp_path, monkeypatch)
    fleet = cast("Roster", other.fleet)
    fleet.dies_in = {"load": "b-0"}  # not the one that checks
    other.get_ready()
    assert (fleet.checked, fleet.asked) == (["a-0"], ["load"])


def test_workers_that_see_unlike_datasets_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = crew_of(tmp_path, monkeypatch)
    cast("Roster", found.fleet).lengths = {"b-0": 7}
    with pytest.raises(ConfigError, match=r"has 8 samples on a-0, but 7 samples on b-0; every dev"):
        found.get_ready()


def test_workers_that_run_unlike_code_are_refused_and_whoever_comes_later_is_told_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ray-project/ray#53635: one node went on with what it had been sent before."""
    (tmp_path / "mytask.py").write_text("")
    ours = Module("mytask", str(file_digest(tmp_path / "mytask.py")), "mytask.py")
    found = crew_of(tmp_path, monkeypatch)
    fleet = cast("Roster", found.fleet)
    fleet.codes = {d: Code((ours,), lyray_digest()) for d in fleet.device_ids}
    found.get_ready()
    told = found._spec(Place("c-0")).code
    assert told is not None
    assert told.modules == {"mytask.py": ours.digest}
    fleet.codes["b-0"] = Code((Module("mytask", "0" * 64, "mytask.py"),), lyray_digest(), "host-1")
    with pytest.raises(ConfigError, match="device b-0 on node host-1 runs another mytask"):
        found.get_ready()


def test_whoever_comes_later_is_told_how_many_samples_the_others_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = crew_of(tmp_path, monkeypatch)
    assert found._spec(Place("c-0")).dataset_samples is None
    found.get_ready()
    assert found._spec(Place("c-0")).dataset_samples == 8


def test_where_nobody_is_left_before_the_first_step_every_device_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = crew_of(tmp_path, monkeypatch)
    cast("Roster", found.fleet).dies_in = {"load": "a-0", "connect": "b-0"}
    found.get_ready()
    with pytest.raises(LostWorkerError, match=r"device a-0: its process.*; device b-0: its"):
        found.join()


def test_a_device_lost_while_it_measures_is_replaced_by_another_of_its_kind(two: Crew) -> None:
    cast("Roster", two.fleet).dies_in = {"profile": "a-0"}
    assert profiles_of(two, {"a-0": "t4", "b-0": "t4"}).keys() == {"t4"}
    cast("Roster", two.fleet).device_ids = ("a-0", "b-0")
    cast("Roster", two.fleet).dies_in = {"profile": "a-0"}
    assert profiles_of(two, {"a-0": "t4", "b-0": "v100-16"}).keys() == {"v100-16"}


class Ends:
    """A watch that hears of losses."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def drain(self) -> None: ...

    def lose(self, losses: Sequence[Loss]) -> None:
        self.reasons |= {loss.device_id: loss.reason for loss in losses}


@pytest.mark.parametrize("missed", [{"a-0": ("c-0",)}, {"c-0": ("a-0",)}])
def test_one_that_joins_and_reaches_only_some_is_left_out_and_named(
    two: Crew, missed: dict[str, tuple[str, ...]]
) -> None:
    roster = cast("Roster", two.fleet)
    watch = Ends()
    roster.missed = missed
    two.enlist(Place("c-0"))
    boundary = two.regroup(cast("Watch", watch))
    assert boundary is not None
    assert two.is_joined
    assert two.fleet.device_ids == ("a-0", "b-0")
    ((device, others),) = missed.items()
    told = f"device {device} does not reach device {others[0]} at 10.0.0.1:1 (refused); it was left"
    assert watch.reasons["c-0"].startswith(told)


def test_of_two_that_lost_each_other_the_newer_is_left_out_before_they_join_again(
    two: Crew,
) -> None:
    roster = cast("Roster", two.fleet)
    watch = Ends()
    roster.missed = {"a-0": ("b-0",), "b-0": ("a-0",)}
    roster.asked.clear()
    assert two.regroup(cast("Watch", watch)) is not None
    assert two.fleet.device_ids == ("a-0",)
    assert list(watch.reasons) == ["b-0"]
    assert roster.asked.index("reach") < roster.asked.index("connect")


class Deaf:
    """A watch that hears of no loss."""

    def lose(self, losses: Sequence[object]) -> None:
        assert not losses


def test_a_layer_is_written_by_the_first_who_holds_it_and_only_while_all_are_joined(
    two: Crew,
) -> None:
    watch, roster = cast("Watch", Deaf()), cast("Roster", two.fleet)
    assert two.save(watch, 3, {0: ("b-0", "a-0"), 1: ("b-0",)}) is not None
    assert roster.saved == {"a-0": ((0,),), "b-0": ((1,),)}
    roster.saved = {}
    two.enlist(Place("b-0"))  # the layer that b-0 had is nowhere
    assert two.save(watch, 3, {0: ("a-0",), 1: ("b-0",)}) is None
    assert roster.saved == {}
