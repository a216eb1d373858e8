"""What single processes of a run are told: task, faults, emulation, where their output goes."""

from collections.abc import Mapping
from pathlib import Path

import torch

from orchestrator.config import RunConfig
from orchestrator.core.model import ModelProfile
from orchestrator.runtime.actors import Place
from orchestrator.runtime.truth import StageTruth
from workers.describing import describe_model
from workers.emulation import Delay, EmulatedStage
from workers.evaluation import evaluation_set
from workers.faults import FaultAct, Injector, ProcessFault
from workers.grouping import freeze
from workers.output import send_output_to
from workers.profile_cache import known_or_measured
from workers.splitting import load_task, split
from workers.worker import WorkerSpec


def worker_spec(config: RunConfig, place: Place, working_dir: str) -> WorkerSpec:
    """What a worker needs to import the user's task and split the model."""
    training = config.training
    return WorkerSpec(
        task=training.task,
        task_args=training.task_args,
        options=training,
        seed=config.run.seed,
        run_url=config.run.run_url,
        timeout_s=config.failure.timeouts.receive_s,
        evaluation_s=config.failure.timeouts.checkpoint_s,
        working_dir=working_dir,
        device="cuda" if place.num_gpus else "cpu",
        faults=_process_faults(config, place.device_id),
    )


def emulated_stages(
    stages: Mapping[str, StageTruth] | None,
) -> Mapping[str, EmulatedStage] | None:
    """What emulated devices are told of their stages; None where devices are real."""
    if stages is None:
        return None
    return {
        device_id: EmulatedStage(
            seconds=dict(stage.seconds),
            to_next=stage.to_next,
            to_previous=stage.to_previous,
            step_end_s=stage.step_end_s,
            slowdowns=stage.slowdowns,
            delays=tuple(Delay(*delay) for delay in stage.delays),
            narrow_next=stage.narrow_next,
            narrow_previous=stage.narrow_previous,
        )
        for device_id, stage in stages.items()
    }


def head_injector(config: RunConfig, driver_pid: int | None) -> Injector:
    """What breaks the head, and the process that started it, as the run's faults say."""
    faults = _process_faults(config, None)
    return Injector("head", faults, config.run.run_url, driver_pid=driver_pid)


def _process_faults(config: RunConfig, device_id: str | None) -> tuple[ProcessFault, ...]:
    """Faults of a worker's process, or of the head's."""
    kinds: Mapping[str, FaultAct] = {
        "fail": "fail",
        "kill_head": "fail",
        "hang": "hang",
        "disk_full": "disk_full",
        "cut_link": "cut_link",
        "kill_driver": "kill_driver",
    }
    return tuple(
        ProcessFault(number, kinds[fault.kind], fault.at_step, fault.where, fault.peer)
        for number, fault in enumerate(config.emulation.faults)
        if fault.kind in kinds and fault.device == device_id
    )


def send_output(config: RunConfig, name: str) -> None:
    """Send this process's output to ``logs/`` of the run where it is local, else leave it."""
    path = log_path(config, name)
    if path is not None:
        send_output_to(path)


def log_path(config: RunConfig, name: str) -> Path | None:
    """Where the output of a process goes; None where the run's folder is not local."""
    run_url = config.run.run_url
    return None if "://" in run_url else Path(run_url) / "logs" / f"{name}.log"


def look_at_model(config: RunConfig, *, fresh: bool = False) -> ModelProfile:
    """What planning needs to know of the user's model, found in this process.

    Its layers are measured on this processor; with ``cluster.source: file`` they are only
    described, which takes neither their time nor their memory: kinds are priced from FLOP.

    Args:
        config: The whole file.
        fresh: Measure again what was measured earlier on this machine.

    Raises:
        UserCodeError: If the user's code raises.
        ConfigError: If the model cannot be split, its groups will not do, or what is to be
            evaluated cannot be.
    """
    training = config.training
    if config.cluster.source == "emulated":
        torch.set_num_threads(1)  # as its workers run; then CPU time counts, not a busy neighbour
    task = load_task(training.task, training.task_args, config.run.seed)
    described = config.cluster.source == "file"
    model = split(task, to_train=not described)
    freeze(model, training.optimizer.groups)
    evaluation_set(task, training, config.run.seed)  # what a run refuses is told before one
    if described:
        return describe_model(model, task, training)
    return known_or_measured(model, task, training, fresh=fresh)
