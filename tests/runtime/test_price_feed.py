"""Prices while a run goes on: who waits for whom, how old they are, and what is told."""

import threading
import time
from pathlib import Path

import pytest

from orchestrator.control.backend import PriceFeedOptions
from orchestrator.core.cluster import Offer
from orchestrator.price_sources import HttpPrices, make_source
from orchestrator.runtime import price_feed
from orchestrator.runtime.price_feed import PricedPresence, PriceFeed
from orchestrator.runtime.roster import Roster
from orchestrator.telemetry.price_rows import PriceRow, Reading
from orchestrator.telemetry.prices import Prices
from tests.price_server import price_server, prices, says
from tests.runtime.crew import FakePresence

OPTIONS = PriceFeedOptions(url="http://127.0.0.1:9/", every_s=1e6, max_age_s=900.0)
PER_S = 1 / 3600


def offer(pool: str, per_hour: float, **given: object) -> Offer:
    return Offer(pool=pool, kind="t4", zone="z", price_usd_per_s=per_hour * PER_S, **given)  # type: ignore[arg-type]


OFFERS = (offer("fast", 3.0, discount_ratio=0.5), offer("slow", 0.5))


class Said:
    """A source that says what a test puts there, in the thread that asks."""

    name = "the source"

    def __init__(self, *answers: Reading | Exception) -> None:
        self.answers = list(answers)

    def read(self) -> Reading:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def reading(**per_hour: float) -> Reading:
    return Reading(tuple(PriceRow(pool=p, price_per_hour=c) for p, c in per_hour.items()))


class Watched:
    """A feed that is asked anew before every look, and what it told."""

    def __init__(self, *answers: Reading | Exception, **given: object) -> None:
        self.told: list[str] = []
        options = given.pop("options", OPTIONS)
        assert isinstance(options, PriceFeedOptions)
        self.feed = PriceFeed(Said(*answers), options, warn=self.told.append, **given)  # type: ignore[arg-type]

    def look(self, now_s: float) -> dict[str, tuple[float, float | None]]:
        """Dollars an hour and time of reading, by pool."""
        self.feed.wait()
        return self.glance(now_s)

    def glance(self, now_s: float) -> dict[str, tuple[float, float | None]]:
        self.feed.look(now_s)
        found = self.feed.priced(OFFERS)
        return {
            o.pool: (
                round(o.price_usd_per_s / PER_S, 9),
                None if o.read_s is None else round(o.read_s, 9),
            )
            for o in found
        }


def test_listed_prices_are_paid_with_the_discount_and_pools_beside_the_feed_stay() -> None:
    """skypilot-org/skypilot#1962: discounts, on prices of a feed as on those of the file."""
    assert Watched(reading(fast=8.0)).look(10.0) == {"fast": (4.0, 10.0), "slow": (0.5, None)}


def test_prices_are_dollars_a_billed_second() -> None:
    found = Watched(reading(slow=2.0), billing_speedup=60.0).look(10.0)
    assert found["slow"] == (120.0, 10.0)


def test_a_reading_that_fails_leaves_the_pools_of_the_feed_out_until_one_comes() -> None:
    watched = Watched(reading(fast=8.0), OSError("it is down"), reading(fast=9.0))
    watched.look(10.0)
    assert watched.look(20.0) == {"slow": (0.5, None)}
    assert watched.look(30.0) == {"fast": (4.5, 30.0), "slow": (0.5, None)}
    assert watched.told == [
        "price_feed: the source: it is down; the last prices count and grow old"
    ]


def test_the_same_failure_is_told_once_and_again_after_a_good_reading() -> None:
    down = OSError("down")
    watched = Watched(down, down, reading(fast=1.0), down, ValueError("no list"))
    for now_s in range(5):
        watched.look(float(now_s))
    assert [line.split(": ")[2].split(";")[0] for line in watched.told] == [
        "down", "down", "no list",
    ]  # fmt: skip


def test_a_feed_that_never_answered_counts_as_that_of_every_pool_and_ages() -> None:
    """skypilot-org/skypilot#1437, #1438, #976: prices that nobody read again are no prices."""
    watched = Watched(*[OSError("down")] * 10)
    believed = Prices(OFFERS, 0.0, (), 900.0)
    for now_s in (0.0, 300.0, 600.0, 901.0):
        watched.look(now_s)
        believed.update(watched.feed.priced(OFFERS), now_s)
        assert dict(believed.age_s(now_s)) == pytest.approx({"fast": now_s, "slow": now_s})
    assert {doubt.cause for doubt in believed.doubts(901.0)} == {"stale"}


