"""The oracle: one process trains the same task on the whole batch, or in groups' microbatches."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from workers.cutter import call_model
from workers.data import SampleSource
from workers.randomness import sample_randomness
from workers.splitting import load_task, split
from workers.worker import WorkerSpec

Shares = Sequence[Sequence[int]]  # per group the samples of its microbatches


def train_alone(
    spec: WorkerSpec, num_steps: int, *, shares: Shares | None = None
) -> tuple[nn.ModuleList, list[float]]:
    """Return the trained layers and the loss of every step.

    With ``shares`` gradients are accumulated in microbatches within a group, then groups are
    added up: the order of two groups' sum on a plan.
    """
    torch.set_num_threads(1)  # as in the workers: the bits depend on it
    options = spec.options
    task = load_task(spec.task, spec.task_args, spec.seed)
    layers = nn.ModuleList(task.layers if isinstance(task.layers, list) else split(task).layers)
    source = SampleSource(task.dataset, task.collate, spec.seed, task.inputs)
    parameters = [p for p in layers.parameters() if p.requires_grad]
    classes = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = classes[options.optimizer.name](
        parameters, lr=options.optimizer.lr, **options.optimizer.arguments
    )
    total = (options.steps or 0) * options.global_batch
    total = total or options.epochs * source.num_samples
    steps_in_all = -(-total // options.global_batch)
    losses = []
    for step in range(num_steps):
        first = step * options.global_batch
        num_samples = min(options.global_batch, total - first)
        loss_sum = weight_sum = 0.0
        sums: dict[nn.Parameter, Tensor] = {}
        for group in shares or ((num_samples,),):
            for positions in _cut(first, group):
                part, weight = _loss(spec, task, layers, source, (step, positions))
                (part / num_samples).backward()
                loss_sum += float(part.detach())
                weight_sum += float(weight)
            first += sum(group)
            for p in parameters:
                if p.grad is not None:
                    sums[p] = sums[p] + p.grad if p in sums else p.grad
                p.grad = None
        for p, gradient in sums.items():
            p.grad = gradient.mul_(num_samples / weight_sum)
        losses.append(loss_sum / weight_sum)
        if not all(torch.isfinite(gradient).all() for gradient in sums.values()):
            optimizer.zero_grad()  # a step without an update
            continue
        if options.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, options.clip_grad_norm)
        for settings in optimizer.param_groups:
            settings["lr"] = options.optimizer.lr * options.lr_schedule.factor(step, steps_in_all)
        optimizer.step()
        optimizer.zero_grad()
    return layers, losses


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
    value = source.first_input(batch)
    if isinstance(task.layers, nn.Module):  # the user's own forward, whole
        return task.loss(call_model(task.layers, value), batch)
    with torch.autocast("cpu", torch.bfloat16, enabled=spec.options.precision == "bf16"):
        for index, layer in enumerate(layers):
            with sample_randomness(spec.seed, step, positions, index):
                value = layer(value)
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
