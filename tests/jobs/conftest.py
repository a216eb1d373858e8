"""What the jobs of these tests train."""

from pathlib import Path

import pytest

TASK = """
import torch
from torch import nn
from orchestrator import Task

class Lines:
    def __len__(self):
        return 256
    def __getitem__(self, index):
        x = torch.tensor([index / 256.0, 1.0])
        return x, x[:1] * 3 - 1

def squares(output, batch):
    return ((output - batch[1]) ** 2).sum(), len(output)

def task(broken=False):
    if broken:
        raise RuntimeError("my own mistake")
    layers = [nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)]
    return Task(layers=layers, loss=squares, dataset=Lines(), eval_dataset=Lines())
"""

FILE = """
run: {{name: {name}, storage_path: {storage}}}
training:
  task: mytask:task
  global_batch: 16
  steps: 40
  optimizer: {{name: sgd, lr: 0.1}}
cluster:
  source: ray
  offers:
    - {{pool: one, kind: one, price_per_hour: 1, speed_ratio: 0.01, memory_gib: 1,
       billed: while_used}}
    - {{pool: two, kind: two, price_per_hour: 1, speed_ratio: 0.01, memory_gib: 1,
       billed: while_used}}
  links: [{{within: zone, latency_s: 0.0003, bandwidth_gbytes_per_s: 0.1}}]
budget: {{average_per_hour_usd: 10}}
control: {{slot_s: 1}}
metrics: {{port: 0}}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working directory to upload."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "mytask.py").write_text(TASK)
    for name in ("one", "two"):
        (folder / f"{name}.yaml").write_text(FILE.format(name=name, storage=tmp_path / "runs"))
    return folder
