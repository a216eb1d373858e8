"""The oracle: one process trains the same task on the whole batch, or in groups' microbatches."""

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from orchestrator.core.training import TrainingOptions
from workers.cutter import call_model
from workers.data import SampleSource
from workers.randomness import sample_randomness
from workers.splitting import load_task, split
from workers.worker import WorkerSpec

Shares = Sequence[Sequence[int]]  # per group the samples of its microbatches


def train_alone(
    spec: WorkerSpec,
    num_steps: int,
    *,
    shares: Shares | None = None,
    scales: list[float] | None = None,
    begin: Callable[[Any], None] = lambda _: None,
) -> tuple[nn.ModuleList, list[float]]:
    """Return the trained layers and the loss of every step.

    With ``shares`` gradients are accumulated in microbatches within a group, then groups are
    added up: the order of two groups' sum on a plan. ``scales`` gets torch's loss scale of every
    step in fp16; ``begin`` gets the model before the first step.
    """
    torch.set_num_threads(1)  # as in the workers: the bits depend on it
    options = spec.options
    task = load_task(spec.task, spec.task_args, spec.seed)
    begin(task.layers)
    layers = nn.ModuleList(task.layers if isinstance(task.layers, list) else split(task).layers)
    source = SampleSource(task.dataset, task.collate, spec.seed, task.inputs)
    optimizer = _optimizer(options, task.layers)
    parameters = [p for part in optimizer.param_groups for p in part["params"]]
    scaler = torch.amp.GradScaler("cpu", enabled=options.precision == "fp16")
    total = (options.steps or 0) * options.global_batch
    total = total or options.epochs * source.num_samples
    steps_in_all = -(-total // options.global_batch)
    factor = task.lr_factor or options.lr_schedule.factor
    losses = []
    for step in range(num_steps):
        first = step * options.global_batch
        num_samples = min(options.global_batch, total - first)
        loss_sum = weight_sum = 0.0
        sums: dict[nn.Parameter, Tensor] = {}
        for group in shares or ((num_samples,),):
            for positions in _cut(first, group):
                part, weight = _loss(spec, task, layers, source, (step, positions))
                scaler.scale(part / num_samples).backward()
                loss_sum += float(part.detach())
                weight_sum += float(weight)
            first += sum(group)
            for p in parameters:
                if p.grad is not None:
                    p.grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                    sums[p] = sums[p] + p.grad if p in sums else p.grad
                p.grad = None
        for p, gradient in sums.items():
            p.grad = gradient.mul_(num_samples / weight_sum)
        losses.append(loss_sum / weight_sum)
        if scales is not None:
            scales.append(scaler.get_scale())
        for part in optimizer.param_groups:
            part["lr"] = options.optimizer.lr * part["ratio"] * factor(step, steps_in_all)
        _update(options, optimizer, scaler)
    return layers, losses


def _optimizer(options: TrainingOptions, model: Any) -> torch.optim.Optimizer:
    """Torch's own, with the groups of the file as torch wants them."""
    classes = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    module = nn.ModuleList(model) if isinstance(model, list) else model
    numbers = {p: -1 for p in module.parameters() if p.requires_grad}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        fits = [any(fnmatch(name, p) for p in g.patterns) for g in options.optimizer.groups]
        if parameter in numbers and any(fits):
            numbers[parameter] = fits.index(True)
    members: dict[int, list[nn.Parameter]] = {}
    for parameter, number in numbers.items():
        if number >= 0 and options.optimizer.groups[number].frozen:
            parameter.requires_grad_(False)
        else:
            members.setdefault(number, []).append(parameter)
    parts: list[dict[str, Any]] = [
        {"params": found, "ratio": options.optimizer.groups[number].lr_ratio}
        | dict(options.optimizer.groups[number].arguments)
        if number >= 0
        else {"params": found, "ratio": 1.0}
        for number, found in members.items()
    ]
    arguments = options.optimizer.arguments
    return classes[options.optimizer.name](parts, lr=options.optimizer.lr, **arguments)


def _update(
    options: TrainingOptions, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    parameters = [p for part in optimizer.param_groups for p in part["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if scaler.is_enabled() or all(torch.isfinite(gradient).all() for gradient in gradients):
        scaler.unscale_(optimizer)
        if options.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, options.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()  # without an update otherwise


def _cut(first: int, sizes: Sequence[int]) -> Iterator[range]:
    for size in sizes:
        yield range(first, first + size)
        first += size


def _loss(
    spec: WorkerSpec,
    task: Any,
    layers: nn.ModuleList,
    source: SampleSource,
    place: tuple[int, range],
) -> tuple[Tensor, Any]:
    step, positions = place
    batch = source.batch(positions)
    value = source.first_input(batch, positions)
    if isinstance(task.layers, nn.Module):  # the user's own forward, whole
        return task.loss(call_model(task.layers, value), batch)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(spec.options.precision)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        for index, layer in enumerate(layers):
            with sample_randomness(spec.seed, step, positions, index):
                value = layer(value)
        with sample_randomness(spec.seed, step, positions, len(layers)):
            return task.loss(value, batch)


def saved_parameters(run_url: str, step: int, num_layers: int) -> list[dict[str, Tensor]]:
    """Parameters of each layer in a checkpoint, by the layer's own names."""
    layers = []
    for layer in range(num_layers):
        tensors = load_file(f"{run_url}/checkpoints/step-{step:06d}/layer-{layer:03d}.safetensors")
        layers.append({k[6:]: t for k, t in tensors.items() if k.startswith("param/")})
    return layers


def largest_difference(layers: nn.ModuleList, saved: list[dict[str, Tensor]]) -> float:
    """Largest difference of a parameter between the oracle and a checkpoint."""
    worst = 0.0
    for layer, tensors in zip(layers, saved, strict=True):
        own = dict(layer.named_parameters())
        assert set(own) == set(tensors)
        for name, parameter in own.items():
            worst = max(worst, float((parameter.detach() - tensors[name]).abs().max()))
    return worst
