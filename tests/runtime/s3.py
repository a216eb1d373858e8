"""An S3 server on loopback, in a process of its own, that can be told to fail as S3 does."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from s3fs import S3FileSystem

BUCKET = "runs"
_ORDERS = "/-/faults"
_SLOW_DOWN = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"


@dataclass(frozen=True)
class Fault:
    """Requests that fail instead of being served."""

    method: str
    path: str  # a regular expression, found anywhere in the path
    times: int
    status: int = 503
    code: str = "SlowDown"


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str

    def fail(self, *faults: Fault) -> None:
        """From now on these requests fail, and none that were told before."""
        self._order("POST", [asdict(fault) for fault in faults])

    def left(self) -> list[int]:
        """How often each fault will still happen."""
        return [fault["times"] for fault in self._order("GET")]

    def _order(self, method: str, body: object = None) -> Any:
        request = urllib.request.Request(
            self.url + _ORDERS, method=method, data=json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


@contextmanager
def s3_server() -> Iterator[Server]:
    """Serve an empty bucket, with the environment telling everyone where."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.s3"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    old = dict(os.environ)
    try:
        server = Server(process.stdout.readline().strip())
        os.environ |= {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        S3FileSystem.clear_instance_cache()  # those of an earlier server
        request = urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        yield server
    finally:
        os.environ.clear()
        os.environ.update(old)
        process.kill()
        process.wait()
        process.stdout.close()


class _Faults:
    """WSGI in front of the S3 application."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._faults: list[dict[str, Any]] = []

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path == _ORDERS:
            if method == "POST":
                self._faults = json.loads(
                    environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
                )
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(self._faults).encode()]
        for fault in self._faults:
            if fault["times"] and method == fault["method"] and re.search(fault["path"], path):
                fault["times"] -= 1
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start(f"{fault['status']} Trouble", [("Content-Type", "application/xml")])
                return [_SLOW_DOWN.format(code=fault["code"]).encode()]
        answer: Iterable[bytes] = self._application(environ, start)
        return answer


def _serve() -> None:
    # Only the server's own process needs these.
    from moto.server import (  # noqa: PLC0415
        DomainDispatcherApplication,
        create_backend_app,
    )
    from werkzeug.serving import WSGIRequestHandler, make_server  # noqa: PLC0415

    class Silent(WSGIRequestHandler):
        def log_request(self, *_: object) -> None: ...

    application = _Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Silent)
    sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    _serve()
