"""What layers need of memory while they run, measured on this process's device."""

import torch
from torch import nn

from workers.describing import Passage, detached
from workers.failures import user_code
from workers.peak import measured_peak


def work_bytes(passage: Passage, index: int, size: int, value: object) -> int:
    """What is allocated at most while a layer alone runs, beside its input and its gradients.

    Args:
        passage: Runs it.
        index: The layer.
        size: Samples.
        value: What it takes.
    """
    layer: nn.Module = passage.model.layers[index]
    for parameter in layer.parameters():  # new gradients are then added, as in most steps
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    came = detached(value)
    with measured_peak(passage.device) as peak:
        output, roots = passage.forward(index, size, came)
        gradients = [torch.ones_like(root) for root in roots]
        edges = [torch.autograd.graph.get_gradient_edge(root) for root in roots]
        del output, roots  # as in a stage: they live on where backward needs them
        if edges:
            with user_code(f"profiling: backward of layer {index}"):
                torch.autograd.backward(edges, gradients)
        del edges, gradients
    layer.zero_grad(set_to_none=True)
    return peak.peak_bytes
