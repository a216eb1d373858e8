"""One text over HTTP: what is answered, refused, and given up, and who gets the token."""

import socket
import threading
from http.server import BaseHTTPRequestHandler

import pytest

from orchestrator.fetching import fetch_text
from tests.price_server import Answer, price_server, says

TOKEN = "s3cr3t-t0ken"


def fetch(url: str, *, token: str = "", timeout_s: float = 5.0, max_bytes: int = 1000) -> str:
    return fetch_text(url, token=token, timeout_s=timeout_s, max_bytes=max_bytes)


def redirects(to: str, status: int = 302) -> Answer:
    return says(b"", status, Location=to)


def test_a_good_answer_is_its_text_and_is_asked_for_once_without_a_token() -> None:
    with price_server(says("ü".encode())) as server:
        assert fetch(server.url) == "ü"
        assert server.asked == [("/prices.json", None)]


@pytest.mark.parametrize("status", [201, 204, 304, 400, 401, 403, 404, 429, 500, 502, 503])
def test_any_other_status_is_an_error_that_shows_nothing_of_the_answer(status: int) -> None:
    with (
        price_server(says(TOKEN.encode() * (status not in (204, 304)), status)) as server,
        pytest.raises(OSError, match=rf"^it answers with status {status}$"),
    ):
        fetch(server.url, token=TOKEN)


def test_the_token_goes_to_its_own_server_alone() -> None:
    with price_server(says(b"there")) as other, price_server(redirects(other.url)) as server:
        assert fetch(server.url, token=TOKEN) == "there"
        assert server.asked == [("/prices.json", f"Bearer {TOKEN}")]
        assert other.asked == [("/prices.json", None)]


def test_a_redirect_on_the_same_server_keeps_the_token_also_after_one_elsewhere() -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        (says(b"here") if handler.path == "/new" else redirects("/new", 307))(handler)

    with price_server(answer) as server:
        assert fetch(server.url, token=TOKEN) == "here"
        assert server.asked == [(path, f"Bearer {TOKEN}") for path in ("/prices.json", "/new")]


@pytest.mark.parametrize(
    "to", ["file:///etc/hostname", "ftp://127.0.0.1/x", "data:,x", "gopher://127.0.0.1/"]
)
def test_a_redirect_to_what_is_no_web_server_is_refused(to: str) -> None:
    with (
        price_server(redirects(to)) as server,
        pytest.raises(OSError, match=r"^it (answers with status 302|redirects from http to what)"),
    ):
        fetch(server.url, token=TOKEN)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("to", ["http://[::1", "http://127.0.0.1:port/", "http://[x]/"])
def test_a_redirect_to_a_malformed_address_is_told_in_our_words(to: str, status: int) -> None:
    with (
        price_server(redirects(to, status)) as server,
        pytest.raises(OSError, match=r"^it redirects to what is no address$"),
    ):
        fetch(server.url, token=TOKEN)


def test_a_circle_of_redirects_ends() -> None:
    with price_server(redirects("/prices.json")) as server:
        with pytest.raises(OSError, match="status 302"):
            fetch(server.url)
        assert len(server.asked) < 20


def chunked(num_bytes: int) -> Answer:
    """An answer that does not say how long it is."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(num_bytes // 100):
            handler.wfile.write(b"x" * 100)

    return answer


@pytest.mark.parametrize("answer", [says(b"x" * 1001), chunked(10**6)])
def test_an_answer_that_is_too_large_is_refused(answer: Answer) -> None:
    with (
        price_server(answer) as server,
        pytest.raises(OSError, match=r"^its answer has more than 1,000 bytes$"),
    ):
        fetch(server.url)


def test_a_server_that_drips_is_given_up_though_each_byte_comes_in_time() -> None:
    ended = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not ended.wait(0.02):
            handler.wfile.write(b" ")
            handler.wfile.flush()

    with price_server(drip) as server:
        with pytest.raises(OSError, match=r"^no answer within 0\.3 s$"):
            fetch(server.url, timeout_s=0.3, max_bytes=10**6)
        ended.set()


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(
            OSError, match=r"^no answer within 0\.2 s|cannot be reached \(timed out"
        ):
            fetch(url, timeout_s=0.2)


def test_nobody_at_the_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(OSError, match=r"^it cannot be reached \(Connection refused\)$"):
        fetch(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize("said", [b"SSH-2.0-x\r\n", b"", b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe"])
def test_what_is_no_web_server_or_no_text_is_told(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OSError, match=r"no text over HTTP|cannot be reached|closed connection"):
            fetch(f"http://127.0.0.1:{listening.getsockname()[1]}/")
        thread.join()
