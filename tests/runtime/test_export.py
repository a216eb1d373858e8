"""Weights leave a checkpoint under the names of the user's own state_dict."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from orchestrator.control.persistence import CheckpointStore
from orchestrator.core.durable import CheckpointManifest
from orchestrator.core.training import Task
from orchestrator.export import export_weights
from workers.splitting import split
from workers.state import ModelState, checkpoint_folder, save_layer


class Odd(nn.Module):
    """A weight under two names, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        return self.b(self.a(value)) * self.scale * self.mask


def test_the_exported_file_loads_into_the_users_own_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight  # tied across layers
    layers = [first, Odd(), last]
    task = Task(layers=layers, loss=lambda output, batch: (output.sum(), 1.0), dataset=[])
    model = split(task)
    state = ModelState(model.layers, torch.device("cpu"))
    folder = checkpoint_folder(str(tmp_path / "run"), 5)
    files = []
    for layer in range(3):
        state.begin(layer)
        files.append(save_layer(folder, layer, state.tensors(layer), model.state_keys(layer)))
    store = CheckpointStore(str(tmp_path / "run"))
    store.write_manifest(CheckpointManifest(5, 1, tuple(files), 3, 40, 0))

    exported = export_weights(str(tmp_path / "run"), str(tmp_path / "out.safetensors"))

    own = nn.Sequential(nn.Linear(3, 3), Odd(), nn.Linear(3, 3))
    found = load_file(tmp_path / "out.safetensors")
    own.load_state_dict(found, strict=True)
    for name, value in nn.Sequential(*layers).state_dict().items():
        assert torch.equal(found[name], value), name
    assert exported.num_tensors == len(found) == len(own.state_dict())
