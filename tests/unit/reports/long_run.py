"""Run folders of any size: devices come, go and slow down, plans change, money is spent."""

import json
from pathlib import Path

import numpy as np

from benchmarks.builders import make_device, make_group, make_plan
from orchestrator.core.cluster import Device
from orchestrator.core.plan import Plan
from orchestrator.core.slot import Rates
from orchestrator.core.view import DeviceView, Spread, StepSpreads
from orchestrator.reports.records import slot_data
from tests.unit.reports.samples import a_record

POOLS = (("fast", "a100-40", 3.67), ("mid", "v100-16", 0.90), ("slow", "t4", 0.35))
PRICES = {pool: usd for pool, _, usd in POOLS}
SLOT_S, STEPS, LAYERS, MICROBATCHES = 60.0, 10, 12, 16

CONFIG = """run: {{name: {name}, seed: 0}}
training: {{task: "examples.byte_gpt:task", global_batch: {batch}, steps: {steps}}}
budget: {{average_per_hour_usd: {budget}}}
control: {{strategy: {strategy}}}
"""


def write_run(  # noqa: PLR0913 - a builder names every field
    folder: Path,
    *,
    num_slots: int,
    num_devices: int,
    plan_every: int = 12,
    strategy: str = "joint",
    batch_factor: int = 1,
    speed: float = 1.0,
    seed: int = 0,
) -> str:
    """A run of a name of its own; every figure of it follows from the arguments."""
    run = _Run(num_devices, strategy, batch_factor, speed, seed)
    for slot in range(num_slots):
        run.slot(slot, plan_every)
    folder.mkdir(parents=True, exist_ok=True)
    for file, lines in run.files.items():
        (folder / f"{file}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "config.yaml").write_text(
        CONFIG.format(name=folder.name, budget=run.budget, strategy=strategy,
                      batch=64 * batch_factor, steps=STEPS * num_slots)
    )  # fmt: skip
    (folder / "result.json").write_text(
        json.dumps({"status": "finished", "reason": f"all {STEPS * num_slots} steps done"})
    )
    return str(folder)


