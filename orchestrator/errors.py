"""The errors a user can meet: each carries the status and exit code that the command ends with."""

import errno
import tempfile
import traceback

from orchestrator.credentials import masked
from orchestrator.retries import may_pass

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no other path would help


class OrchestratorError(Exception):
    """The world is difficult: nobody passed nonsense, and the message says what to do."""

    status: str = "failed"
    exit_code: int = 1


class ConfigError(OrchestratorError):
    """The file or the arguments are wrong; the message names the path, the value, the mend."""

    status = "bad_config"
    exit_code = 2


class DamagedCheckpointError(ConfigError):
    """A checkpoint that was whole is not any more; an older one may be."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


class InfeasibleError(OrchestratorError):
    """No plan fits the memory of the devices or the user's limits."""

    status = "infeasible"
    exit_code = 4


class DeviceMemoryError(InfeasibleError):
    """The memory of a device, or of its machine, ran out at work."""


class UserCodeError(OrchestratorError):
    """The user's task raised. ``user_traceback`` holds the user's own frames, as text."""

    status = "user_error"
    exit_code = 5

    def __init__(self, message: str, user_traceback: str = "") -> None:
        super().__init__(message, user_traceback)
        self.user_traceback = user_traceback

    def __str__(self) -> str:
        return str(self.args[0])


class LostWorkerError(OrchestratorError):
    """A device was lost and what is left cannot go on; the message names the device."""

    status = "too_few_workers"
    exit_code = 6


class SolverError(OrchestratorError):
    """The solver gave no answer within its limit; the caller falls back and counts it."""


def as_told(error: Exception) -> OrchestratorError:
    """What to tell the user of any error; the trace of one of ours goes into a log file."""
    if isinstance(error, OrchestratorError):
        return error
    if isinstance(error, OSError) and (
        error.filename or not isinstance(error, ConnectionError | TimeoutError)
    ):
        place = f"{error.filename}: " if error.filename else ""
        what = f"{place}{error.strerror or error}"
        if error.errno in _FULL:
            return OrchestratorError(f"{what}; make room and start again")
        if may_pass(error):
            return OrchestratorError(f"{what}, whenever tried; start again when that is mended")
        return ConfigError(f"{what}; give a path that can be read and written")
    with tempfile.NamedTemporaryFile("w", prefix="lyray-", suffix=".log", delete=False) as log:
        log.write(masked("".join(traceback.format_exception(error))))
    return OrchestratorError(
        f"lyray failed: {type(error).__name__}: {error}; please report this with {log.name}"
    )
