"""Which code this process has loaded of the user's."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from orchestrator.core.code import LYRAY, Code, Module, file_digest, lyray_digest

_INSTALLED = {"site-packages", "dist-packages"}


def loaded_code(task: str, folder: Path) -> Code:
    """What this process has loaded, by the contents of the files as they are now.

    Args:
        task: ``training.task``; its module comes first.
        folder: The working directory.
    """
    main = task.partition(":")[0]
    found = {module.key: module for module in _modules(main.partition(".")[0], folder)}
    ordered = sorted(found.values(), key=lambda module: (module.name != main, module))
    return Code(tuple(ordered), lyray_digest(), socket.gethostname())


def _modules(package: str, folder: Path) -> Iterator[Module]:
    folders, inner = {folder.absolute(), folder.resolve()}, Path(sys.prefix)
    for name, module in tuple(sys.modules.items()):
        top, file = name.partition(".")[0], getattr(module, "__file__", None)
        if top in (*LYRAY, "__main__") or not isinstance(file, str):
            continue
        path = Path(file)
        home = next((f for f in folders if path.is_relative_to(f)), None)
        if home and (_INSTALLED.intersection(path.parts) or _lies_in(path, inner, home)):
            home = None
        if (home or top == package) and (digest := file_digest(path)):
            yield Module(name, digest, str(path.relative_to(home)) if home else None)


def _lies_in(path: Path, environment: Path, folder: Path) -> bool:
    """Whether it belongs to an environment that lies in the working directory."""
    return environment.is_relative_to(folder) and path.is_relative_to(environment)
