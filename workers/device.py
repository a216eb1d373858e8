"""What differs between a processor and an accelerator: names, memory, copies, time, chance, errors.

Everything that asks which of the two a worker drives is here, and the same calls are made for
both: on a processor they copy nothing and measure with the machine's clock. A process drives one
device.
"""

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError

PROCESSOR = torch.device("cpu")

CUDA = "cuda"
"""What torch calls GPUs, those of AMD included."""


# Naming ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device is, as its driver says; of a processor only ``type`` is known."""

    type: str
    name: str = ""
    memory_bytes: int = 0
    identity: str = ""
    """Tells two devices apart, on whatever node they are."""

    collectives: str = ""
    """Library and version that adds tensors up where they lie; workers must have the same."""


def take(name: str) -> torch.device:
    """Return the device that this process drives from now on; torch makes it the current one.

    Args:
        name: ``cpu`` or ``cuda``. Of the GPUs, the first that Ray leaves visible.

    Raises:
        ConfigError: If torch cannot use a GPU here.
    """
    device = torch.device(name)
    if device.type != CUDA:
        return device
    if not torch.cuda.is_available():
        why = (
            "finds no usable driver or GPU"
            if torch.version.cuda or torch.version.hip
            else "is built for processors only"
        )
        raise ConfigError(
            f"Ray gave this worker a GPU, but torch {torch.__version__} {why} on its node; install "
            "there the torch for its GPUs, or start the node with --num-gpus=0"
        )
    device = torch.device(CUDA, device.index or 0)
    torch.cuda.set_device(device)
    return device


def facts(device: torch.device) -> DeviceFacts:
    """What the driver says of a device."""
    if device.type != CUDA:
        return DeviceFacts(device.type)
    found = torch.cuda.get_device_properties(device)
    library = "rccl" if torch.version.hip else "nccl"
    version = ".".join(map(str, torch.cuda.nccl.version())) if _has_nccl() else ""
    return DeviceFacts(
        type=CUDA,
        name=found.name,
        memory_bytes=found.total_memory,
        identity=str(getattr(found, "uuid", "")),
        collectives=f"{library} {version}" if version else "",
    )


def _has_nccl() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


def product_name(device: torch.device) -> str:
    """What its maker calls it, of a processor as far as the system tells."""
    if device.type == CUDA:
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def driven_gpu() -> torch.device:
    """The GPU that this process drives, since ``take``."""
    return torch.device(CUDA, torch.cuda.current_device())


# Memory ----------------------------------------------------------------------------------


def device_memory_bytes(device: torch.device) -> float:
    """Memory that this process can have of its device: what is free, and what it holds of it.

    Of a processor: what the machine, or the container around us, can still give.
    """
    if device.type != CUDA:
        return machine_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device))


def forget_peak(device: torch.device) -> None:
    """Let ``peak_memory_bytes`` begin anew."""
    if device.type == CUDA:
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Most bytes that tensors had on the device since ``forget_peak``; None: nobody counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == CUDA else None


def give_back(device: torch.device) -> None:
    """Return to the driver what torch keeps for later tensors: sizes change with the layers."""
    if device.type == CUDA:
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the device, or of the machine, is full."""
    full = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return full or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


_MEMORY = Path("/proc/meminfo")
_CONTAINERS = (  # its limit, its use, and which part of that are files that can be dropped
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def machine_bytes() -> float:
    """Memory that this machine, or the container around us, can still give; inf: nothing tells."""
    found = [float("inf")]
    with suppress(OSError, StopIteration):
        found.append(1024.0 * _row(_MEMORY, "MemAvailable:"))
    for limit, used, droppable in _CONTAINERS:
        with suppress(OSError, ValueError, StopIteration):  # not there, or its limit is "max"
            free = int(Path(limit).read_text("utf-8")) - int(Path(used).read_text("utf-8"))
            found.append(free + _row(Path(limit).with_name("memory.stat"), droppable))
    return min(found)


def _row(file: Path, name: str) -> int:
    rows = (line.split() for line in file.read_text("utf-8").splitlines())
    return next(int(row[1]) for row in rows if row[0] == name)


# Copies ----------------------------------------------------------------------------------
#
# What is copied to or from a GPU lies in pinned memory of the machine and has a stream of its
# own for each direction, so that neither holds up what is computed meanwhile.


@cache
def _copy_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    del direction
    return torch.cuda.Stream(device)


def host_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor in the machine's memory, from which a device can be filled quickly."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=torch.cuda.is_initialized())


def pinned(tensor: Tensor) -> Tensor:
    """The same tensor where ``brought`` copies without waiting: pinned, if there is a GPU."""
    return tensor.pin_memory() if torch.cuda.is_initialized() and not tensor.is_cuda else tensor


def brought(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``; what is computed from now on sees it, and nobody waits."""
    if device.type != CUDA or tensor.device == device:
        return tensor.to(device)
    stream, current = _copy_stream(device, "in"), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        copy = tensor.to(device, non_blocking=True)
    current.wait_stream(stream)
    copy.record_stream(current)  # its memory must not be used again before that has read it
    return copy


