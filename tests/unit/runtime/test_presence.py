"""What is there of an emulated cluster, and who is told to leave."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.builders import make_cluster, make_device, make_profile
from orchestrator import storage
from orchestrator.control.backend import (
    ClusterOptions,
    EmulatedEvent,
    LinkOptions,
    OfferOptions,
)
from orchestrator.control.pools import build_cluster
from orchestrator.core.training import TrainingOptions
from orchestrator.errors import LostWorkerError
from orchestrator.runtime import notices
from orchestrator.runtime import presence as module
from orchestrator.runtime.inventory import Numbering, found_nodes, price_nodes
from orchestrator.runtime.notices import NoticeBoard, parse_notices
from orchestrator.runtime.presence import EmulatedPresence, RayPresence
from orchestrator.runtime.products import Products
from orchestrator.runtime.truth import EmulatedTruth


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file says is there at once, however busy this machine is."""
    monkeypatch.setattr(notices, "GLANCE_S", 60.0)


def presence(*events: EmulatedEvent, spot: bool = False) -> EmulatedPresence:
    cluster = make_cluster([make_device("fast-0"), make_device("slow-0")])
    cluster = replace(cluster, offers=tuple(replace(o, spot=spot) for o in cluster.offers))
    truth = EmulatedTruth(
        cluster=cluster,
        model=make_profile({"gpu": [1.0] * 4}),
        training=TrainingOptions(task="m:t", global_batch=4, steps=10),
        events=events,
    )
    return EmulatedPresence(truth, "here", NoticeBoard(None))


def test_what_has_happened_stays_so_when_the_run_goes_back_to_a_checkpoint() -> None:
    sight = presence(EmulatedEvent(at_step=5, device="slow-0", lost=True))
    assert set(sight.look(4, 1.0).present) == {"fast-0", "slow-0"}
    assert set(sight.look(5, 2.0).present) == {"fast-0"}
    assert set(sight.look(0, 3.0).present) == {"fast-0"}


def test_a_device_under_notice_is_there_until_its_time_has_come() -> None:
    """ray-project/ray#63968: notice existed, and nobody moved work off before the deadline."""
    looking = presence(EmulatedEvent(at_step=5, device="slow-0", notice_s=30.0))
    assert looking.look(4, 1.0).leaving_s == {}
    sight = looking.look(5, 2.0)
    assert (set(sight.present), sight.leaving_s) == ({"fast-0", "slow-0"}, {"slow-0": 32.0})
    assert looking.look(5, 31.9).leaving_s == {"slow-0": 32.0}
    sight = looking.look(5, 32.0)
    assert (set(sight.present), sight.leaving_s) == ({"fast-0"}, {})
    assert looking.is_preemption("slow-0")


def test_an_emulated_cluster_that_no_step_can_fill_again_is_an_error() -> None:
    """Devices join at steps, and without a device there is none: the run would wait for ever."""
    lost = EmulatedEvent(at_step=5, device="fast-0", lost=True)
    late = presence(lost, EmulatedEvent(at_step=6, pool="slow", joined=1))
    assert set(late.look(4, 1.0).present) == {"fast-0"}
    with pytest.raises(LostWorkerError, match="no device is left at step 5"):
        late.look(5, 2.0)
    in_time = presence(lost, EmulatedEvent(at_step=5, pool="slow", joined=1))
    assert set(in_time.look(5, 2.0).present) == {"slow-0"}


def ray_node(name: str) -> dict[str, object]:
    return {
        "NodeID": f"id-{name}",
        "NodeName": name,
        "Alive": True,
        "Labels": {"lyray.kind": "t4"},
        "Resources": {"CPU": 1.0},
    }


def test_a_device_on_demand_that_went_after_notice_was_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_draining", lambda now_s: {})
    monkeypatch.setattr(module, "POLL_S", -1.0)
    offers = (OfferOptions(pool="p", kind="t4", price_per_hour=1.0),)
    numbering = Numbering()
    nodes = [ray_node("a"), ray_node("b")]
    links = (LinkOptions(within="zone", bandwidth_gbytes_per_s=1.0),)
    described = ClusterOptions(source="ray", offers=offers, links=links)
    options, _ = price_nodes(found_nodes(nodes), described, numbering)
    (tmp_path / "board").write_text('{"p-0": 30, "p-9": 30}')
    board = NoticeBoard(str(tmp_path / "board"))
    looking = RayPresence(
        options, build_cluster(options), numbering, board, lambda: nodes, Products()
    )
    assert set(looking.look(0, 1.0).leaving_s) == {"p-0"}
    nodes.pop(0)
    assert set(looking.look(0, 2.0).present) == {"p-1"}  # before anybody hears of the loss
    assert looking.is_preemption("p-0")
    assert not looking.is_preemption("p-1")
    nodes.append(ray_node("c"))
    assert set(looking.look(0, 3.0).present) == {"p-0", "p-1"}


