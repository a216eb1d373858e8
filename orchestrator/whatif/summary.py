"""What a file asks for, in one line."""

from orchestrator.config import RunConfig
from orchestrator.reports import figures


def summary(config: RunConfig) -> str:
    """For example: tiny: 20 steps of 8 samples on 3 devices, $4.00/h on average."""
    training, cluster = config.training, config.cluster
    work = f"{training.steps} steps" if training.steps else f"{training.epochs} epoch(s)"
    devices = sum(offer.count for offer in cluster.offers)
    where = "devices found by Ray" if cluster.source == "ray" else f"{devices} devices"
    return (
        f"{config.run.name}: {work} of {training.global_batch} samples on {where}, "
        f"{figures.usd(config.budget.average_per_hour_usd)}/h on average"
    )
