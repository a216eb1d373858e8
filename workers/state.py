"""State of layers: parameters, buffers, optimizer state; as bytes and in checkpoints."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from orchestrator import storage
from orchestrator.core.durable import (
    CHECKPOINTS,
    STATE_DICT_KEY,
    CheckpointFile,
    CheckpointManifest,
    checkpoint_name,
)
from orchestrator.core.training import Precision
from orchestrator.errors import ConfigError, DamagedCheckpointError
from workers.device import place
from workers.scaling import LossScale

Tensors = dict[str, Tensor]  # "param/<name>", "buffer/<name>", "optim/<name>/<key>", LossScale's
OptimizerState = dict[str, Tensor]  # of one parameter


def pack(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a description and one flat buffer, both as bytes.

    Never a cast: bf16 holds 257 as 256, so a float buffer would break Adam's step and moments.
    The layout travels because the receiver may have no optimizer state of its own yet.
    """
    layout = [
        [key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in tensors.items()
    ]
    header = torch.tensor(list(json.dumps(layout).encode()), dtype=torch.uint8)
    parts = [
        t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        for t in tensors.values()
        if t.numel()
    ]
    return header, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def unpack(header: Tensor, flat: Tensor) -> Tensors:
    """Return what ``pack`` got, bit by bit."""
    tensors, at = {}, 0
    for key, dtype_name, shape in json.loads(bytes(header.tolist())):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        # clone: view(dtype) demands alignment, and the buffer may go
        tensors[key] = flat[at : at + size].clone().view(dtype).view(shape)
        at += size
    return tensors


class ModelState:
    """The layers of the whole model, of which this worker holds some.

    A layer not held keeps its modules but no memory. Parameters and buffers keep their identity,
    so what layers share, or the user's functions hold, survives every move.
    """

    def __init__(
        self, layers: Sequence[nn.Module], device: torch.device, precision: Precision = "fp32"
    ) -> None:
        self.layers = tuple(layers)
        self.device = device
        self.loss_scale = LossScale(precision)
        self._shapes = tuple(  # of the whole model: a layer that is not held has lost them
            {name: tuple(p.shape) for name, p in layer.named_parameters()} for layer in self.layers
        )
        self.held: frozenset[int] = frozenset()
        self._optimizer_state: dict[nn.Parameter, OptimizerState] = {}

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Trainable parameters of the held layers, each once, in the model's order."""
        found = {id(p): p for i in sorted(self.held) for p in self.layers[i].parameters()}
        return tuple(p for p in found.values() if p.requires_grad)

    def tensors(self, layer: int) -> Tensors:
        """State of one layer by sorted key; the tensors are the live ones."""
        module = self.layers[layer]
        found: Tensors = {f"buffer/{name}": b for name, b in module.named_buffers()}
        found |= self.loss_scale.tensors()
        for name, parameter in module.named_parameters():
            found[f"param/{name}"] = parameter.detach()
            for key, value in self._optimizer_state.get(parameter, {}).items():
                found[f"optim/{name}/{key}"] = value
        return {key: found[key] for key in sorted(found)}

    def load(self, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Take over the state of one layer, which is held from now on.

        Raises:
            ConfigError: If the parameters are not those of the layer.
        """
        module = self.layers[layer]
        parameters = dict(module.named_parameters())
        wanted = {f"param/{name}": shape for name, shape in self._shapes[layer].items()}
        found = {key: tuple(t.shape) for key, t in tensors.items() if key.startswith("param/")}
        for key in sorted(wanted.keys() | found.keys()):
            if wanted.get(key) != found.get(key):
                raise ConfigError(
                    f"layer {layer}: {key.removeprefix('param/')} has the shape "
                    f"{found.get(key, 'of nothing')} in the state, but {wanted.get(key, 'none')} "
                    "in the model; it comes from another model: restore training.task and its "
                    "task_args, or start under another run.name"
                )
        for name, parameter in parameters.items():
            parameter.data = tensors[f"param/{name}"].to(self.device)
            if not parameter.requires_grad:
                continue  # what it had when it was trained is given up
            prefix = f"optim/{name}/"
            self._optimizer_state[parameter] = {
                key.removeprefix(prefix): value
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
        for key, value in tensors.items():
            if key.startswith("buffer/"):
                module.get_buffer(key.removeprefix("buffer/")).data = value.to(self.device)
        self.loss_scale.load(tensors)
        self.held |= {layer}

    def begin(self, layer: int) -> None:
        """Hold a layer as the user's task built it."""
        place(self.layers[layer], self.device)
        self.held |= {layer}

    def forget(self) -> None:
        """Hold nothing: what is here belongs to another step."""
        self.held = frozenset()
        self._optimizer_state.clear()
        self.loss_scale.reset()

    def keep(self, layers: Iterable[int]) -> None:
        """Free the memory of every other layer."""
        self.held = self.held & frozenset(layers)
        held = [self.layers[i] for i in self.held]
        parameters = {id(p) for module in held for p in module.parameters()}
        buffers = {id(b) for module in held for b in module.buffers()}
        for index, layer in enumerate(self.layers):
            if index in self.held:
                continue
            for parameter in layer.parameters():
                if id(parameter) not in parameters:
                    parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)
                    self._optimizer_state.pop(parameter, None)
            for buffer in layer.buffers():
                if id(buffer) not in buffers:
                    buffer.data = buffer.new_empty(0)

    def give_to(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Hand the optimizer the state of its parameters; both share the tensors from then on."""
        if optimizer is None:
            return
        # torch keeps the step count on the CPU unless a kernel reads it.
        counts_there = bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))
        for parameter in self.parameters():
            if state := self._optimizer_state.get(parameter):
                optimizer.state[parameter] = {
                    key: value if key == "step" and not counts_there else value.to(self.device)
                    for key, value in state.items()
                }

    def take_from(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Read the optimizer's state back, before layers move or are saved."""
        if optimizer is None:
            return
        for parameter, state in optimizer.state.items():
            self._optimizer_state[cast("nn.Parameter", parameter)] = {
                key: value if isinstance(value, Tensor) else torch.tensor(value)
                for key, value in state.items()
                if value is not None
            }

    def state_bytes(self, optimizer: torch.optim.Optimizer | None) -> int:
        """Bytes of parameters, their gradients and optimizer state of the held layers."""
        state = {} if optimizer is None else optimizer.state
        parameters = {id(p): p for i in self.held for p in self.layers[i].parameters()}
        total = 0
        for parameter in parameters.values():
            size = parameter.numel() * parameter.element_size()
            total += 2 * size if parameter.requires_grad else size
            kept = (t for t in state.get(parameter, {}).values() if isinstance(t, Tensor))
            total += sum(t.numel() * t.element_size() for t in kept)
        return total

    def checksums(self) -> dict[int, str]:
        """SHA-256 of each held layer's parameters and optimizer state; equal on all owners."""
        found = {}
        for layer in sorted(self.held):
            digest = hashlib.sha256()
            for key, tensor in self.tensors(layer).items():
                digest.update(key.encode())
                digest.update(pack({key: tensor})[1].numpy().tobytes())
            found[layer] = digest.hexdigest()
        return found


def checkpoint_folder(run_url: str, step: int) -> str:
    """Folder of the checkpoint from which ``step`` is the next to run."""
    return storage.join(run_url, CHECKPOINTS, checkpoint_name(step))


def host_copy(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copies in the machine's memory; two that share theirs, ties, do so no more."""
    return {
        key: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for key, t in tensors.items()
    }


def save_layer(
    folder: str,
    layer: int,
    tensors: Mapping[str, Tensor],
    state_keys: Mapping[str, str] | None = None,
) -> CheckpointFile:
    """Write one layer's file, atomically.

    Args:
        folder: URL of the checkpoint.
        layer: Its number.
        tensors: As ``host_copy`` returns them.
        state_keys: See SplitModel; they go into the file's metadata.

    Raises:
        OSError: If the storage refuses.
    """
    path = f"layer-{layer:03d}.safetensors"
    data = save_safetensors(
        dict(tensors), metadata={STATE_DICT_KEY: json.dumps(dict(state_keys or {}))}
    )
    storage.write_bytes(storage.join(folder, path), data)
    return CheckpointFile(layer, path, len(data), hashlib.sha256(data).hexdigest())


def load_layer(folder: str, manifest: CheckpointManifest, layer: int) -> Tensors:
    """Read one layer's file.

    Raises:
        ConfigError: If the manifest lacks the layer.
        DamagedCheckpointError: If the file is gone or not the one that was written.
        OSError: If the storage refuses.
    """
    found = [file for file in manifest.files if file.layer == layer]
    if not found:
        raise ConfigError(
            f"{folder} has no file for layer {layer}; it comes from another model, or resume from "
            "another checkpoint"
        )
    try:
        data = storage.read_bytes(storage.join(folder, found[0].path))
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{storage.join(folder, found[0].path)} is gone",
            manifest.step,
        ) from None
    if hashlib.sha256(data).hexdigest() != found[0].checksum:
        raise DamagedCheckpointError(
            f"{storage.join(folder, found[0].path)} is damaged: its checksum is not that of the "
            "manifest",
            manifest.step,
        )
    return load_safetensors(data)
