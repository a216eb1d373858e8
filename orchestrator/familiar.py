"""What other trainers call keys of the file, and the key that says the same here.

docs/config.md has the table. Only names whose value can be kept as it is.
"""

from collections.abc import Mapping
from types import MappingProxyType

FAMILIAR: Mapping[str, str] = MappingProxyType(
    {
        "batch_size": "training.global_batch",
        "train_batch_size": "training.global_batch",
        "per_device_train_batch_size": "training.microbatch",
        "max_steps": "training.steps",
        "num_train_epochs": "training.epochs",
        "num_epochs": "training.epochs",
        "max_epochs": "training.epochs",
        "lr": "training.optimizer.lr",
        "learning_rate": "training.optimizer.lr",
        "weight_decay": "training.optimizer.weight_decay",
        "optim": "training.optimizer.name",
        "lr_scheduler_type": "training.lr_schedule.name",
        "warmup_steps": "training.lr_schedule.warmup_steps",
        "max_grad_norm": "training.clip_grad_norm",
        "gradient_clip_val": "training.clip_grad_norm",
        "bf16": "training.precision: bf16",
        "fp16": "training.precision: fp16",
        "gradient_checkpointing": "training.activation_checkpointing: always",
        "eval_steps": "training.eval_every_steps",
        "metric_for_best_model": "training.keep_best.metric",
        "early_stopping_patience": "training.early_stop.patience",
        "save_steps": "training.checkpoint_every_steps",
        "save_total_limit": "training.keep_checkpoints",
        "num_to_keep": "training.keep_checkpoints",
        "output_dir": "run.storage_path",
        "run_name": "run.name",
    }
)
