"""What only our own TCP promises: strangers do not get in."""

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from workers.links import PeerLostError
from workers.tcp import tcp_transport

pytestmark = pytest.mark.runtime
LONG_S = 30.0
SECRET = b"known to the ranks"


def test_strangers_are_dropped_while_the_ranks_connect(caplog: pytest.LogCaptureFixture) -> None:
    life = PrefixStore("life", HashStore())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tcp_transport, 0, 2, life, secret=SECRET, timeout_s=LONG_S)
        host, port = life.get("tcp/0").decode().rsplit(":", 1)
        browser, impostor, silent = (
            socket.create_connection((host, int(port)), timeout=LONG_S) for _ in range(3)
        )
        browser.sendall(b"GET / HTTP/1.1\r\nHost: lyray and enough to fill a hello\r\n\r\n")
        impostor.sendall(b"lyray/1\n" + (1).to_bytes(4, "little") + bytes(32))
        second = pool.submit(tcp_transport, 1, 2, life, secret=SECRET, timeout_s=LONG_S)
        joined = [first.result(LONG_S), second.result(LONG_S)]
    try:
        joined[1].send((torch.tensor(6),), 0, 0)
        message = joined[0].receive(joined[0].expect(1, 0), LONG_S)
        assert int(message.tensors[0]) == 6
        for stranger in (browser, impostor):
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""  # closed without an answer
        told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert told == 2 * ["a stranger at 127.0.0.1 was refused: it does not prove to be a peer"]
    finally:
        for end in (*joined, browser, impostor, silent):
            end.close()


def test_a_rank_that_died_after_publishing_its_address_is_named() -> None:
    life = PrefixStore("life", HashStore())
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    life.set("tcp/0", f"127.0.0.1:{port}")
    with pytest.raises(PeerLostError, match=r"rank 0.*refused"):
        tcp_transport(1, 2, life, secret=SECRET, timeout_s=LONG_S)


def test_whoever_reads_the_store_but_does_not_know_the_secret_cannot_join() -> None:
    life = PrefixStore("life", HashStore())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tcp_transport, 0, 2, life, secret=SECRET, timeout_s=1.0)
        second = pool.submit(tcp_transport, 1, 2, life, secret=b"guessed", timeout_s=1.0)
        with pytest.raises(PeerLostError, match="did not answer as that rank"):
            second.result(LONG_S)
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not connect"):
            first.result(LONG_S)
    assert life.num_keys() == 2, "two addresses, and no secret"
