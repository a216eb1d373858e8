"""Draws dashboards with Grafana's own UI library: ``python dashboards/render/draw.py ANSWERS OUT``.

ANSWERS is a JSON file of what Prometheus answered: series by expression, as query_range gives them.
Needs npm and Chromium. Panels are Grafana's; its server, provisioning and alerting take no part.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="bundle.css">
<style>body {{ margin: 0 }}</style><div id="root"></div>
<script>window.theme = {theme}; window.dashboard = {dashboard}; window.answers = {answers};</script>
<script src="bundle.js"></script>
"""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
DRAWN_MS = 8000  # of the page's own time
HEIGHT_PX, WIDTH_PX = 32, 1400  # of a row of Grafana's grid with its share of gaps; of the page


def why_not() -> str | None:
    """What is missing here to draw; None when nothing is."""
    for names in (("npm",), CHROMIUM):
        if not any(map(shutil.which, names)):
            return f"there is no {names[0]} (Debian: apt-get install {names[0]})"
    return None


def chromium() -> str | None:
    """Where Chromium is; None: nowhere."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


def expressions(dashboard: Path) -> list[str]:
    """Each query of a dashboard."""
    panels = json.loads(dashboard.read_text("utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def filled(expression: str, run: str) -> str:
    """A query as Grafana asks it, with the run chosen."""
    return re.sub(r"\$__rate_interval|\$__interval", "1m", expression).replace("$run", run)


def install() -> None:
    """Have npm install what package-lock.json pins, where it has not yet."""
    if not (FOLDER / "node_modules").exists():
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=FOLDER, check=True)


def bundle(out: Path) -> None:
    """Write bundle.js and bundle.css."""
    install()
    options = ("--bundle", "--minify", "--loader:.svg=text", "--loader:.ttf=empty",
               '--define:process.env.NODE_ENV="production"')  # fmt: skip
    command = [FOLDER / "node_modules/.bin/esbuild", FOLDER / "panels.tsx", *options]
    subprocess.run([*command, f"--outfile={out / 'bundle.js'}"], check=True, capture_output=True)


def draw(dashboard: Path, answers: dict[str, object], out: Path, theme: str = "dark") -> str:
    """Write ``NAME-THEME.png`` into a folder with a bundle; returns the page as it was drawn."""
    content = json.loads(dashboard.read_text("utf-8"))
    rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in content["panels"])
    page = out / f"{dashboard.stem}-{theme}.html"
    parts = {"theme": theme, "dashboard": content, "answers": answers}
    page.write_text(PAGE.format(**{name: json.dumps(part) for name, part in parts.items()}))
    command = [str(chromium()), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               f"--virtual-time-budget={DRAWN_MS}",
               f"--window-size={WIDTH_PX},{rows * HEIGHT_PX}"]  # fmt: skip
    picture = page.with_suffix(".png")
    subprocess.run([*command, f"--screenshot={picture}", page], check=True, capture_output=True)
    done = subprocess.run(
        [*command, "--dump-dom", page], check=True, capture_output=True, text=True
    )
    return done.stdout.split("<script", 1)[0]


if __name__ == "__main__":
    answers_path, out_path = map(Path, sys.argv[1:])
    out_path.mkdir(parents=True, exist_ok=True)
    bundle(out_path)
    for path in sorted(FOLDER.parent.glob("*.json")):
        draw(path, json.loads(answers_path.read_text("utf-8")), out_path)
