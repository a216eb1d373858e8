"""Plans go by the memory that is free, not by the data sheet."""

from dataclasses import dataclass
from math import inf

from benchmarks.builders import GIB, make_device
from orchestrator.runtime.free_memory import with_free_memory


@dataclass(frozen=True)
class Info:
    free_bytes: float
    shares_memory: bool = False


def test_what_a_neighbour_has_taken_is_not_planned_with_and_is_said():
    devices = [make_device(f"gpu-{i}", memory_bytes=16 * GIB) for i in range(4)]
    infos = {
        "gpu-0": Info(15 * GIB),  # its own context takes some
        "gpu-1": Info(6 * GIB),
        "gpu-2": Info(inf),
    }
    said: list[str] = []
    found = list(with_free_memory(devices, infos, said.append))
    assert [d.memory_bytes // GIB for d in found] == [16, 6, 16, 16]
    (line,) = said
    assert "gpu-1 has 6 GiB free of the 16 GiB" in line
    assert "memory_gib" in line


def test_processors_of_one_machine_share_what_is_free_there():
    devices = [
        make_device(f"cpu-{i}", node_id="a" if i < 2 else "b", memory_bytes=4 * GIB)
        for i in range(3)
    ]
    infos = {d.device_id: Info(6 * GIB, shares_memory=True) for d in devices}
    found = list(with_free_memory(devices, infos, lambda line: None))
    assert [d.memory_bytes // GIB for d in found] == [3, 3, 4]
