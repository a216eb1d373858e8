import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.builders import make_cluster, make_device
from orchestrator.core.cluster import ClusterState
from orchestrator.telemetry.coherence import MIN_SLOTS, Coherence

CLUSTER = make_cluster([make_device("gpu-0"), make_device("gpu-1")])


def priced(factor: float) -> ClusterState:
    return replace(
        CLUSTER,
        offers=tuple(
            replace(o, price_usd_per_s=factor * o.price_usd_per_s) for o in CLUSTER.offers
        ),
    )


def test_a_cluster_that_never_moves_has_none() -> None:
    coherence = Coherence(60.0)
    for _ in range(10 * MIN_SLOTS):
        coherence.add(CLUSTER)
    assert coherence.coherence_s is None


def test_a_single_change_says_nothing() -> None:
    coherence = Coherence(60.0)
    for slot in range(10 * MIN_SLOTS):
        coherence.add(priced(1.0 if slot < 100 else 2.0))
    assert coherence.coherence_s is None


def test_nothing_is_said_of_a_few_slots() -> None:
    coherence = Coherence(60.0)
    for slot in range(MIN_SLOTS - 1):
        coherence.add(priced(1.0 + slot % 2))
    assert coherence.coherence_s is None


@pytest.mark.parametrize("relaxation_slots", [5.0, 30.0])
def test_a_price_that_jumps_between_two_values_lasts_as_long_as_its_process(
    relaxation_slots: float,
) -> None:
    """Correlation exp(-1 / n) a slot: it changes sides with probability (1 - exp(-1/n)) / 2."""
    rng, coherence, dear = np.random.default_rng(0), Coherence(60.0), False
    for _ in range(60_000):
        dear ^= rng.random() < (1 - math.exp(-1 / relaxation_slots)) / 2
        coherence.add(priced(3.0 if dear else 1.0))
    assert coherence.coherence_s == pytest.approx(60.0 * relaxation_slots, rel=0.1)


def test_the_slowest_process_counts() -> None:
    rng, coherence, dear = np.random.default_rng(1), Coherence(60.0), False
    for _ in range(60_000):
        dear ^= rng.random() < (1 - math.exp(-1 / 20)) / 2
        noisy = replace(CLUSTER.devices[0], slowdown=1.0 + 0.1 * float(rng.random()))
        state = replace(priced(3.0 if dear else 1.0), devices=(noisy, CLUSTER.devices[1]))
        coherence.add(state)
    assert coherence.coherence_s == pytest.approx(60.0 * 20, rel=0.15)


def test_what_changes_every_slot_lasts_a_slot() -> None:
    rng, coherence = np.random.default_rng(2), Coherence(60.0)
    for _ in range(1000):
        coherence.add(priced(float(rng.uniform(1.0, 3.0))))
    assert coherence.coherence_s == 60.0
