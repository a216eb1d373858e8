"""What is said of a model that is not run: the same as running it tells, and what one counts."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import hub_models
from benchmarks.hub_models import Texts, cross_entropy, hub, without_labels
from orchestrator.config import RunConfig
from orchestrator.core.model import LayerSizes, ModelProfile
from orchestrator.core.training import Blocks, OptimizerOptions, Task, TrainingOptions
from orchestrator.errors import ConfigError, UserCodeError
from orchestrator.runtime.processes import look_at_model
from orchestrator.whatif.plans import what_if
from workers import profiler
from workers.describing import describe_model
from workers.profiler import profile_model
from workers.splitting import SplitModel, split

pytestmark = pytest.mark.runtime


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "BUDGET_S", 0.0)
    monkeypatch.setattr(profiler, "HARD_LIMIT_S", 0.0)
    torch.set_num_threads(1)


def options(precision: Any = "fp32", microbatch: int = 4, **optimizer: Any) -> TrainingOptions:
    return TrainingOptions(
        task="tests:task",
        global_batch=16,
        microbatch=microbatch,
        steps=1,
        precision=precision,
        optimizer=OptimizerOptions(name=optimizer.pop("name", "adamw"), arguments=optimizer),
    )


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def task(layers: list[nn.Module], loss: Any = squares) -> Task:
    return Task(layers=layers, loss=loss, dataset=[(torch.ones(8), 0)] * 5)


def test_a_linear_layer_has_2_m_n_k_flop_and_keeps_what_it_takes() -> None:
    layers = [nn.Linear(8, 16), nn.Linear(16, 4)]
    found = describe_model(split(task(layers)), task(layers), options())
    (sizes,) = found.sizes
    assert found.forward_flop_per_sample == (2 * 8 * 16, 2 * 16 * 4)
    assert sizes.param_bytes == (4 * (8 * 16 + 16), 4 * (16 * 4 + 4))
    assert sizes.boundary_bytes_per_sample == (4 * 16, 0)
    assert sizes.stash_bytes_per_sample == (4 * 8, 4 * (16 + 4))  # the loss keeps what it squares
    assert found.times == ()
    assert found.optimizer_bytes_per_param_byte == 3.0


class Force(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (force,) = torch.autograd.grad(self.line(x).tanh().sum(), x, create_graph=True)
        return force


@pytest.mark.parametrize("look", [describe_model, profile_model])
def test_a_layer_may_ask_for_gradients_of_what_it_takes(look: Any) -> None:
    layers = [Force(), nn.Linear(8, 4)]
    found = look(split(task(layers)), task(layers), options())
    assert found.forward_flop_per_sample == (2 * 8 * 8 + 2 * 8 * 8, 2 * 8 * 4)  # and back


def test_a_convolution_has_2_c_c_k_k_h_w_flop_and_a_net_of_such_keeps_what_a_run_keeps() -> None:
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        nn.Conv2d(8, 4, 3, stride=2, padding=1),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
    ]
    images = Task(layers=layers, loss=squares, dataset=[(torch.ones(3, 6, 6), 0)] * 5)
    model = split(images)
    told, measured = (look(model, images, options()) for look in (describe_model, profile_model))
    assert told.forward_flop_per_sample == (
        2 * 3 * 8 * 9 * 36, 0, 2 * 8 * 4 * 9 * 9, 2 * 4 * 2,
    )  # fmt: skip
    assert told.sizes == without_work(measured)
    assert told.sizes[0].boundary_bytes_per_sample[:3] == (4 * 8 * 36, 4 * 8 * 36, 4 * 4 * 9)


def without_work(measured: ModelProfile) -> tuple[LayerSizes]:
    """Sizes as they can be told without running: what is freed again is not seen."""
    (sizes,) = measured.sizes
    nothing = (0.0,) * measured.num_layers
    return (
        replace(
            sizes,
            work_bytes_per_sample=nothing,
            work_bytes_per_microbatch=nothing,
            update_bytes=nothing,
        ),
    )


@cache
def parts(name: str) -> tuple[Task, SplitModel]:
    """A model of the hub, cut."""
    given = hub(name, double=False)
    return given, split(given)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_a_model_that_is_not_run_has_the_bytes_and_flop_of_one_that_is(name: str) -> None:
    given, model = parts(name)
    told, measured = (look(model, given, options()) for look in (describe_model, profile_model))
    assert told.sizes == without_work(measured)
    assert told.forward_flop_per_sample == measured.forward_flop_per_sample
    assert sum(told.forward_flop_per_sample) > 0
    assert told.ties == measured.ties
    assert told.optimizer_bytes_per_param_byte == measured.optimizer_bytes_per_param_byte


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_bytes_at_half_precision_are_those_of_a_run_too(name: str) -> None:
    given, model = parts(name)
    told = describe_model(model, given, options("bf16"))
    assert told.sizes == without_work(profile_model(model, given, options("bf16")))


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_model_without_values_is_cut_and_described_as_one_with_values(name: str) -> None:
    given, model = parts(name)
    real = describe_model(model, given, options())
    with torch.device("meta"):
        shapes = getattr(hub_models, name)()
    shapes.config.use_cache = False
    bare = Task(
        layers=shapes,
        loss=cross_entropy,
        dataset=Texts(answers=5 if name == "t5" else 0),
        inputs=without_labels,
    )
    found = describe_model(split(bare, to_train=False), bare, options())
    assert found.layers == real.layers
    assert found.ties == real.ties
    assert found.forward_flop_per_sample == real.forward_flop_per_sample
    (mine,), (theirs,) = found.sizes, real.sizes
    assert mine.param_bytes == theirs.param_bytes
    assert mine.boundary_bytes_per_sample == theirs.boundary_bytes_per_sample
    # Attention has a kernel of its own on the processor.
    assert sum(mine.stash_bytes_per_sample) == pytest.approx(
        sum(theirs.stash_bytes_per_sample), rel=0.1
    )
    with pytest.raises(ConfigError, match="is on the meta device and has no values to train"):
        split(bare)


def test_numbers_that_are_read_from_tensors_are_one_and_generators_stay() -> None:
    class Read(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not bool((x > 0).any()):  # every value read is 1, and so this is not
                raise ValueError
            return nn.functional.dropout(x * x.sum().item(), 0.5)

    def counted(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return output.sum(), int((batch[1] == 0).sum())

    layers = [nn.Linear(8, 8), Read()]
    state = torch.get_rng_state()
    found = describe_model(split(task(layers)), task(layers, counted), options())
    assert found.num_layers == 2
    assert torch.equal(state, torch.get_rng_state())


def test_what_depends_on_values_is_named() -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0]

    layers = [nn.Linear(8, 8), Picks()]
    with pytest.raises(UserCodeError, match=r"profiling: layer 1 \(1\) raised"):
        describe_model(split(task(layers)), task(layers), options())


def valueless(width: int = 64) -> Task:
    """For a file: a model that takes no memory, in blocks."""
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "first": nn.Linear(8, width),
                "blocks": nn.ModuleList(nn.Linear(width, width) for _ in range(6)),
            }
        )
    blocks = Blocks(
        embed=model["first"],
        block=lambda i, x: model["blocks"][i](x),
        head=lambda x: x,
    )
    return Task(layers=model, blocks=blocks, loss=squares, dataset=[(torch.ones(8), 0)] * 5)


CONFIG = """
run: {name: bare}
training: {task: "tests.runtime.test_describing:valueless", task_args: {width: 40000},
           global_batch: 8, microbatch: 2, steps: 20}
