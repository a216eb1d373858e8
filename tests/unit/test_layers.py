"""Files that include others and are overlaid: what counts in the end, and who is named."""

import json
import os
from pathlib import Path

import jsonschema
import pytest

from orchestrator import retries, storage
from orchestrator.config import RunConfig, config_schema
from orchestrator.errors import ConfigError
from orchestrator.layers import MAX_DEPTH, MAX_FILES, Layers, read_layers

RUN = """
run: {name: tiny}
training: {task: "job:task", global_batch: 8, steps: 20}
cluster:
  source: emulated
  links: [{within: zone, bandwidth_gbytes_per_s: 3}]
"""
BUDGET = "budget: {average_per_hour_usd: 4.0, horizon_hours: 10}\n"
PRICES = """
cluster:
  offers:
    - {pool: fast, kind: a100-40, price_per_hour: 3.0, count: 0}
    - {pool: slow, kind: t4, price_per_hour: 0.5, count: 0}
"""
OFFERS = "  offers: [{pool: slow, count: 2}, {pool: own, kind: t4, price_per_hour: 0.2}]\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**texts: str) -> None:
    """Files of the working directory, by name without .yaml; ``__`` stands for a folder."""
    for name, text in texts.items():
        path = Path(name.replace("__", "/") + ".yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def refused(path: str = "run.yaml", *overlays: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(path, overrides, overlays)
    return str(caught.value)


def test_later_layers_win_included_then_file_then_overlays_then_set() -> None:
    write(
        low="budget: {average_per_hour_usd: 1, horizon_hours: 1, total_usd: 1, queue_cap: 1}",
        run=f"include: low.yaml\n{RUN}{OFFERS.replace('count: 2', 'kind: t4, price_per_hour: 1')}"
        "budget: {horizon_hours: 2, total_usd: 2, queue_cap: 2}\n",
        over="budget: {total_usd: 3, queue_cap: 3}",
        last="budget: {queue_cap: 4}",
    )
    budget = RunConfig.load("run.yaml", ["budget.min_samples_per_s=5"], ["over.yaml"]).budget
    assert budget.average_per_hour_usd == 1.0
    assert budget.horizon_hours == 2.0
    assert (budget.total_usd, budget.queue_cap) == (3.0, 3.0)
    assert budget.min_samples_per_s == 5.0
    both = ["over.yaml", "last.yaml"]
    assert read_layers("run.yaml", both).files == ["low.yaml", "run.yaml", *both]
    assert RunConfig.load("run.yaml", (), both).budget.queue_cap == 4.0
    assert RunConfig.load("run.yaml", (), both[::-1]).budget.queue_cap == 3.0
    assert RunConfig.load("run.yaml", ["budget.queue_cap=5"], both).budget.queue_cap == 5.0


def test_offers_are_merged_by_pool_and_prices_without_devices_are_left_out() -> None:
    write(shared__prices=PRICES, run=f"include: [shared/prices.yaml]\n{RUN}{OFFERS}{BUDGET}")
    config = RunConfig.load("run.yaml")
    assert [(o.pool, o.kind, o.count, o.price_per_hour) for o in config.cluster.offers] == [
        ("slow", "t4", 2, 0.5),
        ("own", "t4", 1, 0.2),
    ]
    assert RunConfig.parse(config.to_yaml()) == config
    assert "include" not in config.to_yaml()


def test_on_ray_a_price_without_a_count_prices_what_is_found() -> None:
    write(prices=PRICES, run=f"include: prices.yaml\n{RUN}{BUDGET}".replace("emulated", "ray"))
    offers = RunConfig.load("run.yaml").cluster.offers
    assert [o.pool for o in offers] == ["fast", "slow"]
    assert {o.billed for o in offers} == {"while_present"}


def test_lists_and_scalars_are_replaced_and_null_takes_a_section_away() -> None:
    write(
        run=f"{RUN}{OFFERS.replace('count: 2', 'kind: t4, price_per_hour: 1')}{BUDGET}"
        "emulation: {billing_speedup: 60}\ncontrol: {slot_s: 5}\n",
        over="{emulation: null, cluster: {source: file, links: [{within: node, latency_s: 1, "
        "bandwidth_gbytes_per_s: 1}]}, control: null}",
    )
    config = RunConfig.load("run.yaml", (), ["over.yaml"])
    assert [link.within for link in config.cluster.links] == ["node"]
    assert (config.emulation.billing_speedup, config.control.slot_s) == (1.0, 60.0)


def test_paths_begin_in_the_folder_of_the_file_that_names_them(tmp_path: Path) -> None:
    write(
        a__run=f"include: ../b/one.yaml\n{RUN}{BUDGET}",
        b__one="include: two.yaml\n",
        b__two=PRICES.replace("count: 0", "count: 1"),
    )
    pools = ["fast", "slow"]
    assert [o.pool for o in RunConfig.load("a/run.yaml").cluster.offers] == pools
    os.chdir(tmp_path / "a")
    assert [o.pool for o in RunConfig.load("run.yaml").cluster.offers] == pools
    os.chdir(tmp_path)
    whole = f"include: {tmp_path}/b/one.yaml\n{RUN}{BUDGET}"
    assert [o.pool for o in RunConfig.parse(whole).cluster.offers] == pools
    for name, text in (("x/run.yaml", f"include: ../y/p.yaml\n{RUN}{BUDGET}"),
                       ("y/p.yaml", PRICES.replace("count: 0", "count: 1"))):  # fmt: skip
        storage.write_bytes(f"memory://layers/{name}", text.encode())
    found = RunConfig.load("memory://layers/x/run.yaml").cluster.offers
    assert [o.pool for o in found] == pools


def test_a_file_that_is_included_twice_lies_where_it_was_included_first() -> None:
    write(
        prices=PRICES.replace("count: 0", "count: 1"),
        cheaper="include: prices.yaml\ncluster: {offers: [{pool: slow, price_per_hour: 0.1}]}\n",
        more="include: prices.yaml\n",
        run=f"include: [cheaper.yaml, more.yaml]\n{RUN}{BUDGET}",
    )
    assert RunConfig.load("run.yaml").cluster.offers[1].price_per_hour == 0.1


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ("", "prices.yaml is empty; write the sections"),
        ("- 1", "prices.yaml holds no keys"),
        ("text", "prices.yaml holds no keys"),
        ("a: [1", "prices.yaml line 1, column 6: expected ',' or ']'"),
        ("a: !!python/object:os.system {}", "prices.yaml line 1, column 4: the tag"),
        ("a: 1\na: 2", "prices.yaml line 2, column 1: key 'a' stands twice"),
        ("a: &a [*a]", "prices.yaml holds values more than 50 levels deep"),
        ("include: run.yaml", "prices.yaml: include 'run.yaml' leads back to a file that"),
        ("include: prices.yaml", "prices.yaml: include 'prices.yaml' leads back to a file that"),
        ("include: 3", "prices.yaml: include is 3; write the path of a file, or a list of paths"),
        ("include: [a, [b]]", "prices.yaml: include is ['b']; write the path of a file"),
        ("include: ' '", "prices.yaml: include is ' '; write the path of a file"),
        ("include: {a: b}", "prices.yaml: include is {'a': 'b'}; write the path of a file"),
        ("include: none.yaml", "prices.yaml: include 'none.yaml' does not exist; give the path"),
        ("include: .", "prices.yaml: include '.' is a folder; give the path of a YAML file"),
        ("include: binary", "prices.yaml: include 'binary' is not a text file"),
        ("include: long", "prices.yaml: include 'long' has 2,097,152 bytes"),
        ("include: nonsense://x", "prices.yaml: include 'nonsense://x' cannot be read: "),
        ("include: ~nobody-here/x", "prices.yaml: include '~nobody-here/x' does not exist"),
        ('include: "a\\0b"', r"prices.yaml: include 'a\x00b' cannot be read: "),
    ],
)
def test_what_cannot_be_included_is_one_message_that_names_file_and_key(
    folder: Path, prices: str, message: str
) -> None:
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    (folder / "long").write_bytes(b" " * 2**21)
    write(run=f"include: prices.yaml\n{RUN}{OFFERS}{BUDGET}", prices=prices)
    told = refused()
    assert told.startswith(message)
    assert len(told.splitlines()) == 1


