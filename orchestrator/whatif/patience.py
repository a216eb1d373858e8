"""A strategy that waits while nothing fits, for a cluster whose devices come and go."""

from collections.abc import Callable

from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.errors import InfeasibleError
from orchestrator.planning.cost import CostModel
from orchestrator.strategies.explorer import idle_candidate
from orchestrator.strategies.registry import Strategy


class Patient:
    """Idles where its strategy finds that the devices present cannot hold the model.

    Args:
        strategy: Asked first.
        waits_at_first: Whether it idles even before a plan was ever found; else the error of
            the first search goes on to the caller: the model may simply be too large.
    """

    def __init__(self, strategy: Strategy, *, waits_at_first: bool) -> None:
        self._strategy, self._waits = strategy, waits_at_first

    @property
    def deals_shares(self) -> bool:
        """As the strategy's own."""
        return self._strategy.deals_shares

    def propose(
        self, problem: PlanningProblem, *, out_of_time: Callable[[], bool]
    ) -> tuple[Candidate, ...]:
        """The strategy's candidates, or idle alone; see ``Strategy``."""
        idle = (idle_candidate(CostModel(problem)),)
        if not problem.cluster.devices and self._waits:
            return idle
        try:
            found = self._strategy.propose(problem, out_of_time=out_of_time)
        except InfeasibleError:
            if not self._waits:
                raise
            return idle
        self._waits = True
        return found
