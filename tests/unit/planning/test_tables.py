"""Sums over layers: team sizes on offer, interpolation between measured sizes, its limits."""

from dataclasses import replace

import pytest

from benchmarks.builders import make_profile
from orchestrator.core.model import LayerTimes, ModelProfile
from orchestrator.planning.tables import LayerTables


def _with_teams(sized: tuple[int, ...], timed: tuple[int, ...]) -> ModelProfile:
    """Layers that a team splits evenly, in bytes and in time."""
    base = make_profile({"gpu": [0.012, 0.024]}, param_bytes=1200.0)
    (sizes,), (times,) = base.sizes, base.times
    return replace(
        base,
        sizes=tuple(
            replace(sizes, team_size=q, param_bytes=tuple(b / q for b in sizes.param_bytes))
            for q in sized
        ),
        times=tuple(replace(times.scaled(1 / q), team_size=q) for q in timed),
    )


def test_a_kind_offers_the_team_sizes_that_have_both_times_and_bytes() -> None:
    tables = LayerTables(_with_teams(sized=(4, 1, 2), timed=(8, 1, 2)))
    assert tables.team_sizes("gpu") == (1, 2)
    assert tables.team_sizes("never measured") == ()


def test_times_between_two_measured_microbatches_lie_on_the_line_between_them() -> None:
    profile = make_profile({"gpu": [0.01]}, microbatches=(2, 4))
    table = LayerTables(profile).times("gpu", 1, 3)
    assert table.forward_s[-1] == 0.03
    assert table.interpolated


def test_a_measured_time_is_taken_as_it_is() -> None:
    row = LayerTimes("gpu", 1, 2, (0.5,), (0.7,), (0.1,))
    profile = replace(make_profile({"gpu": [0.01]}, microbatches=(1, 4)), times=(row,))
    table = LayerTables(profile).times("gpu", 1, 2)
    assert (table.forward_s, table.backward_s) == ((0.0, 0.5), (0.0, 0.7))
    assert not table.interpolated


def test_beyond_the_largest_microbatch_nothing_is_gained_over_it() -> None:
    rows = (
        LayerTimes("gpu", 1, 2, (3.0,), (3.0,), (0.0,)),
        LayerTimes("gpu", 1, 4, (4.0,), (9.0,), (0.0,)),
    )
    profile = replace(make_profile({"gpu": [1.0]}), times=rows)
    table = LayerTables(profile).times("gpu", 1, 8)
    assert table.forward_s[-1] == 8.0  # 4 s for 4 samples, though the line says 6 s
    assert table.backward_s[-1] == 21.0  # 9 s, and 3 s for each further sample
    assert (table.interpolated, table.beyond) == (True, True)
    assert table.gap == "gpu at 8 samples (2 and 4 measured)"


def test_below_the_smallest_microbatch_overheads_stay() -> None:
    rows = (
        LayerTimes("gpu", 1, 2, (3.0,), (3.0,), (0.0,)),
        LayerTimes("gpu", 1, 4, (4.0,), (9.0,), (0.0,)),
    )
    table = LayerTables(replace(make_profile({"gpu": [1.0]}), times=rows)).times("gpu", 1, 1)
    assert table.forward_s[-1] == 2.5  # 2 s of overhead, 0.5 s a sample
    assert table.backward_s[-1] == 1.5  # in proportion: the line would end at 0
    assert table.beyond


def test_a_single_measured_microbatch_is_scaled_by_its_samples_and_says_so() -> None:
    table = LayerTables(make_profile({"gpu": [1.0]}, update_s=0.5)).times("gpu", 1, 3)
    assert table.forward_s[-1] == 3.0
    assert table.update_s[-1] == 0.5
    assert (table.beyond, table.gap) == (True, "gpu at 3 samples (1 measured)")


def test_a_team_size_between_two_measured_ones_shares_what_they_share() -> None:
    tables = LayerTables(_with_teams(sized=(1, 2, 4), timed=(1, 2, 4)))
    table = tables.times("gpu", 3, 1)
    assert table.forward_s[-1] == pytest.approx(0.036 / 3)  # an even split stays an even split
    assert tables.sizes(3).param_bytes[-1] == pytest.approx(2400 / 3)
    assert (table.interpolated, table.gap) == (True, "gpu x3 (teams of 2 and 4)")


@pytest.mark.parametrize("team_size", [1, 8])
def test_teams_beyond_the_measured_ones_are_refused(team_size: int) -> None:
    tables = LayerTables(_with_teams(sized=(2, 4), timed=(2, 4)))
    with pytest.raises(ValueError, match=f"no times for kind 'gpu' and teams of {team_size}"):
        tables.times("gpu", team_size, 1)
    with pytest.raises(ValueError, match=f"no sizes for teams of {team_size}"):
        tables.sizes(team_size)


def test_a_tied_parameter_counts_once_on_a_team_too() -> None:
    tied = replace(_with_teams(sized=(1, 2), timed=(1, 2)), ties=((0, 1),), tie_bytes=(900.0,))
    assert LayerTables(tied).param_bytes(1, 0, 2) == 2400 - 900
    assert LayerTables(tied).param_bytes(2, 0, 2) == 1200 - 450