def test_a_missing_overlay_is_named() -> None:
    write(run=RUN + BUDGET)
    message = "--overlay none.yaml does not exist; give the path of a YAML file"
    assert refused("run.yaml", "none.yaml") == message
    assert refused("run.yaml", overrides=("include=x",)).startswith("--set 'include=x': include is")


def test_chains_and_crowds_of_files_have_an_end() -> None:
    chain = {f"f{i}": f"include: f{i + 1}.yaml\n" for i in range(MAX_DEPTH + 1)}
    write(**chain, f9=PRICES, run=f"include: f1.yaml\n{RUN}{OFFERS}{BUDGET}")
    assert refused() == (
        f"f8.yaml: include 'f9.yaml' lies more than {MAX_DEPTH} files deep; include fewer"
    )
    names = [f"g{i}" for i in range(MAX_FILES)]
    write(**dict.fromkeys(names, PRICES), run=f"include: [{', '.join(f'{n}.yaml' for n in names)}]")
    assert f"in more than {MAX_FILES} files" in refused()


def test_a_link_to_itself_under_another_name_is_a_circle(folder: Path) -> None:
    (folder / "other.yaml").symlink_to("run.yaml")
    write(run=f"include: other.yaml\n{RUN}{OFFERS}{BUDGET}")
    assert "leads back" in refused()


