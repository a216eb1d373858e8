"""`lyray simulate`: the closed loop over days, each strategy under the same budget."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.builders import make_profile
from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.core.model import ModelProfile, profile_to_json
from orchestrator.errors import ConfigError
from orchestrator.whatif.rehearsal import Comparison, rehearse
from orchestrator.whatif.rehearsal_page import rehearsal_page
from orchestrator.whatif.rehearsal_table import rehearsal_data, rehearsal_table
from orchestrator.whatif.traces import traces_of

CONFIG = """
run: {name: tiny}
training: {task: "job:task", global_batch: 64, microbatch: 4, steps: 1000000}
cluster:
  source: file
  offers:
    - {pool: fast, kind: a100-40, count: 2, price_per_hour: 3.6}
    - {pool: slow, kind: t4, count: 1, price_per_hour: 0.36}
  links: [{within: zone, latency_s: 0.0001, bandwidth_gbytes_per_s: 3}]
budget: {average_per_hour_usd: 4.0, horizon_hours: 12}
control: {slot_s: 1800}
"""
DAYS = 0.5


def a_profile() -> ModelProfile:
    return make_profile({"a100-40": [0.01] * 4, "t4": [0.04] * 4}, microbatches=(1, 2, 4))


@pytest.mark.parametrize("strategy", ["joint", "even-split", "cheapest"])
def test_every_strategy_keeps_the_average_and_its_slack(strategy: str) -> None:
    result = rehearse(RunConfig.parse(CONFIG), a_profile(), days=DAYS, strategy=strategy)
    assert result.problem == ""
    assert 12.0 <= result.hours <= 12.5
    assert result.budget_usd == pytest.approx(4.0 * result.hours)
    assert result.overspend_usd <= result.overspend_bound_usd
    assert result.samples == 64 * result.steps


def test_joint_trains_most_under_one_budget() -> None:
    config = RunConfig.parse(CONFIG)
    joint, even = (
        rehearse(config, a_profile(), days=DAYS, strategy=name) for name in ("joint", "even-split")
    )
    assert joint.samples > even.samples


def test_doing_nothing_costs_nothing() -> None:
    result = rehearse(RunConfig.parse(CONFIG), a_profile(), days=DAYS, strategy="do-nothing")
    assert (result.spent_usd, result.samples, result.idle_ratio) == (0.0, 0, 1.0)
    assert result.usd_per_million_samples is None


def test_the_hard_cap_ends_a_run_before_its_days() -> None:
    config = RunConfig.parse(CONFIG, ["budget.total_usd=10"])
    result = rehearse(config, a_profile(), days=DAYS, strategy="joint")
    assert result.ended.startswith("budget: ")
    assert result.spent_usd <= 10.0
    assert result.hours < 12.0


def test_a_finished_run_says_so() -> None:
    config = RunConfig.parse(CONFIG, ["training.steps=100"])
    result = rehearse(config, a_profile(), days=DAYS, strategy="joint")
    assert (result.steps, result.ended.partition(":")[0]) == (100, "finished")


def test_a_price_feed_moves_the_bill(tmp_path: Path) -> None:
    feed = tmp_path / "prices.csv"
    feed.write_text("time_s,pool,price_per_hour\n0,fast,1.0\n")
    cheap = RunConfig.parse(CONFIG, [f"cluster.price_feed={{path: {feed}, max_age_s: 1e7}}"])
    dear = rehearse(RunConfig.parse(CONFIG), a_profile(), days=DAYS, strategy="joint")
    result = rehearse(cheap, a_profile(), days=DAYS, strategy="joint")
    assert result.samples > dear.samples
    feed.write_text("time_s,pool\n0,fast\n")
    with pytest.raises(ConfigError, match=r"prices.csv': line 1 lacks price_per_hour"):
        rehearse(cheap, a_profile(), days=DAYS, strategy="joint")


def test_prices_of_a_feed_and_of_events_are_listed_ones(tmp_path: Path) -> None:
    """skypilot-org/skypilot#1962: a discount is taken off whatever is listed."""
    feed = tmp_path / "prices.csv"
    feed.write_text("time_s,pool,price_per_hour\n0,fast,2.0\n")
    given = [f"cluster.price_feed={{path: {feed}, max_age_s: 1e7}}"]
    halved = RunConfig.parse(CONFIG, [*given, "cluster.offers[0].discount_ratio=0.5"])
    feed_of_one = tmp_path / "half.csv"
    feed_of_one.write_text("time_s,pool,price_per_hour\n0,fast,1.0\n")
    plain = RunConfig.parse(CONFIG, [f"cluster.price_feed={{path: {feed_of_one}, max_age_s: 1e7}}"])
    results = [rehearse(c, a_profile(), days=DAYS, strategy="cheapest") for c in (halved, plain)]
    assert results[0].spent_usd == pytest.approx(results[1].spent_usd)
    assert results[0].spent_usd > 0


