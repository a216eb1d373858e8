"""A chaos file becomes a part of the run's configuration, or says what is wrong with it."""

from pathlib import Path

import pytest

from orchestrator.config import RunConfig
from orchestrator.control.faults import Draw, FaultPlan, draw
from orchestrator.errors import ConfigError
from orchestrator.runtime.chaos import with_chaos, with_faults

TEXT = """
run: {name: r}
training: {task: "m:t", global_batch: 8, steps: 40}
cluster:
  source: emulated
  offers:
    - {pool: fast, kind: a100-40, count: 2, price_per_hour: 3.0}
    - {pool: slow, kind: t4, price_per_hour: 1.0}
  links: [{within: zone, latency_s: 0.001, bandwidth_gbytes_per_s: 1}]
budget: {average_per_hour_usd: 1.0}
"""


def write(folder: Path, text: str) -> str:
    path = folder / "chaos.yaml"
    path.write_text(text, "utf-8")
    return str(path)


def test_the_faults_of_a_file_are_those_of_the_run_and_stay_in_its_resolved_file(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path,
        "faults:\n"
        "  - {kind: fail, at_step: 12, device: fast-1, phase: vote}\n"
        "  - {kind: price, at_step: 20, pool: slow, price_per_hour: 2}\n",
    )
    config = with_chaos(RunConfig.parse(TEXT), path)
    plan = FaultPlan().fail_at(12, "fast-1", "vote").price_at(20, "slow", 2.0)
    assert config.emulation.faults == plan.faults
    assert config == with_faults(RunConfig.parse(TEXT), plan)
    assert RunConfig.parse(config.to_yaml()) == config


def test_drawn_faults_are_those_of_the_seed(tmp_path: Path) -> None:
    config = with_chaos(RunConfig.parse(TEXT), write(tmp_path, "draw: {seed: 4, faults: 5}"))
    drawn = draw(
        Draw(seed=4, faults=5), ("fast-0", "fast-1", "slow-0"), {"fast": 3.0, "slow": 1.0}, 40
    )
    assert config.emulation.faults == drawn.faults


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "says neither faults nor draw"),
        ("seed: 3", "says neither faults nor draw, or more; write faults: "),
        ("{draw: {seed: 1}, faults: []}", "says neither faults nor draw, or more"),
        ("faults: 3", "emulation.faults is 3; write a list"),
        ("faults: [{kind: explode, at_step: 1}]", r'faults\[0\].kind is "explode"; write .fail'),
        ("faults: [{kind: fail, at_step: 1}]", r"faults\[0\].device is missing; fail needs"),
        ("faults: [{kind: fail, at_step: 1, device: x-0}]", r"device is 'x-0'; known: fast-0, "),
        ("faults: [{kind: price, at_step: 1, pool: x, price_per_hour: 1}]", "pool is 'x'; known"),
        ("faults: [{kind: fail, at_step: 1, devise: fast-0}]", "did you mean device"),
        ("draw: {sede: 3}", "chaos.yaml: draw has the unknown key 'sede'"),
        ("draw: {seed: x}", "draw.seed is 'x'; it must be of type int"),
        ("draw: {faults: 0}", "draw.faults is 0; write 1 or more"),
        ("draw: {faults: 37}", "draw.faults is 37, but a run of 40 steps has room for 36"),
        ("draw: {kinds: [kill_driver]}", "draw.kinds is kill_driver; write some of fail, hang"),
        ("draw: {spare: [fast-9]}", "draw.spare names 'fast-9'; known: fast-0"),
    ],
)
def test_a_file_that_will_not_do_is_refused_with_its_place(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        with_chaos(RunConfig.parse(TEXT), write(tmp_path, text))
    assert "chaos.yaml" in str(refused.value)


def test_only_an_emulated_cluster_is_broken(tmp_path: Path) -> None:
    found = RunConfig.parse(TEXT, ["cluster.source=ray"])
    with pytest.raises(ConfigError, match=r"only for cluster.source: emulated, and .* is ray"):
        with_chaos(found, write(tmp_path, "draw: {seed: 1}"))


def test_faults_that_are_drawn_need_a_number_of_steps(tmp_path: Path) -> None:
    epochs = RunConfig.parse(TEXT, ["training.steps=null", "training.epochs=2"])
    with pytest.raises(ConfigError, match=r"draw.faults needs .* write training.steps"):
        with_chaos(epochs, write(tmp_path, "draw: {seed: 1}"))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--chaos nowhere.yaml does not exist"):
        with_chaos(RunConfig.parse(TEXT), "nowhere.yaml")
