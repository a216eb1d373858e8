"""Where workers that are left after a fault go on from, and who is joined with whom."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from orchestrator.config import RunConfig
from orchestrator.core.durable import CheckpointPart
from orchestrator.runtime import crew
from orchestrator.runtime.actors import Place
from orchestrator.runtime.crew import Crew, last_applied
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

    def greet(self, timeout_s: float) -> dict[str, object]:
        return {}

    def call(self, method: str, answer: type, **options: object) -> dict[str, TaskInfo]:
        return dict.fromkeys(self.device_ids, TaskInfo(8))

    def ask(
        self,
        method: str,
        answer: type,
        step: int,
        *,
        each: Mapping[str, tuple[object, ...]],
        **_: object,
    ) -> tuple[dict[str, CheckpointPart], tuple[()]]:
        self.saved |= each
        return dict.fromkeys(each, CheckpointPart(step, 1, ())), ()

    def enlist(self, place: Place, *arguments: object) -> None:
        kept = tuple(d for d in self.device_ids if d != place.device_id)
        self.device_ids = (*kept, place.device_id)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Crew:
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
    found = Crew(config, places, str(tmp_path), host="127.0.0.1", actors=None)
    found.get_ready()
    return found


def test_a_new_worker_in_the_place_of_the_last_one_is_not_joined(two: Crew) -> None:
    """horovod/horovod#2652: whoever comes anew joins at a change of plan, and not before."""
    assert two.is_joined
    two.enlist(Place("b-0"))
    assert two.fleet.device_ids == ("a-0", "b-0")
    assert not two.is_joined


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
