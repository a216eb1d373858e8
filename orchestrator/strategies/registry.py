"""Strategies by name: each turns a PlanningProblem into candidates, best first, idle included."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.strategies import baselines, tuned
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
    "slot-cap": tuned.RateCap,
    "tuned-rate-cap": tuned.RateCap,
    "tuned-price-cap": tuned.PriceCap,
    "frozen-price": tuned.FrozenPrice,
    "on-demand": baselines.OnDemand,
    "do-nothing": baselines.DoNothing,
}


TUNED: Mapping[str, Callable[[float], Strategy]] = {
    "tuned-rate-cap": tuned.RateCap,
    "tuned-price-cap": tuned.PriceCap,
    "frozen-price": tuned.FrozenPrice,
}
"""Strategies with one number of their own: $/s of the run, $/sample, samples/$."""


def make_strategy(name: str, *, setting: float | None = None) -> Strategy:
    """Build a strategy by its name in ``control.strategy``.

    Args:
        name: One of ``STRATEGIES``.
        setting: The number of a strategy of ``TUNED``, found in hindsight; when absent it takes
            one from the first state that it sees.

    Raises:
        ValueError: On an unknown name, listing the choices, and on a setting that is not
            positive or that the strategy does not take.
    """
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known: {', '.join(STRATEGIES)}")
    if setting is None:
        return STRATEGIES[name]()
    if name not in TUNED or not setting > 0:
        raise ValueError(
            f"strategy {name!r} with the setting {setting}; one that is positive is taken by "
            f"{', '.join(TUNED)}"
        )
    return TUNED[name](setting)
