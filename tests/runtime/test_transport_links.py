"""What happens to messages that are queued when a link breaks."""

import threading
from collections.abc import Sequence

import pytest
import torch

from workers.links import LinkTransport, PeerLostError

pytestmark = pytest.mark.runtime
LONG_S = 30.0


class BreakingChannel:
    """Takes nothing until told to break, then breaks."""

    def __init__(self) -> None:
        self.broken = threading.Event()

    def write(self, buffers: Sequence[memoryview]) -> None:
        self.broken.wait(LONG_S)
        raise OSError("cable cut")

    def read_into(self, buffer: memoryview) -> None:
        threading.Event().wait(LONG_S)

    def close(self) -> None:
        self.broken.set()


def test_flush_names_the_peer_that_takes_nothing() -> None:
    transport = LinkTransport(0, {1: BreakingChannel()})
    transport.send((torch.zeros(2),), 1, 0)
    transport.send((torch.zeros(2),), 1, 1)
    with pytest.raises(TimeoutError, match="2 messages to rank 1"):
        transport.flush(0.05)
    transport.close()


def test_flush_fails_when_the_peer_was_lost_before_it_got_everything() -> None:
    channel = BreakingChannel()
    transport = LinkTransport(0, {1: channel})
    transport.send((torch.zeros(2),), 1, 0)
    channel.broken.set()
    with pytest.raises(PeerLostError, match="rank 1: cable cut"):
        transport.flush(LONG_S)
    with pytest.raises(PeerLostError, match="rank 1: cable cut"):
        transport.send((torch.zeros(2),), 1, 0)
    transport.close()


class SlowToReturn:
    """Its first message is with the peer, which reads it and leaves, before ``write`` returns."""

    def __init__(self) -> None:
        self.written, self.returned = threading.Event(), threading.Event()

    def write(self, buffers: Sequence[memoryview]) -> None:
        self.written.set()
        self.returned.wait(LONG_S)

    def read_into(self, buffer: memoryview) -> None:
        self.written.wait(LONG_S)
        self.returned.wait(0.2)  # flush is waiting by now
        threading.Timer(0.1, self.returned.set).start()
        raise EOFError("it closed its transport")

    def close(self) -> None:
        self.returned.set()


def test_a_peer_that_leaves_while_its_last_message_is_being_counted_fails_no_flush() -> None:
    transport = LinkTransport(0, {1: SlowToReturn()})
    transport.send((torch.zeros(2),), 1, 0)
    transport.flush(LONG_S)
    transport.close()
