"""What a job would send of its working directory, held against what Ray packs."""

import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE, get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package, get_uri_for_directory

from orchestrator import cli
from orchestrator.errors import ConfigError
from orchestrator.runtime import upload
from orchestrator.runtime.upload import LIMIT_BYTES, look_at_upload

pytestmark = pytest.mark.runtime

ROOT = Path(__file__).parents[2]
FILES = (
    "task.py", "run.yaml", "model.pt", "data/large.bin", "data/small.csv", "runs/a/steps.jsonl",
    "runs/keep.txt", "sub/runs/x.py", "sub/model.pt", ".git/objects/pack", ".venv/bin/python",
)  # fmt: skip


def packed(folder: Path, zip_file: Path) -> set[Path]:
    """What Ray puts into the package of a working directory."""
    create_package(
        str(folder), zip_file, include_gitignore=True, excludes=get_runtime_env_default_excludes()
    )
    return {Path(name) for name in zipfile.ZipFile(zip_file).namelist() if not name.endswith("/")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with what people have in theirs."""
    for name in FILES:
        file = tmp_path / "work" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path / "work"


def documented() -> list[tuple[str, str]]:
    """Patterns and what they leave behind, as docs/operations.md says."""
    lines = (ROOT / "docs" / "operations.md").read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| pattern in `.rayignore`"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        pattern, effect = line.strip("| ").split(" | ")[:2]
        rows += [(p.strip("` "), effect) for p in pattern.split("`, `")]
    return rows


@pytest.mark.parametrize(("pattern", "effect"), documented())
def test_a_documented_pattern_does_what_the_page_says(
    folder: Path, tmp_path: Path, pattern: str, effect: str
) -> None:
    """ray-project/ray#53635, #19236: one pattern excludes nothing, another all, silently."""
    everything = packed(folder, tmp_path / "before.zip")
    (folder / ".rayignore").write_text(f"{pattern}\n!task.py\n")
    left = packed(folder, tmp_path / "after.zip") - {Path(".rayignore")}
    if effect.startswith("everything"):
        before = get_uri_for_directory(str(folder), include_gitignore=True)
        (folder / "task.py").write_text("edited")
        assert not left
        assert get_uri_for_directory(str(folder), include_gitignore=True) == before, "stale"
        with pytest.raises(ConfigError, match="nothing of it is sent"):
            look_at_upload(folder)
        return
    gone = {str(file) for file in everything - left}
    assert gone == {
        "nothing": set(),
        "folders `runs`, wherever they lie": {
            "runs/a/steps.jsonl", "runs/keep.txt", "sub/runs/x.py",
        },
        "the folder `runs` beside the file": {"runs/a/steps.jsonl", "runs/keep.txt"},
        "files of that ending, wherever they lie": {"model.pt", "sub/model.pt"},
    }[effect]  # fmt: skip
    assert look_at_upload(folder).files == left | {Path(".rayignore")}


def test_what_is_sent_of_a_clone_is_small(tmp_path: Path) -> None:
    """ray-project/ray#45602, #38566: .git, an environment and old runs went along."""
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "examples", clone / "examples", ignore=shutil.ignore_patterns("__*__"))
    for name in (".gitignore", ".rayignore"):
        shutil.copy(ROOT / name, clone / name)
    folders = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "examples"]
    for name in (*folders, ".git", ".venv", "venv", "runs", "site", "dist", "examples/runs",
                 "examples/__pycache__", ".mypy_cache"):  # fmt: skip
        (clone / name).mkdir(exist_ok=True)
        (clone / name / "large.bin").write_bytes(b"0" * 2**20)
    sent = packed(clone, tmp_path / "clone.zip")
    assert sent == look_at_upload(clone).files
    assert {file.parts[0] for file in sent if len(file.parts) > 1} == {"examples"}
    assert Path("examples/byte_gpt.py") in sent
    assert (tmp_path / "clone.zip").stat().st_size < 2**19
    assert "large.bin" not in {file.name for file in sent}


def test_size_and_largest_are_told(folder: Path) -> None:
    (folder / "data" / "large.bin").write_bytes(b"0" * 3 * 2**20)
    (folder / ".rayignore").write_text("runs/\n")
    told = str(look_at_upload(folder))
    assert told.startswith(f"upload of {folder}: 3.00 MiB in 7 files; largest: data/ 3.00 MiB, ")


def test_what_ray_would_refuse_is_told_with_what_is_large(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ray-project/ray#45602, #38566: Ray says the limit, and not what goes beyond it."""
    assert LIMIT_BYTES == DASHBOARD_CLIENT_MAX_SIZE
    monkeypatch.setattr(upload, "LIMIT_BYTES", 20)
    told = r"largest: runs/ 31 B, .* takes 20 B; name in .*work/\.rayignore what the job does not"
    with pytest.raises(ConfigError, match=told):
        look_at_upload(folder)


def test_a_needed_file_that_stays_behind_is_named(folder: Path) -> None:
    (folder / ".gitignore").write_text("/sub/\n")
    outside, needed = folder.parent / "other.py", folder / "sub" / "runs" / "x.py"
    look_at_upload(folder, [outside])
    with pytest.raises(ConfigError, match=r"sub/runs/x\.py is not sent, and the job needs it"):
        look_at_upload(folder, [needed])


def test_the_command_tells_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    told = {}
    for folder in (".", "nowhere"):
        command = ["lyray", "validate", "examples/byte_gpt.yaml", "--upload", folder]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            cli.main()
        told[folder] = end.value.code, *capsys.readouterr()
    code, out, _ = told["."]
    assert code == 0
    assert out.startswith("upload of .: ")
    code, _, err = told["nowhere"]
    assert code == 2
    assert "no such folder; write what --working-dir names" in err


def test_an_empty_folder_is_told_as_that_and_not_blamed_on_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "empty" / "below").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"empty: there is no file in it; write what --working-"):
        look_at_upload(tmp_path / "empty")


def test_a_link_to_a_folder_around_it_is_refused_unless_it_is_excluded(folder: Path) -> None:
    for name in ("data/up", "data/again"):  # two of them lead to 2^40 paths
        (folder / name).symlink_to("..")
    with pytest.raises(ConfigError, match=r"data/(up|again) is a link to a folder that holds it"):
        look_at_upload(folder)
    (folder / ".rayignore").write_text("data/up\ndata/again\n")
    assert Path("data/small.csv") in look_at_upload(folder).files
