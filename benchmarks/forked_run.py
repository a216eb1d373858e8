"""A whole run without Ray: the head on a thread of this process, workers as forked processes."""

import gc
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

from benchmarks.forked import ForkedActors
from orchestrator.callbacks import Callbacks
from orchestrator.config import RunConfig
from orchestrator.core.slot import Outcome
from orchestrator.reports.live import View
from orchestrator.runtime.folder import open_folder
from orchestrator.runtime.head import Head
from orchestrator.runtime.life import NO_CURSOR, tell

NEWS_S = 0.02  # between two questions to the head


def run_forked(
    config: RunConfig,
    *,
    resume: str = "auto",
    view: View | None = None,
    actors: ForkedActors | None = None,
) -> Outcome:
    """``run_job`` without Ray: the head runs on a thread of this process.

    Raises:
        OrchestratorError: What ended the run; any other error of the head as it is.
    """
    done = open_folder(config, resume)
    if done is not None:
        return done
    owned = actors or ForkedActors()
    head = Head(config, str(Path.cwd()), actors=owned)
    if isinstance(view, Callbacks):
        view.end_with(head.finish, head.stop)
    cursor = NO_CURSOR
    try:
        with ThreadPoolExecutor(1, "head") as pool:
            running = pool.submit(head.run)
            while not running.done():
                cursor = tell(head.status(cursor), view)
                wait_for([running], timeout=NEWS_S)
            tell(head.status(cursor), view)
            return running.result()
    finally:
        if actors is None:  # else whoever gave them may ask which are left
            owned.end()
        gc.unfreeze()  # the head froze what it found: here it found a whole test suite
