"""Opens pages in Chromium, where every host but this one is out of reach."""

import subprocess

from tests.rendering import module

draw = module("draw")


def why_not() -> str | None:
    """Why no page can be opened here; None when one can."""
    if draw.chromium() is None:
        return f"there is no {draw.CHROMIUM[0]} (Debian: apt-get install {draw.CHROMIUM[0]})"
    return None


def opened(address: str, *options: str) -> subprocess.CompletedProcess[str]:
    """What Chromium wrote of a page; what the page itself says is among its stderr."""
    command = [
        draw.chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", *options, address,
    ]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True)


def console(done: subprocess.CompletedProcess[str]) -> str:
    """The lines that pages wrote to the console."""
    return "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
