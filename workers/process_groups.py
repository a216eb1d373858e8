"""torch's process groups: joining the workers of a run, one group per owner set, teardown."""

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from workers.addresses import interface_towards
from workers.device import is_out_of_memory
from workers.sums import DIRECT, GLOO, Sum

logger = logging.getLogger(__name__)

OwnerSet = tuple[int, ...]  # sorted ranks

TRIAL_SIZES = (1, 1 << 10, 1 << 16)
"""Numbers in the sums that are tried out: what a vote, a bias and a layer have."""

_ABORT_S = 5.0  # for NCCL to let go; it goes on beside us if it needs longer
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
        if is_out_of_memory(error):  # nobody is lost
            raise
        raise LostContactError(
            f"lost contact with another worker in {what}: {str(error).splitlines()[0]}"
        ) from error


class ProcessGroups:
    """The process groups of one worker, cached by owner set.

    Every worker of the world must make the same calls of ``prepare`` in the same order.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        host: str,
        timeout_s: float,
        directly_on: torch.device | None = None,
    ) -> None:
        """Join the others; collective.

        Args:
            store: Where they meet, fresh.
            rank: Of this worker.
            world_size: Number of workers.
            host: Whom the interface must reach.
            timeout_s: Of every collective that has no other.
            directly_on: This worker's GPU, where GPUs add up what lies on them; None: gloo adds
                up everything, in the memory of the machines.
        """
        interface = interface_towards(host)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface  # gloo has no other setting
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        # Else torch kills this process, from two threads of its own, when another one is lost in
        # a sum; ``watch`` keeps the time instead.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        dist.init_process_group(
            GLOO if directly_on is None else DIRECT,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        self.rank = rank
        self._directly_on, self._timeout_s = directly_on, timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[OwnerSet, dist.ProcessGroup] = {}
        self._open, self._closed = True, False

    def prepare(self, owner_sets: Iterable[OwnerSet]) -> None:
        """Make the groups that do not exist yet; collective over the whole world.

        torch demands that everybody takes part in making every group, members or not.
        """
        wanted = sorted({owners for owners in owner_sets if len(owners) > 1})
        with contact("making process groups"):
            for owners in wanted:
                if owners not in self._groups:
                    self._groups[owners] = dist.new_group(list(owners), timeout=self._timeout)
                    if self._directly_on is not None and self.rank in owners:
                        # NCCL connects with the first sum: now, in an order that all share,
                        # and not in a step.
                        self._add_ones(1, self._groups[owners], self._timeout_s).wait()
        for owners in [o for o in self._groups if o not in wanted][:-_MAX_CACHED]:
            _destroy(self._groups.pop(owners))

    def get(self, owners: OwnerSet) -> dist.ProcessGroup | None:
        """The group of these ranks; None for a single one, which needs none."""
        return self._groups[owners] if len(owners) > 1 else None

    def begin_sum(self, flat: torch.Tensor, owners: OwnerSet, patience_s: float) -> Sum:
        """Begin to add a tensor up over its owners, of whom there are several."""
        return self._start(flat, self._groups[owners], patience_s)

    def _start(self, flat: torch.Tensor, group: dist.ProcessGroup, patience_s: float) -> Sum:
        directly = flat.device == self._directly_on
        return Sum(flat, group, patience_s, directly=directly, is_open=lambda: self._open)

    def _add_ones(self, size: int, group: dist.ProcessGroup, patience_s: float) -> Sum:
        return self._start(torch.ones(size, device=self._directly_on), group, patience_s)

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Rows of all workers of the world, by rank."""
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        with contact("gathering what every worker holds"):
            dist.all_gather(rows, row)
        return torch.stack(rows)

    def try_out(self, patience_s: float) -> None:
        """Add up numbers of all workers, few and many: each may take another way through gloo.

        Raises:
            LostContactError: If a sum does not come about.
            RuntimeError: If it is wrong.
        """
        world = dist.group.WORLD
        assert world is not None, "the process has joined"
        for size in TRIAL_SIZES:
            with contact(f"a trial sum of {size} numbers over all devices"):
                ones = self._add_ones(size, world, patience_s).wait()
            if not bool((ones == dist.get_world_size()).all()):
                raise RuntimeError(f"a trial sum of {size} numbers over all devices is wrong")

    def can_be_direct(self) -> bool:
        """Try sums on the GPUs; whether they came about for all of them.

        Firewalls between nodes, driver and library may disagree in ways that only a sum shows:
        who cannot do without the other way takes all with it.
        """
        mine = True
        try:
            # Half the time: whoever sees it fail at once waits for those who do not.
            self.try_out(self._timeout_s / 2)
        except RuntimeError:
            logger.exception("NCCL does not add up over these devices: gloo will")
            mine = False
        return bool(self.gather(torch.tensor([mine], dtype=torch.uint8)).all())

    def break_off(self) -> None:
        """End what waits in a sum on GPUs, here; torch ends no other. Any time, any thread."""
        if self._directly_on is not None and self._open:
            self._open = False
            groups = [dist.group.WORLD, *self._groups.values()]
            # All at once: giving one up may wait for the work of another (pytorch#119797).
            breakers = [
                threading.Thread(target=_abort, args=(group,), name="abort", daemon=True)
                for group in groups
                if isinstance(group, dist.ProcessGroup)
            ]
            for breaker in breakers:
                breaker.start()
            for breaker in breakers:
                breaker.join(_ABORT_S)

    def close(self) -> None:
        """Destroy every group, which frees the peers that wait in one. Safe to call twice.

        A collective of this process that is still pending is not freed: torch waits for it.
        """
        self.break_off()
        if not self._closed:
            self._open, self._closed = False, True
            self._groups.clear()
            _destroy(None)


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(ValueError, RuntimeError):
        group.abort()


def _destroy(group: dist.ProcessGroup | None) -> None:
    # Non-members hold a marker, not a group; a group may be gone with the default one.
    if group is None or isinstance(group, dist.ProcessGroup):
        with suppress(AssertionError, ValueError, RuntimeError):
            dist.destroy_process_group(group)
