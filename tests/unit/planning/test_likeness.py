"""Keys that are noted down, not worked out, are those that would be worked out."""

from orchestrator.core.cluster import make_team
from orchestrator.core.plan import Stage
from orchestrator.planning.likeness import Likeness
from tests.unit.planning.demo_cluster import demo_problem


def test_shifted_stages_have_the_key_of_the_same_stages_made_anew() -> None:
    problem = demo_problem()
    teams = [make_team([device]) for device in problem.cluster.devices[:4]]
    num_layers = problem.model.num_layers
    ends = (2, 4, 6, num_layers)
    stages = tuple(
        Stage(team, first, end) for team, first, end in zip(teams, (0, *ends), ends, strict=False)
    )
    for s in range(3):
        for border in (stages[s].end_layer - 1, stages[s].end_layer + 1):
            known = Likeness(problem)
            known.key(stages)
            moved = known.shifted(stages, s, border)
            assert [moved[s].end_layer, moved[s + 1].first_layer] == [border, border]
            assert known.key(moved) == known.key((*moved[:1], *moved[1:]))
