"""Measures a model layer by layer on this process's device: times, sizes, FLOP, optimizer state."""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from orchestrator.core.model import LayerSizes, LayerTimes, ModelProfile, microbatch_sizes
from orchestrator.core.training import Task, TrainingOptions
from workers import border
from workers.data import SampleSource
from workers.failures import user_code
from workers.splitting import SplitModel, Tie, sample_randomness
from workers.stage import SavedBytes, autocast, to_device
from workers.update import make_optimizer

MIN_REPEATS, MAX_REPEATS = 7, 60
BUDGET_S = 3.0
"""Measuring goes on this long (or MAX_REPEATS), so that short layers get good medians."""

HARD_LIMIT_S = 60.0
"""Measuring stops here even short of MIN_REPEATS: huge layers are steady anyway."""

_Seconds = tuple[float, float]  # forward, backward


def profile_model(
    model: SplitModel,
    task: Task,
    options: TrainingOptions,
    *,
    kind: str = "cpu",
    wall: bool = False,
) -> ModelProfile:
    """Return what planning needs to know of a model, measured here under the name ``kind``.

    Times are medians at microbatches of m, m/2, ..., 1 samples, the loss counted into the last
    layer. They are CPU seconds of this thread where torch runs on one thread of a CPU, so a
    busy neighbour does not show; else wall seconds. Layers of the same class and shapes share
    their median, and layers take turns, so that no disturbance hits one alone. Parameters,
    gradients and random state are left as they were.

    With ``wall`` all times of a CPU are stretched alike, to what the wall clock says of the
    whole measurement. Where processor time is lent by the slice (a quota, a lasting neighbour),
    most layers run at full speed and a few sit out a long pause, which no median shows.

    Raises:
        UserCodeError: If the dataset, a layer or the loss raises.
        ConfigError: If torch does not know the optimizer.
    """
    bench = _Bench(model, task, options)
    times, update_s = bench.measure()
    stretch = bench.stretch() if wall else 1.0
    layers = range(len(model.layers))
    largest = bench.sizes[0]
    last = layers[-1]
    boundary = [bytes_of(bench.outputs[i]) / largest if i != last else 0.0 for i in layers]
    ties = [tie for tie in model.ties if _shared(model, tie).requires_grad]  # others have no sums
    return ModelProfile(
        model=options.task,
        dtype=options.precision,
        layers=model.names,
        sizes=(
            LayerSizes(
                team_size=1,
                param_bytes=tuple(
                    float(sum(_nbytes(p) for p in layer.parameters())) for layer in model.layers
                ),
                boundary_bytes_per_sample=tuple(boundary),
                stash_bytes_per_sample=tuple(b / largest for b in bench.stash_bytes),
                frozen_bytes=tuple(
                    float(sum(_nbytes(p) for p in layer.parameters() if not p.requires_grad))
                    for layer in model.layers
                ),
            ),
        ),
        times=tuple(
            LayerTimes(
                kind=kind,
                team_size=1,
                microbatch=size,
                forward_s=tuple(times[i, size][0] for i in layers),
                backward_s=tuple(times[i, size][1] for i in layers),
                update_s=tuple(update_s[i] for i in layers),
            ).scaled(stretch, kind=kind)
            for size in sorted(bench.sizes)
        ),
        forward_flop_per_sample=tuple(flop / largest for flop in bench.flop),
        edges=tuple((i, i + 1) for i in layers[:-1]),
        ties=tuple(tuple(layer for layer, _ in tie.keys) for tie in ties),
        tie_bytes=tuple(float(_nbytes(_shared(model, tie))) for tie in ties),
        optimizer_bytes_per_param_byte=bench.optimizer_ratio,
    )


def _shared(model: SplitModel, tie: Tie) -> nn.Parameter:
    """The parameter of a tie."""
    layer, name = tie.keys[0]
    return model.layers[layer].get_parameter(name)


def bytes_of(value: Any) -> int:
    """Bytes of the tensors in a nest of tuples, lists and dicts."""
    return sum(map(_nbytes, border.tensors(value)))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _detached(value: Any) -> Any:
    """The same border as a stage would receive it: new tensors, wanting gradients as before."""
    # Not leaves: layers may work in place.
    return border.mapped(value, lambda t: t.detach().requires_grad_(t.requires_grad).clone())


