"""Strategies by name: each turns a PlanningProblem into candidates, idle always among them."""

from collections.abc import Callable
from typing import Protocol

from orchestrator.core.slot import Candidate, PlanningProblem


class Strategy(Protocol):
    """A way to choose plans. Pure: same problem, same candidates."""

    def propose(
        self, problem: PlanningProblem, *, out_of_time: Callable[[], bool]
    ) -> tuple[Candidate, ...]:
        """Return candidates, best score first, idle included; every plan fits memory.

        Args:
            problem: All that may be looked at.
            out_of_time: Says when to stop and return the best so far; never true: same seed,
                same plan.

        Raises:
            InfeasibleError: If the model fits on no combination of the devices.
        """
