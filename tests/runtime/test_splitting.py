"""Layers out of the user's task, and random numbers that no split changes."""

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from orchestrator.core.training import Task
from orchestrator.errors import ConfigError, UserCodeError
from workers.failures import user_frames, user_traceback
from workers.randomness import sample_randomness
from workers.splitting import load_task, split

pytestmark = pytest.mark.runtime


def task_of(layers: Any) -> Task:
    return Task(layers=layers, loss=lambda o, b: (o.sum(), len(o)), dataset=[torch.zeros(2)])


def test_a_list_of_modules_becomes_layers_named_by_index() -> None:
    layers = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)]
    model = split(task_of(layers))
    assert model.layers == tuple(layers)
    assert model.names == ("0", "1", "2")


def test_a_sequential_keeps_the_names_of_its_state_dict() -> None:
    user_model = nn.Sequential()
    user_model.add_module("embed", nn.Linear(2, 3))
    user_model.add_module("head", nn.Linear(3, 1))
    model = split(task_of(user_model))
    names = {
        model.state_name(index, name)
        for index, layer in enumerate(model.layers)
        for name in layer.state_dict()
    }
    assert names == set(user_model.state_dict())


def test_a_module_that_stands_in_two_places_stays_there_twice_and_is_tied() -> None:
    shared = nn.Linear(2, 2, bias=False)
    model = split(task_of(nn.Sequential(shared, nn.ReLU(), shared)))
    assert model.layers[0] is model.layers[2]
    assert model.names == ("0", "1", "2")
    assert [tie.keys for tie in model.ties] == [((0, "weight"), (2, "weight"))]


def test_a_shared_parameter_is_one_tie_with_its_name_in_each_layer() -> None:
    embed, head = nn.Embedding(5, 4), nn.Linear(4, 5)
    head.weight = embed.weight
    model = split(task_of([embed, nn.ReLU(), head]))
    assert [tie.keys for tie in model.ties] == [((0, "weight"), (2, "weight"))]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("gpt2", "is a str.*pass a layer list"),
        ([], "empty; pass a layer list"),
        ([nn.Linear(2, 2), torch.relu], "entry 1 of Task.layers.*pass a layer list"),
        ([nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))], "'0.1' is a BatchNorm2d.*GroupNo"),
        ([nn.BatchNorm1d(3, track_running_stats=False).eval()], r"nn.GroupNorm\(1, 3\)"),
        ([nn.InstanceNorm1d(3, track_running_stats=True)], "InstanceNorm1d.*GroupNorm"),
        ([nn.LazyLinear(3)], "LazyLinear without shapes yet"),
        ([nn.LSTM(2, 2, num_layers=2, dropout=0.1)], "LSTM with dropout 0.1.*nn.Dropout"),
    ],
)
def test_what_cannot_be_split_exactly_is_refused_with_the_alternative(
    layers: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"training.task: .*{message}"):
        split(task_of(layers))


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_a_norm_with_frozen_statistics_is_a_layer_like_any_other(norm: nn.Module) -> None:
    assert len(split(task_of([nn.Linear(2, 4), norm.eval()])).layers) == 2
    with pytest.raises(ConfigError, match=r"\[m.eval\(\) for m in model.modules\(\) if isinstance"):
        split(task_of([nn.Linear(2, 4), norm.train()]))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))


def test_a_task_is_found_relative_to_the_working_directory_and_built_from_the_seed(
    project: Path,
) -> None:
    write(
        project,
        "my_task",
        """
        import torch
        from orchestrator.core.training import Task
        def make(width=2):
            return Task(layers=[torch.nn.Linear(width, 1)], loss=None, dataset=[0])
        """,
    )
    first, second, third = (
        split(load_task("my_task:make", {"width": 3}, seed)).layers[0].weight for seed in (7, 7, 8)
    )
    assert first.shape == (1, 3)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:make", "there is no module 'no_such_module'"),
        ("no_such_package.part:make", "there is no module 'no_such_package'"),
        ("os:no_such_function", "has no function 'no_such_function'"),
        ("os:name", "names no callable"),
    ],
)
def test_a_wrong_import_path_is_a_config_error_that_names_it(
    project: Path, path: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(path, {}, 0)


@pytest.mark.parametrize(
    ("body", "message", "shown"),
    [
        ("import no_such_dependency", "No module named 'no_such_dependency'", "line 1, in <mod"),
        ("def make(:", "SyntaxError", "def make(:"),
        ("def make():\n    return 1 / 0", "ZeroDivisionError", "line 2, in make"),
        ("def make(width):\n    pass", "missing 1 required positional", "TypeError"),
        ("def make():\n    return 3", "returned int; return an orchestrator.Task", ""),
        ("import sys\nsys.exit(3)\ndef make(): pass", "raised SystemExit: 3", "line 2, in <mod"),
        ("import sys\ndef make():\n    sys.exit()", "raised SystemExit", "line 3, in make"),
        ("def make():\n    raise KeyboardInterrupt", "raised KeyboardInterrupt$", "in make"),
        (
            "import asyncio\ndef make():\n    raise asyncio.CancelledError('by me')",
            "raised CancelledError: by me",
            "line 3, in make",
        ),
        (
            "class Odd(Exception):\n    def __str__(self): return self.nothing\n"
            "def make():\n    raise Odd",
            r"raised Odd: \(its message raised AttributeError\)",
            "line 4, in make",
        ),
        (
            "def make():\n    raise ValueError('x' * 5000)",
            r"ValueError: x{1000}\.\.\. \(4000 more letters\)$",
            "x" * 5000,
        ),
    ],
)
def test_an_error_in_the_users_module_keeps_only_the_users_frames(
    project: Path, body: str, message: str, shown: str
) -> None:
    write(project, "broken_task", body)
    with pytest.raises(UserCodeError, match=message) as caught:
        load_task("broken_task:make", {}, 0)
    assert shown in caught.value.user_traceback
    for ours in ("workers/", "importlib"):
        assert ours not in caught.value.user_traceback


def test_a_script_that_trains_while_a_worker_imports_it_is_told_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "trains_at_once", "import orchestrator\norchestrator.Trainer(None, None).fit()")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserCodeError, match='write if __name__ == "__main__": over what starts'):
        load_task("trains_at_once:task", {}, 0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=self.training)[0]