def test_the_age_of_a_price_is_that_of_its_row_and_not_of_the_reading() -> None:
    """skypilot-org/skypilot#1437: a server may answer at once with the prices of last week."""
    row = PriceRow(pool="fast", price_per_hour=4.0, unix_s=time.time() - 300.0)
    watched = Watched(reading(), Reading((row,)), Reading((row,)))
    watched.look(0.0)
    first = watched.look(1000.0)["fast"][1]
    assert first == pytest.approx(700.0, abs=5.0)
    assert watched.look(1100.0)["fast"][1] == first


def test_a_row_from_before_this_life_counts_as_read_at_its_start() -> None:
    row = PriceRow(pool="fast", price_per_hour=4.0, unix_s=time.time() - 300.0)
    watched = Watched(reading(), Reading((row,)))
    watched.look(1000.0)
    assert watched.look(1010.0)["fast"] == (2.0, 1000.0)
    (fast, _) = watched.feed.priced(OFFERS)
    assert fast.read_s is not None
    assert fast.read_s > 1000.0  # so that it is news beside what an earlier life has seen


def test_rows_that_are_too_old_from_the_start_are_passed_over_and_told() -> None:
    """skypilot-org/skypilot#1437: decisions on prices of last week."""
    row = PriceRow(pool="fast", price_per_hour=4.0, unix_s=time.time() - 7 * 86_400)
    watched = Watched(Reading((row,)), Reading((row,)))
    assert watched.look(10.0)["fast"] == (1.5 * 2, None)
    watched.look(20.0)
    assert watched.told == [
        "price_feed: the source: the price of pool fast is passed over: it is 10080 billed minutes "
        "old"
    ]


def test_rows_of_a_file_come_into_force_at_their_time_without_another_reading() -> None:
    rows = [PriceRow(pool="slow", price_per_hour=c, start_s=s) for s, c in ((0, 1), (600, 2))]
    watched = Watched(Reading(tuple(rows)), billing_speedup=60.0)
    assert watched.look(0.0)["slow"] == (60.0, 0.0)
    assert watched.glance(9.9)["slow"] == (60.0, 0.0)
    assert watched.glance(10.0)["slow"] == (120.0, 10.0)


def test_a_file_that_grows_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("time_s,pool,price_per_hour\n0,fast,8\n")
    options = PriceFeedOptions(path=str(path))
    feed = PriceFeed(make_source(options, ["fast", "slow"]), options)
    shown = PricedPresence(FakePresence((), OFFERS), feed)
    for text, per_hour in (("", 4.0), ("50,fast,9\n", 4.5), ("60,fast,-1\n", 4.5)):
        with path.open("a") as file:
            file.write(text)
        feed.wait()
        shown.look(0, 70.0)
        assert shown.offers()[0].price_usd_per_s == pytest.approx(per_hour * PER_S)
    path.write_bytes(b"\xff\xfe\x00")
    feed.wait()
    shown.look(0, 80.0)
    assert [o.pool for o in shown.offers()] == ["slow"]


def test_a_look_takes_no_time_while_the_source_takes_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()

    class Slow:
        name = "the slow source"

        def read(self) -> Reading:
            ended.wait()
            return reading(fast=8.0)

    told: list[str] = []
    feed = PriceFeed(Slow(), OPTIONS, warn=told.append)
    monkeypatch.setattr(price_feed, "ANSWER_S", 0.0)
    feed.wait()
    began_s = time.monotonic()
    for now_s in range(100):
        feed.look(float(now_s))
    assert time.monotonic() - began_s < 1.0
    assert threading.active_count() < 20  # one reading at a time
    assert [line.split(": ")[1] for line in told] == ["the slow source"]
    assert not feed.priced(OFFERS)
    ended.set()
    deadline_s = time.monotonic() + 10.0
    while not feed.priced(OFFERS) and time.monotonic() < deadline_s:
        feed.look(100.0)
    assert feed.priced(OFFERS)[0].read_s == 100.0


