"""A model that was measured once on this machine is known at once; another one never is."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.builders import make_profile
from orchestrator.core.model import ModelProfile, profile_to_json
from orchestrator.core.training import OptimizerOptions, Task, TrainingOptions
from workers import profile_cache
from workers.profile_cache import cache_folder, fingerprint, known_or_measured
from workers.splitting import split

pytestmark = pytest.mark.runtime

OPTIONS = TrainingOptions(task="a:b", global_batch=8, microbatch=2, steps=1)
CPU = torch.device("cpu")


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def cubes(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output * output.square()).sum(), len(output)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 + super().forward(x)


Shifted.__name__ = Shifted.__qualname__ = "Scaled"  # only its code is another one


def task(*layers: nn.Module, loss: Any = squares, length: int = 4) -> Task:
    return Task(
        layers=list(layers) or [nn.Linear(4, 4), nn.Linear(4, 4)],
        loss=loss,
        dataset=[(torch.ones(length), 0)] * 5,
    )


def print_of(given: Task, options: TrainingOptions = OPTIONS, device: torch.device = CPU) -> str:
    return fingerprint(split(given), given, options, device)


class Bench:
    """Counts what is measured."""

    def __init__(self) -> None:
        self.measured = 0

    def __call__(self, model: Any, *others: Any, **options: Any) -> ModelProfile:
        self.measured += 1
        profile = make_profile({"cpu": [0.01 * self.measured] * len(model.layers)})
        return replace(profile, layers=model.names)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench()
    monkeypatch.setenv(profile_cache.ENVIRONMENT, str(tmp_path / "kept"))
    monkeypatch.setattr(profile_cache, "profile_model", bench)
    return bench


def look(given: Task | None = None, **options: Any) -> ModelProfile:
    given = given or task()
    return known_or_measured(split(given), given, OPTIONS, **options)


def test_a_model_is_measured_once_and_anew_when_that_is_asked(bench: Bench) -> None:
    first = look()
    assert look() == first
    assert bench.measured == 1
    again = look(fresh=True)
    assert again != first
    assert look() == again
    assert bench.measured == 2


def test_a_kind_and_a_model_have_entries_of_their_own(bench: Bench, tmp_path: Path) -> None:
    look()
    look(device=torch.device("meta"))
    look(task(nn.Linear(4, 8), nn.Linear(8, 4)))
    assert bench.measured == 3
    assert len(list((tmp_path / "kept").glob("*.json"))) == 3


def test_what_a_neighbour_takes_of_a_processor_is_not_kept(bench: Bench, tmp_path: Path) -> None:
    look(wall=True)
    look(wall=True)
    assert bench.measured == 2
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"schema": "lyray.profile/1"}', "\0"])
def test_a_damaged_entry_is_measured_anew_and_mended(
    bench: Bench, tmp_path: Path, content: str
) -> None:
    look()
    (entry,) = (tmp_path / "kept").glob("*.json")
    entry.write_text(content)
    found = look()
    assert bench.measured == 2
    assert json.loads(entry.read_text()) == json.loads(json.dumps(profile_to_json(found)))
    assert look() == found
    assert bench.measured == 2


def test_a_folder_that_cannot_be_written_to_does_not_stop_a_run(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(profile_cache.ENVIRONMENT, str(tmp_path / "file" / "kept"))
    look()
    look()
    assert bench.measured == 2


def test_many_may_write_one_entry_at_a_time(bench: Bench, tmp_path: Path) -> None:
    def write() -> None:
        for _ in range(20):
            look(fresh=True)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for entry in (tmp_path / "kept").glob("*.json"):
            json.loads(entry.read_text())  # whole, whenever one looks
    (left,) = (tmp_path / "kept").iterdir()
    assert left.suffix == ".json"


DIFFERENT: dict[str, Callable[[], str]] = {
    "another width": lambda: print_of(task(nn.Linear(4, 8), nn.Linear(8, 4))),
    "another class": lambda: print_of(task(nn.Linear(4, 4), Scaled(4, 4))),
    "other code": lambda: print_of(task(nn.Linear(4, 4), Shifted(4, 4))),
    "another loss": lambda: print_of(task(loss=cubes)),
    "a frozen layer": lambda: print_of(
        task(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    ),
    "double precision": lambda: print_of(task(nn.Linear(4, 4).double(), nn.Linear(4, 4))),
    "a longer sample": lambda: print_of(task(length=5)),
    "bf16": lambda: print_of(task(), replace(OPTIONS, precision="bf16")),
    "larger microbatches": lambda: print_of(task(), replace(OPTIONS, microbatch=4)),
    "momentum": lambda: print_of(
        task(), replace(OPTIONS, optimizer=OptimizerOptions(name="sgd", arguments={"momentum": 1}))
    ),
    "sgd": lambda: print_of(task(), replace(OPTIONS, optimizer=OptimizerOptions(name="sgd"))),
    "another kind": lambda: print_of(task(), device=torch.device("meta")),
}


def test_whatever_changes_times_changes_the_fingerprint_and_the_values_do_not() -> None:
    usual = print_of(task())
    assert print_of(task()) == usual  # other parameters, drawn anew
    assert print_of(task(), replace(OPTIONS, steps=7, global_batch=64)) == usual
    found = {name: make() for name, make in DIFFERENT.items()}
    assert len({usual, *found.values()}) == 1 + len(found)


def test_the_folder_follows_the_usual_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(profile_cache.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cache_folder() == Path("/var/cache/me/lyray/profiles")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # to be ignored, says the rule
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/lyray/profiles")
    monkeypatch.setenv(profile_cache.ENVIRONMENT, "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
    monkeypatch.setenv(profile_cache.ENVIRONMENT, "off")
    assert cache_folder() is None
