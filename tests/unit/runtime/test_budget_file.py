"""The budget of a run's config.yaml, as it is found while the run goes on."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.core.edits import BudgetNews
from orchestrator.runtime.budget_file import BudgetFile

TEXT = """
run: {{name: r, storage_path: {folder}}}
training: {{task: "m:t", global_batch: 8, steps: 10}}
cluster:
  source: emulated
  offers: [{{pool: p, kind: t4, price_per_hour: 1.0}}]
budget: {{average_per_hour_usd: 1.0, total_usd: 5.0, horizon_hours: 3}}
"""


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    config = RunConfig.parse(TEXT.format(folder=tmp_path))
    write(config, config.to_yaml())
    return config


def path_of(run: RunConfig) -> Path:
    return Path(run.run.run_url) / "config.yaml"


def write(run: RunConfig, text: str) -> None:
    path_of(run).parent.mkdir(exist_ok=True)
    path_of(run).write_text(text)


def started(run: RunConfig) -> BudgetFile:
    file = BudgetFile(run)
    assert file.at_start(run.budget) == run.budget
    return file


def found(file: BudgetFile) -> BudgetNews:
    """After the two looks that an edit takes."""
    file.look()
    file.look()
    return file.news()


def edited(run: RunConfig, **budget: object) -> str:
    data = run.to_data()
    data["budget"] = {"average_per_hour_usd": 1.0, "horizon_hours": 3, **budget}  # type: ignore[dict-item]
    return yaml.safe_dump(data)


def test_nothing_is_told_while_the_file_stays_as_it_is(run: RunConfig) -> None:
    assert found(started(run)) == BudgetNews(None, "config.yaml")


def test_an_edit_is_told_once(run: RunConfig) -> None:
    file = started(run)
    write(run, edited(run, total_usd=9))
    news = found(file)
    assert news.wanted is not None
    assert (news.wanted.total_usd, news.source, news.warnings) == (9.0, "config.yaml", ())
    assert found(file) == BudgetNews(None, "config.yaml")


def test_a_file_that_is_being_written_is_not_judged(run: RunConfig) -> None:
    file = started(run)
    whole = edited(run, total_usd=9)
    for length in (10, 100, len(whole)):
        write(run, whole[:length])
        file.look()
        assert file.news() == BudgetNews(None, "config.yaml")
    assert found(file).wanted is not None


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        ({"total_usd": -1}, "budget.total_usd is -1.0; it must be positive"),
        ({"total": 9}, "budget.total is not a known key; did you mean total_usd?"),
        ({"horizon_hours": "long"}, 'budget.horizon_hours is "long"; write a number of hours'),
        ({"limits": [{"zone": "z9", "max_per_hour_usd": 1}]}, "budget.limits[0]"),
    ],
)
def test_an_edit_that_validate_would_refuse_is_refused_once_with_its_message(
    run: RunConfig, budget: dict[str, object], problem: str
) -> None:
    file = started(run)
    write(run, edited(run, **budget))
    news = found(file)
    assert news.wanted is None
    (warning,) = news.warnings
    assert warning.startswith(f"budget_refused: {path_of(run)}: {problem}")
    assert warning.endswith("; the budget in force stays")
    assert found(file) == BudgetNews(None, "config.yaml")
    write(run, edited(run, total_usd=9))
    assert found(file).wanted is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("budget: [", "line 1"),
        ("", "is empty; write the section budget"),
        ("run: {name: r}", "budget is missing; write budget: {average_per_hour_usd: 4.0}"),
        (None, "is gone; put it back"),
    ],
)
def test_a_file_that_is_none_any_more_changes_nothing_and_is_told_once(
    run: RunConfig, text: str | None, problem: str
) -> None:
    file = started(run)
    path_of(run).unlink() if text is None else write(run, text)
    news = found(file)
    assert news.wanted is None
    assert problem in news.warnings[0]
    assert found(file).warnings == ()


def test_other_sections_are_ignored_by_name_and_the_budget_beside_them_is_followed(
    run: RunConfig,
) -> None:
    file = started(run)
    other = RunConfig.parse(edited(run, total_usd=9), ["training.steps=99", "control.slot_s=5"])
    write(run, other.to_yaml())
    news = found(file)
    assert news.wanted is not None
    assert news.wanted.total_usd == 9.0
    assert news.warnings[0].startswith(
        f"config_ignored: {path_of(run)}: control.slot_s, training.steps: only the section budget "
    )


def test_limits_are_checked_against_the_cluster_that_runs_not_the_one_written_beside_them(
    run: RunConfig,
) -> None:
    file = started(run)
    limits = [{"pool": "q", "min_share": 0.5}]
    write(run, edited(run, limits=limits).replace("pool: p", "pool: q"))
    assert "budget.limits[0].pool" in found(file).warnings[0]


def test_a_store_that_is_down_changes_nothing(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(url: str, **_: object) -> bytes:
        raise OSError(errno.EIO, "down", url)

    file = started(run)
    monkeypatch.setattr(storage, "read_bytes", down)
    assert found(file) == BudgetNews(None, "config.yaml")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (Path.mkdir, "cannot be read: Is a directory; write a file"),
        (os.mkfifo, "cannot be read: it is no file, but a pipe or a device"),
        (lambda path: path.symlink_to("/dev/zero"), "it is no file, but a pipe or a device"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (lambda path: (path.touch(), os.truncate(path, 2**40)), "has more than 1,048,576 bytes"),
    ],
)
def test_what_is_no_file_that_can_be_read_is_told_once_and_holds_nobody_up(
    run: RunConfig, make: Callable[[Path], object], problem: str
) -> None:
    file = started(run)
    path_of(run).unlink()
    make(path_of(run))
    news = found(file)
    assert news.wanted is None
    assert problem in news.warnings[0]
    assert found(file).warnings == ()


def test_a_file_of_which_the_end_is_missing_does_not_lift_the_cap(run: RunConfig) -> None:
    file, text = started(run), run.to_yaml()
    cut = text[: text.index("total_usd:") + len("total_usd:")]  # where its disk was full
    assert "budget" in yaml.safe_load(cut)
    write(run, cut)
    news = found(file)
    assert news.wanted is None
    assert " lacks control, emulation, failure, metrics: it is not whole" in news.warnings[0]


def test_keys_that_are_no_names_are_ignored_like_others(run: RunConfig) -> None:
    file = started(run)
    write(run, f"1: 2\n{edited(run, total_usd=9)}")
    news = found(file)
    assert news.wanted is not None
    assert news.warnings[0].startswith(f"config_ignored: {path_of(run)}: 1: only")


def test_at_the_start_an_edit_is_followed_and_what_cannot_be_is_told(run: RunConfig) -> None:
    write(run, edited(run, total_usd=9))
    assert BudgetFile(run).at_start(run.budget).total_usd == 9.0
    write(run, edited(run, total_usd=-1))
    file = BudgetFile(run)
    assert file.at_start(run.budget) == run.budget
    assert file.news().warnings[0].startswith("budget_refused: ")


def test_a_thread_looks_for_itself_and_ends_with_the_block(run: RunConfig) -> None:
    config = RunConfig.parse(run.to_yaml(), ["control.slot_s=0.1"])
    write(run, config.to_yaml())
    file = started(config)
    with file.watched():
        write(run, edited(config, total_usd=9))
        while (news := file.news()).wanted is None:
            assert not news.warnings
        (thread,) = [t for t in threading.enumerate() if t.name == "budget"]
    thread.join(10.0)
    assert not thread.is_alive()
    assert news.wanted.total_usd == 9.0