def ready(tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
    """For ``fetched``: the moment at which the tensors hold what was computed until now."""
    on_device = next((tensor for tensor in tensors if tensor.is_cuda), None)
    if on_device is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(on_device.device))
    return event


def fetched(tensor: Tensor) -> Tensor:
    """The tensor in the machine's memory, contiguous, once it is computed."""
    (copy,) = settled((tensor,), ready((tensor,)), (False,))
    return copy


def settled(
    tensors: Sequence[Tensor], at: torch.cuda.Event | None, stays: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The tensors, contiguous, in the machine's memory or, those that stay, where they are.

    Waits until they are computed, on whatever thread.

    Args:
        tensors: Kept alive until this returns.
        at: What ``ready`` returned when they were computed.
        stays: Which of them are left on the device.
    """
    found = [tensor.detach() for tensor in tensors]
    if at is None:
        return tuple(tensor.contiguous() for tensor in found)
    device = next(tensor.device for tensor in found if tensor.is_cuda)
    stream = _copy_stream(device, "out")
    copies = []
    with torch.cuda.stream(stream):
        stream.wait_event(at)
        for tensor, stay in zip(found, stays, strict=True):
            if tensor.is_cuda and not stay:
                host = host_tensor(tensor.shape, tensor.dtype)
                copies.append(host.copy_(tensor, non_blocking=True))
            else:
                copies.append(tensor.contiguous())
    stream.synchronize()
    return tuple(copies)


def at_hand(value: Any) -> Any:
    """A number, where a tensor of one tells it without waiting; else the tensor, or what it is."""
    if not isinstance(value, Tensor):
        return value
    return value.detach() if value.is_cuda else value.item()


def place(module: nn.Module, device: torch.device) -> None:
    """Move a module; parameters and buffers stay the same objects, so what is shared stays so."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


@contextmanager
def lent(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Have a module on ``device`` while inside; then all is as before, gradients forgotten."""
    tensors = [*module.parameters(), *module.buffers()]
    homes = [tensor.device for tensor in tensors]
    if all(home == device for home in homes):
        yield
        return
    before = [tensor.data for tensor in tensors]
    place(module, device)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.grad, tensor.data = None, data


# Time ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in the work of a device: when all that was asked of it before is done."""

    at_s: float
    event: torch.cuda.Event | None = None


def mark(device: torch.device) -> Mark:
    """Mark this moment; on a GPU nobody waits for it."""
    if device.type != CUDA:
        return Mark(time.monotonic())
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return Mark(time.monotonic(), event)


def between_s(start: Mark, end: Mark) -> float:
    """How long the device took from one mark to the other; both must have been reached."""
    if start.event is None or end.event is None:
        return end.at_s - start.at_s
    return start.event.elapsed_time(end.event) / 1e3


def finish(device: torch.device) -> None:
    """Wait until all that was asked of the device is done."""
    if device.type == CUDA:
        torch.cuda.synchronize(device)


# Chance ----------------------------------------------------------------------------------


def generator_states() -> list[Tensor]:
    """The states of torch's own generators of this process, equal while nothing is drawn."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def generators_restored(device: torch.device) -> AbstractContextManager[None]:
    """Whatever is drawn inside, torch's own generators are as before afterwards."""
    return torch.random.fork_rng([device] if device.type == CUDA else [])
