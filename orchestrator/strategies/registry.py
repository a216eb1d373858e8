"""Strategies by name: each turns a PlanningProblem into candidates, best first, idle included."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.errors import ConfigError
from orchestrator.strategies import baselines
from orchestrator.strategies.joint import Joint


class Strategy(Protocol):
    """A way to choose plans. Same problem, same candidates."""

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

PLANNED = ("tuned-rate-cap", "tuned-price-cap", "frozen-price", "pase", "ppo")
"""Documented names whose strategies do not exist yet."""


def make_strategy(name: str) -> Strategy:
    """Build a strategy by its name in ``control.strategy``.

    Raises:
        ConfigError: On an unknown name, listing the choices, or one that is not supported yet.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]()
    reason = "is not supported in this version" if name in PLANNED else "is unknown"
    raise ConfigError(
        f"control.strategy: {name!r} {reason}; choose one of {', '.join(sorted(STRATEGIES))}"
    )
