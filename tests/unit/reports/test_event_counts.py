"""What happened, kind by kind."""

from orchestrator.reports.event_counts import count_cells, event_counts


def test_faults_stand_first_with_how_often_how_long_and_why() -> None:
    found = event_counts((
        {"kind": "checkpoint", "duration_s": 0.5},
        {"kind": "recovered", "cause": "replica", "duration_s": 1.5},
        {"kind": "lost", "device": "a-0", "cause": "preemption"},
        {"kind": "lost", "device": "a-0", "cause": "preemption"},
        {"kind": "lost", "device": "b-0", "cause": "worker"},
        {"kind": "recovered", "cause": "replica", "duration_s": 2.5},
    ))  # fmt: skip
    assert [count_cells(count) for count in found] == [
        ("lost", "3", "", "2", "preemption (2 times), worker (once)"),
        ("recovered", "2", "4.00 s", "", "replica (2 times)"),
        ("checkpoint", "1", "500 ms", "", ""),
    ]
    assert event_counts(()) == ()
