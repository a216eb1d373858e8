"""What code runs: told by content, the same on all devices, and refused where it is not."""

import hashlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.core.code import Code, KnownCode, Module, lyray_digest
from orchestrator.errors import ConfigError
from orchestrator.runtime.same_code import joint_code, same_code
from workers.code import loaded_code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory, first on the path; what is imported from it is forgotten again."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tried.py").write_text("import tried_parts.layer\n")
    (tmp_path / "tried_parts").mkdir()
    (tmp_path / "tried_parts" / "layer.py").write_text("WIDTH = 1\n")
    (tmp_path / "unused.py").write_text("")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def code(*modules: Module, lyray: str | None = None) -> Code:
    return Code(modules, lyray_digest() if lyray is None else lyray, "host-1")


def test_the_tasks_module_and_what_it_imported_from_the_folder_count(folder: Path) -> None:
    importlib.import_module("tried")
    found = loaded_code("tried:task", folder)
    layer = "tried_parts/layer.py"
    assert found.modules == (
        Module("tried", sha(folder / "tried.py"), "tried.py"),
        Module("tried_parts.layer", sha(folder / layer), layer),
    )
    assert str(found) == f"{found.digest[:8]} (tried and 1 more), lyray {lyray_digest()[:8]}"


def test_the_digest_is_that_of_the_content_and_of_nothing_else(folder: Path) -> None:
    """ray-project/ray#53635: edits were ignored, and nothing said which code ran."""
    importlib.import_module("tried")
    before = loaded_code("tried:task", folder).digest
    os.utime(folder / "tried.py", (0, 0))
    (folder / "unused.py").write_text("what is not imported does not count")
    assert loaded_code("tried:task", folder).digest == before
    (folder / "tried_parts" / "layer.py").write_text("WIDTH = 2\n")
    assert loaded_code("tried:task", folder).digest != before


def test_an_installed_package_counts_where_the_task_is_in_it(folder: Path, tmp_path: Path) -> None:
    importlib.import_module("tried")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert [m.key for m in loaded_code("tried:task", elsewhere).modules] == ["tried"]
    assert loaded_code("other:task", elsewhere).modules == ()


def test_packages_of_an_environment_inside_the_folder_do_not_count(folder: Path) -> None:
    inside = folder / ".venv" / "lib" / "site-packages"
    inside.mkdir(parents=True)
    (inside / "tried_library.py").write_text("")
    sys.path.append(str(inside))
    importlib.import_module("tried")
    importlib.import_module("tried_library")
    names = [module.name for module in loaded_code("tried:task", folder).modules]
    assert names == ["tried", "tried_parts.layer"]


def test_workers_that_run_what_lies_in_the_folder_are_fine_and_told_together(folder: Path) -> None:
    main = Module("tried", sha(folder / "tried.py"), "tried.py")
    lazy = Module("unused", sha(folder / "unused.py"), "unused.py")
    found = {"a-0": code(main), "b-0": code(main, lazy)}
    job = same_code(found, str(folder))
    assert job.modules == {"tried.py": main.digest, "unused.py": lazy.digest}
    assert joint_code(found).modules == (main, lazy)


def test_another_copy_of_a_module_is_refused_with_device_node_module_and_mend(folder: Path) -> None:
    """ray-project/ray#53635: a node went on with what it had been sent before."""
    main = Module("tried", sha(folder / "tried.py"), "tried.py")
    stale = Module("tried", "0" * 64, "tried.py")
    told = r"device b-0 on node host-1 runs another tried \(tried\.py 00000000, the job .*submit"
    with pytest.raises(ConfigError, match=told):
        same_code({"a-0": code(main), "b-0": code(stale)}, str(folder))
    installed = Module("tried", "1" * 64)
    with pytest.raises(ConfigError, match=r"device b-0 .* another tried \(tried 11111111, the job"):
        same_code({"a-0": code(main), "b-0": code(installed)}, str(folder))
    foreign = Module("extra", "2" * 64, "extra.py")
    with pytest.raises(ConfigError, match=r"another extra .* which the job does not have"):
        same_code({"a-0": code(main, foreign)}, str(folder))


def test_another_lyray_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"device b-0 on node host-1 runs another lyray \(0000"):
        same_code({"a-0": code(), "b-0": code(lyray="0" * 64)}, str(folder))


def test_what_the_job_cannot_find_is_that_of_the_first_worker(folder: Path) -> None:
    first, other = (Module("nowhere_to_be_found", digit * 64) for digit in "12")
    with pytest.raises(ConfigError, match=r"device b-0 .* 22222222, the job 11111111"):
        same_code({"a-0": code(first), "b-0": code(other)}, str(folder))


def test_of_modules_that_nobody_knew_nothing_is_said() -> None:
    KnownCode("lyray", {}).check("late-0", code(Module("lazy", "3" * 64, "lazy.py"), lyray="lyray"))
