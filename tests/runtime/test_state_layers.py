"""State of layers as bytes: nothing is cast, nothing is forgotten, whatever the optimizer."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from orchestrator.core.durable import CheckpointManifest
from orchestrator.core.training import OptimizerOptions
from orchestrator.errors import ConfigError
from tests.runtime.models import Block, language
from workers.state import ModelState, load_layer, pack, save_layer, unpack
from workers.update import make_optimizer

CPU = torch.device("cpu")
OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam",
    "rmsprop", "rprop", "sgd",
)  # fmt: skip


class Odd(nn.Module):
    """Tensors whose bytes are hard to carry."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("table", torch.arange(7, dtype=torch.float64), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("count", torch.tensor(257))


def held(layers: list[nn.Module]) -> ModelState:
    state = ModelState(layers, CPU)
    for index in range(len(layers)):
        state.begin(index)
    return state


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return sorted(a) == sorted(b) and all(
        x.dtype == b[key].dtype and x.shape == b[key].shape and torch.equal(x, b[key])
        for key, x in a.items()
    )


def test_packed_bytes_come_back_whatever_their_alignment() -> None:
    tensors = {
        "a": torch.tensor([True]),
        "b": torch.tensor(257.0, dtype=torch.bfloat16),
        "c": torch.randn(3, 2, dtype=torch.float64),
        "d": torch.empty(0, 3),
        "e": torch.randn(4, 4)[:, 1],
    }
    assert same_bits(unpack(*pack(tensors)), tensors)


def test_buffers_that_no_state_dict_holds_move_too() -> None:
    source, target = held([Odd()]), ModelState([Odd()], CPU)
    target.keep(())
    target.load(0, unpack(*pack(source.tensors(0))))
    assert same_bits(source.tensors(0), target.tensors(0))
    assert "buffer/table" in target.tensors(0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_goes_on_where_it_was_after_a_move(name: str) -> None:
    options = OptimizerOptions(
        name=name, lr=0.01, arguments={"momentum": 0.9} if name == "sgd" else {}
    )

    def train(state: ModelState, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            state.layers[0](x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state.take_from(optimizer)

    torch.manual_seed(0)
    stayed, moved = held([Block(6)]), ModelState([Block(6)], CPU)
    first = make_optimizer(options, stayed.parameters())
    assert first is not None
    train(stayed, first, range(3))
    moved.load(0, unpack(*pack(stayed.tensors(0))))
    second = make_optimizer(options, moved.parameters())
    assert second is not None
    moved.give_to(second)
    train(stayed, first, range(3, 6))
    train(moved, second, range(3, 6))
    assert same_bits(stayed.tensors(0), moved.tensors(0))
    assert stayed.checksums() == moved.checksums()


def test_tied_parameter_keeps_its_tie_and_its_memory_while_one_of_its_layers_stays() -> None:
    layers = list(language().layers)
    state = held(layers)
    state.keep({0})
    assert layers[6].out.weight is layers[0].tokens.weight
    assert layers[0].tokens.weight.numel() > 0
    assert layers[3].mix.weight.numel() == layers[6].norm.weight.numel() == 0


def test_module_that_stands_twice_keeps_its_buffers_while_one_place_stays() -> None:
    twice = Odd()
    state = held([twice, Odd(), twice])
    state.keep({2})
    assert twice.flags.numel() == 3
    assert state.layers[1].flags.numel() == 0


def test_state_of_another_model_is_refused() -> None:
    state = ModelState([Block(4)], CPU)
    good = {key: t for key, t in state.tensors(0).items() if key.startswith("param/")}
    name = next(iter(good))
    for other in (
        {"param/other": torch.zeros(1)},  # a model with other layers
        {**good, name: torch.zeros(3, 5)},  # one of another width
    ):
        with pytest.raises(ConfigError, match=r"layer 0: .* it comes from another model"):
            state.load(0, other)


def test_layer_file_holds_all_of_its_state_and_its_checksum(tmp_path: Path) -> None:
    state = held([Odd()])
    file = save_layer(str(tmp_path), 0, state.tensors(0))
    manifest = CheckpointManifest(1, 1, (file,), 1, 0, 0)
    assert file.size_bytes == (tmp_path / file.path).stat().st_size
    assert same_bits(load_layer(str(tmp_path), manifest, 0), state.tensors(0))
    with pytest.raises(ConfigError, match="no file for layer 1"):
        load_layer(str(tmp_path), manifest, 1)
