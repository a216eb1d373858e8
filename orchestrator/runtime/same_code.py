"""Whether all workers run the code of the job: a stale copy on one node trains another model."""

import sys
from collections.abc import Mapping
from pathlib import Path

from orchestrator.core.code import Code, KnownCode, Module, file_digest, lyray_digest
from orchestrator.support import find_module


def same_code(found: Mapping[str, Code], working_dir: str) -> KnownCode:
    """What the job runs, held against what its workers have loaded.

    A module of the working directory is the job's own file; an installed one what this process
    would import; what it does not find is that of the first worker that has it.

    Args:
        found: What each device's worker has loaded.
        working_dir: The job's.

    Returns:
        What workers that start later must run, too.

    Raises:
        ConfigError: If a worker runs something else.
    """
    folder, known = Path(working_dir), dict[str, str | None]()
    for code in found.values():
        for module in code.modules:
            if module.key not in known:
                known[module.key] = _own_digest(module, folder)
    job = KnownCode(lyray_digest(), known)
    for device_id, code in found.items():
        job.check(device_id, code)
    return job


def joint_code(found: Mapping[str, Code]) -> Code:
    """All that the workers have loaded, where they run the same."""
    modules = {module.key: module for code in found.values() for module in code.modules}
    return Code(tuple(modules.values()), lyray_digest())


def _own_digest(module: Module, folder: Path) -> str | None:
    if module.path is not None:
        return file_digest(folder / module.path)
    spec = find_module(module.name, [str(folder), *sys.path])
    if spec is None or spec.origin is None:
        return module.digest
    return file_digest(Path(spec.origin))
