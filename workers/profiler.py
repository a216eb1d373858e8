"""Measures a model layer by layer on this process's device: how long each one takes."""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from orchestrator.core.model import LayerTimes, ModelProfile, microbatch_sizes
from orchestrator.core.training import Task, TrainingOptions
from workers.describing import (
    LayerFacts,
    Passage,
    assembled,
    detached,
    nbytes,
    state_bytes,
    state_ratio,
)
from workers.device import PROCESSOR, finish, lent
from workers.failures import user_code
from workers.footprint import work_bytes
from workers.peak import measured_peak
from workers.sizes import work_sizes
from workers.splitting import SplitModel
from workers.update import make_optimizer, sum_of_squares

MIN_REPEATS, MAX_REPEATS = 7, 60
BUDGET_S = 3.0
"""Measuring goes on this long (or MAX_REPEATS), so that short layers get good medians."""

HARD_LIMIT_S = 20.0
"""Measuring stops here even short of MIN_REPEATS: huge layers are steady anyway."""

MEMBERS = 4
"""So many of the layers that are alike take turns: their parameters are then cold, as in a run."""

_Seconds = tuple[float, float]  # forward, backward


def profile_model(
    model: SplitModel,
    task: Task,
    options: TrainingOptions,
    *,
    kind: str = "cpu",
    wall: bool = False,
    device: torch.device = PROCESSOR,
) -> ModelProfile:
    """Return what planning needs to know of a model, measured here under the name ``kind``.

    Times are medians at microbatches of m, m/2, ..., 1 samples, the loss counted into the last
    layer. They are CPU seconds of this thread where torch runs on one thread of a CPU, so a
    busy neighbour does not show; else wall seconds. Layers of the same class and shapes share
    their median, and layers take turns, so that no disturbance hits one alone. Parameters,
    gradients and random state are left as they were.

    The layers lie where the task built them, and are lent to ``device`` one at a time: the whole
    model may be too large for it.

    With ``wall`` all times of a CPU are stretched alike, to what the wall clock says of the
    whole measurement. Where processor time is lent by the slice (a quota, a lasting neighbour),
    most layers run at full speed and a few sit out a long pause, which no median shows.

    Raises:
        UserCodeError: If the dataset, a layer or the loss raises.
        ConfigError: If torch does not know the optimizer.
    """
    bench = _Bench(model, task, options, device)
    times, update_s = bench.measure()
    stretch = bench.stretch() if wall else 1.0
    layers = range(len(model.layers))
    measured = [
        LayerTimes(
            kind=kind,
            team_size=1,
            microbatch=size,
            forward_s=tuple(times[i, size][0] for i in layers),
            backward_s=tuple(times[i, size][1] for i in layers),
            update_s=tuple(update_s[i] for i in layers),
        ).scaled(stretch, kind=kind)
        for size in sorted(bench.sizes)
    ]
    profile = assembled(model, options, bench.facts_at, measured, bench.optimizer_ratio)
    sizes = replace(
        profile.sizes[0],
        **work_sizes(bench.work_bytes),
        update_bytes=tuple(float(size) for size in bench.update_bytes),
    )
    # Whether updates come together is torch's own choice.
    return replace(profile, sizes=(sizes,), updates_together=bench.device != PROCESSOR)


