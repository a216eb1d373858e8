"""Every page that lyray writes, opened in a real browser without a network."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.builders import make_cluster, make_device, make_group, make_plan, make_problem
from orchestrator.config import RunConfig
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime, timeline
from orchestrator.reports.bill import compare_bill
from orchestrator.reports.comparison import compare_runs
from orchestrator.reports.comparison_page import comparison_page
from orchestrator.reports.plan_page import plan_page
from orchestrator.reports.run_page import run_page
from orchestrator.reports.run_report import read_run
from orchestrator.reports.tables import make_row
from orchestrator.reports.worth import Worth
from orchestrator.whatif.rehearsal import Rehearsal
from orchestrator.whatif.rehearsal_page import rehearsal_page
from tests.chromium import why_not
from tests.pages.browser import SCHEMES, WIDTHS, Seen, look
from tests.unit.reports.long_run import write_run
from tests.unit.reports.samples import read_page

CONFIG = """
run: {name: rehearsed}
training: {task: "examples.byte_gpt:task", global_batch: 8, steps: 10}
cluster:
  source: emulated
  offers: [{pool: fast, kind: t4, count: 1, zone: z1, price_per_hour: 1.0}]
budget: {average_per_hour_usd: 2.0}
"""


def the_plan_page() -> str:
    devices = [make_device(f"{pool}-{i}") for pool in ("a100", "t4") for i in range(4)]
    cluster = make_cluster(devices, price_usd_per_s=0.001)
    cost = CostModel(make_problem(cluster, batch_samples=24))
    groups = (make_group(devices[:2], [0, 2, 4], [1] * 8),
              make_group([devices[2]], [0, 4], [2] * 4),
              make_group(devices[4:6], [0, 3, 4], [4, 4]))  # fmt: skip
    plan = make_plan(*groups)
    row = make_row("joint", plan, retime(cost, groups, "1f1b"), cluster, billing_speedup=60.0)
    worth = Worth("the best plan", (("device_samples_per_s.t4", 4.0),), (("t4", 0.35),))
    timelines = [timeline(cost, group, "1f1b") for group in groups]
    rows = [replace(row, chosen=True), replace(row, strategy="even-split")]
    return plan_page("byte-gpt", rows, cluster, timelines, ["times are interpolated"], worth)


def the_rehearsal_page() -> str:
    curves = {"joint": 1.0, "even-split": 0.7, "greedy": 0.5, "do-nothing": 0.0}
    results = [
        Rehearsal(name, 48.0, 100, int(1e6 * speed), 90.0 * speed, 96.0,
                  points=tuple((float(h), int(2e4 * speed * h), 1.9 * speed * h)
                               for h in range(49)))
        for name, speed in curves.items()
    ]  # fmt: skip
    results.append(Rehearsal("pase", problem="no plan fits"))
    return rehearsal_page(RunConfig.parse(CONFIG), results)


def the_pages(folder: Path) -> dict[str, str]:
    """Each page by name; the report also of few and of many devices."""
    joint = read_run(write_run(folder / "joint", num_slots=120, num_devices=20))
    even = read_run(write_run(folder / "even", num_slots=60, num_devices=2, speed=0.5,
                              strategy="even-split"))  # fmt: skip
    large = read_run(write_run(folder / "large", num_slots=60, num_devices=200, plan_every=3))
    bill = compare_bill(joint.pools, {"fast": joint.pools[0].usd, "disk": 3.0})
    return {
        "report": run_page(joint, bill),
        "small-report": run_page(even),
        "large-report": run_page(large),
        "comparison": comparison_page(compare_runs((joint, even))),
        "plan": the_plan_page(),
        "rehearsal": the_rehearsal_page(),
    }


@pytest.fixture(scope="module", params=list(SCHEMES))
def looked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, tuple[Seen, ...], str]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("pages")
    pages = the_pages(folder)
    for text in pages.values():
        assert read_page(text).outside == []
        assert not re.search(r"url\(|@import|<script|https?://(?!www\.w3\.org)", text)
    return request.param, *look(pages, request.param, folder)


def test_every_page_is_drawn_whole_and_alone(looked: tuple[str, tuple[Seen, ...], str]) -> None:
    scheme, seen, console = looked
    assert console == ""
    assert len(seen) == 6 * len(WIDTHS)
    for page in seen:
        assert page.dark == (scheme == "dark"), page
        assert page.requests == (), page
        assert page.empty_drawings == (), page
        assert page.odd == (), page
        assert page.overflows_px == 0, page
        assert page.width == "phone" or page.wide == (), page


def test_every_text_can_be_read(looked: tuple[str, tuple[Seen, ...], str]) -> None:
    """WCAG 2.2, 1.4.3: a contrast of 4.5, of the colours as they are drawn."""
    _, seen, _ = looked
    for page in seen:
        assert page.num_texts > 40, page
        assert page.faint == (), page
        assert page.overlaps == (), page
