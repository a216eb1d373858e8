"""The file that tells Prometheus where a run's metrics are, for as long as it runs."""

import hashlib
import json
import logging
import tempfile
from pathlib import Path

from orchestrator import storage

logger = logging.getLogger(__name__)


def discovery_file(run_url: str) -> Path:
    """The file for ``file_sd_configs`` that names a run's exporter.

    It lies beside the run's folder: there Prometheus can look for those of all runs, as only the
    last part of a path may hold a star. Prometheus looks at no bucket: for a run in one, it lies
    in Ray's own folder, next to the file that Ray writes for Prometheus.
    """
    beside = storage.local_path(f"{run_url}.prometheus.json")
    if beside is not None:
        return beside
    which = hashlib.sha256(run_url.encode()).hexdigest()[:8]  # buckets may hold runs of one name
    name = f"lyray-{run_url.rpartition('/')[2]}-{which}.prometheus.json"
    return Path(tempfile.gettempdir(), "ray", name)


def announce(run_url: str, run: str, address: tuple[str, int]) -> None:
    """Name a run's exporter, which listens on this host and port.

    Whoever cannot be found trains all the same: a file that cannot be written is a warning.
    """
    file, (host, port) = discovery_file(run_url), address
    found = [{"targets": [f"{host}:{port}"], "labels": {"job": "lyray", "run": run}}]
    try:
        storage.write_bytes(str(file), (json.dumps(found) + "\n").encode())
    except OSError as error:
        logger.warning("Prometheus cannot find the metrics of this run: %s", error)


def withdraw(run_url: str) -> None:
    """Nobody listens any more: a target that stays would be one that is down."""
    file = discovery_file(run_url)
    try:
        storage.delete(str(file))
    except OSError as error:
        logger.warning("%s stays: %s", file, error)