def test_a_device_given_back_is_left_in_time_and_used_again_when_more_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node is still there, and what leaves it alone is what lets Ray's autoscaler take it."""
    monkeypatch.setattr(module, "_draining", lambda now_s: {})
    monkeypatch.setattr(module, "POLL_S", -1.0)
    offers = (OfferOptions(pool="p", kind="t4", price_per_hour=1.0),)
    links = (LinkOptions(within="zone", bandwidth_gbytes_per_s=1.0),)
    numbering, nodes = Numbering(), [ray_node("a"), ray_node("b"), ray_node("c")]
    described = ClusterOptions(source="ray", offers=offers, links=links)
    options, _ = price_nodes(found_nodes(nodes), described, numbering)
    looking = RayPresence(
        options, build_cluster(options), numbering, NoticeBoard(None), lambda: nodes, Products()
    )
    looking.look(0, 1.0)
    looking.give_back({"p-1", "p-2"}, {"p": 1}, 10.0)
    sight = looking.look(0, 2.0)
    assert sight.leaving_s == {"p-1": 11.0, "p-2": 11.0}
    assert set(looking.look(0, 12.0).present) == {"p-0"}
    assert looking.is_preemption("p-1"), "nobody broke it"
    looking.give_back(frozenset(), {"p": 2}, 10.0)
    sight = looking.look(0, 13.0)
    assert (len(sight.present), sight.leaving_s) == (2, {})
    nodes.append(ray_node("d"))
    assert len(looking.look(0, 14.0).present) == 3


@pytest.mark.parametrize("spot", [False, True])
def test_a_spot_device_that_vanishes_was_taken_away_and_one_whose_process_died_was_not(
    spot: bool,
) -> None:
    """ray-project/ray#41285: three preemptions use up max_failures=3."""
    looking = presence(EmulatedEvent(at_step=5, device="slow-0", lost=True), spot=spot)
    looking.look(5, 2.0)
    assert looking.is_preemption("slow-0") == spot
    assert not looking.is_preemption("fast-0")


def test_a_notice_from_outside_holds_while_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "notices.json"
    assert NoticeBoard(str(path)).read(5.0) == {}
    path.write_text('{"mid-0": 30}')
    board = NoticeBoard(str(path))
    assert board.read(5.0) == {"mid-0": 35.0}
    path.write_text("{")  # being written
    board._read_s = float("-inf")  # a second later
    assert board.read(6.0) == {"mid-0": 35.0}
    path.write_text('{"mid-0": 29, "mid-1": 2.5}')
    board._read_s = float("-inf")
    assert board.read(7.0) == {"mid-0": 35.0, "mid-1": 9.5}
    path.unlink()
    board._read_s = float("-inf")
    assert board.read(8.0) == {}


def test_a_board_that_hangs_holds_up_nobody_and_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    def hang(url: str, *, timeout_s: float) -> bytes:
        assert timeout_s > 0
        assert answers.wait(60.0)
        return b'{"mid-0": 30}'

    monkeypatch.setattr(storage, "read_bytes", hang)
    monkeypatch.setattr(notices, "GLANCE_S", 0.01)
    monkeypatch.setattr(notices, "ANSWER_S", 0.01)
    board = NoticeBoard("http://nowhere/notices")
    for now_s in (1.0, 2.0, 3.0):
        assert board.read(now_s) == {}
    (record,) = caplog.records
    assert "http://nowhere/notices: no answer within" in record.getMessage()
    answers.set()
    assert board._reading is not None
    board._reading.join()
    assert board.read(4.0) == {"mid-0": 34.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "no JSON object"),
        ('{"mid-0": "soon"}', "'mid-0' is 'soon'; write the seconds"),
        ('{"mid-0": -1}', "'mid-0' is -1"),
        ('{"mid-0": true}', "'mid-0' is True"),
        ("mid-0,30", "Expecting value"),
    ],
)
def test_a_notice_that_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_notices(text)
