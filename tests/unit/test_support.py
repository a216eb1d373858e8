"""The task is found without importing it."""

import sys
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.support import find_task

MODULE = """
raise RuntimeError("importing runs this")

def task(layers: int, width: int = 64, *, bias: bool = True): ...

def free(**kwargs): ...

if True:
    inner = task
class Made: ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").write_text("raise RuntimeError('importing runs this')")
    (tmp_path / "jobs" / "gpt.py").write_text(MODULE)
    (tmp_path / "jobs" / "star.py").write_text("from jobs.gpt import *\n")
    (tmp_path / "bare" / "folders").mkdir(parents=True)
    (tmp_path / "bare" / "folders" / "gpt.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def task(:\n")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("jobs.gpt:task", {"layers": 2}),
        ("jobs.gpt:task", {"layers": 2, "width": 3, "bias": False}),
        ("jobs.gpt:free", {"anything": 1}),
        ("jobs.gpt:inner", {}),
        ("jobs.gpt:Made", {}),
        ("jobs.star:task", {}),
        ("bare.folders.gpt:task", {"layers": 2}),
    ],
)
def test_a_callable_that_is_there_is_found_without_running_its_module(
    folder: Path, path: str, arguments: dict[str, object]
) -> None:
    find_task(path, arguments, folder)
    assert path.partition(":")[0] not in sys.modules


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("jobs.gpt", {}, r"training.task is 'jobs.gpt'; write package.module:callable"),
        ("jobs/gpt.py:task", {}, r"write package.module:callable"),
        ("jobs.gtp:task", {}, r"there is no module 'jobs.gtp'"),
        ("broken.part:task", {}, r"there is no module 'broken.part'"),
        ("jobs.gpt:tusk", {}, r"gpt.py defines no 'tusk'; did you mean jobs.gpt:task\?"),
        ("jobs.gpt:zzz", {}, r"defines no 'zzz'; define it there"),
        ("broken:task", {}, r"broken.py line 1 is no Python"),
        ("jobs.gpt:task", {}, r"training.task_args.layers is missing; task\(\) needs it"),
        ("jobs.gpt:task", {"layers": 1, "widht": 2},
         r"training.task_args.widht is not an argument of task\(\); did you mean width\?"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_called_names_place_and_mend(
    folder: Path, path: str, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_task(path, arguments, folder)
