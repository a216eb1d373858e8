"""torch's process groups: joining the workers of a run, one group per owner set, teardown."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from workers.addresses import interface_towards

OwnerSet = tuple[int, ...]  # sorted ranks

TRIAL_SIZES = (1, 1 << 10, 1 << 16)
"""Numbers in the sums that are tried out: what a vote, a bias and a layer have."""

_MAX_CACHED = 16  # unused ones; a group holds 3 threads and about size + 3 descriptors


class LostContactError(RuntimeError):
    """A collective broke off because some worker is gone; torch does not say which."""


@contextmanager
def contact(what: str) -> Iterator[None]:
    """Turn torch's errors about peers into one that says what was going on.

    Raises:
        LostContactError: Naming ``what``.
    """
    try:
        yield
    except RuntimeError as error:
        raise LostContactError(
            f"lost contact with another worker in {what}: {str(error).splitlines()[0]}"
        ) from error


class ProcessGroups:
    """The process groups of one worker, cached by owner set.

    Every worker of the world must make the same calls of ``prepare`` in the same order.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, host: str, timeout_s: float
    ) -> None:
        interface = interface_towards(host)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface  # gloo has no other setting
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        self.rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[OwnerSet, dist.ProcessGroup] = {}
        self._open = True

    def prepare(self, owner_sets: Iterable[OwnerSet]) -> None:
        """Make the groups that do not exist yet; collective over the whole world.

        torch demands that everybody takes part in making every group, members or not.
        """
        wanted = sorted({owners for owners in owner_sets if len(owners) > 1})
        with contact("making process groups"):
            for owners in wanted:
                if owners not in self._groups:
                    self._groups[owners] = dist.new_group(list(owners), timeout=self._timeout)
        for owners in [o for o in self._groups if o not in wanted][:-_MAX_CACHED]:
            _destroy(self._groups.pop(owners))

    def get(self, owners: OwnerSet) -> dist.ProcessGroup | None:
        """The group of these ranks; None for a single one, which needs none."""
        return self._groups[owners] if len(owners) > 1 else None

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Rows of all workers of the world, by rank."""
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        with contact("gathering what every worker holds"):
            dist.all_gather(rows, row)
        return torch.stack(rows)

    def try_out(self) -> None:
        """Add up numbers of all workers, few and many: each may take another way through gloo.

        Raises:
            LostContactError: If a sum does not come about.
            RuntimeError: If it is wrong.
        """
        for size in TRIAL_SIZES:
            ones = torch.ones(size)
            with contact(f"a trial sum of {size} numbers over all devices"):
                dist.all_reduce(ones)
            if not bool((ones == dist.get_world_size()).all()):
                raise RuntimeError(f"a trial sum of {size} numbers over all devices is wrong")

    def close(self) -> None:
        """Destroy every group, which frees the peers that wait in one. Safe to call twice.

        A collective of this process that is still pending is not freed: torch waits for it.
        """
        if self._open:
            self._open = False
            self._groups.clear()
            _destroy(None)


def start_sum(flat: torch.Tensor, group: dist.ProcessGroup, patience_s: float) -> dist.Work:
    """Begin to add a tensor up over a group; waiting for it fails after ``patience_s``.

    The group's own time-out is that of making it, which may be shorter or longer than a step's.
    """
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=patience_s)
    return group.allreduce([flat], options)


def _destroy(group: dist.ProcessGroup | None) -> None:
    # Non-members hold a marker, not a group; a group may be gone with the default one.
    if group is None or isinstance(group, dist.ProcessGroup):
        with suppress(AssertionError, ValueError, RuntimeError):
            dist.destroy_process_group(group)
