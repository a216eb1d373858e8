"""The import contracts of pyproject.toml hold, and the two lists of strategies agree."""

import subprocess
import sys
from pathlib import Path

from orchestrator.strategies.registry import STRATEGIES
from orchestrator.support import STRATEGIES as SUPPORTED

ROOT = Path(__file__).parents[2]


def test_layers_point_downwards_and_every_door_is_kept() -> None:
    command = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [command, "--no-cache"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " 0 broken" in done.stdout


def test_the_config_offers_the_strategies_that_the_registry_builds() -> None:
    assert set(SUPPORTED) == set(STRATEGIES)


def test_packages_are_empty_but_for_the_entry_point() -> None:
    inits = [*ROOT.glob("orchestrator/**/__init__.py"), *ROOT.glob("workers/**/__init__.py")]
    full = {str(p.relative_to(ROOT)) for p in inits if p.read_text().strip()}
    assert full <= {"orchestrator/__init__.py"}


def test_no_module_is_longer_than_400_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for folder in ("orchestrator", "workers")
        for path in ROOT.glob(f"{folder}/**/*.py")
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert not long