def test_the_command_prints_one_object_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("def task(): ...\n")
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(storage.to_json(profile_to_json(a_profile()))))
    (tmp_path / "run.yaml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "simulate", "run.yaml", "--days", "0.1", "--json",
         "--set", f"cluster.profile={profile}", "--compare", "cheapest,do-nothing"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [row["strategy"] for row in data["strategies"]] == ["joint", "cheapest", "do-nothing"]
    joint, cheapest, nothing = data["strategies"]
    assert joint["samples"] > cheapest["samples"] > nothing["samples"] == 0
    assert cheapest["usd_per_million_samples"] < joint["usd_per_million_samples"]


def test_a_strategy_without_a_plan_is_named_and_the_others_go_on() -> None:
    config = RunConfig.parse(CONFIG, [f"cluster.offers[{i}].memory_gib=0.001" for i in (0, 1)])
    result = rehearse(config, a_profile(), days=DAYS, strategy="even-split")
    assert " GiB on 'fast-0'" in result.problem
    data = json.loads(json.dumps(rehearsal_data(config, [result])))
    assert set(data["strategies"][0]) == {"strategy", "problem"}
    console = Console(record=True, width=80)
    with console.capture():
        console.print(rehearsal_table(config, [result]))


SCENARIO = """
seed: 3
losses: [{pool: fast, per_hour: 0.5, devices: [1, 2], return_after_hours: 1.0}]
slowdowns: [{preset: node, pools: [fast, slow], per_hour: 0.5}, {preset: cluster}]
environment:
  slot_s: 1800
  chains:
    - name: price
      levels:
        usual: {next: {dear: 0.2}}
        dear: {next: {usual: 0.3}, pools: [fast], price_ratio: 3.0}
events: [{at_hour: 3, device: slow-0, speed_ratio: 0.4}]
"""


def told(tmp_path: Path, text: str = SCENARIO) -> Comparison:
    (tmp_path / "scenario.yaml").write_text(text)
    return Comparison(
        RunConfig.parse(CONFIG), 0.25, ("cheapest", "do-nothing"), str(tmp_path / "scenario.yaml")
    )


def test_a_run_goes_on_without_the_devices_that_a_scenario_takes(tmp_path: Path) -> None:
    joint, cheapest, nothing = told(tmp_path).run(a_profile())
    assert joint.lost == cheapest.lost == nothing.lost > 0  # the same world for all
    assert joint.ended == ""
    assert joint.samples == 64 * joint.steps > 0
    assert joint.overspend_usd <= joint.overspend_bound_usd
    assert joint.samples > cheapest.samples > nothing.samples == 0


def test_notice_in_a_scenario_and_in_the_file_itself_saves_what_a_sudden_loss_does_not(
    tmp_path: Path,
) -> None:
    """ray-project/ray#63968: the simulation knows notice, so it shows what it is worth."""
    lines = [f"0,add,{node}" for node in "ab"] + ["7200000,remove,a", "7200000,remove,b"]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(lines))
    where = f"preemptions: [{{pool: fast, path: {trace}, repeat: false, notice_s: NOTICE}}]"
    sudden, told_before = (
        replace(told(tmp_path, where.replace("NOTICE", s)), others=()).run(a_profile())[0]
        for s in ("0", "120")
    )
    assert sudden.lost == told_before.lost == 2
    assert told_before.redone == 0
    assert sudden.redone >= told_before.redone
    events = RunConfig.parse(
        CONFIG.replace("source: file", "source: emulated")
        + "emulation: {events: [{at_step: 9, device: fast-0, notice_s: 5}]}\n"
    )
    (announced,) = traces_of(events)
    assert (announced.at_step, announced.device, announced.notice_s) == (9, "fast-0", 5.0)


