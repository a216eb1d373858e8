import json

import pytest

from benchmarks.reference_data import TRACES
from orchestrator.simulation.preemptions import Instant, read_node_trace


def test_changes_of_one_instant_are_one_event() -> None:
    trace = read_node_trace(["0,add,a", "0,add,b", "60000,remove,a", "60000,remove,b"])
    assert trace.instants == (Instant(0.0, ("a", "b")), Instant(60.0, (), ("a", "b")))
    assert trace.end_s == 60.0


def test_nodes_present_are_those_that_came_and_did_not_leave() -> None:
    trace = read_node_trace(["0,add,a", "1000,add,b", "2000,remove,a"])
    assert trace.nodes_at(0.0) == ("a",)
    assert trace.nodes_at(1.5) == ("a", "b")
    assert trace.nodes_at(9.0) == ("b",)


def test_lists_of_json_say_the_same() -> None:
    lines = [
        json.dumps([0, "add", {"nodes": ["a", "b"], "duration": 60000}]),
        json.dumps([60000, "no-op", {"nodes": []}]),
        json.dumps([120000, "remove", {"nodes": ["a"]}]),
    ]
    assert read_node_trace(lines).instants == (Instant(0.0, ("a", "b")), Instant(120.0, (), ("a",)))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "it is empty; write lines of"),
        (["0,add,a", "0,fetch,b"], "line 2 is '0,fetch,b'; write time_ms,add,node"),
        (["0,add,a", "5,remove,b"], "line 2: node 'b' is not there; drop the line"),
        (["0,add,a", "5,add,a"], "line 2: node 'a' is there already; drop the line"),
        (["9,add,a", "5,add,b"], "line 2: time runs back .*; sort the lines"),
        (["soon,add,a"], "line 1: the time is 'soon'; write milliseconds"),
        (["nan,add,a"], "line 1: the time is 'nan'; write milliseconds"),
        (['[0, "add", {}]'], "line 1 is .*; write .*nodes"),
        (['[0, "no-op", {"nodes": ["a"]}]'], "line 1 says 'no-op' of 1 nodes; write add"),
        (['[0, "add", {"nodes": ["a"]}]', "x"], "line 2 is 'x'; write"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_line_and_the_mend(
    lines: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_node_trace(lines)


@pytest.mark.parametrize(
    ("name", "hours", "most", "losses", "instants", "largest"),
    [
        ("p3-trace.csv", 11.37, 32, 167, 79, 6),
        ("g4dn-trace.csv", 10.77, 24, 74, 48, 5),
        ("trace_hh_55_65.txt", None, 32, 19, 9, 4),
        ("trace_ll_10_11.txt", None, 18, 4, 3, 2),
    ],
)
def test_public_traces_have_the_figures_published_with_them(
    name: str, hours: float | None, most: int, losses: int, instants: int, largest: int
) -> None:
    if not (TRACES / name).exists():
        pytest.skip(f"{TRACES / name} is not here")
    trace = read_node_trace((TRACES / name).read_text("utf-8").splitlines())
    lost = [len(instant.removed) for instant in trace.instants if instant.removed]
    assert (sum(lost), len(lost), max(lost)) == (losses, instants, largest)
    assert max(len(trace.nodes_at(instant.at_s)) for instant in trace.instants) == most
    if hours is not None:
        assert trace.end_s / 3600 == pytest.approx(hours, abs=0.005)
