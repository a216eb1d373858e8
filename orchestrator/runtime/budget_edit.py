"""``lyray budget``: shows the budget that a run goes by, and edits it while the run goes on."""

import fcntl
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.control.persistence import RunStore
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.edits import BudgetChange, budget_changes
from orchestrator.document import apply_override
from orchestrator.errors import ConfigError
from orchestrator.layers import read_layers
from orchestrator.runtime.budget_file import CONFIG_FILE, find_config, one_editor, read_config
from orchestrator.runtime.folder import LOCK_FILE, done_before, submitted

SECTION = "budget"


@dataclass(frozen=True, slots=True)
class BudgetFound:
    """The budget of a run, as it is and as it is written down for later."""

    run_url: str
    in_force: BudgetOptions
    wanted: BudgetOptions
    when: str
    """When what is wanted is followed."""

    problem: str = ""
    """Why what is written down is not followed."""

    events: tuple[dict[str, object], ...] = ()
    """``budget_changed`` so far."""

    @property
    def awaited(self) -> tuple[BudgetChange, ...]:
        """What is written down and not in force yet."""
        return budget_changes(self.in_force, self.wanted)


def budget_of(run_dir: str) -> BudgetFound:
    """Look at the budget of a run.

    Raises:
        ConfigError: If there is no run in the folder, or its files are damaged.
    """
    store, config = _run_in(run_dir)
    state = store.load_state(config.emulation.billing_speedup)
    in_force, wanted, problem = (state.budget if state else None) or config.budget, None, ""
    try:
        wanted = _wanted(store, config)
    except ConfigError as error:
        problem = str(error)
    return BudgetFound(
        run_url=store.run_url,
        in_force=in_force,
        wanted=wanted or in_force,
        when=_when(store),
        problem=problem,
        events=tuple(e for e in store.read("events") if e.get("kind") == "budget_changed"),
    )


def edit_budget(
    run_dir: str, file: str | None, overrides: Sequence[str]
) -> tuple[tuple[BudgetChange, ...], str, str]:
    """Write another budget down for a run; one that ``lyray validate`` refuses is not written.

    Args:
        run_dir: Folder of the run.
        file: A file with a section ``budget``, which is taken whole; None: the one written down.
        overrides: ``budget.key=value`` each, over either.

    Returns:
        What changes, where it was written, and when the run follows it.

    Raises:
        ConfigError: If the budget is wrong, the folder holds no run, or the run is over.
    """
    store, config = _run_in(run_dir)
    done = done_before(store)
    if done is not None:
        raise ConfigError(f"the run in {store.run_url} is over ({done.reason}); start another one")
    url = store.url(CONFIG_FILE)
    with one_editor(store.run_url):
        source, section = (
            (url, _section(store, config)) if file is None else (file, _section_of(file))
        )
        document: dict[str, object] = {SECTION: section}
        for override in overrides:
            if not override.strip().startswith(f"{SECTION}."):
                raise ConfigError(
                    f"--set {override!r}: of a run that goes on only the budget changes; "
                    "write --set budget.total_usd=50"
                )
            apply_override(document, override)
        after = config.with_budget(document[SECTION], source)
        try:
            before = _wanted(store, config)
        except ConfigError:  # what is written now is followed by nobody
            before = budget_of(run_dir).in_force
        changes = budget_changes(before, after.budget)
        storage.write_bytes(url, after.to_yaml().encode())
    return changes, url, _when(store)


def _run_in(run_dir: str) -> tuple[RunStore, RunConfig]:
    store = RunStore(storage.absolute(run_dir))
    config = submitted(store)
    if config is None:
        raise ConfigError(f"{run_dir} holds no run; give the folder that has its {CONFIG_FILE}")
    return store, config


def _section(store: RunStore, config: RunConfig) -> object:
    url = store.url(CONFIG_FILE)
    return read_config(find_config(url), url, config).get(SECTION)


def _wanted(store: RunStore, config: RunConfig) -> BudgetOptions:
    return config.with_budget(_section(store, config), store.url(CONFIG_FILE)).budget


def _section_of(file: str) -> object:
    data = read_layers(file).data
    if data.get(SECTION) is None:
        raise ConfigError(f"{file} has no section {SECTION}; write {SECTION}: {{...}}")
    return data[SECTION]


def _when(store: RunStore) -> str:
    """When a run reads what is written now: whether it goes on tells the lock, on local disks."""
    path = storage.local_path(store.url(LOCK_FILE))
    if path is None:
        return (
            "at the end of a slot, this one or the next, while the run goes on; else when it does"
        )
    if path.exists():
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return "at the end of the slot under way, or of the next"
    return "when the run is started again"
