"""Sums over layers: team sizes on offer, interpolation between measured sizes, its limits."""

from dataclasses import replace

from orchestrator.core.model import LayerTimes, ModelProfile
from orchestrator.planning.tables import LayerTables
from tests.unit.builders import make_profile


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
