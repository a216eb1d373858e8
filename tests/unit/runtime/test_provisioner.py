"""What Ray's autoscaler is asked for, and how often."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from orchestrator.runtime.provisioner import RayProvisioner

if TYPE_CHECKING:
    from orchestrator.runtime.presence import RayPresence

BIG, SMALL = {"lyray.pool.big": 1.0}, {"lyray.pool.small": 1.0}


class Site:
    """A presence and an autoscaler that note what they are told."""

    def __init__(self) -> None:
        self.given_back: list[frozenset[str]] = []
        self.asked: list[list[dict[str, float]]] = []
        self.fails = False

    def give_back(
        self, released: frozenset[str], counts: Mapping[str, int], grace_s: float
    ) -> None:
        self.given_back.append(released)

    def ask(self, bundles: list[dict[str, float]]) -> None:
        if self.fails:
            raise ConnectionError("no control plane")
        self.asked.append(bundles)


def test_the_whole_wish_is_sent_one_bundle_a_device_and_only_when_it_changes() -> None:
    site = Site()
    provisioner = RayProvisioner(cast("RayPresence", site), 4.0, site.ask)
    for counts in ({"big": 1, "small": 2}, {"big": 1, "small": 2}, {"big": 1, "small": 0}):
        provisioner.request(counts, frozenset())
    assert site.asked == [[BIG, SMALL, SMALL], [BIG]]
    assert len(site.given_back) == 3


def test_an_autoscaler_that_cannot_be_reached_stops_nothing_and_is_asked_again() -> None:
    site = Site()
    provisioner = RayProvisioner(cast("RayPresence", site), 4.0, site.ask)
    site.fails = True
    provisioner.request({"small": 1}, frozenset({"small-1"}))
    assert site.given_back == [{"small-1"}]
    site.fails = False
    provisioner.request({"small": 1}, frozenset())
    assert site.asked == [[SMALL]]
