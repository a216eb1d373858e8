"""Ray for one run: an embedded one that nobody notices, or the cluster that RAY_ADDRESS names."""

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]  # no stubs
import ray
from ray._private import ray_constants
from ray.exceptions import RayError

from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.runtime.signals import handled

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 128 * 2**20
"""Plans, reports and profiles are small; tensors never pass through Ray."""

PROBE_S = 5.0
"""Longest wait for the answer whether a cluster asks for a token."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else every worker warns of a future default
}


@contextmanager
def ray_session(num_devices: int) -> Iterator[None]:
    """Be connected to Ray inside the block; what was started is taken down at its end.

    A process that is connected already (a notebook, a test) keeps its connection.

    Args:
        num_devices: Workers that an embedded Ray should have processes ready for.

    Raises:
        ConfigError: If the cluster that ``RAY_ADDRESS`` names cannot be joined.
        OrchestratorError: If an embedded Ray does not start.
    """
    if ray.is_initialized():
        yield
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    folder: str | None = None
    try:
        if address := os.environ.get("RAY_ADDRESS"):
            _attach(address)
        else:
            folder = tempfile.mkdtemp(prefix="lyray-", dir=_short_folder())
            _embed(folder, num_devices)
        _silence_raylets()
        yield
    finally:
        with handled(signal.SIG_IGN):  # a second or two, and nothing is left
            ray.shutdown()
            if folder is not None:
                _end_rest(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _end_rest(folder: str) -> None:
    """End whoever still writes into the folder of an embedded Ray that was taken down.

    A raylet that is stopped while it starts leaves its two agents behind; they notice after
    more than a minute. Where there is no /proc they are left to that.
    """
    for open_files in Path("/proc").glob("[0-9]*/fd"):
        pid = int(open_files.parent.name)
        with suppress(OSError):  # it has ended, or belongs to someone else
            if pid != os.getpid() and any(_lies_in(file, folder) for file in open_files.iterdir()):
                os.kill(pid, signal.SIGKILL)


def _lies_in(open_file: Path, folder: str) -> bool:
    """Whether an entry of ``/proc/PID/fd`` leads there; not if it was closed since it was seen."""
    try:
        return open_file.readlink().is_relative_to(folder)
    except FileNotFoundError:
        return False


def _embed(folder: str, num_devices: int) -> None:
    try:
        with _on_loopback():
            ray.init(
                address="local",
                num_cpus=num_devices + 1,  # processes started ahead: the workers and the head
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=folder,
            )
    except Exception as error:  # whatever Ray raises: some of it is of no class but this
        said = " ".join(str(error).split()) or type(error).__name__
        raise OrchestratorError(
            f"Ray did not start on this machine: {said}; see to free memory, space below "
            f"{Path(folder).parent} and in /dev/shm, and room for processes (ulimit -u) and files "
            "(ulimit -n), and start again"
        ) from error


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let all that Ray starts inside the block listen on 127.0.0.1, and not on every interface.

    It does so by itself on other systems than Linux, where it forms no clusters; the address
    that ``ray.init`` takes is replaced by another one if it is a loopback address.
    """
    forms_clusters = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = forms_clusters


def _attach(address: str) -> None:
    """Join a running cluster, with a token if it asks for one.

    Ray's servers demand a token unless told otherwise, while its clients send none unless
    told so; and a client that sends one cannot work with a server that demands none.
    """
    if "RAY_AUTH_MODE" not in os.environ and _asks_for_token(address):
        os.environ["RAY_AUTH_MODE"] = "token"
        # Ray has read its environment when it was imported.
        ray._raylet.Config.initialize("")  # type: ignore[attr-defined]  # compiled
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cannot join the Ray cluster at RAY_ADDRESS={address}: {error}; unset RAY_ADDRESS "
            "to start a local one, or, if it asks for a token, set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN (or put the token into ~/.ray/auth_token)"
        ) from None


def _asks_for_token(address: str) -> bool:
    """Whether the cluster's control plane refuses a question that comes without a token."""
    if "://" in address or ":" not in address:
        return False  # ``auto``, or a proxy with rules of its own
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            ask(b"", timeout=PROBE_S)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


def _silence_raylets() -> None:
    """Send what raylets tell every driver ("A worker died ...") to the log.

    Ray prints it on stdout whatever ``log_to_driver`` says, between our own lines, and offers
    no switch; in a Ray that prints it otherwise this does nothing.
    """

    def to_log(data: dict[str, Any], ignore_prefix: bool = False) -> None:
        logger.info("Ray: %s", " ".join(data.get("lines", ())))

    ray._private.worker.print_to_stdstream = to_log


def _short_folder() -> str:
    """Where sockets may lie: their paths must stay within 107 bytes, so never a long TMPDIR."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 20 else "/tmp"
