"""A crew without processes: its workers do as they are told and finish a step whenever heard."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.cluster import Device, Offer
from orchestrator.core.durable import CheckpointFile, CheckpointPart
from orchestrator.core.evaluation import RoundReport
from orchestrator.core.slot import StepReport, WorkerFailed
from orchestrator.runtime.actors import Place
from orchestrator.runtime.crew import Boundary, Order
from orchestrator.runtime.presence import Present, Sight
from orchestrator.runtime.trouble import Loss
from orchestrator.runtime.watch import Watch


@dataclass(frozen=True)
class Said:
    reports: tuple[StepReport, ...] = ()
    rounds: tuple[RoundReport, ...] = ()
    parts: tuple[CheckpointPart, ...] = ()
    failure: WorkerFailed | None = None
    ended_before: int | None = None
    waits_for: str = ""


class FakePresence:
    """Devices that a test takes away, brings back, or puts under notice."""

    def __init__(self, devices: Iterable[Device], offers: tuple[Offer, ...]) -> None:
        self.present = {d.device_id: Present(d, Place(d.device_id)) for d in devices}
        self.leaving_s: dict[str, float] = {}
        self._offers = offers

    def look(self, next_step: int, now_s: float) -> Sight:
        leaving = {d: s for d, s in self.leaving_s.items() if d in self.present}
        return Sight(dict(self.present), leaving)

    def offers(self) -> tuple[Offer, ...]:
        return self._offers

    def is_preemption(self, device_id: str) -> bool:
        return device_id not in self.present


class FakeCrew:
    """Crew and fleet in one; ``at(step, act)`` calls ``act`` once that step is the next one."""

    def __init__(self, device_ids: Iterable[str]) -> None:
        self.fleet = self
        self.layers: dict[str, frozenset[int]] = {d: frozenset() for d in device_ids}
        self.next_step = 0
        self.saved: list[int] = []
        self.installed: list[Order] = []
        self.forgot: list[int] = []
        self.dies_in_save: str | None = None
        self.dies_in_install: str | None = None
        self.stuck: str | None = None  # reaches no boundary at which it is asked to hold
        self.failures: dict[str, WorkerFailed] = {}
        self.comes_back = True
        self.out_of_reach: set[str] = set()  # for the others
        self._gone: list[Loss] = []
        self._told: list[Loss] = []  # not heard of yet
        self._recruits: set[str] = set()
        self._running: tuple[str, ...] = ()
        self._end_step, self._holds, self._generation = 0, False, 0
        self._joined = self.device_ids
        self._acts: dict[int, Callable[[], None]] = {}

    def at(self, step: int, act: Callable[[], None]) -> None:
        self._acts[step] = act

    # As a fleet ------------------------------------------------------------------------

    @property
    def device_ids(self) -> tuple[str, ...]:
        return tuple(self.layers)

    @property
    def losses(self) -> tuple[Loss, ...]:
        return tuple(self._gone)

    @property
    def recruited(self) -> frozenset[str]:
        return frozenset(self._recruits)

    def tell(self, method: str, *args: object, device_ids: Iterable[str] | None = None) -> None:
        if method == "run":
            assert isinstance(args[0], int)
            self._running, self._end_step, self._holds = tuple(device_ids or ()), args[0], False
        self._holds |= method == "hold"
        if method == "extend":
            assert isinstance(args[0], int)
            self._end_step = args[0]

    def gather(self, timeout_s: float) -> tuple[tuple[tuple[str, Said], ...], tuple[Loss, ...]]:
        act = self._acts.pop(self.next_step, None)
        if act is not None:
            act()
        told, self._told = tuple(self._told), []
        failures, self.failures = self.failures, {}
        if failures or {loss.device_id for loss in told} & set(self._running):
            self._running = ()
        if told or failures:
            return tuple((d, Said(failure=f)) for d, f in failures.items()), told
        if not self._running:
            return (), ()
        step = self.next_step
        self.next_step += 1
        ends = self._holds or self.next_step >= self._end_step
        ended = self.next_step if ends else None
        heard = tuple(
            (d, Said((self._report(step, d, i),), ended_before=ended))
            for i, d in enumerate(self._running)
            if not (self._holds and d == self.stuck)
        )
        if ends:
            self._running = ()
        return heard, ()

    def _report(self, step: int, device_id: str, index: int) -> StepReport:
        return StepReport(
            self._generation, step, device_id, index, 4, 0.0, 1.0, step_s=0.01, compute_s=0.01
        )

    def kill(self, device_id: str) -> None:
        if device_id in self.layers:
            self._told.append(self.die(device_id))

    def die(self, device_id: str) -> Loss:
        """Without telling: whoever asks finds out."""
        del self.layers[device_id]
        loss = Loss(device_id, "its process was killed")
        self._gone.append(loss)
        return loss

    def kill_silent(self, longest_s: float) -> tuple[Loss, ...]:
        return ()

    def muster(self, longest_s: float) -> tuple[tuple[str, ...], tuple[Loss, ...]]:
        ready = tuple(sorted(self._recruits)) if self.comes_back else ()
        self._recruits -= set(ready)
        self.layers |= dict.fromkeys(ready, frozenset())
        self._gone = [loss for loss in self._gone if loss.device_id not in ready]
        return ready, ()

    def close(self, timeout_s: float) -> None: ...

    # As a crew -------------------------------------------------------------------------

    @property
    def is_joined(self) -> bool:
        return bool(self._joined) and self._joined == self.device_ids

    def enlist(self, place: Place) -> None:
        self._recruits.add(place.device_id)
        self._joined = ()

    def install(self, order: Order) -> bool:
        if self.dies_in_install:
            self.die(self.dies_in_install)
            self.dies_in_install = None
            return False
        assert self.is_joined, "workers that are not joined cannot take places together"
        held = frozenset[int]().union(*self.layers.values())
        assert held or order.restore or order.first_step == 0, "layers come from nowhere"
        self.installed.append(order)
        self.next_step, self._generation = order.first_step, order.plan.generation
        for device_id in self.layers:
            self.layers[device_id] = frozenset(
                layer for layer, devices in order.plan.holders.items() if device_id in devices
            )
        return True

    def save(
        self, watch: Watch, step: int, holders: Mapping[int, tuple[str, ...]]
    ) -> tuple[CheckpointPart, ...] | None:
        if self.dies_in_save:
            self.die(self.dies_in_save)
            self.dies_in_save = None
        if not {devices[0] for devices in holders.values()} <= self.layers.keys():
            watch.lose(self._gone)
            return None
        assert step == self.next_step, "whoever saves stands there"
        self.saved.append(step)
        files = tuple(CheckpointFile(layer, f"layer-{layer}", 1, "0") for layer in holders)
        return (CheckpointPart(step, self._generation, files),)

    def part(self, watch: Watch, order: Sequence[str]) -> bool:
        left_out = [d for d in order if d in self.out_of_reach]
        watch.lose([self.die(device_id) for device_id in left_out])
        return bool(left_out)

    def regroup(self, watch: Watch) -> Boundary | None:
        watch.lose(self._told)
        self._running, self._told = (), []
        for device_id in watch.running & self.layers.keys():
            self.failures[device_id] = WorkerFailed(device_id, self.next_step, "lost contact")
        watch.drain()
        if not self.layers:
            return None
        self._joined = self.device_ids
        holders = {
            layer: tuple(d for d, held in self.layers.items() if layer in held)
            for layer in sorted(frozenset[int]().union(*self.layers.values()))
        }
        return Boundary(self.next_step if holders else 0, holders)

    def forget(self, watch: Watch, step: int, *, anew: bool) -> None:
        self.forgot.append(step)
        self.next_step = step
        self.layers = dict.fromkeys(self.layers, frozenset())
