"""What drivers call the devices of known kinds: from the name of a product to its kind."""

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

from orchestrator.core.cluster import known_kinds

_MAKERS = ("NVIDIA ", "Tesla ", "AMD ")


def product_kind(name: str, memory_bytes: int) -> str | None:
    """Return the kind of the catalogue that a driver's name of a device means; None: none.

    Args:
        name: As ``torch.cuda.get_device_properties`` and ``nvidia-smi -L`` tell it.
        memory_bytes: All memory of the device; tells kinds of one name apart.
    """
    for maker in _MAKERS:
        name = name.removeprefix(maker)
    kinds = next((kinds for like, kinds in _products().items() if fnmatchcase(name, like)), ())
    sheets = known_kinds()
    return min(kinds, key=lambda k: abs(sheets[k].memory_bytes - memory_bytes), default=None)


@cache
def _products() -> Mapping[str, tuple[str, ...]]:
    table = tomllib.loads((files("orchestrator.core") / "products.toml").read_text("utf-8"))
    return {like: tuple(kinds) for like, kinds in table.items()}
