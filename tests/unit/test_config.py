"""The config file: what it may hold, and the one message that each mistake gives."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from orchestrator.config import RunConfig, config_schema
from orchestrator.errors import ConfigError
from orchestrator.familiar import FAMILIAR

GOOD = """
run: {name: byte-gpt}
training:
  task: examples.byte_gpt:task
  global_batch: 64
  microbatch: 4
  steps: 300
  optimizer: {name: adamw, lr: 3e-4, weight_decay: 0.1, betas: [0.9, 0.95]}
cluster:
  source: emulated
  offers:
    - {pool: fast, kind: a100-40, count: 2, price_per_hour: 3.67}
    - {pool: slow, kind: t4, count: 2, zone: z2, price_per_hour: 0.35}
  links:
    - {within: zone, latency_s: 0.0001, bandwidth_gbytes_per_s: 3}
    - {between: [z1, z2], latency_s: 0.002, bandwidth_gbytes_per_s: 0.02}
budget: {average_per_hour_usd: 4.0, queue_cap: off}
emulation: {billing_speedup: 60}
"""


MISTAKES = (Path(__file__).parent / "config_mistakes.txt").read_text().splitlines()[1:]


def message_of(*overrides: str, text: str = GOOD) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse(text, overrides, source="run.yaml")
    return str(caught.value)


def test_sections_are_the_owners_options_and_the_rest_is_default() -> None:
    config = RunConfig.parse(GOOD)
    assert config.training.optimizer.lr == 3e-4  # YAML 1.1 would read text
    assert config.training.optimizer.arguments == {"weight_decay": 0.1, "betas": [0.9, 0.95]}
    assert config.budget.queue_cap == "off"  # YAML 1.1 would read false
    assert config.control.slot_s == 60.0
    assert config.failure.timeout_s == 60.0
    assert [offer.pool for offer in config.cluster.offers] == ["fast", "slow"]


def test_limit_below_what_a_zone_costs_unused_is_refused_with_the_amount() -> None:
    offers = "[{pool: a, kind: t4, price_per_hour: 0.5, count: 4, zone: z2, billed: while_present}]"
    said = message_of(
        f"cluster.offers={offers}",
        "cluster.links=[]",
        "budget.limits=[{zone: z2, max_per_hour_usd: 1.5}]",
    )
    assert (
        "zone z2 may spend 1.5 $/h, but its devices that are billed while present cost 2 $/h: "
        "2 $/h in all, 0.5 more; write max_per_hour_usd: 2 or more"
    ) in said


def test_the_resolved_file_loads_to_an_equal_config(tmp_path: Path) -> None:
    groups = '[{match: ["*.bias", "*norm*"], weight_decay: 0}, {match: "wte.*", lr_ratio: 0.1}]'
    config = RunConfig.parse(
        GOOD,
        ["budget.queue_cap=12.5", "training.schedule=[1f1b, gpipe]",
         f"training.optimizer.groups={groups}"],
    )  # fmt: skip
    first, second = config.training.optimizer.groups
    assert (first.patterns, first.arguments) == (("*.bias", "*norm*"), {"weight_decay": 0})
    assert (second.patterns, second.lr_ratio, second.frozen) == (("wte.*",), 0.1, False)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert RunConfig.load(path) == config


def test_a_later_value_overrides_the_file() -> None:
    config = RunConfig.parse(GOOD, ["training.steps=5", "cluster.offers[1].price_per_hour=0.5",
                                    "control.straggler.ratio=1.5", "run.seed=7"])  # fmt: skip
    assert config.training.steps == 5
    assert config.cluster.offers[1].price_per_hour == 0.5
    assert config.control.straggler.ratio == 1.5
    assert config.run.seed == 7


def test_a_section_without_keys_has_its_defaults() -> None:
    assert RunConfig.parse(GOOD + "control:\n") == RunConfig.parse(GOOD)


def test_on_ray_a_present_device_costs_unless_the_offer_says_otherwise() -> None:
    ray = ["cluster.source=ray", "cluster.offers[1].billed=while_used"]
    config = RunConfig.parse(GOOD.replace("emulation: {billing_speedup: 60}", ""), ray)
    assert [offer.billed for offer in config.cluster.offers] == ["while_present", "while_used"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_value_gives_one_message_with_path_value_and_mend(mistake: str) -> None:
    override, _, message = mistake.partition("  =>  ")
    assert message_of(override).startswith(f"run.yaml: {message}")


@pytest.mark.parametrize(("name", "key"), FAMILIAR.items())
def test_a_name_of_another_trainer_leads_to_a_key_that_exists_and_is_in_the_page(
    name: str, key: str
) -> None:
    place, _, value = key.partition(": ")
    assert message_of(f"{place}=[[]]").count(f"{place} is [[]]; write ") == 1
    page = Path(__file__).parents[2].joinpath("docs", "config.md").read_text("utf-8")
    row = next(line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line)
    section, _, last = place.rpartition(".")
    assert section in row
    assert last in row
    assert value in row


def test_a_missing_required_key_says_what_to_write() -> None:
    """deepspeedai/DeepSpeed#8156: a bare ZeroDivisionError when a size is missing."""
    message = message_of(text=GOOD.replace("  global_batch: 64\n", ""))
    assert message == "run.yaml: training.global_batch is missing; write global_batch: 64"


