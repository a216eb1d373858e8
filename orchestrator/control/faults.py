"""Faults to inject into an emulated run: what breaks, where, at which step of it. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

T = TypeVar("T")

FaultKind = Literal[
    "fail", "hang", "slow", "price", "disk_full",
    "cut_link", "slow_link", "notice", "join", "kill_head", "kill_driver",
]  # fmt: skip

Phase = Literal[
    "loader", "forward", "backward", "reduce", "vote", "agreed", "apply", "save", "evaluate",
]  # fmt: skip
"""Where in a step: reading samples; before the first forward or backward of a stage; while
gradients are summed; while votes are counted; between the vote and the update; after the update
and before its report; while a checkpoint is written; before a round of an evaluation."""

_OF_PROCESS: tuple[Phase, ...] = (
    "forward", "backward", "reduce", "vote", "agreed", "apply", "save",
)  # fmt: skip
PHASES: Mapping[FaultKind, tuple[Phase, ...]] = {
    "fail": _OF_PROCESS,
    "hang": _OF_PROCESS,
    "slow": ("loader", "forward", "backward"),
}
"""Where each kind may hit that has a phase, in any run; ``_EVALUATING`` where that is done."""

_EVALUATING: Mapping[FaultKind, tuple[Phase, ...]] = {"fail": ("evaluate",), "hang": ("evaluate",)}

DRAWN: tuple[FaultKind, ...] = (
    "fail", "hang", "slow", "price", "notice", "join", "disk_full", "cut_link", "kill_head",
)  # fmt: skip
"""Kinds that a run survives by itself. The death of the job is not one: somebody has to resume.
A slow link is one, but needs a plan that uses it to be felt at all."""

_WEIGHTS: Mapping[FaultKind, int] = {
    "fail": 4,
    "hang": 2,
    "slow": 2,
    "price": 2,
    "notice": 2,
    "join": 2,
    "disk_full": 1,
    "cut_link": 1,
    "kill_head": 1,
}
"""How often each is drawn."""

_FIELDS: Mapping[FaultKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fail": (("device",), ("phase",)),
    "hang": (("device",), ("phase",)),
    "slow": (("device", "delay_s"), ("phase", "num_steps")),
    "price": (("pool", "price_per_hour"), ()),
    "disk_full": ((), ("device",)),
    "cut_link": (("device", "peer"), ()),
    "slow_link": (("device", "peer", "bandwidth_ratio"), ("num_steps",)),
    "notice": (("device", "warning_s"), ()),
    "join": (("pool",), ()),
    "kill_head": ((), ()),
    "kill_driver": ((), ()),
}
"""What a fault of each kind needs, and what else it may say."""

_SPARED_STEPS = 2
"""Of a drawn plan, at either end: a run should have run before it breaks, and notice it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry of YAML ``emulation.faults``, or of ``lyray run --chaos FILE``."""

    kind: FaultKind
    """``fail``: a worker's process is killed. ``hang``: it stops. ``slow``: it takes longer.
    ``price``: a pool has another price. ``notice``: a device is taken away, after a warning.
    ``join``: one joins a pool. ``disk_full``: a write fails. ``kill_head``: the head's process is
    killed. ``kill_driver``: that of the job is, and ends all; the same command resumes.
    ``cut_link``: two workers lose their connection. ``slow_link``: theirs carries less."""

    at_step: int
    """The first step it may hit; what breaks a process hits once, at the first chance."""

    device: str | None = None
    """Whom it hits; ``disk_full`` without a device hits the head."""

    phase: Phase | None = None
    """Where in the step; ``forward`` when absent."""

    delay_s: float | None = None
    """With ``slow``: so much longer takes the loader a step, or each forward or backward."""

    num_steps: int | None = None
    """With ``slow`` and ``slow_link``: for so many steps; to the end of the run when absent."""

    pool: str | None = None
    """With ``price`` and ``join``: which pool."""

    price_per_hour: float | None = None
    """With ``price``: its price from then on."""

    peer: str | None = None
    """With ``cut_link`` and ``slow_link``: the other end."""

    bandwidth_ratio: float | None = None
    """With ``slow_link``: of what the link carries otherwise, both ways."""

    warning_s: float | None = None
    """With ``notice``: how long before its device is taken away."""

    def __post_init__(self) -> None:
        if self.at_step < 0:
            raise ValueError(f"at_step is {self.at_step}; it must not be negative")
        needed, allowed = _FIELDS[self.kind]
        for name in ("device", "phase", "delay_s", "num_steps", "pool", "price_per_hour", "peer",
                     "warning_s", "bandwidth_ratio"):  # fmt: skip
            given = getattr(self, name) is not None
            if given and name not in needed + allowed:
                takes = ", ".join(("at_step", *needed, *allowed))
                raise ValueError(f"{name} means nothing to {self.kind}, which takes {takes}")
            if not given and name in needed:
                raise ValueError(f"{name} is missing; {self.kind} needs {' and '.join(needed)}")
        phases = (*PHASES.get(self.kind, ()), *_EVALUATING.get(self.kind, ()))
        if self.phase is not None and self.phase not in phases:
            raise ValueError(f"phase is {self.phase}; {self.kind} hits in {', '.join(phases)}")
        for name in ("delay_s", "num_steps", "price_per_hour", "warning_s", "bandwidth_ratio"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; it must be positive")
        if self.bandwidth_ratio is not None and self.bandwidth_ratio > 1:
            raise ValueError(f"bandwidth_ratio is {self.bandwidth_ratio}; it must not exceed 1")
        if self.peer is not None and self.peer == self.device:
            raise ValueError(f"peer is {self.peer}, the device itself; name the other end")

    @property
    def end_step(self) -> float:
        """The first step that it spares again; infinite when it lasts to the end."""
        return math.inf if self.num_steps is None else self.at_step + self.num_steps

    @property
    def where(self) -> Phase:
        """The phase in which it hits a process."""
        of_head = self.kind in ("disk_full", "kill_head", "kill_driver")
        return "save" if of_head else self.phase or "forward"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults of one run. Made by hand, method by method, or drawn: same seed, same plan."""

    faults: tuple[Fault, ...] = ()

    def fail_at(self, step: int, device: str, phase: Phase = "forward") -> "FaultPlan":
        """A worker's process is killed."""
        return self._and(Fault(kind="fail", at_step=step, device=device, phase=phase))

    def hang_at(self, step: int, device: str, phase: Phase = "forward") -> "FaultPlan":
        """A worker's process stops, and says nothing more."""
        return self._and(Fault(kind="hang", at_step=step, device=device, phase=phase))

    def slow_at(
        self,
        step: int,
        device: str,
        phase: Phase,
        delay_s: float,
        *,
        num_steps: int | None = None,
    ) -> "FaultPlan":
        """A device takes longer, for some steps or to the end."""
        return self._and(
            Fault(
                kind="slow",
                at_step=step,
                device=device,
                phase=phase,
                delay_s=delay_s,
                num_steps=num_steps,
            )
        )

    def price_at(self, step: int, pool: str, price_per_hour: float) -> "FaultPlan":
        """A pool has another price, in $/h."""
        return self._and(
            Fault(kind="price", at_step=step, pool=pool, price_per_hour=price_per_hour)
        )

    def disk_full_at(self, step: int, device: str | None = None) -> "FaultPlan":
        """The next write of the head fails, or of this device's part of a checkpoint."""
        return self._and(Fault(kind="disk_full", at_step=step, device=device))

    def cut_link_at(self, step: int, device: str, peer: str) -> "FaultPlan":
        """Two workers lose their connection."""
        return self._and(Fault(kind="cut_link", at_step=step, device=device, peer=peer))

    def slow_link_at(
        self,
        step: int,
        device: str,
        peer: str,
        bandwidth_ratio: float,
        *,
        num_steps: int | None = None,
    ) -> "FaultPlan":
        """The link of two devices carries less, for some steps or to the end."""
        return self._and(
            Fault(
                kind="slow_link",
                at_step=step,
                device=device,
                peer=peer,
                bandwidth_ratio=bandwidth_ratio,
                num_steps=num_steps,
            )
        )

    def notice_at(self, step: int, device: str, warning_s: float) -> "FaultPlan":
        """A device is taken away after a warning."""
        return self._and(Fault(kind="notice", at_step=step, device=device, warning_s=warning_s))

    def join_at(self, step: int, pool: str) -> "FaultPlan":
        """A device joins a pool."""
        return self._and(Fault(kind="join", at_step=step, pool=pool))

    def kill_head_at(self, step: int) -> "FaultPlan":
        """The head's process is killed."""
        return self._and(Fault(kind="kill_head", at_step=step))

    def kill_driver_at(self, step: int) -> "FaultPlan":
        """The job's process is killed."""
        return self._and(Fault(kind="kill_driver", at_step=step))

    def _and(self, fault: Fault) -> "FaultPlan":
        return FaultPlan((*self.faults, fault))

    @property
    def num_restarts(self) -> int:
        """How often at most the run ends, resumable, and its command has to be given again."""
        return sum(fault.kind == "disk_full" for fault in self.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Which faults to draw: section ``draw`` of a chaos file."""

    seed: int = 0
    faults: int = 4
    """How many."""

    spare: tuple[str, ...] = ()
    """Devices that are never killed, hung or taken away; one that is drawn when absent. They
    should hold the model alone."""

    kinds: tuple[FaultKind, ...] = DRAWN

    def __post_init__(self) -> None:
        if not self.faults >= 1:
            raise ValueError(f"faults is {self.faults}; write 1 or more")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; write 0 or more")
        unknown = [kind for kind in self.kinds if kind not in DRAWN]
        if unknown or not self.kinds:
            raise ValueError(
                f"kinds is {', '.join(unknown) or 'empty'}; write some of {', '.join(DRAWN)}"
            )


def draw(
    asked: Draw, devices: Sequence[str], prices_per_hour: Mapping[str, float], num_steps: int
) -> FaultPlan:
    """Return faults drawn at random: the same for the same arguments, at steps all different.

    At least one device is never killed, hung or taken away.

    Args:
        asked: Seed and number.
        devices: Of the run.
        prices_per_hour: Pool to its price at the start.
        num_steps: Of the run.

    Raises:
        ValueError: If the run has too few steps, or too few devices, for so many faults.
    """
    steps = range(_SPARED_STEPS, num_steps - _SPARED_STEPS)
    if len(steps) < asked.faults:
        raise ValueError(
            f"faults is {asked.faults}, but a run of {num_steps} steps has room for {len(steps)}"
        )
    if unknown := [device for device in asked.spare if device not in devices]:
        raise ValueError(f"spare names {unknown[0]!r}; known: {', '.join(devices)}")
    rng = np.random.default_rng(asked.seed)
    spared = asked.spare or (_pick(rng, devices),)
    exposed = tuple(device for device in devices if device not in spared)
    if not exposed:
        raise ValueError("spare names every device; leave one out to break")
    dice = _Dice(rng, devices, exposed, prices_per_hour)
    chosen = sorted(rng.choice(len(steps), asked.faults, replace=False).tolist())
    kinds = [kind for kind in asked.kinds for _ in range(_WEIGHTS[kind])]
    return FaultPlan(tuple(_DRAWS[_pick(rng, kinds)](dice, steps[i]) for i in chosen))


def _pick(rng: np.random.Generator, choices: Sequence[T]) -> T:
    return choices[int(rng.integers(len(choices)))]


@dataclass(frozen=True, slots=True)
class _Dice:
    """What is drawn from."""

    rng: np.random.Generator
    devices: Sequence[str]
    exposed: Sequence[str]
    prices_per_hour: Mapping[str, float]

    def process(self, kind: FaultKind, step: int) -> Fault:
        device, phase = _pick(self.rng, self.exposed), _pick(self.rng, PHASES[kind])
        return Fault(kind=kind, at_step=step, device=device, phase=phase)

    def slow(self, step: int) -> Fault:
        return Fault(
            kind="slow",
            at_step=step,
            device=_pick(self.rng, self.devices),
            phase=_pick(self.rng, PHASES["slow"]),
            delay_s=round(float(self.rng.uniform(0.005, 0.05)), 4),
            num_steps=int(self.rng.integers(1, 20)),
        )

    def price(self, step: int) -> Fault:
        pool = _pick(self.rng, tuple(self.prices_per_hour))
        price = self.prices_per_hour[pool] * 2.0 ** float(self.rng.uniform(-1.0, 1.0))
        return Fault(kind="price", at_step=step, pool=pool, price_per_hour=round(price, 4))

    def notice(self, step: int) -> Fault:
        device, warning_s = _pick(self.rng, self.exposed), float(self.rng.uniform(0.1, 1.5))
        return Fault(kind="notice", at_step=step, device=device, warning_s=round(warning_s, 3))

    def join(self, step: int) -> Fault:
        return Fault(kind="join", at_step=step, pool=_pick(self.rng, tuple(self.prices_per_hour)))

    def cut_link(self, step: int) -> Fault:
        device = _pick(self.rng, self.devices)
        peer = _pick(self.rng, [other for other in self.devices if other != device])
        return Fault(kind="cut_link", at_step=step, device=device, peer=peer)

    def disk_full(self, step: int) -> Fault:
        device = _pick(self.rng, (None, *self.exposed))
        return Fault(kind="disk_full", at_step=step, device=device)


_DRAWS: Mapping[FaultKind, Callable[[_Dice, int], Fault]] = {
    "fail": lambda dice, step: dice.process("fail", step),
    "hang": lambda dice, step: dice.process("hang", step),
    "slow": _Dice.slow,
    "price": _Dice.price,
    "notice": _Dice.notice,
    "join": _Dice.join,
    "disk_full": _Dice.disk_full,
    "cut_link": _Dice.cut_link,
    "kill_head": lambda _, step: Fault(kind="kill_head", at_step=step),
}
