"""Where the workers of a run meet: a store on one address, and a secret that Ray alone carries."""

import secrets
import socket
from dataclasses import dataclass, field

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stub

from orchestrator.errors import ConfigError

_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a worker must know to join the others."""

    host: str
    port: int
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(_SECRET_BYTES), repr=False)
    """Workers prove to each other that they know it. Never in the store: that asks nobody."""


class Meeting:
    """A store of this process, for one set of workers; it ends with this object."""

    def __init__(self, host: str) -> None:
        """Serve it on the address ``host`` of this machine; torch alone would on all of them.

        Raises:
            ConfigError: If it is no address of this machine.
        """
        with _listener(host) as listener:
            port = int(listener.getsockname()[1])
            self._store = TCPStore(
                host, port, is_master=True, wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        self.invitation = Invitation(host, port)


def _listener(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0))
    except OSError as error:
        raise ConfigError(
            f"Ray knows this node as {host}, where it cannot listen: {error.strerror or error}; "
            "give ray start --node-ip-address the address of one of its interfaces"
        ) from None
