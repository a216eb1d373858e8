"""Weights to start from, and weights that leave: under the names of the user's own model."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.fleet import Fleet, make_plan
from orchestrator import storage
from orchestrator.control.persistence import CheckpointStore
from orchestrator.core.training import GroupOptions
from orchestrator.errors import ConfigError
from orchestrator.export import export_weights
from tests.runtime import models
from tests.runtime.harness import make_spec
from tests.runtime.reference import train_alone
from workers.splitting import split
from workers.weights import load_weights

pytest.importorskip("transformers", reason="the extra dev brings transformers")
from benchmarks import hub_models

NUM_STEPS = 3
GROUPS = {
    "gpt2": (
        GroupOptions(match="transformer.wpe.*", frozen=True),
        GroupOptions(match=("*.bias", "*.ln_*"), arguments={"weight_decay": 0.0}),
        GroupOptions(match="lm_head.*", lr_ratio=0.5),  # another name of the embedding
    ),
    "t5": (
        GroupOptions(match="encoder.block.0.*", frozen=True),
        GroupOptions(match="*layer_norm*", arguments={"weight_decay": 0.0}),
        GroupOptions(match="shared.*", lr_ratio=0.5),
    ),
}
HUB = "benchmarks.hub_models:hub"


def weights(seed: int = 1) -> tuple[Any, dict[str, Tensor]]:
    """A language model in layers, and the values of another one by name."""
    torch.manual_seed(seed)
    source = nn.ModuleList(models.language().layers)
    return split(models.language()), {k: v.clone() for k, v in source.state_dict().items()}


def holds(model: Any, values: dict[str, Tensor]) -> bool:
    own = {
        model.state_name(index, name): value
        for index, layer in enumerate(model.layers)
        for name, value in layer.state_dict().items()
    }
    return own.keys() == values.keys() and all(own[k].equal(values[k]) for k in own)


@pytest.mark.parametrize("left_out", [(), ("0.tokens.weight",), ("6.out.weight",)])
def test_any_name_of_a_tied_parameter_will_do(tmp_path: Path, left_out: tuple[str, ...]) -> None:
    model, values = weights()
    path = str(tmp_path / "start.safetensors")
    save_file({k: v for k, v in values.items() if k not in left_out}, path)
    load_weights(model, path)
    assert holds(model, values)


def test_weights_may_lie_behind_any_url(tmp_path: Path) -> None:
    model, values = weights()
    save_file(values, tmp_path / "start.safetensors")
    data = (tmp_path / "start.safetensors").read_bytes()
    storage.write_bytes("memory://weights/start.safetensors", data)
    load_weights(model, "memory://weights/start.safetensors")
    assert holds(model, values)


def test_files_of_an_index_are_read_one_after_another(tmp_path: Path) -> None:
    model, values = weights()
    shards = {"one.safetensors": sorted(values)[::2], "two.safetensors": sorted(values)[1::2]}
    for file, names in shards.items():
        save_file({name: values[name] for name in names}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {n: file for file, names in shards.items() for n in names}})
    )
    load_weights(model, str(index))
    assert holds(model, values)
    load_weights(model, index.as_uri())
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"there is no file '.*two\.safetensors'"):
        load_weights(model, str(index))
    for wrong in ("[]", "{}", "{", '{"weight_map": 3}'):
        index.write_text(wrong)
        with pytest.raises(ConfigError, match="is no index of safetensors files: "):
            load_weights(model, str(index))


@pytest.mark.parametrize("file", ["../start.safetensors", "/start.safetensors", "file:///start"])
def test_an_index_cannot_name_a_file_that_does_not_lie_beside_it(tmp_path: Path, file: str) -> None:
    model, values = weights()
    save_file(values, tmp_path / "start.safetensors")
    (tmp_path / "below").mkdir()
    index = tmp_path / "below" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(values, file)}))
    with pytest.raises(ConfigError, match=f"it names '{file}', which does not lie beside it"):
        load_weights(model, str(index))


def test_a_value_takes_the_dtype_of_the_model(tmp_path: Path) -> None:
    model, values = weights()
    path = str(tmp_path / "start.safetensors")
    save_file({k: v.to(torch.bfloat16) for k, v in values.items()}, path)
    load_weights(model, path)
    assert holds(model, {k: v.to(torch.bfloat16).to(v.dtype) for k, v in values.items()})


@pytest.mark.parametrize("wrong", [b"", b"garbage", b"\xff" * 100])
def test_what_is_no_safetensors_file_is_told(tmp_path: Path, wrong: bytes) -> None:
    model, _ = weights()
    path = tmp_path / "start.safetensors"
    with pytest.raises(ConfigError, match="there is no file"):
        load_weights(model, str(path))
    path.write_bytes(wrong)
    with pytest.raises(ConfigError, match=r"is no safetensors file: .*; write one with"):
        load_weights(model, str(path))
    with pytest.raises(ConfigError, match=r"is a folder; give the file in it: start\.safetensors$"):
        load_weights(model, str(tmp_path))


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    model, values = weights()
    path = str(tmp_path / "start.safetensors")
    changed = {k: v for k, v in values.items() if not k.startswith("1.")}
    changed["6.norm.weight"] = torch.zeros(3)
    changed["6.out.weight"] = values["6.out.weight"] + 1  # tied to the embedding
    changed["extra"] = torch.zeros(1)
    changed["2.up.bias"] = values["2.up.bias"].to(torch.int8)  # quantized
    save_file(changed, path)
    with pytest.raises(ConfigError) as caught:
        load_weights(model, path)
    for part in (
        "does not fit the model: ",
        "1.mix.weight",
        "extra is not in the model",
        "2.up.bias holds int8, and the model wants float64",
        f"6.norm.weight has the shape (3,), and the model wants "
        f"{tuple(values['6.norm.weight'].shape)}",
        "0.tokens.weight and 6.out.weight differ, though they are one parameter of the model",
        "give weights that were saved from the very class that training.task builds",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        (lambda name: f"module.{name}", "the file's names begin with 'module.', and those of the"),
        (lambda name: name.partition(".")[2], "the model's names begin with"),
    ],
)
def test_a_prefix_too_many_or_too_few_is_named(tmp_path: Path, rename: Any, words: str) -> None:
    torch.manual_seed(0)
    model = split(hub_models.hub("gpt2"))
    values = hub_models.gpt2().state_dict()
    path = str(tmp_path / "start.safetensors")
    save_file({rename(name): value.clone() for name, value in values.items()}, path)
    with pytest.raises(ConfigError, match=words):
        load_weights(model, path)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_model_of_transformers_comes_in_trains_and_goes_back(
    fleet: Fleet, tmp_path: Path, name: str
) -> None:
    torch.manual_seed(7)
    build = {"gpt2": hub_models.gpt2, "t5": hub_models.t5}[name]
    start: Any = build().double()
    start.save_pretrained(tmp_path / "start")
    start.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    sharded = tmp_path / "shards" / "model.safetensors.index.json"
    whole = tmp_path / "start" / "model.safetensors"
    for number, (source, front_end) in enumerate(((whole, "automatic"), (sharded, "blocks"))):
        url = str(tmp_path / f"run{number}")
        task_args = {"name": name, "front_end": front_end}
        spec = make_spec(
            HUB, url, task_args=task_args, global_batch=6, init_from=str(source),
            optimizer={"name": "adamw", "lr": 0.003, "weight_decay": 0.1, "groups": GROUPS[name]},
            clip_grad_norm=1.0,
        )  # fmt: skip
        alone, count = train_whole(spec, start)
        plans = (
            make_plan([([("a", 1), ("b", count - 1)], (2, 1)), ([("c", count)], (3,))]),
            make_plan([([("c", 2), ("a", count - 4), ("b", 2)], (2, 2, 2))]),
        )
        plan = plans[number]
        fleet.start(spec)
        fleet.install(plan, first_step=0, end_step=NUM_STEPS)
        fleet.run(plan)
        CheckpointStore(url).write_manifest(fleet.save(NUM_STEPS, num_layers=count))
        target = tmp_path / f"trained{number}"
        start.config.save_pretrained(target)
        export_weights(url, str(target / "model.safetensors"))
        back = type(start).from_pretrained(target)
        assert back.dtype == torch.float64
        found, before = back.state_dict(), start.state_dict()
        assert found.keys() == alone.keys() == load_file(target / "model.safetensors").keys()
        assert max(float((found[k] - alone[k]).abs().max()) for k in found) <= 1e-12
        frozen = {k for k in found if fnmatch(k, GROUPS[name][0].patterns[0])}
        assert frozen == {k for k in found if found[k].equal(before[k])}


def train_whole(spec: Any, start: nn.Module) -> tuple[dict[str, Tensor], int]:
    """The state after training in one process, of a model that begins as ``start``; its layers."""
    trained: Any = None

    def begin(model: nn.Module) -> None:
        nonlocal trained
        model.load_state_dict(start.state_dict())
        trained = model

    layers, _ = train_alone(spec, NUM_STEPS, begin=begin)
    return dict(trained.state_dict()), len(layers)
