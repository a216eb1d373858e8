"""A chaos file: the faults it says, or draws, become part of a run's configuration."""

import json
from collections.abc import Mapping

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.control.faults import Draw, FaultPlan, draw
from orchestrator.control.pools import build_cluster
from orchestrator.document import read_document
from orchestrator.errors import ConfigError
from orchestrator.inputs import MAX_TEXT_BYTES, read_text

_MEND = "write faults: [{kind: fail, at_step: 20, device: fast-0}, ...] or draw: {seed: 1}"


def with_chaos(config: RunConfig, path: str | None) -> RunConfig:
    """Return the run's configuration with the faults of a chaos file.

    Args:
        config: The whole file of the run.
        path: Of a YAML file with ``faults``, in the form of ``emulation.faults``, or ``draw``;
            None: no faults.

    Raises:
        ConfigError: If the file cannot be read, says something impossible, or the run's cluster
            is not emulated.
    """
    if path is None:
        return config
    text = read_text(path, f"--chaos {path}", "give a chaos file", max_bytes=MAX_TEXT_BYTES)
    data = read_document(text, path)
    if not isinstance(data, Mapping) or len(data) != 1 or not {"faults", "draw"} & set(data):
        raise ConfigError(f"{path} says neither faults nor draw, or more; {_MEND}")
    if config.cluster.source != "emulated":
        raise ConfigError(
            f"--chaos is only for cluster.source: emulated, and cluster.source is "
            f"{config.cluster.source}; leave --chaos out"
        )
    if "draw" not in data:
        return _with_faults(config, data["faults"], path)
    try:
        return with_faults(config, _drawn(config, data["draw"]), source=path)
    except ValueError as error:
        what = str(error).removeprefix("Draw").removeprefix(".")
        raise ConfigError(f"{path}: draw{'' if what.startswith(' ') else '.'}{what}") from None


def with_faults(config: RunConfig, plan: FaultPlan, *, source: str = "faults") -> RunConfig:
    """Return the run's configuration with these faults, checked. Raises ConfigError."""
    rows = [
        {key: value for key, value in row.items() if value is not None}
        for row in map(storage.to_json, plan.faults)
        if isinstance(row, dict)
    ]
    return _with_faults(config, rows, source)


def _with_faults(config: RunConfig, rows: object, source: str) -> RunConfig:
    override = f"emulation.faults={json.dumps(rows)}"
    return RunConfig.parse(config.to_yaml(), [override], source=source)


def _drawn(config: RunConfig, section: object) -> FaultPlan:
    asked = storage.from_json(Draw, section)
    if config.training.steps is None:
        raise ValueError("faults needs to know how many steps there are; write training.steps")
    return draw(
        asked,
        [device.device_id for device in build_cluster(config.cluster).devices],
        {offer.pool: offer.price_per_hour for offer in config.cluster.offers},
        config.training.steps,
    )
