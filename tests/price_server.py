"""A server of prices on loopback, which answers as a test says and remembers who asked."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class PriceServer:
    """``answer`` may be changed at any time; ``asked`` holds path and Authorization of each."""

    url: str
    answer: Answer
    asked: list[tuple[str, str | None]] = field(default_factory=list)


def says(body: object, status: int = 200, **headers: str) -> Answer:
    """Answers with JSON, or with bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def prices(**per_hour: float) -> list[dict[str, object]]:
    return [{"pool": pool, "price_per_hour": price} for pool, price in per_hour.items()]


@contextmanager
def price_server(answer: Answer) -> Iterator[PriceServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append((self.path, self.headers.get("Authorization")))
            try:
                server.answer(self)
            except OSError:  # whoever asked has given up
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = PriceServer(f"http://127.0.0.1:{http.server_port}/prices.json", answer)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