class InPlace(nn.Module):
    """As an automatically cut model runs them: operations, not functions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, aten = x.clone(), torch.ops.aten
        for kind in ("dropout_", "feature_dropout_", "alpha_dropout_", "feature_alpha_dropout_"):
            getattr(aten, kind).default(x, 0.3, True)
        return x


class Functional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(x, 0.3) + torch.randn_like(x) + torch.rand(x.shape)
        x = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.2)
        x = x * torch.bernoulli(torch.full_like(x, 0.5)) + torch.empty_like(x).uniform_()
        return functional.dropout1d(x, 0.3)


RANDOM_LAYERS = {
    "dropout": nn.Dropout(0.5),
    "attention": Attention(),
    "encoder": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True),
    "alpha": nn.AlphaDropout(0.5),
    "channels": nn.Dropout1d(0.5),
    "functional": Functional(),
    "in place": InPlace(),
}


def run(name: str, x: torch.Tensor, indices: list[int], **key: int) -> torch.Tensor:
    options = {"seed": 0, "step": 3, "layer": 2} | key
    with sample_randomness(sample_indices=indices, **options):
        return RANDOM_LAYERS[name](x)


@pytest.mark.parametrize("name", RANDOM_LAYERS)
def test_what_a_layer_draws_does_not_depend_on_the_split_into_microbatches(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, 8)
    whole = run(name, x, [40, 41, 42, 43, 44, 45])
    parts = [run(name, x[:1], [40]), run(name, x[1:4], [41, 42, 43]), run(name, x[4:], [44, 45])]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RANDOM_LAYERS)
@pytest.mark.parametrize("key", [{"seed": 1}, {"step": 4}, {"layer": 3}], ids=str)
def test_seed_step_and_layer_each_change_what_is_drawn(name: str, key: dict[str, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 8)
    assert not torch.equal(run(name, x, [0, 1, 2, 3]), run(name, x, [0, 1, 2, 3], **key))


def test_dropout_keeps_the_mean_and_the_gradient_uses_the_same_mask() -> None:
    x = torch.ones(8, 4000, requires_grad=True)
    with sample_randomness(0, 0, range(8), 0):
        y = functional.dropout(x, 0.25)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    assert y.detach().unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float(y.detach().mean()) == pytest.approx(1.0, abs=0.02)  # 4 standard deviations: 0.013


def test_nothing_is_taken_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    run("encoder", torch.ones(2, 3, 8), [0, 1])
    assert torch.equal(before, torch.get_rng_state())


def test_a_generator_of_the_users_own_is_left_alone() -> None:
    def draw() -> torch.Tensor:
        return torch.rand(3, generator=torch.Generator().manual_seed(5))

    with sample_randomness(0, 0, [0, 1], 0):
        inside = draw()
    assert torch.equal(inside, draw())


def test_draws_that_cannot_be_told_apart_by_sample_are_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"layer 4 draws .* shape \(5,\) for 2 samples"),
        sample_randomness(0, 0, [0, 1], 4),
    ):
        torch.rand(5)
    with (
        pytest.raises(ValueError, match="layer 4 draws from torch's global generator"),
        sample_randomness(0, 0, [0, 1], 4),
    ):
        torch.randperm(2)


class DrawsLater(nn.Module):
    rate = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.rate) if self.rate else x


def test_a_module_known_to_draw_nothing_is_caught_when_it_starts_to() -> None:
    module, x = DrawsLater(), torch.ones(2, 3)
    with sample_randomness(0, 0, [0, 1], 5, module):
        module(x)
    module.rate = 0.5
    with (
        pytest.raises(ValueError, match="layer 5 draws from torch's global generator"),
        sample_randomness(0, 1, [0, 1], 5, module),
    ):
        module(x)


def test_a_dropout_module_may_change_its_rate_at_any_step() -> None:
    module, x = nn.Dropout(0.0), torch.ones(2, 30)
    with sample_randomness(0, 0, [0, 1], 5, module):
        assert torch.equal(module(x), x)
    module.p = 0.5
    with sample_randomness(0, 1, [0, 1], 5, module):
        whole = module(x)
    with sample_randomness(0, 1, [1], 5, module):
        part = module(x[1:])
    assert torch.equal(whole[1:], part)
    assert not torch.equal(whole, x)


def test_a_package_whose_name_begins_like_torchs_is_the_users() -> None:
    """As torchvision's does."""
    file = f"{Path(torch.__file__).parent}vision/swin.py"
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("def forward():\n    1 / 0\nforward()", file, "exec"), {})
    for told in (user_traceback(caught.value), user_frames(caught.value)):
        assert f'File "{file}", line 2, in forward' in told
