"""Every metric of a run, declared once, and the exporter that shows them to Prometheus."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions:
    """YAML section ``metrics``."""

    port: int = 9400
    """Port of the exporter; 0 or a taken one: the next free port."""

    host: str = "127.0.0.1"
    """Address it listens on."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; write 0 (any free port) to 65535")
        if not self.host:
            raise ValueError("host is empty; write an address, for example 127.0.0.1")
