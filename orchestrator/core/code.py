"""Which code a process runs: the user's modules and lyray itself, told apart by content alone."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from orchestrator.errors import ConfigError

LYRAY = ("orchestrator", "workers")
"""The packages that lyray is made of."""

SHORT = 8
"""Digits of a digest that people are shown."""


@dataclass(frozen=True, slots=True, order=True)
class Module:
    """A module that is loaded."""

    name: str
    digest: str
    path: str | None = None
    """In the working directory; None: it is installed."""

    @property
    def key(self) -> str:
        """What it is called when it is compared."""
        return self.path or self.name


@dataclass(frozen=True, slots=True)
class Code:
    """What a process runs."""

    modules: tuple[Module, ...] = ()
    """Loaded from the working directory, or of the package that the task is in."""

    lyray: str = ""
    host: str = field(default="", compare=False)

    @property
    def digest(self) -> str:
        """Of the user's modules."""
        told = "".join(f"{module.key} {module.digest}\n" for module in sorted(self.modules))
        return hashlib.sha256(told.encode()).hexdigest()

    def __str__(self) -> str:
        """For example: 1f3a9c20 (mytask and 2 more), lyray 8e1c22aa."""
        names = [module.name for module in self.modules]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        told = f"{self.digest[:SHORT]} ({names[0]}{more})" if names else "of no file"
        return f"{told}, lyray {self.lyray[:SHORT]}"


NO_CODE = Code()


@dataclass(frozen=True, slots=True)
class KnownCode:
    """What a job runs: what every device must run, too."""

    lyray: str
    modules: Mapping[str, str | None]
    """Digests by ``Module.key``; None: the job has no such file."""

    def check(self, device_id: str, found: Code) -> None:
        """See to it that a device runs the same; of modules that are not known nothing is said.

        Raises:
            ConfigError: If it does not, with device, node, module and mend.
        """
        where = f"device {device_id} on node {found.host}"
        if found.lyray != self.lyray:
            raise ConfigError(
                f"{where} runs another lyray ({found.lyray[:SHORT]}) than the job "
                f"({self.lyray[:SHORT]}); install the same one on every node, and leave no copy "
                "of it in the working directory"
            )
        for module in found.modules:
            ours = self.modules.get(module.key, module.digest)
            if ours != module.digest:
                has = f"the job {ours[:SHORT]}" if ours else "which the job does not have"
                raise ConfigError(
                    f"{where} runs another {module.name} ({module.key} {module.digest[:SHORT]}, "
                    f"{has}); start the job anew with ray job submit --working-dir, and take "
                    "older copies off that node: out of its environment and its PYTHONPATH"
                )


def file_digest(path: Path) -> str | None:
    """The SHA-256 of a file; None: it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


@cache
def lyray_digest() -> str:
    """Of lyray as it is installed where this process imports it from."""
    found = hashlib.sha256()
    root = Path(__file__).parents[2]
    for package in LYRAY:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".toml"):
                found.update(f"{path.relative_to(root)} {file_digest(path)}\n".encode())
    return found.hexdigest()
