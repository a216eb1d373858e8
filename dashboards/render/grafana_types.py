"""Holds dashboards to Grafana's own types: ``@grafana/schema`` and the TypeScript compiler."""

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
HEAD = """import type { AnnotationQuery, Dashboard, Panel, VariableModel } from '@grafana/schema';

// What the schema leaves to plug-ins and to kinds of variables; panels, as among rows slips pass.
type Query = { expr: string };
type Choice = { auto: boolean; auto_count: number; auto_min: string };
type Shown = Omit<Dashboard, 'annotations' | 'id' | 'panels' | 'templating'> & {
  annotations: { list: (AnnotationQuery & Query)[] };
  panels: Panel[];
  templating: { list: (VariableModel & Partial<Choice>)[] };
};

export const shown = """
OPTIONS = ("--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution",
           "bundler", "--target", "es2022")  # fmt: skip


def slips(dashboards: Mapping[str, str]) -> list[str]:
    """What the compiler says against dashboards, given as JSON by name; the packages are installed.

    Raises:
        CalledProcessError: If the compiler does not run.
    """
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".types-") as place:
        files = []
        for name, text in dashboards.items():
            files.append(Path(place) / f"{name}.ts")
            files[-1].write_text(f"{HEAD}{text.strip()} satisfies Shown;\n", "utf-8")
        command = [FOLDER / "node_modules/.bin/tsc", *OPTIONS, *files]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if "error TS" in line]
    if done.returncode and not found:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return found
