"""Who counts as there while devices go: whoever is held has to have a price."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from benchmarks.builders import make_cluster, make_device
from orchestrator.runtime.roster import Roster
from tests.runtime.crew import FakePresence

if TYPE_CHECKING:
    from orchestrator.runtime.rig import Rig
    from orchestrator.runtime.watch import Watch

DEVICES = [make_device("a-0"), make_device("b-0")]


def test_a_device_that_went_counts_until_its_loss_is_heard_but_is_not_planned_with() -> None:
    killed: list[str] = []
    fleet = SimpleNamespace(
        device_ids=("a-0", "b-0"),
        recruited=frozenset[str](),
        kill=killed.append,
        muster=lambda longest_s: ((), ()),
    )
    cluster = make_cluster(DEVICES)
    presence = FakePresence(DEVICES, cluster.offers)
    rig: Any = SimpleNamespace(
        presence=presence, crew=SimpleNamespace(fleet=fleet), cluster=cluster
    )
    watch: Any = SimpleNamespace(progress=SimpleNamespace(next_step=3))
    roster = Roster(cast("Rig", rig), slot_s=1.0, start_s=1.0, next_step=0, now_s=0.0)
    assert roster.leaving == set()

    del presence.present["b-0"]
    assert roster.look(cast("Watch", watch), 1.0) == []
    assert killed == ["b-0"]
    assert [device.device_id for device in roster.devices] == ["a-0", "b-0"]
    assert roster.leaving == {"b-0"}

    fleet.device_ids = ("a-0",)  # its poll has erred by now
    assert [device.device_id for device in roster.devices] == ["a-0"]
    assert roster.leaving == set()
