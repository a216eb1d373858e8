"""Strategies by name: each turns a PlanningProblem into candidates, best first, idle included."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.strategies import baselines
from orchestrator.strategies.joint import Joint


class Strategy(Protocol):
    """A way to choose plans. Same problem, same candidates."""

    @property
    def deals_shares(self) -> bool:
        """Whether the slot's assignment may deal shares anew; False: they are its very idea."""

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


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "joint": Joint,
    "even-split": partial(baselines.Fixed, baselines.even_split),
    "proportional": partial(baselines.Fixed, baselines.proportional),
    "even-pipeline": partial(baselines.Fixed, baselines.even_pipeline),
    "balanced-pipeline": partial(baselines.Fixed, baselines.balanced_pipeline),
    "static": partial(baselines.Static, rebalance=False),
    "static-rebalanced": partial(baselines.Static, rebalance=True),
    "greedy": baselines.Greedy,
    "cheapest": baselines.Cheapest,
    "slot-cap": baselines.SlotCap,
    "on-demand": baselines.OnDemand,
    "do-nothing": baselines.DoNothing,
}


def make_strategy(name: str) -> Strategy:
    """Build a strategy by its name in ``control.strategy``.

    Raises:
        ValueError: On an unknown name, listing the choices.
    """
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]()
