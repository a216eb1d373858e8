"""What a search may try: states of a space, and trials, which are states with cuts and shares."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from orchestrator.core.cluster import Team
from orchestrator.core.plan import Group, Plan
from orchestrator.core.slot import StepEstimate
from orchestrator.planning.sums import Alike

State = tuple[Any, ...]
"""What a space calls one of its tentative groupings of teams; hashable."""


class ChainSet(NamedTuple):
    """A chain of teams, how many groups have such a one, and where two of them may lie."""

    teams: tuple[Team, ...]
    alike: Alike


class Space(Protocol):
    """What a search may try: device by device, or classes of devices."""

    @property
    def teams(self) -> Sequence[Team]:
        """One team of every sort, by which speed and price of states are bounded."""

    @property
    def layout(self) -> object:
        """Equal for spaces in which a state means the same devices."""

    def seeds(self, seconds_per_sample: Sequence[float], longest: int) -> Iterable[State]:
        """First guesses, given the time of the whole model on each of ``teams``.

        Chains have at most ``longest`` teams.
        """

    def filled(
        self, state: State, seconds_per_sample: Sequence[float], longest: int
    ) -> Iterable[State]:
        """A state and more groups over devices that it leaves idle; see ``seeds``."""

    def by_kind(self, state: State) -> Mapping[str, State]:
        """The groups whose devices are all of one kind, as states by themselves."""

    def joined(self, states: Sequence[State]) -> State:
        """States that use unlike devices, as one."""

    def near(self, state: State, longest: int, rng: np.random.Generator) -> Iterator[State]:
        """States one move away in random order; chains have at most ``longest`` teams."""

    def shown(self, state: State) -> Sequence[tuple[tuple[Team, ...], int]]:
        """The chains that a state is made of, and how many groups have such a one."""

    def chains(self, state: State) -> Sequence[ChainSet]:
        """The same, and where groups lie."""

    def used(self, state: State) -> Sequence[tuple[int, int]]:
        """Indices into ``teams``, and how many of such a team are in use."""

    def of_plan(self, plan: Plan) -> Sequence[State]:
        """States of a plan, as it is or mended; none when for instance a device has left."""

    def placed(self, trial: "Trial", incumbent: Plan | None) -> tuple[Group, ...] | None:
        """The trial's groups, one by one, where the incumbent has their layers if that can be.

        None when they do not fit the nodes after all.
        """


@dataclass(frozen=True, slots=True)
class Trial:
    """A state with cuts and shares, and what the cost model says of it."""

    state: State
    schedule: str
    groups: tuple[Group, ...]
    alike: tuple[Alike, ...]  # for how many groups each stands
    estimate: StepEstimate
    space: Space = field(compare=False, repr=False)
