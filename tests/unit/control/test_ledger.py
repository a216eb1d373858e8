from dataclasses import replace
from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.builders import make_cluster, make_device
from orchestrator.control.ledger import Ledger, slot_bill_bound_usd
from orchestrator.control.traffic import Traffic
from orchestrator.core.cluster import ClusterState, Offer
from orchestrator.core.slot import Usage

DEVICE = make_device("gpu-0")


def cluster_at(now_s: float, **offer: object) -> ClusterState:
    """One device at 0.01 $/s; ``offer`` replaces fields of its offer."""
    cluster = make_cluster([DEVICE], now_s=now_s)
    known = Offer("gpu", "gpu", "z1", 0.01, quantum_s=0.0)
    return replace(cluster, offers=(replace(known, **offer),))  # type: ignore[arg-type]


def test_a_held_second_costs_its_price_working_or_not() -> None:
    (entry,) = Ledger().close((Usage("gpu-0", 2.0, 7.0),), cluster_at(0.0), cluster_at(10.0))
    assert (entry.from_s, entry.to_s, entry.usd) == (2.0, 7.0, pytest.approx(0.05))
    assert entry.price_per_hour == pytest.approx(36.0)


def test_a_new_price_counts_from_when_it_is_valid() -> None:
    later = cluster_at(10.0, price_usd_per_s=0.03, valid_from_s=6.0)
    entries = Ledger().close((Usage("gpu-0", 0.0, 10.0),), cluster_at(0.0), later)
    assert [(e.from_s, e.to_s, round(e.usd, 9)) for e in entries] == [(0, 6, 0.06), (6, 10, 0.12)]


def test_a_block_is_charged_in_full_when_it_starts_at_the_price_then_in_force() -> None:
    ledger = Ledger()
    first = ledger.close(
        (Usage("gpu-0", 0.0, 10.0),), cluster_at(0.0, quantum_s=60), cluster_at(10.0, quantum_s=60)
    )
    assert [e.usd for e in first] == [pytest.approx(0.6)]
    dearer = cluster_at(70.0, quantum_s=60, price_usd_per_s=0.02, valid_from_s=30.0)
    second = ledger.close((Usage("gpu-0", 10.0, 70.0),), cluster_at(10.0, quantum_s=60), dearer)
    assert [(e.from_s, e.usd) for e in second] == [(60.0, pytest.approx(1.2))]


def test_the_minimum_is_charged_once_per_hold_and_again_after_a_gap() -> None:
    ledger, terms = Ledger(), {"minimum_s": 30.0, "quantum_s": 1.0}
    usage = (Usage("gpu-0", 0.0, 5.0), Usage("gpu-0", 8.0, 10.0))
    entries = ledger.close(usage, cluster_at(0.0, **terms), cluster_at(10.0, **terms))
    assert [(e.from_s, e.to_s, e.cause) for e in entries] == [(0, 30, "block"), (8, 38, "block")]


def test_a_hold_across_slots_pays_no_second_minimum() -> None:
    ledger, terms = Ledger(), {"minimum_s": 30.0, "quantum_s": 1.0}
    for end in (10.0, 20.0, 30.0, 40.0):
        entries = ledger.close(
            (Usage("gpu-0", end - 10, end),),
            cluster_at(end - 10, **terms),
            cluster_at(end, **terms),
        )
    assert ledger.spent_usd == pytest.approx(0.40)
    assert sum(e.usd for e in entries) == pytest.approx(0.10)


def test_a_restart_remembers_what_was_paid_ahead() -> None:
    terms = {"minimum_s": 30.0, "quantum_s": 1.0}
    before = Ledger()
    before.close((Usage("gpu-0", 0, 10),), cluster_at(0, **terms), cluster_at(10, **terms))
    after = Ledger(spent_usd=before.spent_usd, num_entries=before.num_entries, holds=before.holds)
    assert (
        after.close((Usage("gpu-0", 10, 20),), cluster_at(10, **terms), cluster_at(20, **terms))
        == ()
    )
    assert after.spent_usd == pytest.approx(0.30)


def test_a_device_billed_while_present_costs_without_being_used() -> None:
    terms = {"billed": "while_present"}
    (entry,) = Ledger().close((), cluster_at(0.0, **terms), cluster_at(10.0, **terms))
    assert (entry.cause, entry.usd) == ("standing", pytest.approx(0.1))


def test_one_second_of_the_run_is_billed_as_so_many() -> None:
    ledger = Ledger(billing_speedup=60.0)
    (entry,) = ledger.close((Usage("gpu-0", 1.0, 2.0),), cluster_at(0.0), cluster_at(2.0))
    assert (entry.from_s, entry.to_s) == (60.0, 120.0)
    assert entry.usd == pytest.approx(entry.price_per_hour * (entry.to_s - entry.from_s) / 3600)


def test_egress_is_an_entry_of_its_own() -> None:
    sent = Traffic("gpu-0", "gpu", 1e9, 0.01)
    (entry,) = Ledger().close((), cluster_at(0.0), cluster_at(10.0), traffic=(sent,))
    assert (entry.cause, entry.usd, entry.egress_usd, entry.egress_bytes) == (
        "egress", 0.0, 0.01, 1e9,
    )  # fmt: skip


def test_a_guessed_price_is_marked() -> None:
    (entry,) = Ledger().close(
        (Usage("gpu-0", 0.0, 1.0),),
        cluster_at(0.0),
        cluster_at(1.0),
        doubtful_pools=frozenset({"gpu"}),
    )
    assert entry.estimated


@given(
    cuts=st.lists(st.floats(0.01, 50.0), min_size=1, max_size=12),
    quantum_s=st.sampled_from([0.0, 1.0, 7.0, 60.0]),
    minimum_s=st.sampled_from([0.0, 5.0, 60.0]),
)
def test_however_a_hold_is_cut_into_slots_its_bill_is_the_same(
    cuts: list[float], quantum_s: float, minimum_s: float
) -> None:
    terms = {"quantum_s": quantum_s, "minimum_s": minimum_s}
    ledger, now_s = Ledger(), 0.0
    for length_s in cuts:
        usage = (Usage("gpu-0", now_s, now_s + length_s),)
        ledger.close(usage, cluster_at(now_s, **terms), cluster_at(now_s + length_s, **terms))
        now_s += length_s
    whole = Ledger()
    whole.close((Usage("gpu-0", 0.0, now_s),), cluster_at(0.0, **terms), cluster_at(now_s, **terms))
    assert ledger.spent_usd == pytest.approx(whole.spent_usd, rel=1e-9)
    assert whole.spent_usd >= 0.01 * now_s * (1 - 1e-9)
    bound = slot_bill_bound_usd(cluster_at(0.0, **terms), now_s, 0.0)
    assert whole.spent_usd <= bound * (1 + 1e-9)


def test_what_was_spent_is_the_sum_of_the_entries() -> None:
    ledger, entries = Ledger(), []
    for slot in range(100):
        usage = (Usage("gpu-0", slot, slot + 0.7),)
        entries += ledger.close(usage, cluster_at(slot), cluster_at(slot + 1.0))
    assert ledger.spent_usd == pytest.approx(fsum(e.usd for e in entries), abs=1e-12)
    assert ledger.num_entries == len(entries)
