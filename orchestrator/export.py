"""The trained weights of a run as one safetensors file under the user's own state_dict names."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from orchestrator import storage
from orchestrator.control.persistence import CheckpointStore, RunStore
from orchestrator.core.durable import STATE_DICT_KEY, CheckpointManifest
from orchestrator.errors import ConfigError

_ALIGNMENT = 8  # of the data, as safetensors asks for
_DTYPE_BITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    step: int
    num_tensors: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def export_weights(run_url: str, target_url: str, *, best: bool = False) -> Exported:
    """Copy parameters and buffers of a whole checkpoint into one file: the newest, or the best.

    Bytes are copied as they are, so any dtype survives. A parameter that two layers share
    appears under both names, as in the user's own state_dict.

    Raises:
        ConfigError: If there is no run, no whole checkpoint, or a damaged file.
    """
    store = CheckpointStore(storage.absolute(run_url))
    manifest = _best(run_url, store) if best else store.latest()
    if manifest is None:
        raise ConfigError(
            f"{run_url} holds no whole checkpoint; give the folder of a run that has written one"
        )
    tensors = {tensor.name: tensor for tensor in _tensors(store, manifest)}
    data = _file_of(sorted(tensors.values(), key=_place), manifest)
    storage.write_bytes(target_url, data)
    return Exported(manifest.step, len(tensors), len(data))


def _best(run_url: str, store: CheckpointStore) -> CheckpointManifest:
    runs = RunStore(storage.absolute(run_url))
    step = runs.best_step()
    if step is None and (evaluations := runs.read_evaluations()):
        raise ConfigError(
            f"none of the {len(evaluations)} evaluations in {run_url} has the figure that says "
            "which is the best, or it was never a number; see Task.metrics, or leave --best away"
        )
    if step is None:
        raise ConfigError(
            f"{run_url} has no evaluation; set training.eval_every_steps, or leave --best away"
        )
    if step not in store.steps():
        raise ConfigError(
            f"the best evaluation in {run_url} is that of step {step}, whose checkpoint is not "
            "there; training.keep_best keeps it: leave --best away, or run with it"
        )
    return store.read(step)


def _tensors(store: CheckpointStore, manifest: CheckpointManifest) -> Iterator[_Tensor]:
    for file in sorted(manifest.files, key=lambda f: f.layer):
        url = store.url(manifest.step, file.path)
        try:
            data = storage.read_bytes(url)
        except FileNotFoundError:
            raise ConfigError(
                f"{url} is gone, though the manifest names it; restore the file, or export an "
                "older checkpoint"
            ) from None
        if hashlib.sha256(data).hexdigest() != file.checksum:
            raise ConfigError(
                f"{url} is damaged: its checksum is not that of the manifest; "
                "restore the file, or export an older checkpoint"
            )
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        told = header.pop("__metadata__", {})
        names: Mapping[str, str] = json.loads(told.get(STATE_DICT_KEY, "{}"))
        body = memoryview(data)[8 + length :]
        for name, key in names.items():
            entry = header[key]
            first, end = entry["data_offsets"]
            yield _Tensor(name, entry["dtype"], tuple(entry["shape"]), body[first:end])


def _place(tensor: _Tensor) -> tuple[int, str]:
    """Wide numbers first: then every tensor is aligned to its own width."""
    bits = _DTYPE_BITS.search(tensor.dtype)
    return -int(bits.group()) if bits else 0, tensor.name


def _file_of(tensors: list[_Tensor], manifest: CheckpointManifest) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(manifest.step)}}
    at = 0
    for tensor in tensors:
        end = at + len(tensor.data)
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end],
        }  # fmt: skip
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join([len(text).to_bytes(8, "little"), text, *(t.data for t in tensors)])
