"""Breaks this process where a fault plan says so; emulated runs only."""

import errno
import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from orchestrator import lines, storage

logger = logging.getLogger(__name__)

FAULTS_FILE = "faults.jsonl"
"""In the folder of the run: each fault that has hit a process, one a line."""


FaultAct = Literal["fail", "hang", "disk_full", "cut_link", "kill_driver"]


@dataclass(frozen=True, slots=True)
class ProcessFault:
    """One fault of one process, in the phase of a step (control/faults.py names them)."""

    number: int  # within the run's plan
    kind: FaultAct
    at_step: int
    phase: str
    peer: str | None = None  # with ``cut_link``: the device at the other end


class Injector:
    """Lets each fault hit once in the whole run, at the first chance from its step on.

    Which have hit is in a file, written before the fault is let loose: a process that is started
    anew, or a resumed run, goes through the same steps again.
    """

    def __init__(
        self,
        owner: str,
        faults: Sequence[ProcessFault],
        run_url: str,
        cut: Callable[[str], None] | None = None,
        driver_pid: int | None = None,
    ) -> None:
        """Take note of what to break.

        Args:
            owner: The device, or the head.
            faults: Its own.
            run_url: Folder of the run.
            cut: Gives up the link to a device.
            driver_pid: The job's process, which runs on the head's node.
        """
        self._cut, self._driver_pid = cut, driver_pid
        self._owner, self._url = owner, storage.join(run_url, FAULTS_FILE)
        self._run_url = run_url
        rows = lines.read_lines(self._url) if faults else ()
        hit = {json.loads(row)["number"] for row in rows}
        self._open = tuple(fault for fault in faults if fault.number not in hit)

    def reach(self, step: int, phase: str) -> None:
        """Break now if a fault is due here; costs nothing where there is none.

        Raises:
            OSError: As a full disk does.
        """
        for fault in self._open:
            if fault.phase == phase and fault.at_step <= step:  # each phase has its own thread
                self._open = tuple(other for other in self._open if other is not fault)
                self._break(fault, step)
                return

    def wrote(self, step: int) -> None:
        """A layer of the checkpoint of a step has been written. Raises OSError as ``reach``."""
        self.reach(step, "save")

    def _break(self, fault: ProcessFault, step: int) -> None:
        row = {**asdict(fault), "step": step, "owner": self._owner}
        lines.append_lines(self._url, [json.dumps(row)])
        logger.warning("fault %s: %s in %s of step %s", fault.number, fault.kind, fault.phase, step)
        match fault.kind:
            case "fail":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "kill_driver":
                assert self._driver_pid is not None, "the head knows its driver"
                os.kill(self._driver_pid, signal.SIGKILL)
            case "cut_link":
                assert self._cut is not None, "workers have links"
                assert fault.peer is not None, "a link has two ends"
                self._cut(fault.peer)
            case "disk_full":
                why = f"{os.strerror(errno.ENOSPC)} (a fault injected on purpose)"
                raise OSError(errno.ENOSPC, why, self._run_url)


NO_FAULTS = Injector("nobody", (), "")