def test_a_reader_is_told_whose_turn_it_is(tmp_path: Path) -> None:
    found = replace(told(tmp_path, "seed: 3\n"), days=0.01)
    turns: list[str] = []
    found.run(a_profile(), turns.append)
    assert turns == [
        "simulating joint (1 of 3)", "simulating cheapest (2 of 3)",
        "simulating do-nothing (3 of 3)",
    ]  # fmt: skip


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    found = replace(told(tmp_path), others=())
    assert found.run(a_profile()) == found.run(a_profile())


def test_a_run_waits_for_its_first_device(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("3600000,add,a\n86400000,remove,a\n")
    only = CONFIG.replace("    - {pool: slow, kind: t4, count: 1, price_per_hour: 0.36}\n", "")
    text = f"preemptions: [{{pool: fast, path: {trace}, repeat: false}}]\n"
    (tmp_path / "scenario.yaml").write_text(text)
    found = Comparison(RunConfig.parse(only), DAYS, (), str(tmp_path / "scenario.yaml"))
    (joint,) = found.run(a_profile())
    assert joint.steps > 0
    assert joint.points[1][1] == 0  # the first half hour brought nothing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weather: []", "'weather' is no section; write one of seed, environment"),
        ("losses: [{pool: gone}]", "losses: 'devices' is missing"),
        (
            "preemptions: [{pool: fast, path: no.csv}]",
            "scenario.yaml: preemptions: path 'no.csv' does not exist; give a trace of nodes",
        ),
        (
            "losses: [{pool: gone, per_hour: 1, devices: [1, 2], return_after_hours: 1}]",
            "losses: pool 'gone' is not on offer; write one of fast, slow",
        ),
        ("slowdowns: [{preset: rain}]", "slowdowns: preset 'rain'; write one of node"),
        ("slowdowns: [{preset: node}]", "slowdowns: a slow-down touches devices or links"),
        ("events: [{at_hour: 1, pool: fast, speed_ratio: 0}]", "speed_ratio is 0; it must be"),
        ("events: [{at_hour: 1, pool: fast, notice_s: -1}]", "notice_s is -1; write the seconds"),
        ("preemptions: [{pool: fast, path: none.csv}]", "path 'none.csv' does not exist"),
        ("environment: {chains: [{name: x, levels: {a: {next: {b: 1}}}}]}", "goes to 'b'"),
        ("[]", "holds no keys"),
    ],
)
def test_a_scenario_that_makes_no_sense_is_refused_with_the_mend(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        told(tmp_path, text)


def test_rates_are_compared_at_equal_cost(tmp_path: Path) -> None:
    results = told(tmp_path).run(a_profile())
    dear = replace(results[0], spent_usd=2 * results[0].budget_usd)
    assert dear.samples_per_s_at_budget == pytest.approx((results[0].samples_per_s or 0.0) / 2)
    page = rehearsal_page(RunConfig.parse(CONFIG), [dear, *results[1:]])
    assert "(x0.50)" in page
    assert page.count("<svg") == 3
    assert "budget over spending" in page


def test_a_simulated_run_uses_teams_as_far_as_the_file_allows() -> None:
    """Four layers that no device can hold alone; a team of two takes half the time."""
    profile = a_profile()
    sizes = profile.sizes[0]
    big = replace(sizes, param_bytes=tuple(12e9 / 4 for _ in sizes.param_bytes))
    halves = replace(big, team_size=2, param_bytes=tuple(b / 2 for b in big.param_bytes))
    times = (*profile.times, *(replace(t.scaled(0.5), team_size=2) for t in profile.times))
    teams = replace(profile, sizes=(big, halves), times=times)
    pair = ["cluster.offers[0].devices_per_node=2"]
    few, none = (
        rehearse(
            RunConfig.parse(CONFIG, [*pair, f"control.max_team={size}"]),
            teams,
            days=0.1,
            strategy="joint",
        )
        for size in (2, 1)
    )
    assert few.samples > none.samples
