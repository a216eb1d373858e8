"""A machine as a newcomer has it: an empty home, a private /tmp, and nothing else to write to."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).parents[2]

_KEPT = ("PATH", "LANG")
_OF_PIP = ("PIP_", "SSL_", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")

_ENTER = """
set -e
mount --bind / /
mount --bind {root} {root}
mount -o remount,bind,ro /
mount --bind {root}/tmp /tmp
mount -t proc proc /proc
{cache}
set +e
cd {folder}
{line}
ended=$?
exec 3>{told}
echo $ended >&3
for process in /proc/[0-9]*; do
  [ ${{process#/proc/}} = $$ ] || tr '\\0' ' ' < $process/cmdline >&3
done
"""


@dataclass(frozen=True)
class Said:
    """What became of one command."""

    code: int
    output: str
    left: str
    """Command lines of processes that it left behind."""

    wall_s: float


@dataclass(frozen=True)
class Root:
    """Only ``folder`` can be written to, by commands that see no other process."""

    folder: Path

    @property
    def clone(self) -> Path:
        """The files of the project, without what git ignores."""
        return self.folder / "clone"

    @property
    def home(self) -> Path:
        """HOME, empty at first."""
        return self.folder / "home"

    @property
    def temporary(self) -> Path:
        """What commands see as /tmp."""
        return self.folder / "tmp"

    def run(self, line: str, folder: Path, *, timeout_s: float) -> Said:
        """A line of a shell, in namespaces of its own, which end with all that runs in them."""
        told, output = self.folder / "told", self.folder / "output"
        told.unlink(missing_ok=True)
        cache = pip_cache()
        script = _ENTER.format(
            root=self.folder,
            folder=shlex.quote(str(folder)),
            line=line,
            told=told,
            cache=f"mount --bind {cache} {cache}" if cache else "",
        )
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation",
                 "private", "bash", "-c", script]  # fmt: skip
        started_s = time.monotonic()
        with output.open("wb") as file:
            done = subprocess.run(
                enter, env=self._environment(), stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, timeout=timeout_s, check=False,
            )  # fmt: skip
        code, _, left = (told.read_text() if told.exists() else f"{done.returncode}\n").partition(
            "\n"
        )
        wall_s = time.monotonic() - started_s
        return Said(int(code), output.read_text(errors="replace"), left.strip(), wall_s)

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_OF_PIP)}
        cache = pip_cache()
        return {**kept, "HOME": str(self.home), **({"PIP_CACHE_DIR": str(cache)} if cache else {})}


def pip_cache() -> Path | None:
    """Where pip keeps what it has downloaded, for whoever runs the tests; None: nowhere."""
    command = [sys.executable, "-m", "pip", "cache", "dir"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return Path(told) if told and Path(told).is_dir() else None


def why_not() -> str | None:
    """What this machine lacks for such a root; None when it can be had."""
    if os.geteuid() != 0:
        return "a root of its own takes root"
    trial = ["unshare", "--mount", "--pid", "--fork", "mount", "--bind", "/", "/"]
    done = subprocess.run(trial, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no namespaces: {done.stderr.strip()}"


@contextmanager
def fresh_root() -> Iterator[Root]:
    """One with the files of the working tree, and nothing of it left afterwards."""
    # Not below /tmp, which commands see as their own.
    folder = Path(tempfile.mkdtemp(prefix="lyray-newcomer-", dir="/var/tmp"))
    try:
        root = Root(folder)
        for made in (root.clone, root.home, root.temporary):
            made.mkdir()
        root.temporary.chmod(0o1777)
        for name in _files():
            target = root.clone / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TREE / name, target)
        yield root
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    told = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=True).stdout
    return [name for name in told.split("\0") if name and (TREE / name).is_file()]
