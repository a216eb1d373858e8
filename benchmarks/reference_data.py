"""Reads measured layer times, sizes and links of several GPU kinds into our own forms.

The data lie outside the project; nothing of them is copied into it. The environment variable
``LYRAY_REFERENCE_DATA`` names their folder, otherwise it is ``shared/data`` beside the checkout.
Where there is none, what needs it is skipped and says so.
``python -m benchmarks.reference_data A100-40=8 V100-16=8 -o DIR`` writes the profile and a
file for ``lyray plan``; a price is given as in ``A100-80=8@4.10`` where the data have none.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from orchestrator.control.backend import ClusterOptions, LinkOptions, OfferOptions
from orchestrator.core.cluster import known_kinds
from orchestrator.core.model import LayerSizes, LayerTimes, ModelProfile, profile_to_json
from orchestrator.storage import to_json

DATA = Path(os.environ.get("LYRAY_REFERENCE_DATA", Path(__file__).parents[2] / "shared" / "data"))
PROFILES, TRACES = DATA / "gpu_profiles", DATA / "spot_traces"

OPT_350, GPT_NEO = "OPT-350", "GPT-Neo-2.7"
GLOBAL_BATCH = {OPT_350: 1024, GPT_NEO: 2048}
STATE_BYTES_PER_PARAM, BYTES_PER_PARAM = 24, 4
DEVICES_PER_NODE = 4
ZONE = "us-central1-a"  # the only one with all kinds
GB, GIB = 1e9, 2**30
MEMORY_GB = {
    "A100-40": 40, "A100-80": 80, "V100-16": 16, "GH-96": 96, "RTX-3090": 24, "RTX-2080": 11,
    "Titan-RTX": 24,
}  # fmt: skip
PRICE_PER_HOUR = {"A100-40": 3.67, "V100-16": 2.86, "GH-96": 11.06}

MEGABYTE, LARGEST_EXPONENT = 1e6, 10
"""Bandwidths are fitted over messages of 1 MB to 2^10 MB."""

Fit: TypeAlias = tuple[tuple[float, float, float], float]
"""Polynomial c0 x^2 + c1 x + c2 in GB/s over x = log2(MB), and the largest bytes/s seen."""


@dataclass(frozen=True, slots=True)
class Share:
    """Devices of one kind in a mix."""

    kind: str
    count: int
    price_per_hour: float | None = None  # None: the data's

    @property
    def price(self) -> float:
        """Dollars per device and hour. Raises ValueError where neither mix nor data have one."""
        found = self.price_per_hour or PRICE_PER_HOUR.get(self.kind)
        if found is None:
            raise ValueError(f"{self.kind} has no price in the data; write {self.kind}=N@PRICE")
        return found


Mix: TypeAlias = Sequence[Share]


def missing() -> str:
    """Why the data cannot be read; empty when they are there."""
    if PROFILES.is_dir():
        return ""
    return f"there is no reference data at {PROFILES}; LYRAY_REFERENCE_DATA names their folder"


def read_profile(model: str, kinds: Sequence[str] | None = None) -> ModelProfile:
    """The layers of one model as measured, holes and outliers included.

    The update time, one figure repeated on every layer, is that of the largest layer; the
    others take their part of it by parameters. State is 24 bytes a parameter.

    Args:
        model: ``OPT-350`` or ``GPT-Neo-2.7``.
        kinds: As the data call them; None: all.
    """
    tables = _load("profiles_tmp.json")[model]
    sizes = {int(team): _columns(layers) for team, layers in _load("llm_info.json")[model].items()}
    num_layers = len(sizes[1]["params_bytes"])
    times = [
        _times(kind, int(team), int(microbatch), layers, sizes[int(team)]["params_bytes"])
        for kind in (tables if kinds is None else kinds)
        for microbatch, teams in tables[kind].items()
        for team, layers in teams.items()
    ]
    return ModelProfile(
        model=model.lower(),
        dtype="fp32",
        layers=("embedding", *(f"block{i}" for i in range(1, num_layers - 1)), "head"),
        sizes=tuple(
            LayerSizes(team, c["params_bytes"], c["act_output_bytes"], c["act_mem_bytes"])
            for team, c in sorted(sizes.items())
        ),
        times=tuple(sorted(times, key=lambda t: (t.kind, t.team_size, t.microbatch))),
        optimizer_bytes_per_param_byte=STATE_BYTES_PER_PARAM / BYTES_PER_PARAM - 1,
    )


def _load(name: str) -> Any:  # nested JSON of others' making
    return json.loads((PROFILES / name).read_text("utf-8"))


def _columns(layers: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    """Figure to its value in every layer."""
    rows = [layers[str(index)] for index in range(len(layers))]
    return {name: tuple(float(row[name]) for row in rows) for name in rows[0]}


def _times(
    kind: str,
    team: int,
    microbatch: int,
    layers: Mapping[str, Sequence[float]],
    param_bytes: Sequence[float],
) -> LayerTimes:
    rows = [layers[str(index)] for index in range(len(layers))]
    largest = max(param_bytes)
    return LayerTimes(
        kind=kind.lower(),
        team_size=team,
        microbatch=microbatch,
        forward_s=tuple(row[0] for row in rows),
        backward_s=tuple(row[1] for row in rows),
        update_s=tuple(row[2] * p / largest for row, p in zip(rows, param_bytes, strict=True)),
    )


def largest_microbatch(model: str, mix: Mix) -> int:
    """The largest size that was measured on some kind of the mix."""
    tables = _load("profiles_tmp.json")[model]
    return max(int(microbatch) for share in mix for microbatch in tables[share.kind])


def cluster_options(
    mix: Mix,
    *,
    profile: str | None = None,
    model: str = OPT_350,
    node_link_gpus: int = DEVICES_PER_NODE,
) -> ClusterOptions:
    """Offers and links of a mix, nodes of four like devices in one zone.

    A pool is called as its kind. Paths that were not measured (an A100-80 to anything) are
    those of the A100-40, or are left out.

    Args:
        mix: Devices of each kind.
        profile: Path of the profile file, for ``cluster.profile``.
        model: For the speed of kinds that the catalogue lacks.
        node_link_gpus: Paths between nodes are those measured between nodes of so many GPUs.
    """
    return ClusterOptions(
        source="file",
        offers=tuple(
            OfferOptions(
                pool=share.kind.lower(),
                kind=share.kind.lower(),
                count=share.count,
                devices_per_node=DEVICES_PER_NODE,
                zone=ZONE,
                price_per_hour=share.price,
                memory_gib=MEMORY_GB[share.kind] * GB / GIB,
                speed_ratio=None
                if share.kind.lower() in known_kinds()
                else _speed_ratio(share.kind, model),
            )
            for share in mix
        ),
        links=tuple(_links([share.kind for share in mix], str(node_link_gpus))),
        profile=profile,
    )


def _speed_ratio(kind: str, model: str) -> float:
    """Of whole forward passes, over an A100-40's; only a kind without times is priced by it."""
    tables = _load("profiles_tmp.json")[model]
    reference_s, own_s = (
        sum(row[0] for row in tables[name]["1"]["1"].values()) for name in ("A100-40", kind)
    )
    return float(reference_s / own_s)


