"""Before a run: who does not reach whom is told by name and address; nothing hangs."""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import distributed as dist

from orchestrator.control.recovery import FailureOptions
from orchestrator.errors import OrchestratorError
from orchestrator.runtime.actors import Place
from orchestrator.runtime.preflight import Miss, by_node, find_misses, refuse, without
from workers import process_groups
from workers.link_speed import SIZES_BYTES as ALL_SIZES
from workers.link_speed import one_way
from workers.preflight import SIZES_BYTES, Echo, reach
from workers.process_groups import LostContactError, ProcessGroups

if TYPE_CHECKING:
    from orchestrator.runtime.fleet import Fleet

pytestmark = pytest.mark.runtime

SECRET = b"s" * 32
TIMEOUT_S = 3.0  # what must answer has to on a busy machine, too


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that accepts connections, and what it does with each; its address."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def swallow(connection: socket.socket) -> None:
    """Take what comes and say nothing, as a link that loses all packets back."""
    with suppress(OSError), connection:
        while connection.recv(1 << 16):
            pass


def small_only(connection: socket.socket) -> None:
    """Lose what does not fit into one packet, as a link does whose MTU is set wrong."""
    with suppress(OSError), connection:
        connection.recv(len(SECRET))
        got = connection.recv(9)
        connection.sendall(got[8:])
        swallow(connection)


def mangle(connection: socket.socket) -> None:
    with suppress(OSError), connection:
        connection.recv(len(SECRET))
        connection.recv(9)
        connection.sendall(b"y")
        swallow(connection)


def test_messages_of_all_sizes_come_back_from_whoever_is_reached() -> None:
    first, second = Echo("127.0.0.1", SECRET, TIMEOUT_S), Echo("127.0.0.1", SECRET, TIMEOUT_S)
    addresses = {"a-0": first.address, "b-0": second.address}
    assert reach(addresses, SECRET, TIMEOUT_S) == ()
    assert [missed[0] for missed in reach(addresses, b"x" * 32, TIMEOUT_S)] == ["a-0", "b-0"]
    first.close()
    ((device, address, why),) = reach(addresses, SECRET, TIMEOUT_S)
    assert (device, address) == ("a-0", first.address)
    assert "no connection" in why
    second.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (swallow, "a message of 1 bytes did not come back: timed out"),
        (small_only, f"a message of {SIZES_BYTES[1]} bytes did not come back: timed out"),
        (mangle, "a message of 1 bytes came back changed"),
    ],
)
def test_a_link_that_takes_but_does_not_bring_is_found_within_the_time_out(
    answer: Callable[[socket.socket], None], why: str
) -> None:
    """NVIDIA/nccl#794, #1136: messages of some sizes hang, others pass; it is found in the run."""
    with server(answer) as address:
        assert reach({"b-0": address}, SECRET, TIMEOUT_S) == (("b-0", address, why),)


class Callers:
    """A fleet of echoes in this process; ``barred``: who cannot reach whom, at which address."""

    def __init__(self, device_ids: tuple[str, ...], barred: Mapping[tuple[str, str], str]) -> None:
        self.device_ids, self._barred = device_ids, barred
        self._echoes: dict[str, Echo] = {}
        self.asked: list[str] = []

    def ask(
        self,
        method: str,
        answer: type,
        *arguments: object,
        device_ids: Iterable[str],
        each: Mapping[str, tuple[Mapping[str, str]]] | None = None,
        **_: object,
    ) -> tuple[dict[str, object], tuple[()]]:
        self.asked += device_ids
        if method == "listen":
            host, secret, _ = cast("tuple[str, bytes, float]", arguments)
            self._echoes = {d: Echo(host, secret, TIMEOUT_S) for d in device_ids}
            return {d: echo.address for d, echo in self._echoes.items()}, ()
        assert each is not None
        secret, _ = cast("tuple[bytes, float]", arguments)
        return {
            d: reach({o: self._barred.get((d, o), at) for o, at in others.items()}, secret, 0.5)
            for d, (others,) in each.items()
        }, ()

    def tell(self, method: str, *, device_ids: Iterable[str]) -> None:
        assert method == "stop_listening"
        for echo in self._echoes.values():
            echo.close()


