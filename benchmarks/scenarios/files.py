"""Reads scenario files: who takes part, what is trained, what happens, what is compared.

A file's ``cluster``, ``training``, ``budget`` and ``control`` have the form of docs/config.md,
its ``world`` that of docs/scenarios.md. A case picks a model and so many devices of each pool.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from benchmarks import reference_data
from benchmarks.reference_data import Share
from benchmarks.scenarios.models import Kind, analytic_profile
from orchestrator.config import RunConfig
from orchestrator.core.cluster import known_kinds
from orchestrator.core.model import ModelProfile
from orchestrator.storage import to_json

FOLDER = Path(__file__).parent
HOUR_S = 3600.0
MEASURED, ANALYTIC = "measured", "analytic"


@dataclass(frozen=True)
class ScenarioFile:
    """One file, as it stands."""

    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        """S1 to S13."""
        return str(self.data["scenario"])

    @property
    def kind(self) -> str:
        """Who runs it: a key of ``__main__.RUNNERS``."""
        return str(self.data["kind"])

    def cases(self, *, quick: bool) -> list["Case"]:
        """All, or those of the short form."""
        rows = self.data.get("cases") or [{"name": self.name}]
        return [Case(self, row) for row in rows if not quick or row.get("quick", False)]


@dataclass(frozen=True)
class Case:
    """One problem of a scenario."""

    file: ScenarioFile
    row: Mapping[str, Any]

    @property
    def name(self) -> str:
        """For the table."""
        return str(self.row["name"])

    def get(self, key: str, default: Any = None) -> Any:
        """Of the case, else of the whole file."""
        return self.row.get(key, self.file.data.get(key, default))

    @cached_property
    def model_name(self) -> str:
        """A key of the file's ``models``; the only one when the case names none."""
        return str(self.get("model") or next(iter(self.file.data["models"])))

    @cached_property
    def _model(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.file.data["models"][self.model_name]
        return found

    @cached_property
    def counts(self) -> dict[str, int]:
        """Devices of every pool that takes part."""
        given = self.get("counts") or {o["pool"]: o["count"] for o in self._offers}
        return {pool: int(count) for pool, count in given.items() if count}

    @cached_property
    def source(self) -> str:
        """Where times and links come from: measured data when they are there, else the file."""
        has_data = "measured" in self._model and not reference_data.missing()
        return MEASURED if has_data else ANALYTIC

    @cached_property
    def microbatch(self) -> int:
        """The largest one; measured data name their own."""
        if self.source == MEASURED:
            return reference_data.largest_microbatch(self._model["measured"], self._mix)
        return int(self._model["microbatch"])

    @cached_property
    def profile(self) -> ModelProfile:
        """Times and sizes of the model's layers."""
        if self.source == MEASURED:
            names = dict.fromkeys(share.kind for share in self._mix)
            return reference_data.read_profile(self._model["measured"], tuple(names))
        return analytic_profile(self.model_name, self._model, self._kinds, self.microbatch)

    @cached_property
    def config(self) -> RunConfig:
        """The whole run as one of the project's own files."""
        batch = int(self.get("global_batch") or self._model["global_batch"])
        prices = {o["pool"]: float(o["price_per_hour"]) for o in self._offers}
        whole = sum(prices[pool] * count for pool, count in self.counts.items())
        budget = {
            "average_per_hour_usd": whole * float(self.get("budget_share", 1.0)),
            **(self.get("budget") or {}),
        }
        return RunConfig.parse(
            yaml.safe_dump(
                {
                    "run": {"name": self.file.name.lower()},
                    "training": {
                        "task": "examples.byte_gpt:task",  # planning never calls it
                        "steps": 10**6,
                        "global_batch": batch,
                        "microbatch": min(batch, self.microbatch),
                        **(self.get("training") or {}),
                    },
                    "cluster": self._cluster,
                    "budget": budget,
                    "control": {"max_team": 8, **(self.get("control") or {})},
                }
            ),
            source=f"scenario {self.file.name}",
        )

    @property
    def _offers(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.file.data["cluster"]["offers"]
        return found

    @property
    def _mix(self) -> list[Share]:
        """The pools as the measured data call their kinds."""
        names = {kind.lower(): kind for kind in reference_data.MEMORY_GB}
        rows = {o["pool"]: o for o in self._offers}
        return [
            Share(names[rows[pool]["kind"]], count, float(rows[pool]["price_per_hour"]))
            for pool, count in self.counts.items()
        ]

    @property
    def _cluster(self) -> dict[str, Any]:
        """Offers and links; measured links where the data have them."""
        if self.source == MEASURED and not self.get("own_links", False):
            mix, model = self._mix, self._model["measured"]
            found = to_json(reference_data.cluster_options(mix, model=model))
            assert isinstance(found, dict), "a section is a mapping"
            return found
        offers = [
            {**offer, "count": self.counts[offer["pool"]]}
            for offer in self._offers
            if offer["pool"] in self.counts
        ]
        own = {name for o in self._offers for name in (o["pool"], o.get("zone", "z1"))}
        here = {name for o in offers for name in (o["pool"], o.get("zone", "z1"))}
        absent = own - here
        links = [
            link
            for link in self.file.data["cluster"]["links"]
            if not absent & {link.get("pool"), *link.get("between", ())}
        ]
        return {"source": "file", "offers": offers, "links": links}

    @property
    def _kinds(self) -> list[Kind]:
        achieved = self._model["tflops"]
        rates = self._model.get("team_gbytes_per_s", {})
        kinds = dict.fromkeys(o["kind"] for o in self._offers if o["pool"] in self.counts)
        return [
            Kind(
                kind,
                float(achieved[kind]) * 1e12,
                float(self._memory_rate(kind)),
                float(rates.get(kind, 10.0)) * 1e9,
            )
            for kind in kinds
        ]

    def _memory_rate(self, kind: str) -> float:
        sheet = known_kinds().get(kind)
        known = sheet.memory_bandwidth_bytes_per_s if sheet else None
        given = self.file.data.get("memory_gbytes_per_s", {}).get(kind)
        return float(given) * 1e9 if given else known or 1e12


@cache
def _all() -> dict[str, Mapping[str, Any]]:
    every = [yaml.safe_load(p.read_text("utf-8")) for p in sorted(FOLDER.glob("s[0-9]*.yaml"))]
    return {str(data["scenario"]): data for data in every}


def load(name: str) -> ScenarioFile:
    """A scenario's file by its name. Raises KeyError when there is none."""
    return ScenarioFile(_all()[name])


def names() -> list[str]:
    """Of all files, in order."""
    return list(_all())
