"""The other workers of a run: joined through a store, left at a fault, and joined anew."""

import traceback
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stub
from torch.distributed.distributed_c10d import PrefixStore

from workers.process_groups import ProcessGroups, contact
from workers.transport import TRANSPORTS, Transport


class Peers:
    """Process groups and transport of one worker, and when they are closed."""

    def __init__(self, transport: str, timeout_s: float) -> None:
        """Belong to nobody yet.

        Args:
            transport: A name of ``TRANSPORTS``.
            timeout_s: Of every collective, and of the set-up.
        """
        self._transport_name, self._timeout_s = transport, timeout_s
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

    def join(self, store_host: str, store_port: int, rank: int, world_size: int) -> None:
        """Join with others, after leaving those of before; collective.

        Args:
            store_host: Where the head serves a TCPStore, a fresh one for every set of workers.
            store_port: Its port.
            rank: Place of this worker.
            world_size: Number of workers.

        Raises:
            LostContactError: If not all of them come in time.
        """
        self.leave()
        with contact("joining the others"):
            timeout = timedelta(seconds=self._timeout_s)
            store = TCPStore(store_host, store_port, is_master=False, timeout=timeout)
            self._groups = ProcessGroups(
                PrefixStore("groups", store),
                rank=rank,
                world_size=world_size,
                host=store_host,
                timeout_s=self._timeout_s,
            )
            self._groups.try_out()
            self._transport = TRANSPORTS[self._transport_name](
                rank, world_size, PrefixStore("transport", store), timeout_s=self._timeout_s
            )

    def hang_up(self) -> None:
        """Close the transport only, which frees whoever waits for a message, here and there."""
        if self._transport is not None:
            self._transport.close()

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
