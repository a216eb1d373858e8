"""The end of a step: one vote of all active workers, then the same update everywhere or nowhere."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from orchestrator.core.training import OptimizerOptions, TrainingOptions
from orchestrator.errors import ConfigError
from workers.failures import user_code
from workers.process_groups import contact
from workers.reduction import real_view
from workers.scaling import LossScale
from workers.sums import start_sum

SQUARED_AT_ONCE = 2**18
"""Numbers of a gradient of which torch makes a copy in fp64, to square them."""

_SUMS = 7  # squares, weight, loss, not finite, hold, due, busy
_NOT_FOR_US = {"lbfgs": "it needs a closure", "sparseadam": "gradients are dense here"}


def make_optimizer(
    options: OptimizerOptions,
    parameters: Sequence[nn.Parameter],
    groups: Mapping[nn.Parameter, int] | None = None,
) -> torch.optim.Optimizer | None:
    """Return torch's optimizer of that name; None without parameters (a frozen stage).

    Args:
        options: Name, arguments and groups.
        parameters: What it trains.
        groups: To which of the groups a parameter belongs; none where it is absent.

    Raises:
        ConfigError: On a name or arguments that torch does not know.
    """
    classes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    if not parameters:
        return None
    known = sorted(set(classes) - {"optimizer", *_NOT_FOR_US})
    if options.name not in known:
        why = _NOT_FOR_US.get(options.name, "torch.optim has no such optimizer")
        raise ConfigError(
            f"training.optimizer.name is {options.name!r}: {why}; write one of {', '.join(known)}"
        )
    members: dict[int, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        members[(groups or {}).get(parameter, -1)].append(parameter)
    parts = [
        {"params": members[number], "lr_ratio": 1.0}
        if number < 0
        else {
            "params": members[number],
            "lr_ratio": options.groups[number].lr_ratio,
            **_as_torch_wants(options.groups[number].arguments),
        }
        for number in sorted(members)
    ]
    try:
        return classes[options.name](parts, lr=options.lr, **_as_torch_wants(options.arguments))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"training.optimizer: {options.name} says: {error}") from error


def _as_torch_wants(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}


def learning_rate(
    options: TrainingOptions, num_steps: int, factor: Callable[[int, int], float] | None
) -> Callable[[int], float]:
    """The learning rate of each step: a function of the step alone, whatever the plan.

    Args:
        options: The peak rate and the schedule.
        num_steps: Of the whole run.
        factor: The user's own schedule, see Task. What is returned raises UserCodeError where it
            raises, or returns no finite number.
    """
    peak, schedule = options.optimizer.lr, options.lr_schedule

    def rate(step: int) -> float:
        if factor is None:
            return peak * schedule.factor(step, num_steps)
        with user_code(f"step {step}: Task.lr_factor"):
            value = float(factor(step, num_steps))
            if not 0 <= value < math.inf:
                raise ValueError(f"it returned {value}; return a finite number, 0 or more")
        return peak * value

    return rate


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one worker brings to the vote."""

    squares: float  # of the summed gradients it counts, without the factor of the loss
    weight_sum: float
    loss_sum: float
    hold: bool
    end_step: int  # where its window ends
    end_s: float  # when its work ended
    due: bool = False  # a checkpoint is
    busy: bool = False  # it still writes an earlier one


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all active workers know after the vote; the same bits on each."""

    squares: float
    weight_sum: float
    loss_sum: float
    finite: bool
    hold: bool
    end_step: int  # the least
    end_s: float  # the latest
    due: bool = False  # for any
    busy: bool = False  # any

    @property
    def save(self) -> bool:
        """Whether all begin a checkpoint at this boundary: it is due, and nobody still writes."""
        return self.due and not self.busy

    @property
    def loss(self) -> float:
        """Sum of losses over sum of weights of the whole step."""
        return self.loss_sum / self.weight_sum if self.weight_sum else math.nan

    @property
    def skip(self) -> bool:
        """Whether no worker applies this step."""
        return not self.finite or self.weight_sum == 0

    def grad_norm(self, num_samples: int) -> float:
        """Norm of the gradient of the loss above, before clipping."""
        return (
            math.sqrt(self.squares) * num_samples / self.weight_sum if not self.skip else math.nan
        )


class Vote:
    """One all-reduce over the active workers; entered only after every own sum is complete.

    A sum can end nowhere before everybody has entered, so if any worker knows the verdict,
    every worker holds its summed gradients.
    """

    def __init__(self, group: dist.ProcessGroup | None, place: int, num_places: int) -> None:
        self._group, self._place, self._num_places = group, place, num_places

    def cast(
        self, ballot: Ballot, patience_s: float, under_way: Callable[[], None] | None = None
    ) -> Verdict:
        """Bring a ballot, return the verdict; ``under_way`` is called before the count is there.

        The others may take ``patience_s``.

        Raises:
            LostContactError: If a worker is lost.
        """
        finite = math.isfinite(ballot.squares)
        wishes = [ballot.hold, ballot.due, ballot.busy]
        sums = [ballot.squares, ballot.weight_sum, ballot.loss_sum, float(not finite), *wishes]
        places = torch.zeros(self._num_places, 2, dtype=torch.float64)
        places[self._place] = torch.tensor([ballot.end_step, ballot.end_s], dtype=torch.float64)
        box = torch.cat([torch.tensor(sums, dtype=torch.float64), places.reshape(-1)])
        with contact("the vote on a step"):
            work = None if self._group is None else start_sum(box, self._group, patience_s)
            if under_way is not None:
                under_way()
            if work is not None:
                work.wait()
        squares, weight_sum, loss_sum, not_finite, hold, due, busy = box[:_SUMS].tolist()
        end_steps, ends_s = box[_SUMS:].view(-1, 2).unbind(1)
        return Verdict(
            squares,
            weight_sum,
            loss_sum,
            not not_finite,
            bool(hold),
            int(end_steps.min()),
            float(ends_s.max()),
            bool(due),
            bool(busy),
        )


def sum_of_squares(gradients: Iterable[torch.Tensor]) -> float:
    """Sum of squares in fp64, whatever the gradients' dtype; not finite if any entry is not."""
    norms = [
        torch.linalg.vector_norm(part, dtype=torch.float64)
        for gradient in gradients
        for part in real_view(gradient).reshape(-1).split(SQUARED_AT_ONCE)
    ]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


