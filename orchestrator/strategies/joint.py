"""The default strategy: data shares, cuts and groups of devices, searched together."""

from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.strategies.explorer import Explorer, OutOfTime, candidates_of, uncollected


class Joint:
    """Maximises J over groups, cuts and shares by tentative search.

    Source: docs/model.md, section 5.
    """

    deals_shares = True

    def __init__(self) -> None:
        self._explorer = Explorer()

    @uncollected()
    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """The finalists of the search; see ``Strategy``."""
        return candidates_of(problem, self._explorer.search(problem, out_of_time))
