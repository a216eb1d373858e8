"""``lyray run`` on nodes that differ for real, looked at through the files that it writes."""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from tests.net.cluster import RayNodes

PATIENCE_S = 90.0  # for whatever a run does next

TEXT = """
run: {{name: run, storage_path: {folder}}}
training:
  task: tests.net.models:pictures
  global_batch: 48
  microbatch: 4
  steps: {steps}
  optimizer: {{name: sgd, lr: 0.01}}
  checkpoint_every_steps: 5
cluster:
  source: ray
  offers:
    - {{pool: full, kind: full, price_per_hour: 1, speed_ratio: 0.01, memory_gib: 4}}
    - {{pool: half, kind: half, price_per_hour: 1, speed_ratio: 0.01, memory_gib: 4}}
    - {{pool: quarter, kind: quarter, price_per_hour: 1, speed_ratio: 0.01, memory_gib: 4}}
  links:
    - {{between: [full, half], latency_s: 0.0003, bandwidth_gbytes_per_s: 0.025}}
    - {{within: zone, latency_s: 0.0003, bandwidth_gbytes_per_s: 0.0125}}
budget: {{average_per_hour_usd: 10}}
control: {{slot_s: 2}}
failure: {{timeout_s: 30}}
metrics: {{port: 0}}
"""


@dataclass(frozen=True)
class Run:
    """A run that is under way or over."""

    config: RunConfig
    folder: Path
    output: Path
    process: subprocess.Popen[bytes]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """What a file of JSON lines says so far."""
        path = self.folder / name
        text = path.read_text("utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def result(self) -> dict[str, Any]:
        """What the run says of itself at its end."""
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text("utf-8"))
        return found

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait while the run is under way; fails with what it printed if it ends or stands."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not reached():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline_s, self.output.read_text()
            time.sleep(0.1)

    def wait_for_end(self) -> None:
        """Wait until it has finished; fails with what it printed if it ends otherwise."""
        assert self.process.wait(PATIENCE_S) == 0, self.output.read_text()

    @property
    def losses(self) -> list[float]:
        """Of every step."""
        return [row["loss"] for row in self.rows("steps.jsonl")]

    @property
    def lost(self) -> list[str]:
        """Devices that are gone, in the order in which they were missed."""
        return [row["device"] for row in self.rows("events.jsonl") if row["kind"] == "lost"]

    def check_books(self) -> None:
        """Every sample once, in order, and every dollar in the ledger."""
        steps, batch = self.rows("steps.jsonl"), self.config.training.global_batch
        assert [row["step"] for row in steps] == list(range(self.config.training.steps or 0))
        assert [(row["first_sample"], row["end_sample"]) for row in steps] == [
            (batch * row["step"], batch * (row["step"] + 1)) for row in steps
        ]
        spent_usd = sum(row["usd"] for row in self.rows("ledger.jsonl"))
        assert self.result()["spent_usd"] == pytest.approx(spent_usd, abs=1e-9)


def start_run(cluster: RayNodes, folder: Path, *options: str, steps: int) -> Run:
    """Start a run whose files lie in ``folder``."""
    file, output = folder / "run.yaml", folder / "output"
    file.write_text(TEXT.format(folder=folder, steps=steps))
    config = RunConfig.load(str(file))
    process = cluster.run("run", str(file), *options, output=output)
    return Run(config, Path(config.run.run_url), output, process)
