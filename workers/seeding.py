"""What a dataset draws at random: seeded by position, and apart from what the layers draw."""

import random
import struct
import threading
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class _Own(threading.local):
    """The generator that stands for torch's default one in this thread."""

    generator: torch.Generator | None = None


_own = _Own()

_generators = threading.Lock()
"""Python's and NumPy's generators are one for all threads: whoever is inside has them alone."""


class _ThreadsDefault:
    """torch's default generator, but in a thread that has one of its own.

    ``torch.manual_seed`` and its like go there by this name. A dataset that seeds in every item
    would else disturb the layers, which run in another thread at the same time.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(_own.generator or torch.default_generator, name)


torch.random.default_generator = _ThreadsDefault()  # type: ignore[assignment, attr-defined]


_MAY_DRAW = (
    "attention", "bernoulli", "binomial", "cauchy", "dirichlet", "drop", "exponential",
    "fractional", "gamma", "geometric", "gumbel", "multinomial", "normal", "poisson", "rand",
    "rrelu", "uniform",
)  # fmt: skip
"""In the names of functions that are looked into; one too many costs a little time."""


@cache
def _may_draw(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return any(part in name for part in _MAY_DRAW)


def generators_state() -> tuple[object, ...]:
    """Of Python's and NumPy's generators, when no ``Draws`` of another thread has them."""
    with _generators:
        state: Any = np.random.get_state()  # noqa: NPY002 - as in ``Draws.key``
        return random.getstate(), bytes(state[1]), state[2:]


def seed_from(data: bytes) -> int:
    """A seed for torch, which takes those below 2^63; salted by nothing, so the same everywhere."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


class Draws(TorchFunctionMode):
    """Inside, the user's code draws from generators of this thread, seeded by ``key``.

    torch's own generator is not touched: layers run in another thread. numpy's and Python's are
    seeded, and as before afterwards; a second thread waits until the first one is out. Threads
    that the user's code starts draw from the process's own generators.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cpu = torch.Generator()
        self._inner = _Generated(self._cpu)

    def key(self, *key: int) -> None:
        """Let what is drawn from now on be a function of these numbers."""
        seed = seed_from(struct.pack(f"<{len(key)}q", *key))
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - the user's code may draw from it
        self._cpu.manual_seed(seed)
        self._inner.reseed(seed)

    def __enter__(self) -> "Draws":
        _generators.acquire()
        super().__enter__()
        self._before = random.getstate(), np.random.get_state()  # noqa: NPY002 - as in ``key``
        _own.generator = self._cpu
        return self

    def __exit__(self, *about: Any) -> None:
        _own.generator = None
        random.setstate(self._before[0])
        np.random.set_state(self._before[1])  # noqa: NPY002 - as in ``key``
        super().__exit__(*about)
        _generators.release()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not _may_draw(func):
            return func(*args, **(kwargs or {}))
        with self._inner:
            return func(*args, **(kwargs or {}))


class _Generated(TorchDispatchMode):
    """Gives every random operation a generator."""

    def __init__(self, cpu: torch.Generator) -> None:
        super().__init__()
        self._seed, self._cpu = 0, cpu
        self._others: dict[str, torch.Generator] = {}  # by device

    def reseed(self, seed: int) -> None:
        """Begin anew."""
        self._seed = seed
        self._others.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and options.get("generator") is None:
            like = next((arg for arg in args if isinstance(arg, Tensor)), None)
            fallback = "cpu" if like is None else like.device
            device = torch.device(options.get("device") or fallback)
            seeded = _with_generator(func)
            if seeded is not None and device.type != "meta":
                return seeded(*args, **{**options, "generator": self._generator(device)})
        return func(*args, **options)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device == self._cpu.device:
            return self._cpu
        if str(device) not in self._others:
            self._others[str(device)] = torch.Generator(device).manual_seed(self._seed)
        return self._others[str(device)]


@cache
def _with_generator(func: Any) -> Any:
    """The form of an operation that takes a generator; None: it has none."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func
    packet = func._overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        kinds = [(a.name, str(a.type)) for a in other._schema.arguments if a.name != "generator"]
        if len(kinds) < len(other._schema.arguments) and kinds == [
            (a.name, str(a.type)) for a in func._schema.arguments
        ]:
            return other
    return None