def test_a_pair_that_cannot_talk_is_named_with_address_and_mend_before_the_run() -> None:
    """NVIDIA/nccl#794, #1136: an all-reduce over unlike nodes hangs, and names nobody."""
    timeouts = FailureOptions(timeout_s=2.0).timeouts
    devices = ("a100-0", "v100-0", "v100-1")
    refuse(find_misses(cast("Fleet", Callers(devices, {})), devices, "127.0.0.1", timeouts))
    with server(swallow) as address:
        barred = {("v100-1", "a100-0"): address, ("a100-0", "v100-1"): address}
        started_s = time.monotonic()
        fleet = cast("Fleet", Callers(devices, barred))
        misses = find_misses(fleet, devices, "127.0.0.1", timeouts)
    assert time.monotonic() - started_s < timeouts.hold_s + timeouts.start_s
    with pytest.raises(OrchestratorError) as caught:
        refuse(misses)
    told = str(caught.value)
    assert told.startswith(f"device a100-0 does not reach device v100-1 at {address} (a message of")
    assert "and 1 more like this; let TCP pass between their nodes" in told


def test_one_device_of_a_node_speaks_for_all_of_it() -> None:
    places = [Place("a-0", "one"), Place("b-0", "two"), Place("a-1", "one"), Place("c-0")]
    assert by_node(places) == (("a-0", "a-1"), ("b-0",), ("c-0",))
    fleet, timeouts = Callers(("a-0", "a-1"), {}), FailureOptions().timeouts
    assert find_misses(cast("Fleet", fleet), ("a-0",), "127.0.0.1", timeouts) == ()
    assert fleet.asked == []
    assert find_misses(cast("Fleet", fleet), ("a-0", "a-1"), "127.0.0.1", timeouts) == ()
    assert fleet.asked == 2 * ["a-0", "a-1"]


@pytest.mark.parametrize(
    ("pairs", "left_out"),
    [
        ([], []),
        (["ad", "bd", "dc"], ["d"]),  # one that nobody reaches, and that reaches nobody
        (["ab"], ["b"]),  # of two, the later one
        (["ac", "bc", "cd"], ["c"]),
        (["ac", "ad", "bc", "bd"], ["d", "c"]),  # two halves: those who came first stay
    ],
)
def test_as_few_as_possible_are_left_out_and_of_two_the_newer(
    pairs: list[str], left_out: list[str]
) -> None:
    misses = [Miss(one, other, "10.0.0.1:1", "refused") for one, other in pairs]
    found = without(misses, "abcd")
    assert list(found) == left_out
    assert all(device in miss.ends for device, miss in found.items())


def test_those_who_are_needed_stay_and_so_do_pairs_of_them() -> None:
    misses = [Miss(one, other, "10.0.0.1:1", "refused") for one, other in ("ac", "ad", "ab")]
    assert list(without(misses, "cd")) == ["d", "c"]


def test_a_sum_that_comes_about_for_nobody_ends_with_an_error_and_a_wrong_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVIDIA/nccl#794, #1136: sums of few and of many numbers are tried before they matter."""
    groups, seen = ProcessGroups.__new__(ProcessGroups), []
    groups._directly_on = None

    class Done:
        def __init__(self, ones: torch.Tensor, *_: object, **__: object) -> None:
            seen.append(len(ones))
            self._ones = ones

        def wait(self) -> torch.Tensor:
            return self._ones

    class Late(Done):
        def wait(self) -> torch.Tensor:
            raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")

    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="all"))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(process_groups, "Sum", Done)
    groups.try_out(1.0)
    assert seen == sorted(seen)
    assert seen[-1] >= 1000 * seen[0]
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)  # of whom only one is heard
    with pytest.raises(RuntimeError, match="a trial sum of 1 numbers over all devices is wrong"):
        groups.try_out(1.0)
    monkeypatch.setattr(process_groups, "Sum", Late)
    with pytest.raises(LostContactError, match=r"in a trial sum of 1 numbers .*: Timed out"):
        groups.try_out(1.0)


def test_messages_of_all_sizes_come_back_and_larger_ones_are_counted_by_their_time() -> None:
    echo = Echo("127.0.0.1", SECRET, 5.0)
    try:
        found = one_way(echo.address, SECRET, 5.0)
        again = one_way(echo.address, SECRET, 5.0)
    finally:
        echo.close()
    assert [size for size, _ in found] == [size for size, _ in again] == list(ALL_SIZES)
    assert all(seconds > 0 for _, seconds in found)
    assert found[-1][1] > found[0][1]  # 16 MiB, and one byte


def test_whoever_does_not_know_the_secret_times_nothing() -> None:
    echo = Echo("127.0.0.1", SECRET, 5.0)
    try:
        with pytest.raises((OSError, EOFError)):
            one_way(echo.address, b"x" * 32, 5.0)
    finally:
        echo.close()