class _Bench:
    """The layers on the bench: which are alike, and what one of these takes at every size."""

    def __init__(
        self, model: SplitModel, task: Task, options: TrainingOptions, device: torch.device
    ) -> None:
        self._model, self._options, self.device = model, options, device
        self._passage = Passage(model, task, options, without_values=False, device=device)
        self.sizes = microbatch_sizes(options.microbatch)
        self.facts: list[LayerFacts] = []  # at the largest size
        self.facts_at: dict[int, Sequence[LayerFacts]] = {}  # at that and the smallest one
        self.work_bytes: dict[int, Sequence[int]] = {}  # of every layer, at the same sizes
        self.update_bytes: list[int] = []  # of every layer
        self.optimizer_ratio = 1.0
        self._members: list[list[int]] = []  # layers that are alike
        self._class_of: list[int] = []
        self._inputs: dict[tuple[int, int], Any] = {}  # by class and size, of its first layer
        self._names: list[tuple[str, ...]] = []  # under which each layer finds what it takes
        self._wall_s = self._told_s = 0.0  # of all measurements, and what their medians make of it
        self._look(self.sizes[0])
        self.facts_at[self.sizes[0]] = self.facts
        for size in self.sizes[1:]:
            self._pass(size)

    def _look(self, size: int) -> None:
        """Run all layers once, which tells what they are."""
        numbers: dict[Hashable, int] = {}
        for index, value, facts in self._passage.walk(size):
            self.facts.append(facts)
            number = numbers.setdefault(facts.looks, len(numbers))
            if number == len(self._members):
                self._members.append([])
                self._inputs[number, size] = value
            self._members[number].append(index)
            self._class_of.append(number)
            self._names.append(tuple(value) if isinstance(value, dict) else ())

    def _input(self, index: int, size: int) -> Any:
        """What a layer takes: the input of the first that is like it, under names of its own."""
        value = self._inputs[self._class_of[index], size]
        if isinstance(value, dict):
            return dict(zip(self._names[index], value.values(), strict=True))
        return value

    def _pass(self, size: int) -> None:
        """Bring inputs of another size to one layer of each kind."""
        found = []
        for index, value, facts in self._passage.walk(size):
            self._inputs.setdefault((self._class_of[index], size), value)
            found.append(facts)
        if size == self.sizes[-1]:
            self.facts_at[size] = found

    def measure(self) -> tuple[dict[tuple[int, int], _Seconds], dict[int, float]]:
        """Medians: (layer, size) to (forward_s, backward_s), and layer to update_s."""
        stopwatch = self._stopwatch()
        taken = self._take_turns(stopwatch)
        times: dict[tuple[int, int], _Seconds] = {}
        update_s: dict[int, float] = {}
        kept_bytes = param_bytes = 0
        freed_bytes: dict[int, int] = {}
        work: dict[int, dict[int, int]] = {size: {} for size in self.facts_at}
        for number, members in enumerate(self._members):
            seconds, kept, trained, freed = self._update(self._model.layers[members[0]], stopwatch)
            freed_bytes |= dict.fromkeys(members, freed)
            for size, mine in work.items():
                value = self._inputs[number, size]
                needed = work_bytes(self._passage, members[0], size, value)
                mine.update(dict.fromkeys(members, needed))
            kept_bytes += kept * len(members)
            param_bytes += trained * len(members)
            update_s |= dict.fromkeys(members, seconds)
            for size in self.sizes:
                forward_s, backward_s = zip(*taken[number, size], strict=True)
                shared = median(forward_s), median(backward_s)
                self._told_s += sum(shared) * len(forward_s)
                times |= {(member, size): shared for member in members}
        self.optimizer_ratio = state_ratio(kept_bytes, param_bytes)
        layers = range(len(self._model.layers))
        self.update_bytes = [freed_bytes[i] for i in layers]
        self.work_bytes = {size: [mine[i] for i in layers] for size, mine in work.items()}
        return times, update_s

    def stretch(self) -> float:
        """How much longer the measured layers took than their times say; 1 but on a CPU."""
        return self._wall_s / self._told_s if self.device == PROCESSOR and self._told_s else 1.0

    def _take_turns(self, stopwatch: Callable[[], float]) -> dict[tuple[int, int], list[_Seconds]]:
        """Times by (number of the class, size); each repeat measures another member of a class."""
        taken: dict[tuple[int, int], list[_Seconds]] = defaultdict(list)
        start_s = time.monotonic()
        for repeat in range(MAX_REPEATS):
            for number, members in enumerate(self._members):
                member = members[repeat % min(MEMBERS, len(members))]
                for size in self.sizes:
                    taken[number, size].append(self._time(member, size, stopwatch))
            elapsed_s = time.monotonic() - start_s
            if elapsed_s > (BUDGET_S if repeat + 1 >= MIN_REPEATS else HARD_LIMIT_S):
                break
        for layer in self._model.layers:
            layer.zero_grad(set_to_none=True)
        return taken

    def _stopwatch(self) -> Callable[[], float]:
        if self.device == PROCESSOR and torch.get_num_threads() == 1:
            return time.thread_time

        def at_rest() -> float:
            finish(self.device)
            return time.perf_counter()

        return at_rest

    def _time(self, index: int, size: int, stopwatch: Callable[[], float]) -> tuple[float, float]:
        with lent(self._model.layers[index], self.device):
            return self._time_here(index, size, stopwatch)

    def _time_here(
        self, index: int, size: int, stopwatch: Callable[[], float]
    ) -> tuple[float, float]:
        value = detached(self._input(index, size))
        wall_s, start_s = time.perf_counter(), stopwatch()
        _, roots = self._passage.forward(index, size, value)
        middle_s = stopwatch()
        if roots:
            with user_code(f"profiling: backward of layer {index} ({self._model.names[index]})"):
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        end_s = stopwatch()
        self._wall_s += time.perf_counter() - wall_s
        return middle_s - start_s, end_s - middle_s

    def _update(
        self, layer: nn.Module, stopwatch: Callable[[], float]
    ) -> tuple[float, int, int, int]:
        """Time of a step on copies; bytes of optimizer state, of them, and of what is freed."""
        trained = (p.detach() for p in layer.parameters() if p.requires_grad)
        copies = [nn.Parameter(p.to(self.device, copy=True)) for p in trained]
        optimizer = make_optimizer(self._options.optimizer, copies)
        if optimizer is None:
            return 0.0, 0, 0, 0
        taken = []
        for _ in range(MIN_REPEATS):
            for copy in copies:
                copy.grad = torch.zeros_like(copy)
            start_s = stopwatch()
            optimizer.step()
            taken.append(stopwatch() - start_s)
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        with measured_peak(self.device) as peak:
            sum_of_squares(copy.grad for copy in copies if copy.grad is not None)
            optimizer.step()
        sizes = state_bytes(optimizer), sum(map(nbytes, copies)), peak.peak_bytes
        return median(taken), *sizes