class Updater:
    """Applies a step to this worker's parameters as the verdict says."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Sequence[nn.Parameter],
        loss_scale: LossScale,
        clip_grad_norm: float | None,
        lr: Callable[[int], float],
    ) -> None:
        self._optimizer, self._parameters = optimizer, tuple(parameters)
        self._loss_scale, self._clip_grad_norm = loss_scale, clip_grad_norm
        self.lr = lr
        """The learning rate of a step, see ``learning_rate``."""

    def apply(self, step: int, verdict: Verdict, num_samples: int) -> None:
        """Scale, clip and step; a skipped step only forgets its gradients.

        Source: docs/model.md, section 3.1 (the update does not depend on the plan).
        """
        if not verdict.skip and self._optimizer is not None:
            scale = num_samples / verdict.weight_sum / self._loss_scale.scale
            limit = self._clip_grad_norm
            if limit is not None:
                scale *= min(1.0, limit / (verdict.grad_norm(num_samples) + 1e-6))
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
            lr = self.lr(step)
            for group in self._optimizer.param_groups:
                group["lr"] = lr * group["lr_ratio"]
            self._optimizer.step()
        self._loss_scale.follow(verdict.finite)
        self.discard()

    def discard(self) -> None:
        """Forget the gradients of a step."""
        for parameter in self._parameters:
            parameter.grad = None
