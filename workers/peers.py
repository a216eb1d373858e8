"""The other workers of a run: joined through a store, left at a fault, and joined anew."""

import json
import logging
import traceback
from dataclasses import asdict
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stub
from torch.distributed.distributed_c10d import PrefixStore, Store

from workers.device import PROCESSOR, DeviceFacts, facts
from workers.meeting import Invitation
from workers.process_groups import ProcessGroups, contact
from workers.sums import DIRECT, choose_backend
from workers.transport import TRANSPORTS, Transport

logger = logging.getLogger(__name__)


class Peers:
    """Process groups and transport of one worker, and when they are closed."""

    def __init__(self, transport: str, timeout_s: float) -> None:
        """Belong to nobody yet.

        Args:
            transport: A name of ``TRANSPORTS``.
            timeout_s: Of every collective, and of the set-up.
        """
        self._transport_name, self._timeout_s = transport, timeout_s
        self.device = PROCESSOR
        """That of this process."""

        self.device_ids: tuple[str, ...] = ()
        """What the others are called, by rank; known once there is a plan."""

        self._groups: ProcessGroups | None = None
        self._transport: Transport | None = None

    @property
    def groups(self) -> ProcessGroups:
        """Collectives; only while joined."""
        assert self._groups is not None, "connect comes first"
        return self._groups

    @property
    def transport(self) -> Transport:
        """Messages from one to another; only while joined."""
        assert self._transport is not None, "connect comes first"
        return self._transport

    @property
    def rank(self) -> int:
        """Place among all joined workers; only while joined."""
        return self.groups.rank

    def join(self, invitation: Invitation, rank: int, world_size: int) -> None:
        """Join with others, after leaving those of before; collective.

        Args:
            invitation: Of the head's Meeting, a new one for every set of workers.
            rank: Place of this worker.
            world_size: Number of workers.

        Raises:
            LostContactError: If not all of them come in time.
        """
        self.leave()
        with contact("joining the others"):
            timeout, host = timedelta(seconds=self._timeout_s), invitation.host
            store = TCPStore(host, invitation.port, is_master=False, timeout=timeout)
            everybody = self._introduce(PrefixStore("devices", store), rank, world_size)
            backend, why_not = choose_backend(everybody)
            if self.device != PROCESSOR:
                logger.info("sums of gradients by %s%s", backend, why_not and f": {why_not}")

            def groups(directly_on: torch.device | None) -> ProcessGroups:
                return ProcessGroups(
                    PrefixStore("groups/gloo" if directly_on is None else "groups/direct", store),
                    rank=rank,
                    world_size=world_size,
                    host=host,
                    timeout_s=self._timeout_s,
                    directly_on=directly_on,
                )

            self._groups = groups(self.device if backend == DIRECT else None)
            if backend == DIRECT and not self._groups.can_be_direct():
                self._groups.close()
                self._groups = groups(None)
            self._groups.try_out(self._timeout_s)
            self._transport = TRANSPORTS[self._transport_name](
                rank,
                world_size,
                PrefixStore("transport", store),
                secret=invitation.secret,
                timeout_s=self._timeout_s,
            )

    def _introduce(self, store: Store, rank: int, world_size: int) -> list[DeviceFacts]:
        """What devices all of them have, by rank."""
        names = [str(peer) for peer in range(world_size)]
        store.set(names[rank], json.dumps(asdict(facts(self.device))))
        store.wait(names, timedelta(seconds=self._timeout_s))
        return [DeviceFacts(**json.loads(told)) for told in store.multi_get(names)]

    def hang_up(self) -> None:
        """Free whoever waits for a message, here and there, or here in a sum on GPUs."""
        if self._transport is not None:
            self._transport.close()
        if self._groups is not None:
            self._groups.break_off()

    def cut(self, device_id: str) -> None:
        """Give up the link to one of them; nothing happens where there is none."""
        if self._groups is not None and device_id in self.device_ids:
            self.transport.cut(self.device_ids.index(device_id))

    def leave(self, error: BaseException | None = None) -> None:
        """Close everything, which frees every peer that waits. Any time, any thread.

        ``error``: why; gloo closes a socket when the last reference goes, and the frames of a
        traceback hold some.
        """
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__
        self.hang_up()
        if self._groups is not None:
            self._groups.close()