@pytest.mark.parametrize(
    ("where", "text", "message"),
    [
        ("prices", PRICES.replace("0.5", "-0.5"),
         "prices.yaml: cluster.offers[1].price_per_hour is -0.5 in pool 'slow'"),
        ("prices", PRICES.replace("price_per_hour: 0.5", "prize: 1"),
         "prices.yaml: cluster.offers[1].prize is not a known key; did you mean price_per_hour?"),
        ("prices", PRICES + BUDGET.replace("4.0", "-4"),
         "prices.yaml: budget.average_per_hour_usd is -4.0; it must be positive"),
        ("over", "cluster: {offers: [{pool: slow, count: 2.5}]}",
         "over.yaml: cluster.offers[0].count is 2.5; write a whole number"),
        ("over", "training: {steps: many}", 'over.yaml: training.steps is "many"; write a whole'),
        ("over", "cluster:", "over.yaml: cluster is missing; write cluster: {source:"),
        ("over", "cluster: {offers: [{pool: new, kind: t4}]}",
         "over.yaml: cluster.offers[0].price_per_hour is missing; write price_per_hour: ..."),
        ("over", "cluster: {offers: [{pool: slow, memory_gib: 42949672960}]}",
         "over.yaml: cluster.offers[0].memory_gib is 42949672960"),
        ("over", "slots: 3", "over.yaml: slots is not a known key"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_the_file_in_which_it_stands(
    where: str, text: str, message: str
) -> None:
    files = {"prices": PRICES, "over": "{}", "run": f"include: prices.yaml\n{RUN}{OFFERS}"}
    write(**files | {where: text})
    if "budget" not in text:
        write(run=files["run"] + BUDGET)
    told = refused("run.yaml", "over.yaml")
    assert told.startswith(message)


def test_a_pool_twice_in_one_file_is_refused_though_another_file_has_it() -> None:
    offer = "{pool: slow, kind: t4, price_per_hour: 1}"
    write(prices=PRICES, run=f"include: prices.yaml\n{RUN}{OFFERS}{BUDGET}")
    write(over=f"cluster: {{offers: [{offer}, {offer}]}}")
    told = refused("run.yaml", "over.yaml")
    assert "cluster.offers names pool 'slow' twice; give every pool a name of its own" in told


def test_mistakes_of_several_files_are_listed_at_once() -> None:
    write(
        prices=PRICES.replace("0.5", "-0.5"),
        run=f"include: prices.yaml\n{RUN}{OFFERS}{BUDGET}",
        over="control: {slot_s: soon}",
    )
    assert refused("run.yaml", "over.yaml", overrides=("metrics.prt=1",)).splitlines() == [
        "run.yaml has 3 errors:",
        "  - prices.yaml: cluster.offers[1].price_per_hour is -0.5 in pool 'slow'; it must be "
        "positive",
        "  - metrics.prt is not a known key; did you mean port?",
        '  - over.yaml: control.slot_s is "soon"; write a number of seconds',
    ]


def test_a_price_list_given_as_a_run_is_told_to_be_included() -> None:
    write(prices="cluster: {offers: [{pool: a, kind: t4, count: 0, price_per_hour: 1.0}]}")
    told = refused("prices.yaml").splitlines()
    assert told[0] == "prices.yaml has 4 errors:"
    assert told[-1].startswith("  a price list or an overlay is no run by itself: give the run")
    write(run="run: {name: a}\nbudget: {}")
    assert "overlay" not in refused()


def test_a_value_that_was_set_is_no_longer_told_of_the_file_below() -> None:
    write(prices=PRICES, run=f"include: prices.yaml\n{RUN}{OFFERS}{BUDGET}")
    told = refused(overrides=("cluster.offers[1].price_per_hour=-1",))
    assert told.startswith("run.yaml: cluster.offers[1].price_per_hour is -1.0 in pool 'slow'")


def test_names_may_be_of_any_script(folder: Path) -> None:
    write(**{"preise-für-alle": PRICES, "run": f"include: preise-für-alle.yaml\n{RUN}{OFFERS}"})
    write(über=BUDGET)
    assert RunConfig.load("run.yaml", (), ["über.yaml"]).cluster.offers[0].pool == "slow"


def test_what_aliases_share_is_not_changed_together() -> None:
    layers = Layers("run.yaml")
    shared = {"x": 1}
    layers.lay({"a": shared, "b": shared}, "run.yaml")
    layers.lay({"a": {"x": 2}}, "over.yaml")
    layers.set("b.x=3")
    assert layers.data == {"a": {"x": 2}, "b": {"x": 3}}
    assert shared == {"x": 1}


def test_the_schema_of_a_part_takes_what_a_whole_file_lacks_and_no_wrong_key() -> None:
    whole, part = (json.loads(json.dumps(config_schema(part=p))) for p in (False, True))
    assert "include" in whole["properties"]
    assert "include" in part["properties"]
    prices = {"include": ["a.yaml"], "cluster": {"offers": [{"pool": "a", "price_per_hour": 1}]}}
    jsonschema.validate(prices, part)
    with pytest.raises(jsonschema.ValidationError, match="required"):
        jsonschema.validate(prices, whole)
    with pytest.raises(jsonschema.ValidationError, match="prize"):
        jsonschema.validate({"cluster": {"offers": [{"prize": 1}]}}, part)


def test_a_server_that_is_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is one where nothing listens."""
    monkeypatch.setattr(retries, "WAITS_S", ())
    write(run="include: http://127.0.0.1:9/prices.yaml\n" + RUN)
    assert refused().startswith(
        "run.yaml: include 'http://127.0.0.1:9/prices.yaml' cannot be read: "
    )
