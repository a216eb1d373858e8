"""Gradient sums: one flat bucket of parameters per owner set, added up over the owners."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from orchestrator.core.plan import Plan, segments
from workers.process_groups import OwnerSet, ProcessGroups, contact
from workers.splitting import Tie


def layer_owners(plan: Plan, ranks: Mapping[str, int]) -> tuple[OwnerSet, ...]:
    """Owner set of each layer: the sorted ranks that hold it, one a group."""
    owners: list[OwnerSet] = []
    for segment in segments(plan.groups):
        stages = [g.stages[s] for g, s in zip(plan.groups, segment.owners, strict=True)]
        holders = tuple(sorted(ranks[stage.team.device_ids[0]] for stage in stages))
        owners += [holders] * (segment.end_layer - segment.first_layer)
    return tuple(owners)


def tie_owners(owners: Sequence[OwnerSet], ties: Sequence[Tie]) -> tuple[OwnerSet, ...]:
    """Owner set of each tie: the union over the layers that share the parameter."""
    return tuple(
        tuple(sorted({rank for layer, _ in tie.keys for rank in owners[layer]})) for tie in ties
    )


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of this worker with one owner set and dtype, in an order that all owners share."""

    owners: OwnerSet
    parameters: tuple[nn.Parameter, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the flat buffer; a bucket of one owner needs none."""
        if len(self.owners) == 1:
            return 0
        return sum(p.numel() * p.element_size() for p in self.parameters)


def make_buckets(
    layers: Sequence[nn.Module],
    held: Iterable[int],
    owners: Sequence[OwnerSet],
    ties: Sequence[Tie],
) -> tuple[Bucket, ...]:
    """Collect this worker's trainable parameters by owner set and dtype, each once.

    All owners of a bucket list it alike: a segment's layers are the same on each, and ties,
    of which an owner may hold any of the layers, come in the model's order of ties.
    """
    found: dict[tuple[OwnerSet, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    mine = sorted(held)
    seen = {id(layers[layer].get_parameter(name)) for tie in ties for layer, name in tie.keys}
    for layer in mine:
        for parameter in layers[layer].parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                found[owners[layer], parameter.dtype].append(parameter)
    for tie, union in zip(ties, tie_owners(owners, ties), strict=True):
        layer, name = tie.keys[0]
        parameter = layers[layer].get_parameter(name)
        if parameter.requires_grad and any(layer in mine for layer, _ in tie.keys):
            found[union, parameter.dtype].append(parameter)
    return tuple(Bucket(union, tuple(members)) for (union, _), members in found.items())


class GradientSums:
    """Adds the gradients of a step over all owners, without averaging.

    A parameter that got no gradient here enters as zeros; one that got none anywhere keeps
    none, as in a single process, so the optimizer leaves it alone everywhere.
    """

    def __init__(self, buckets: Sequence[Bucket], groups: ProcessGroups) -> None:
        self._buckets = tuple(buckets)
        self._groups = groups

    def run(self, under_way: Callable[[], None], patience_s: float) -> None:
        """Start every sum, then wait for all: one after another, owner sets in a ring deadlock.

        ``under_way`` is called in between; each sum may take ``patience_s``.
        """
        started = []
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
        with contact("the sum of gradients"):
            for bucket in self._buckets:
                if len(bucket.owners) > 1:
                    flat = _flatten(bucket.parameters)
                    started.append(
                        (bucket, self._groups.begin_sum(flat, bucket.owners, patience_s))
                    )
            under_way()
            for bucket, begun in started:
                _scatter(bucket.parameters, begun.wait())

    def counted(self) -> Iterator[torch.Tensor]:
        """Summed gradients that enter the norm here: those of which this is the first owner."""
        for bucket in self._buckets:
            if bucket.owners[0] == self._groups.rank:
                yield from (p.grad for p in bucket.parameters if p.grad is not None)


def _flatten(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Gradients one after another, then for each parameter how many owners had one."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    parts = [real_view(gradient).reshape(-1) for gradient in gradients]
    present = [float(p.grad is not None) for p in parameters]
    return torch.cat([*parts, torch.tensor(present, dtype=parts[0].dtype, device=parts[0].device)])


def _scatter(parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
    views = [real_view(p) for p in parameters]
    *sums, present = flat.split([*(view.numel() for view in views), len(views)])
    for p, view, flat_sum, count in zip(parameters, views, sums, present.tolist(), strict=True):
        total = flat_sum.view(view.shape)
        p.grad = (torch.view_as_complex(total) if p.is_complex() else total) if count else None


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: gloo and the norm of a gradient do not know them otherwise."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
