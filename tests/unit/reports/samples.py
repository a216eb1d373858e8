"""A SlotRecord to show, and a reader of pages that are shown."""

from dataclasses import replace
from html.parser import HTMLParser

from benchmarks.builders import make_device, make_group, make_plan
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.slot import SlotRecord
from orchestrator.core.view import DeviceView, Rates

FAST, SLOW = make_device("fast-0"), make_device("slow-0")
PLAN = make_plan(make_group([FAST, SLOW], [0, 7, 10], [4, 4, 3]))


def a_record(**changes: object) -> SlotRecord:
    record = SlotRecord(
        slot=4, time_s=240.0, step=17, generation=3, decision="keep", reason="best by far",
        plan=PLAN, next_plan=make_plan(), predicted=Rates(0.5, 128.0, 3.5, (("fast-0", 1000),)),
        measured=Rates(0.55, 116.0, 3.5), backlog_usd=0.1, penalty_weight=2.0,
        price_of_money_samples_per_usd=0.05, marginal_values=(("device_samples_per_s.fast", 0.3),),
        spent_usd=1.0, budget_usd=1.2, overspend_bound_usd=0.4, solve_s=0.01, migration_s=0.0,
        moved_bytes=0, control_cpu_s=0.02,
        devices=(DeviceView("fast-0", "a100-40", "fast", "used", 1.0, False, 3.67),
                 DeviceView("slow-0", "t4", "slow", "used", 2.5, True, 0.35),
                 DeviceView("gone-0", "t4", "gone", "lost", 1.0, False, 0.35)),
        loss=2.5, stragglers=("slow-0",), budget=BudgetOptions(average_per_hour_usd=4.0),
    )  # fmt: skip
    return replace(record, **changes)  # type: ignore[arg-type]


VOID = {"meta", "br"}


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href", "srcset") and v]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes something else"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read_page(page: str) -> _Page:
    found = _Page()
    found.feed(page)
    found.close()
    assert not found.open
    return found
