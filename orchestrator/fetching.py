"""One text over HTTP: bounded in time and size, with a token that only its own server gets."""

import time
from http.client import HTTPException, InvalidURL
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

SCHEMES = ("http", "https")
_PORTS = {"http": 80, "https": 443}
_CHUNK_BYTES = 2**16


def fetch_text(url: str, *, token: str = "", timeout_s: float, max_bytes: int) -> str:
    """Return what a server answers with status 200.

    Args:
        url: http or https. Redirects are followed to these only, and never from https to http.
        token: Sent as ``Authorization: Bearer``, to the host and port of ``url`` alone.
        timeout_s: For every answer of the server; one that drips is given up soon after.
        max_bytes: Of the answer; a longer one is refused, unread where it says so.

    Raises:
        OSError: What went wrong, in words that hold nothing the server said.
    """
    request = Request(url, headers={"Accept": "application/json", "User-Agent": "lyray"})
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    opener = OpenerDirector()
    for handler in (
        ProxyHandler(), HTTPHandler(), HTTPSHandler(), HTTPDefaultErrorHandler(),
        HTTPErrorProcessor(), _Redirects(url, token),
    ):  # fmt: skip
        opener.add_handler(handler)
    ends_s = time.monotonic() + timeout_s
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            if answer.status != 200:
                raise OSError(f"it answers with status {answer.status}")
            return _body(answer, ends_s, max_bytes).decode("utf-8-sig")
    except HTTPError as error:
        error.close()
        raise OSError(f"it answers with status {error.code}") from None
    except URLError as error:
        reason = error.reason
        said = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
        raise OSError(f"it cannot be reached ({said})") from None
    except TimeoutError:
        raise OSError(f"no answer within {timeout_s:g} s") from None
    except (HTTPException, UnicodeError) as error:
        raise OSError(f"its answer is no text over HTTP ({type(error).__name__})") from None


def _body(answer: IO[bytes], ends_s: float, max_bytes: int) -> bytes:
    """The whole answer, piece by piece: a time-out of the socket starts anew with every byte."""
    told = getattr(answer, "length", None)
    body = b""
    while told is None or told <= max_bytes:
        piece = answer.read1(_CHUNK_BYTES)  # type: ignore[attr-defined]  # an HTTPResponse
        if not piece:
            return body
        body += piece
        if time.monotonic() > ends_s:
            raise TimeoutError
        if len(body) > max_bytes:
            break
    raise OSError(f"its answer has more than {max_bytes:,} bytes")


class _Redirects(HTTPRedirectHandler):
    """Follows redirects between web servers; the token stays with the first one."""

    def __init__(self, url: str, token: str) -> None:
        self._origin, self._token = _origin(url), token

    def http_error_302(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: object
    ) -> object:
        """What the address answers that ``headers`` name, where it is one."""
        try:
            return super().http_error_302(req, fp, code, msg, headers)  # type: ignore[arg-type]
        except (ValueError, InvalidURL):  # of urllib, which quotes the server
            raise OSError("it redirects to what is no address") from None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: object, newurl: str
    ) -> Request | None:
        """The request that follows; urllib drops the token, which its own server gets again."""
        was, will = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if will not in SCHEMES or (was == "https" and will == "http"):
            there = will if will in SCHEMES else "what is no web server"
            raise OSError(f"it redirects from {was} to {there}")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if request is not None and self._token and _origin(newurl) == self._origin:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        return request


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