cluster:
  source: file
  offers: [{pool: fast, kind: a100-80, count: 4, devices_per_node: 4, price_per_hour: 2}]
  links: [{within: node, latency_s: 0.0001, bandwidth_gbytes_per_s: 100}]
budget: {average_per_hour_usd: 20}
"""


def test_a_file_without_profile_and_devices_is_planned_from_what_its_model_is() -> None:
    config = RunConfig.parse(CONFIG)
    model = look_at_model(config)
    assert sum(model.sizes[0].param_bytes) > 35e9  # more than is here
    found = what_if(config, model, stopwatch=lambda: 0.0)
    plan = found.chosen.plan
    assert len({stage.team for group in plan.groups for stage in group.stages}) > 1
    assert any("priced, not measured: from FLOP at 40 %" in note for note in found.notes)


def test_a_model_without_values_is_not_trained() -> None:
    emulated = CONFIG.replace("source: file", "source: emulated")
    with pytest.raises(ConfigError, match=r"'first\.weight' is on the meta device"):
        look_at_model(RunConfig.parse(emulated))


def judged_by_a_stream() -> Task:
    return replace(task([nn.Linear(8, 4)]), eval_dataset=(item for item in ()))


def test_what_a_run_would_not_evaluate_is_refused_where_its_model_is_looked_at() -> None:
    text = CONFIG.replace("valueless", "judged_by_a_stream").replace(
        "task_args: {width: 40000},", ""
    )
    config = RunConfig.parse(text, ["training.eval_every_steps=5"])
    with pytest.raises(ConfigError, match=r"Task\.eval_dataset is a generator; give a map-style"):
        look_at_model(config)


@pytest.mark.parametrize("look", [describe_model, profile_model])
def test_a_loss_without_a_weight_is_told_what_to_return(look: Any) -> None:
    asked = task([nn.Linear(8, 4)], loss=lambda output, batch: output.sum())
    with pytest.raises(UserCodeError, match=r"returned a Tensor, not two values; return \(sum"):
        look(split(asked), asked, options())
