"""What a run is called, and where its files go."""

import re
from dataclasses import dataclass

from orchestrator.storage import absolute, join

_MAX_NAME = 100  # file systems allow 255 bytes, of which tools take some


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """YAML section ``run``: what the run is called and where its files go."""

    name: str
    """Name of the run, [a-z0-9-]; becomes the folder under ``storage_path``."""

    storage_path: str = "./runs"
    """Local path or any fsspec URL (``s3://bucket/prefix``, ``gs://``, ``memory://``)."""

    seed: int = 0
    """Of weights, order of samples and noise; no plan changes any of them."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", self.name):
            raise ValueError(
                f"name is {self.name!r}; write lower-case letters, digits and inner hyphens"
            )
        if len(self.name) > _MAX_NAME:
            raise ValueError(f"name has {len(self.name)} letters; write {_MAX_NAME} or fewer")
        if not self.storage_path.isprintable() or not self.storage_path:
            raise ValueError(f"storage_path is {self.storage_path!r}; write a folder or a URL")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; write 0 or more")

    @property
    def run_url(self) -> str:
        """Folder of the run's files; an absolute path where the storage is local."""
        return join(absolute(self.storage_path), self.name)