class _Bench:
    """The layers on the bench, their inputs at every microbatch size, and what one pass told."""

    def __init__(self, model: SplitModel, task: Task, options: TrainingOptions) -> None:
        self._model, self._task, self._options = model, task, options
        self._source = SampleSource(task.dataset, task.collate, 0, task.inputs)
        self._device = next(
            (p.device for layer in model.layers for p in layer.parameters()), torch.device("cpu")
        )
        self._inputs: dict[tuple[int, int], Any] = {}
        self._batches: dict[int, Any] = {}
        self.sizes = microbatch_sizes(options.microbatch)
        self.outputs: dict[int, Any] = {}
        self.stash_bytes: list[int] = []
        self.flop: list[int] = []
        self.optimizer_ratio = 1.0
        self._wall_s = self._told_s = 0.0  # of all measurements, and what their medians make of it
        for size in self.sizes:
            self._pass(size)

    def _pass(self, size: int) -> None:
        """Run all layers once; the largest microbatch comes first and tells bytes and FLOP."""
        with user_code("the dataset, while profiling,"):
            self._batches[size] = to_device(self._source.batch(range(size)), self._device)
            value = self._source.first_input(self._batches[size])
        told = size == self.sizes[0]
        for index in range(len(self._model.layers)):
            self._inputs[index, size] = value
            saved = SavedBytes(self._model.layers) if told else None
            counter = FlopCounterMode(display=False) if told else nullcontext()
            with counter, saved.counting() if saved else nullcontext():
                value, _ = self._forward(index, size, _detached(value))
            if saved is not None and isinstance(counter, FlopCounterMode):
                self.stash_bytes.append(saved.total)
                self.flop.append(counter.get_total_flops())
                self.outputs[index] = value
            value = _detached(value)

    def _forward(self, index: int, size: int, value: Any) -> tuple[Any, list[Tensor]]:
        """Output of a layer, and what its backward starts from; the loss at the last one."""
        place = f"profiling: layer {index} ({self._model.names[index]})"
        layer = self._model.layers[index]
        randomness = sample_randomness(0, 0, range(size), index, layer)
        with user_code(place), self._autocast(), randomness:
            value = layer(value)
            is_last = index == len(self._model.layers) - 1
            value = value if is_last else border.checked(value)
        roots = list(border.tensors(value))
        if is_last:
            with user_code("profiling: the loss"), self._autocast():
                loss_sum, _ = self._task.loss(value, self._batches[size])
            roots = [loss_sum] if torch.is_tensor(loss_sum) else []
        return value, [root for root in roots if root.requires_grad]

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self._options.precision, self._device)

    def measure(self) -> tuple[dict[tuple[int, int], _Seconds], dict[int, float]]:
        """Medians: (layer, size) to (forward_s, backward_s), and layer to update_s."""
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for index in range(len(self._model.layers)):
            alike[self._likeness(index)].append(index)
        classes, stopwatch = list(alike.values()), self._stopwatch()
        taken = self._take_turns(classes, stopwatch)
        times: dict[tuple[int, int], _Seconds] = {}
        update_s: dict[int, float] = {}
        state_bytes = param_bytes = 0
        for number, members in enumerate(classes):
            seconds, state, trained = self._update(self._model.layers[members[0]], stopwatch)
            state_bytes += state * len(members)
            param_bytes += trained * len(members)
            update_s |= dict.fromkeys(members, seconds)
            for size in self.sizes:
                forward_s, backward_s = zip(*taken[number, size], strict=True)
                shared = median(forward_s), median(backward_s)
                self._told_s += sum(shared) * len(forward_s)
                times |= {(member, size): shared for member in members}
        if param_bytes:
            # Rounded: Adam also keeps a step count of 4 bytes a tensor.
            self.optimizer_ratio = round(1.0 + state_bytes / param_bytes, 1)
        return times, update_s

    def stretch(self) -> float:
        """How much longer the measured layers took than their times say; 1 but on a CPU."""
        return self._wall_s / self._told_s if self._device.type == "cpu" and self._told_s else 1.0

    def _take_turns(
        self, classes: Sequence[Sequence[int]], stopwatch: Callable[[], float]
    ) -> dict[tuple[int, int], list[_Seconds]]:
        """Times by (number of the class, size); each repeat measures another member of a class."""
        taken: dict[tuple[int, int], list[_Seconds]] = defaultdict(list)
        start_s = time.monotonic()
        for repeat in range(MAX_REPEATS):
            for number, members in enumerate(classes):
                for size in self.sizes:
                    member = members[repeat % len(members)]
                    taken[number, size].append(self._time(member, size, stopwatch))
            elapsed_s = time.monotonic() - start_s
            if elapsed_s > (BUDGET_S if repeat + 1 >= MIN_REPEATS else HARD_LIMIT_S):
                break
        for layer in self._model.layers:
            layer.zero_grad(set_to_none=True)
        return taken

    def _likeness(self, index: int) -> Hashable:
        layer, last = self._model.layers[index], index == len(self._model.layers) - 1
        shapes = [
            tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in border.tensors(value))
            for value in (self._inputs[index, self.sizes[0]], self.outputs[index])
        ]
        parameters = tuple((tuple(p.shape), p.requires_grad) for p in layer.parameters())
        return type(layer), repr(layer), parameters, *shapes, last

    def _stopwatch(self) -> Callable[[], float]:
        if self._device.type != "cpu":

            def synchronized() -> float:
                torch.cuda.synchronize(self._device)
                return time.perf_counter()

            return synchronized
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def _time(self, index: int, size: int, stopwatch: Callable[[], float]) -> tuple[float, float]:
        value = _detached(self._inputs[index, size])
        wall_s, start_s = time.perf_counter(), stopwatch()
        _, roots = self._forward(index, size, value)
        middle_s = stopwatch()
        if roots:
            with user_code(f"profiling: backward of layer {index} ({self._model.names[index]})"):
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        end_s = stopwatch()
        self._wall_s += time.perf_counter() - wall_s
        return middle_s - start_s, end_s - middle_s

    def _update(self, layer: nn.Module, stopwatch: Callable[[], float]) -> tuple[float, int, int]:
        """Time of an optimizer step on copies of the parameters, bytes of its state and of them."""
        copies = [nn.Parameter(p.detach().clone()) for p in layer.parameters() if p.requires_grad]
        optimizer = make_optimizer(self._options.optimizer, copies)
        if optimizer is None:
            return 0.0, 0, 0
        taken = []
        for _ in range(MIN_REPEATS):
            for copy in copies:
                copy.grad = torch.zeros_like(copy)
            start_s = stopwatch()
            optimizer.step()
            taken.append(stopwatch() - start_s)
        kept = [t for state in optimizer.state.values() for t in state.values()]
        state_bytes = sum(_nbytes(t) for t in kept if torch.is_tensor(t))
        return median(taken), state_bytes, sum(_nbytes(copy) for copy in copies)
