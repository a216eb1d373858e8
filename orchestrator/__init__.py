"""lyray: trains one PyTorch model on unlike devices under a long-term cost budget.

The names of a script, each loaded on first use: importing the package loads nothing heavy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.callbacks import STOP, Callback
    from orchestrator.config import RunConfig
    from orchestrator.core.training import Blocks, Task
    from orchestrator.runtime.driver import Result, Trainer
    from workers.streaming import Lines, Tokens

__all__ = [
    "STOP",
    "Blocks",
    "Callback",
    "Lines",
    "Result",
    "RunConfig",
    "Task",
    "Tokens",
    "Trainer",
]

_HOMES = {
    "STOP": "orchestrator.callbacks",
    "Blocks": "orchestrator.core.training",
    "Callback": "orchestrator.callbacks",
    "Lines": "workers.streaming",
    "Result": "orchestrator.runtime.driver",
    "RunConfig": "orchestrator.config",
    "Task": "orchestrator.core.training",
    "Tokens": "workers.streaming",
    "Trainer": "orchestrator.runtime.driver",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
