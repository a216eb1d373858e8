"""The wheel holds both packages, their data files and the licence, and runs from where it lies."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("orchestrator", "workers", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, with the setuptools that torch brought: no network is asked."""
    source = tmp_path_factory.mktemp("source")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif (ROOT / part).exists():
            shutil.copy(ROOT / part, source / part)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist"],
        capture_output=True, text=True, cwd=source, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = (source / "dist").glob("lyray-*.whl")
    return found


def test_modules_data_files_and_licence_are_inside(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packed = {n for n in names if n.endswith(".py")}
    expected = {
        str(path.relative_to(ROOT))
        for folder in ("orchestrator", "workers")
        for path in ROOT.glob(f"{folder}/**/*.py")
    }
    assert packed == expected
    data = {str(p.relative_to(ROOT)) for p in ROOT.glob("orchestrator/**/*.toml")}
    assert data <= set(names)
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_metadata_names_command_licence_and_dependencies(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(n for n in archive.namelist() if n.endswith("/METADATA")).rpartition("/")[0]
    assert "lyray = orchestrator.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    metadata = archive.read(f"{info}/METADATA").decode()
    for line in ("Name: lyray", "License-Expression: Apache-2.0", "Requires-Python: >=3.11",
                 "Requires-Dist: ray[default]", "Requires-Dist: torch"):  # fmt: skip
        assert line in metadata


def test_the_unpacked_wheel_answers(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import orchestrator.cli as c;"
        "assert c.__file__.startswith(sys.argv[1]), c.__file__;"
        "from orchestrator.core.cluster import known_kinds; assert 'a100-40' in known_kinds();"
        "sys.argv = ['lyray', 'schema']; c.main()"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path / "site")],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"title": "lyray run"' in done.stdout
