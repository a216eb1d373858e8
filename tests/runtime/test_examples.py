"""The two example tasks: they learn, and their files say what they should."""

import sys
import tomllib
from collections.abc import Iterator
from math import log
from pathlib import Path

import pytest
import torch
from torch import nn

from examples import byte_gpt, digits_cnn
from orchestrator.config import RunConfig
from orchestrator.core.training import Task
from workers.data import SampleSource
from workers.splitting import load_task, split

pytestmark = pytest.mark.runtime
EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.yaml"))


def losses(task: Task, batch_samples: int, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """Loss of each step of plain training in one process."""
    model, source, first = nn.Sequential(*task.layers), SampleSource(task.dataset, None, 0), 0
    while True:
        batch = source.batch(range(first, first + batch_samples))
        loss_sum, weight = task.loss(model(batch[0]), batch)
        optimizer.zero_grad()
        (loss_sum / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield float(loss_sum.detach()) / weight
        first += batch_samples


def parameters(task: Task) -> list[nn.Parameter]:
    return [p for layer in task.layers for p in layer.parameters()]


def test_byte_gpt_starts_without_knowledge_and_learns() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = byte_gpt.task(num_layers=2)
    steps = losses(task, 64, torch.optim.AdamW(parameters(task), lr=3e-3))
    curve = [next(steps) for _ in range(60)]
    assert curve[0] == pytest.approx(log(256), abs=0.6)
    assert sum(curve[-10:]) / 10 < 3.1  # 2.8 with the demo's eight layers


def test_digits_cnn_learns_with_its_own_dropout() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = digits_cnn.task(num_blocks=2)
    steps = losses(task, 50, torch.optim.SGD(parameters(task), lr=0.05, momentum=0.9))
    curve = [next(steps) for _ in range(60)]
    assert curve[0] == pytest.approx(log(10), abs=0.5)
    assert sum(curve[-10:]) / 10 < 1.0


def test_the_text_is_the_same_every_time_and_bounded() -> None:
    text = byte_gpt.stdlib_text(100_000)
    assert len(text) == 100_000
    assert text == byte_gpt.stdlib_text(100_000)
    assert b"import" in text


def test_a_python_without_sources_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_gpt.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="without its sources"):
        byte_gpt.stdlib_text()


def test_each_byte_is_asked_for_the_one_after_it() -> None:
    windows = byte_gpt.Windows(b"abcdefgh", 3)
    assert len(windows) == 2
    text, following = windows[1]
    assert bytes(text.tolist()) == b"def"
    assert bytes(following.tolist()) == b"efg"


def test_byte_gpt_cannot_see_the_byte_it_predicts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*byte_gpt.task(num_layers=2).layers)
    text = torch.zeros(1, 32, dtype=torch.int64)
    changed = text.clone()
    changed[0, 20] = 7
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :20], after[0, :20])
    assert not torch.equal(before[0, 20], after[0, 20])


def test_digits_without_scikit_learn_say_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'lyray\[examples\]'"):
        digits_cnn.task()
    extras = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text("utf-8"))
    assert any("scikit-learn" in e for e in extras["project"]["optional-dependencies"]["examples"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_file_of_an_example_loads_and_its_task_splits(path: Path) -> None:
    training = RunConfig.load(path).training
    model = split(load_task(training.task, training.task_args, 0))
    assert len(model.layers) == len(model.names) > 1


def test_the_demo_can_spend_its_average_over_its_horizon_and_no_more() -> None:
    budget = RunConfig.load(EXAMPLES / "byte_gpt.yaml").budget
    assert budget.total_usd == pytest.approx(budget.average_per_hour_usd * budget.horizon_hours)