def test_every_mistake_is_listed_at_once() -> None:
    message = message_of("training.steps=0.5", "metrics.prt=1", "cluster.offers[0].kid=x")
    assert message.splitlines() == [
        "run.yaml has 3 errors:",
        "  - cluster.offers[0].kid is not a known key; did you mean kind?",
        "  - metrics.prt is not a known key; did you mean port?",
        "  - training.steps is 0.5; write a whole number",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml is empty; write the sections run, training, cluster and budget"),
        ("- 1", "run.yaml holds no keys"),
        ("a: [1", "run.yaml line 1, column 6: expected ',' or ']'"),
        ("a: 1\na: 2\n", "run.yaml line 2, column 1: key 'a' stands twice; keep one"),
        ("a: !!python/object:os.system {}", "run.yaml line 1, column 4: the tag !!python/object"),
        ("a: !!binary x", "run.yaml line 1, column 4: the tag !!binary is not known here"),
        ("a: !!int ten", "run.yaml line 1, column 4: 'ten' is no int; mend it"),
        (f"a: {'9' * 5000}", f"run.yaml line 1, column 4: '{'9' * 40}' is no int; mend it"),
        ("[1]: 2", "run.yaml line 1, column 1: a key is a list or a mapping; write a name"),
        ("a: &a [*a]", "run.yaml holds values more than 50 levels deep; write them flat"),
        ("a: " + "[" * 3000, "run.yaml holds values more than 50 levels deep; write them flat"),
        (
            "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
            + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdef")),
            "run.yaml holds more than 100,000 values; a run needs fewer",
        ),
        ('a: "\\ud800"', r"run.yaml: '\ud800' holds half a character"),
        ("a: \x01", "run.yaml: unacceptable character"),
    ],
)
def test_broken_yaml_says_where(text: str, message: str) -> None:
    assert message_of(text=text).startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nonsense", "--set 'nonsense': write --set section.key=value"),
        ("cluster.offers[7].count=2", "--set 'cluster.offers[7].count=2': there is no 7"),
        ("a." * 99 + "b=1", "--set 'a.a."),
        (f"cluster.offers[{5000 * '9'}].count=2", "--set 'cluster.offers[999"),
        ("training.steps=[1", "--set training.steps line 1"),
    ],
)
def test_a_wrong_override_names_itself(override: str, message: str) -> None:
    assert message_of(override).startswith(message)


def test_a_merged_mapping_is_overridden_by_the_keys_beside_it() -> None:
    text = GOOD.replace("- {pool: fast,", "- &fast {pool: fast,").replace(
        "- {pool: slow, kind: t4, count: 2, zone: z2, price_per_hour: 0.35}",
        "- {<<: *fast, pool: slow, zone: z2}",
    )
    fast, slow = RunConfig.parse(text).cluster.offers
    assert (slow.kind, slow.count, slow.price_per_hour) == (fast.kind, fast.count, 3.67)
    assert (slow.pool, slow.zone) == ("slow", "z2")


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "long").write_bytes(b" " * 2**21)
    for name, problem in (("none.yaml", "does not exist"), (".", "is a folder"),
                          ("binary", "is not a text file"), ("long", "has 2,097,152 bytes"),
                          ("long/x", "cannot be read: Not a directory"),
                          ("a\0b", "cannot be read: .* is no path")):  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            RunConfig.load(tmp_path / name)
    with pytest.raises(ConfigError, match=r"cannot be read: .*Protocol not known: nonsense"):
        RunConfig.load("nonsense://run.yaml")


def test_the_schema_describes_every_section_and_knows_the_flat_optimizer() -> None:
    schema = json.loads(json.dumps(config_schema()))
    assert set(schema["properties"]) == {"include", *RunConfig.model_fields}
    assert schema["required"] == ["run", "training", "cluster", "budget"]
    optimizer = schema["$defs"]["OptimizerOptions"]
    assert set(optimizer["properties"]) == {"name", "lr", "groups"}
    assert optimizer["additionalProperties"] is True
    budget = schema["$defs"]["BudgetOptions"]["properties"]
    assert budget["total_usd"]["description"].startswith("Hard cap")
    assert budget["horizon_hours"]["default"] == 48.0


def test_reading_a_config_loads_nothing_heavy() -> None:
    code = "import orchestrator.config, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in found.stdout.split()}
    assert not loaded & {"ray", "torch", "cvxpy", "simpy", "scipy"}
