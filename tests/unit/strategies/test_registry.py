import pytest

from orchestrator.planning.cost import CostModel
from orchestrator.strategies.registry import STRATEGIES, make_strategy
from tests.unit.planning.demo_cluster import demo_cluster, demo_devices, demo_problem


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_keeps_the_contract(name: str) -> None:
    problem = demo_problem(demo_cluster(demo_devices((1, 1, 1))), backlog_usd=50.0)
    cost, strategy = CostModel(problem), make_strategy(name)
    found = strategy.propose(problem, out_of_time=lambda: False)
    assert found == strategy.propose(problem, out_of_time=lambda: False)
    assert [c.score for c in found] == sorted((c.score for c in found), reverse=True)
    assert sum(c.plan.is_idle for c in found) == 1
    for candidate in found:
        assert candidate.score == cost.score(candidate.estimate)
        if not candidate.plan.is_idle:
            assert candidate.plan.num_samples == problem.batch_samples
            assert candidate.plan.num_layers == problem.model.num_layers
            assert cost.memory_error(candidate.plan.groups, candidate.plan.schedule) is None


def test_unknown_strategy_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"unknown strategy 'jont'; known: joint, "):
        make_strategy("jont")
