"""The oracle: one process trains the same task on the whole batch, or in microbatches."""

from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import default_collate

from workers.data import SampleSource
from workers.randomness import sample_randomness
from workers.splitting import load_task
from workers.worker import WorkerSpec


def train_alone(
    spec: WorkerSpec, num_steps: int, *, microbatch: int | None = None
) -> tuple[nn.ModuleList, list[float]]:
    """Return the trained layers and the loss of every step."""
    options = spec.options
    task = load_task(spec.task, spec.task_args, spec.seed)
    layers = nn.ModuleList(task.layers)
    source = SampleSource(task.dataset, task.collate or default_collate, spec.seed)
    parameters = [p for p in layers.parameters() if p.requires_grad]
    classes = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = classes[options.optimizer.name](
        parameters, lr=options.optimizer.lr, **options.optimizer.arguments
    )
    total = spec.num_samples_total or num_steps * options.global_batch
    num_steps_of_run = -(
        -(spec.num_samples_total or options.steps * options.global_batch) // options.global_batch
    )
    losses = []
    for step in range(num_steps):
        first, end = step * options.global_batch, min((step + 1) * options.global_batch, total)
        size = microbatch or end - first
        loss_sum, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
        for start in range(first, end, size):
            positions = range(start, min(start + size, end))
            part, weight = _loss(spec, task, layers, source.batch(positions), step, positions)
            (part / (end - first)).backward()
            loss_sum += part.detach().double()
            weight_sum += float(weight)
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_((end - first) / weight_sum)
        if options.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, options.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = options.optimizer.lr * options.lr_schedule.factor(step, num_steps_of_run)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss_sum) / weight_sum)
    return layers, losses


def _loss(
    spec: WorkerSpec, task: Any, layers: nn.ModuleList, batch: Any, step: int, positions: range
) -> tuple[Tensor, Any]:
    bf16 = spec.options.precision == "bf16"
    value = batch[0] if isinstance(batch, tuple | list) else batch
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        for index, layer in enumerate(layers):
            with sample_randomness(spec.seed, step, positions, index):
                value = layer(value)
        return task.loss(value, batch)


def saved_parameters(run_url: str, step: int, num_layers: int) -> list[dict[str, Tensor]]:
    """Parameters of each layer in a checkpoint, by the layer's own names."""
    layers = []
    for layer in range(num_layers):
        tensors = load_file(f"{run_url}/checkpoints/step-{step:06d}/layer-{layer:03d}.safetensors")
        prefix = "param/"
        layers.append(
            {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        )
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
