"""The file that tells Prometheus where a run's metrics are, for as long as it runs."""

import json
import logging
from pathlib import Path

from orchestrator import storage

logger = logging.getLogger(__name__)


def discovery_file(run_url: str) -> Path | None:
    """The file for ``file_sd_configs`` that names a run's exporter; None in a bucket.

    It lies beside the run's folder: there Prometheus can look for those of all runs, as only the
    last part of a path may hold a star. It looks at no bucket.
    """
    return storage.local_path(f"{run_url}.prometheus.json")


def announce(run_url: str, run: str, address: tuple[str, int]) -> None:
    """Name a run's exporter, which listens on this host and port.

    Whoever cannot be found trains all the same: a file that cannot be written is a warning.
    """
    file, (host, port) = discovery_file(run_url), address
    if file is None:
        return
    found = [{"targets": [f"{host}:{port}"], "labels": {"job": "lyray", "run": run}}]
    try:
        storage.write_bytes(str(file), (json.dumps(found) + "\n").encode())
    except OSError as error:
        logger.warning("Prometheus cannot find the metrics of this run: %s", error)


def withdraw(run_url: str) -> None:
    """Nobody listens any more: a target that stays would be one that is down."""
    file = discovery_file(run_url)
    if file is None:
        return
    try:
        storage.delete(str(file))
    except OSError as error:
        logger.warning("%s stays: %s", file, error)
