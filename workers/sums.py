"""Which library adds tensors up over workers, and the wait for one sum, which can be broken off."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor
from torch import distributed as dist

from workers.device import CUDA, DeviceFacts, brought, fetched

GLOO = "gloo"
"""Sums in the memory of the machines: any devices, of any makers, together."""

DIRECT = "cpu:gloo,cuda:nccl"
"""Sums where the tensors lie; what lies on the CPU (votes, small agreements) keeps to gloo."""

_FIRST_LOOK_S, _LONGEST_LOOK_S = 2e-5, 1e-3


def choose_backend(everybody: Sequence[DeviceFacts]) -> tuple[str, str]:
    """Return what all workers of a world use, and why it is not the direct way; all find the same.

    NCCL refuses two workers on one GPU, and fails between unlike versions or makers: whoever is
    not like the first one decides for all.
    """
    first = everybody[0]
    if any(one.type != CUDA for one in everybody):
        return GLOO, "not every device is a GPU"
    if not first.collectives or any(one.collectives != first.collectives for one in everybody):
        found = sorted({one.collectives or "none" for one in everybody})
        return GLOO, f"the workers have unlike libraries for sums on GPUs: {', '.join(found)}"
    if not all(one.identity for one in everybody):
        return GLOO, "torch does not tell the GPUs apart"
    if len({one.identity for one in everybody}) < len(everybody):
        return GLOO, "two workers share a GPU"
    return DIRECT, ""


def start_sum(tensor: Tensor, group: dist.ProcessGroup, patience_s: float) -> dist.Work:
    """Begin to add a tensor up over a group; waiting for it fails after ``patience_s``.

    The group's own time-out is that of making it, which may be shorter or longer than a step's.
    """
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=patience_s)
    return group.allreduce([tensor], options)


class Sum:
    """A sum under way, of tensors wherever they lie."""

    def __init__(
        self,
        flat: Tensor,
        group: dist.ProcessGroup,
        patience_s: float,
        *,
        directly: bool,
        is_open: Callable[[], bool],
    ) -> None:
        """Begin it.

        Args:
            flat: What this worker brings; not to be written into until ``wait`` returns.
            group: Over whom.
            patience_s: How long the others may take.
            directly: Whether the group adds tensors up where they lie.
            is_open: Whether the group was not given up meanwhile.
        """
        self._device, self._patience_s, self._is_open = flat.device, patience_s, is_open
        self._directly = directly
        self._here = flat if directly else fetched(flat)
        self._deadline_s = time.monotonic() + patience_s
        self._work = start_sum(self._here, group, patience_s)

    def wait(self) -> Tensor:
        """The sum, on the device of what was brought.

        Raises:
            RuntimeError: If a worker is lost or too slow, or the group was given up.
        """
        if self._directly:
            watch(self._work, self._deadline_s, self._is_open)
        self._work.wait()
        return brought(self._here, self._device)


def watch(work: dist.Work, deadline_s: float, is_open: Callable[[], bool]) -> None:
    """Return once a collective has ended: NCCL's own wait returns at once, or never.

    Raises:
        RuntimeError: If it failed, took too long, or its group was given up: what it left is no
            sum.
    """
    look_s = _FIRST_LOOK_S
    while not work.is_completed():
        if not is_open():
            raise RuntimeError("the sum was broken off")
        if time.monotonic() > deadline_s:
            raise RuntimeError("the others did not come in time")
        time.sleep(look_s)
        look_s = min(2 * look_s, _LONGEST_LOOK_S)
    error = work.exception()
    if error is not None:
        raise RuntimeError(str(error)) from None
    if not is_open():
        raise RuntimeError("the sum was broken off")
