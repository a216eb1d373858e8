"""What a file asks for, in one line; and what of it no prediction has."""

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


def left_out(config: RunConfig) -> tuple[str, ...]:
    """What the figures of ``lyray plan`` and ``lyray simulate`` leave out, a sentence each."""
    every = config.training.eval_every_steps
    if every is None:
        return ()
    return (
        f"Evaluations are left out of all figures: every {every} steps and at the end each takes "
        "the forwards of its samples, about a third of the time that training with as many takes, "
        "and is billed like it.",
    )