class _Run:
    """What has happened so far, as the lines of its files."""

    def __init__(
        self, num_devices: int, strategy: str, batch_factor: int, speed: float, seed: int
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.devices = [
            make_device(f"{POOLS[i % 3][0]}-{i // 3}", kind=POOLS[i % 3][1])
            for i in range(num_devices)
        ]
        self.budget = 0.8 * sum(PRICES[d.pool] for d in self.devices)
        self.factor, self.speed = batch_factor, speed
        self.files: dict[str, list[str]] = {"slots": [], "steps": [], "ledger": [], "events": []}
        self.gone: dict[str, int] = {}  # device -> slot at whose end it is back
        self.spent, self.samples, self.time_s = 0.0, 0, 0.0
        self.plan = _plan(self.devices, self.rng, batch_factor, 1)

    def slot(self, slot: int, plan_every: int) -> None:
        ran, used = self.plan, set(self.plan.device_ids)
        self.time_s += SLOT_S
        self.bill(used)
        slow = {d for d in sorted(used) if self.rng.random() < 0.02}
        step_s = self.train(slot, bool(slow))
        lost = self.trouble(slot, used)
        back = [d for d, until in self.gone.items() if until <= slot]
        for device in back:
            del self.gone[device]
            self.event(slot, "joined", "joined again", device)
        for device in sorted(slow):
            self.event(slot, "straggler", "computes 1.4x slower than predicted for it", device)
        if slot % 20 == 19:
            self.event(slot, "checkpoint", f"step {STEPS * slot}", duration_s=0.4)
        changed = bool(lost or back or slot % plan_every == plan_every - 1)
        reason = "no other plan is better"
        if changed:
            present = [d for d in self.devices if d.device_id not in self.gone]
            self.plan = _plan(present, self.rng, self.factor, ran.generation + 1)
            reason = f"switch: {lost or 'prices'} changed; 12 % more samples per dollar"
            self.event(slot, "replan", reason, duration_s=0.8)
        planned = set(self.plan.device_ids)
        record = a_record(
            slot=slot, time_s=self.time_s, step=STEPS * (slot + 1), generation=ran.generation,
            decision="switch" if changed else "keep", reason=reason, plan=ran,
            next_plan=self.plan, predicted=Rates(6.0 / self.speed, ran.num_samples * self.speed / 6,
                                                 self.budget * 0.95),
            measured=Rates(step_s, ran.num_samples / step_s, len(used) * 1.5),
            spent_usd=self.spent, budget_usd=self.budget * self.time_s / 3600,
            overspend_bound_usd=self.budget * 0.2, samples=self.samples,
            stragglers=tuple(sorted(slow)),
            devices=tuple(
                _view(d, used, slow, lost, planned)
                for d in self.devices
                if d.device_id not in self.gone or d.device_id == lost
            ),
        )  # fmt: skip
        self.files["slots"].append(json.dumps(slot_data(record)))

    def bill(self, used: set[str]) -> None:
        for device in sorted(used):
            pool = device.rsplit("-", 1)[0]
            usd = PRICES[pool] * SLOT_S / 3600
            self.spent += usd
            self.write("ledger", from_s=self.time_s - SLOT_S, to_s=self.time_s, device=device,
                       pool=pool, price_per_hour=PRICES[pool], usd=usd, egress_bytes=0.0,
                       egress_usd=0.0, cause="use", estimated=False)  # fmt: skip

    def train(self, slot: int, slow: bool) -> float:
        size = self.plan.num_samples
        step_s = 6.0 / self.speed * (1.2 if slow else 1.0)
        step_s *= 1 + 0.03 * self.rng.standard_normal()
        for step in range(STEPS * slot, STEPS * slot + STEPS):
            loss = 1.5 + 4 * 0.998 ** (self.samples / 64) + 0.02 * self.rng.random()
            self.write("steps", step=step, loss=loss, grad_norm=1.0, lr=0.001, samples=size,
                       step_s=step_s, generation=self.plan.generation,
                       first_sample=self.samples, end_sample=self.samples + size)  # fmt: skip
            self.samples += size
        return step_s

    def trouble(self, slot: int, used: set[str]) -> str:
        """The device that is lost, if one is."""
        if len(used) <= 2 or self.rng.random() >= 0.03:
            return ""
        lost = sorted(used)[int(self.rng.integers(len(used)))]
        self.event(slot, "notice", "will be taken away", lost)
        self.event(slot, "lost", "taken away", lost, cause="preemption")
        self.event(slot, "recovered", f"at step {STEPS * slot}: layers come from replicas",
                   duration_s=1.5, cause="replica")  # fmt: skip
        self.gone[lost] = slot + int(self.rng.integers(5, 30))
        return lost

    def event(
        self, slot: int, kind: str, detail: str, device: str = "", *,
        duration_s: float | None = None, cause: str = "",
    ) -> None:  # fmt: skip
        self.write("events", time_s=self.time_s, slot=slot, kind=kind, detail=detail,
                   device=device, duration_s=duration_s, cause=cause)  # fmt: skip

    def write(self, file: str, **row: object) -> None:
        self.files[file].append(json.dumps(row))


def _plan(devices: list[Device], rng: np.random.Generator, factor: int, generation: int) -> Plan:
    """Pipelines of up to three of the devices in turn; one in twenty devices is left out."""
    chosen = [d for d in devices if rng.random() > 0.05] or devices
    chains = [chosen[i : i + 3] for i in range(0, len(chosen), 3)]
    groups = []
    for chain in chains:
        inner = sorted(int(c) for c in rng.choice(np.arange(1, LAYERS), len(chain) - 1, False))
        size = factor * max(1, MICROBATCHES // len(chains))
        groups.append(make_group(chain, [0, *inner, LAYERS], [4] * size))
    return make_plan(*groups, generation=generation)


def _view(
    device: Device, used: set[str], slow: set[str], lost: str, planned: set[str]
) -> DeviceView:
    name = device.device_id
    state = "lost" if name == lost else "used" if name in planned else "idle"
    steps = StepSpreads(Spread(4.0, 4.1, 4.5), Spread(1.0, 1.5, 2.0), Spread(0.0, 0.01, 0.02))
    return DeviceView(
        name, device.kind, device.pool, state, 1.4 if name in slow else 1.0,  # type: ignore[arg-type]
        name in slow, PRICES[device.pool], steps if name in used else None,
    )  # fmt: skip