def _links(kinds: Sequence[str], node_link_gpus: str) -> list[LinkOptions]:
    intra, inter = _load("intra_node_bandwidths.json"), _load("multizone_bandwidths_het.json")
    size = str(DEVICES_PER_NODE)
    found = [
        LinkOptions(within="node", pool=kind.lower(), points=link_points(intra[kind][size]))
        for kind in kinds
    ]
    for source in kinds:
        for target in kinds:
            ends = [{"A100-80": "A100-40"}.get(kind, kind) for kind in (source, target)]
            measured = inter[ZONE][ends[0]].get(node_link_gpus, {}).get(ZONE, {})
            fit = measured.get(ends[1], {}).get(node_link_gpus)
            if fit is None:
                continue
            points = link_points(fit)
            if source == target:
                found.append(LinkOptions(within="zone", pool=source.lower(), points=points))
            else:
                pools = (source.lower(), target.lower())
                found.append(LinkOptions(between=pools, points=points))
    return found


def link_points(fit: Fit) -> tuple[tuple[int, float], ...]:
    """(message bytes, bytes/s) of a fitted bandwidth, capped at the largest one seen.

    Below 1 MB a message takes as long as one of 1 MB: the rate falls with the size.
    """
    (c0, c1, c2), most = fit
    at = [(2**x * MEGABYTE, min(most, (c0 * x * x + c1 * x + c2) * GB)) for x in range(11)]
    return ((1, at[0][1] / MEGABYTE), *((round(size), rate) for size, rate in at))


def ideal_steps_per_s(model: str, mix: Mix) -> float:
    """Steps a second if every device were busy at its best microbatch and team, no messages."""
    tables = _load("profiles_tmp.json")[model]
    samples_per_s = math.fsum(
        share.count
        * max(
            int(microbatch) / int(team) / sum(row[0] + row[1] for row in layers.values())
            for microbatch, teams in tables[share.kind].items()
            for team, layers in teams.items()
        )
        for share in mix
    )
    return samples_per_s / GLOBAL_BATCH[model]


def config_data(
    model: str, mix: Mix, profile: str, *, name: str = "reference"
) -> dict[str, object]:
    """A file for ``lyray plan``, whose budget lets all devices run all the time."""
    return {
        "run": {"name": name},
        "training": {
            "task": "examples.byte_gpt:task",  # planning with a profile does not run it
            "global_batch": GLOBAL_BATCH[model],
            "microbatch": largest_microbatch(model, mix),
            "steps": 1000,
            "optimizer": {"name": "adam", "lr": 0.0001},
        },
        "cluster": to_json(cluster_options(mix, profile=profile, model=model)),
        "budget": {"average_per_hour_usd": math.fsum(share.count * share.price for share in mix)},
    }


def write_files(model: str, mix: Mix, folder: Path) -> tuple[Path, Path]:
    """Write ``profile.json`` and ``plan.yaml`` into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    profile, config = folder / "profile.json", folder / "plan.yaml"
    measured = read_profile(model, [share.kind for share in mix])
    profile.write_text(json.dumps(profile_to_json(measured)), "utf-8")
    data = config_data(model, mix, str(profile))
    config.write_text(yaml.safe_dump(data, sort_keys=False), "utf-8")
    return profile, config


def parse_share(text: str) -> Share:
    """``KIND=COUNT`` or ``KIND=COUNT@PRICE``. Raises ValueError."""
    kind, _, rest = text.partition("=")
    count, _, price = rest.partition("@")
    if kind not in MEMORY_GB or not count.isdigit() or int(count) < 1:
        raise ValueError(f"{text!r}; write KIND=COUNT with a kind of {', '.join(MEMORY_GB)}")
    return Share(kind, int(count), float(price) if price else None)


def main() -> None:
    """Write the files of one mix."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference_data")
    parser.add_argument("mix", nargs="+", type=parse_share, help="KIND=COUNT[@PRICE]")
    parser.add_argument("--model", choices=tuple(GLOBAL_BATCH), default=OPT_350)
    parser.add_argument("-o", "--output", type=Path, required=True, help="a folder")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    for path in write_files(options.model, options.mix, options.output):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