def test_it_asks_again_when_it_is_due_and_not_before() -> None:
    asked = []

    class Counting:
        name = "the source"

        def read(self) -> Reading:
            asked.append(1)
            return reading()

    for every_s, expected in ((1e6, 1), (1e-9, 3)):
        asked.clear()
        options = PriceFeedOptions(url="http://h/", every_s=1.0)
        object.__setattr__(options, "every_s", every_s)  # shorter than a file may say
        feed = PriceFeed(Counting(), options)
        feed.wait()
        for _ in range(2):
            feed.look(0.0)
            if feed._asking is not None:
                feed._asking.join()
        assert len(asked) == expected


def test_a_reading_that_goes_wrong_in_any_other_way_is_a_failed_one() -> None:
    watched = Watched(RuntimeError("secret"))
    watched.look(0.0)
    assert watched.told == [
        "price_feed: the source: RuntimeError: it could not be read; the last prices count and grow"
        " old"
    ]


def test_a_server_that_sends_ever_other_nonsense_is_told_of_a_few_times_only() -> None:
    lines = [Reading((), tuple(f"{i} {j}" for j in range(1000))) for i in range(3)]
    watched = Watched(*lines)
    for now_s in range(3):
        watched.look(float(now_s))
    assert len(watched.told) == price_feed.MAX_PASSED_OVER


TOKEN = "s3cr3t-t0ken"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (says({"error": TOKEN}, 401), "it answers with status 401"),
        (says(TOKEN.encode()), "it is no JSON (line 1: Expecting value)"),
        (says([{"pool": "fast", "price_per_hour": TOKEN}]), "price_per_hour is '***'"),
        (says([{"pool": TOKEN, "price_per_hour": 0}]), "of pool '***'"),
        (says(prices(fast=-1.0)), "price_per_hour is -1.0"),
    ],
)
def test_no_message_shows_the_token(tmp_path: Path, answer: object, told: str) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    lines: list[str] = []
    with price_server(answer) as server:  # type: ignore[arg-type]
        feed = PriceFeed(HttpPrices(server.url, str(path), ["fast"]), OPTIONS, warn=lines.append)
        feed.wait()
        feed.look(0.0)
        assert server.asked == [("/prices.json", f"Bearer {TOKEN}")]
    assert told in lines[0]
    assert TOKEN not in str(lines)


@pytest.mark.parametrize(
    ("held", "told"),
    [
        (None, "does not exist"),
        (b"", "does not hold one token"),
        (b"two words", "does not hold one token"),
        (b"a\r\nX-Evil: 1", "does not hold one token"),
        ("ü".encode(), "does not hold one token"),
        (b"\xff\x00", "does not hold one token"),
        (b"x" * 9000, "has more than 8,192 bytes"),
    ],
)
def test_a_file_without_a_token_is_named_and_nobody_is_asked(
    tmp_path: Path, held: bytes | None, told: str
) -> None:
    path = tmp_path / "token"
    if held is not None:
        path.write_bytes(held)
    with price_server(says([])) as server:
        with pytest.raises(OSError, match=told) as error:
            HttpPrices(server.url, str(path), ["fast"]).read()
        assert not server.asked
    assert "Evil" not in str(error.value)


def test_a_token_that_changes_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with price_server(says(prices(fast=1.0))) as server:
        source = HttpPrices(server.url, str(path), ["fast"])
        for token in ("one", "two"):
            path.write_text(token)
            assert source.read().rows == (PriceRow(pool="fast", price_per_hour=1.0),)
        assert [told for _, told in server.asked] == ["Bearer one", "Bearer two"]


def test_that_a_price_was_read_again_ends_no_slot() -> None:
    roster = Roster.__new__(Roster)
    now = (offer("fast", 3.0, read_s=60.0),)
    roster.offers = lambda: now  # type: ignore[method-assign]
    assert not roster.is_repriced([offer("fast", 3.0)])
    assert not roster.is_repriced([])
    assert roster.is_repriced([offer("fast", 3.1)])


def test_rows_repeated_by_a_server_without_times_confirm_a_jump() -> None:
    """The third reading in a row that agrees is believed, as any other price is."""
    watched = Watched(*[reading(fast=80.0)] * 3)
    believed = Prices(OFFERS, 0.0, (), 900.0)
    found = []
    for now_s in (10.0, 20.0, 30.0):
        watched.look(now_s)
        believed.update(watched.feed.priced(OFFERS), now_s)
        found.append(round(believed.counted(now_s)[0].price_usd_per_s / PER_S, 6))
    assert found == [3.0, 3.0, 40.0]
