"""The modules of dashboards/render, which are no package."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
DASHBOARDS = sorted((ROOT / "dashboards").glob("*.json"))


def module(name: str) -> ModuleType:
    """One of them, by its name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "dashboards/render" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
