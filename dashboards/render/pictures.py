"""Makes the pictures of docs/img: ``python dashboards/render/pictures.py`` (``make pictures``).

The demo is run, a Prometheus scrapes it as deploy/prometheus says, every query of the dashboards
is asked over the time of the run, and ``draw`` makes a picture of each dashboard. Four minutes;
``--answers FILE`` keeps what Prometheus answered, or draws once more from what it holds.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import draw
import yaml

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "dashboards").glob("*.json"))
PICTURES = ROOT / "docs" / "img"
RUN = "demo"
ROOM = {"budget.horizon_hours": 14, "budget.total_usd": 126}
"""The demo's average, for longer: a machine that is busy takes longer for its steps."""

PORT = 29190
SCRAPE_S = 2
READY_S = 30.0
THEME = "light"  # a page of documentation is


@contextmanager
def prometheus(runs: Path, folder: Path) -> Iterator[str]:
    """A server that scrapes every run of a folder; its address."""
    config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text("utf-8"))
    config["global"]["scrape_interval"] = f"{SCRAPE_S}s"
    (discovery,) = config["scrape_configs"][0]["file_sd_configs"]
    discovery |= {"files": [str(runs / "*.prometheus.json")], "refresh_interval": "2s"}
    shutil.copytree(SHIPPED, folder / "shipped")
    file = folder / "shipped" / "prometheus.yml"
    file.write_text(yaml.safe_dump(config), "utf-8")
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}",
               f"--web.listen-address=127.0.0.1:{PORT}"]  # fmt: skip
    address = f"http://127.0.0.1:{PORT}"
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + READY_S
        while not is_ready(address):
            if time.monotonic() > deadline_s or server.poll() is not None:
                raise SystemExit(f"prometheus does not answer on port {PORT}; is it taken?")
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait()


def is_ready(address: str) -> bool:
    """Whether it answers."""
    try:
        with urllib.request.urlopen(f"{address}/-/ready"):
            return True
    except urllib.error.URLError:
        return False


def ask(address: str, expression: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """The series of a query over some time, as Grafana asks for it."""
    times = {"start": start_s, "end": end_s, "step": SCRAPE_S}
    query = urllib.parse.urlencode({"query": draw.filled(expression, RUN), **times})
    with urllib.request.urlopen(f"{address}/api/v1/query_range?{query}") as answer:
        return list(json.load(answer)["data"]["result"])


def record(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run the demo, and what every query gives of it."""
    runs = folder / "runs"
    runs.mkdir()
    options: dict[str, object] = {"run.name": RUN, "run.storage_path": runs, **ROOM}
    command = [str(Path(sys.executable).parent / "lyray"), "run", "examples/byte_gpt.yaml"]
    for key, value in options.items():
        command += ["--set", f"{key}={value}"]
    with prometheus(runs, folder) as address:
        start_s = time.time()
        subprocess.run(command, cwd=ROOT, check=True)
        end_s = time.time()
        first_s = min(
            float(s["values"][0][0]) for s in ask(address, "lyray_generation", start_s, end_s)
        )
        return {e: ask(address, e, first_s, end_s) for p in DASHBOARDS for e in draw.expressions(p)}


def main() -> None:
    """Record, or read what was recorded, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=Path, help="keep what Prometheus said, or read it there")
    answers_path = parser.parse_args().answers
    if missing := draw.why_not():
        raise SystemExit(missing)
    with tempfile.TemporaryDirectory(prefix="lyray-pictures-") as place:
        folder = Path(place)
        if answers_path and answers_path.exists():
            answers = json.loads(answers_path.read_text("utf-8"))
        else:
            answers = record(folder)
            if answers_path:
                answers_path.write_text(json.dumps(answers), "utf-8")
        draw.bundle(folder)
        PICTURES.mkdir(exist_ok=True)
        for path in DASHBOARDS:
            draw.draw(path, answers, folder, THEME)
            shutil.copy(folder / f"{path.stem}-{THEME}.png", PICTURES / f"{path.stem}.png")


if __name__ == "__main__":
    main()
