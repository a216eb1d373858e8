"""What a worker holds: layers and their optimizer, as of one step boundary; moved and settled."""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from orchestrator.errors import ConfigError
from workers.checkpointing import LayerState
from workers.device import give_back, take
from workers.grouping import find_groups
from workers.moving import find_moves, holders, move_layers
from workers.orders import Assignment, Standing, WorkerSpec
from workers.peers import Peers
from workers.process_groups import OwnerSet
from workers.splitting import SplitModel
from workers.state import ModelState, checkpoint_folder, load_layer
from workers.step import Samples, StepTrace
from workers.update import Updater, Verdict, make_optimizer


class Holding:
    """The layers of one worker, and the step they stand before."""

    def __init__(self, spec: WorkerSpec, peers: Peers) -> None:
        """Hold nothing; ``peers`` is where layers come from and go to."""
        self._spec, self._peers = spec, peers
        self._model: SplitModel | None = None
        self._state: ModelState | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._updater: Updater | None = None
        self.discards = False
        """Whether the layers are copies, for a run that counts for nothing."""

        self.next_step = 0
        """The first step that is not applied to them."""

        self.trace = StepTrace()

    @property
    def has_begun(self) -> bool:
        """Whether a place was ever taken."""
        return self._state is not None

    @property
    def state(self) -> ModelState:
        """The layers; only once ``take_place`` was called."""
        assert self._state is not None, "nothing is held before the first plan"
        return self._state

    def take_place(
        self,
        model: SplitModel,
        assignment: Assignment,
        owners: Sequence[OwnerSet],
        ranks: Mapping[str, int],
    ) -> None:
        """Bring the layers that a plan wants here, and free all others; collective.

        Args:
            model: The whole model as the task built it.
            assignment: The plan.
            owners: Ranks that hold each layer from now on.
            ranks: Of all devices of the world.

        Raises:
            ConfigError: If the checkpoint or the optimizer does not fit the model.
            PeerLostError, LostContactError: If a worker is gone.
        """
        self._model = model
        state, is_new = self._take_state(model, assignment)
        self.next_step, self.trace = assignment.first_step, StepTrace()
        rank = self._peers.rank
        now = holders(self._peers.groups, state.held, len(owners))
        wished = {(m.layer, ranks[m.target]): ranks[m.source] for m in assignment.moves}
        moves = find_moves(now, owners, wished)
        move_layers(state, moves, rank, self._peers.transport, self._spec.timeout_s)
        mine = frozenset(layer for layer, own in enumerate(owners) if rank in own)
        if assignment.restore is not None and assignment.restore.num_layers != len(owners):
            raise ConfigError(
                f"the checkpoint of step {assignment.restore.step} has "
                f"{assignment.restore.num_layers} layers, but the model has {len(owners)}; restore "
                "training.task and its task_args, or start under another run.name"
            )
        for layer in sorted(mine - state.held):
            if assignment.restore is not None:
                folder = checkpoint_folder(self._spec.run_url, assignment.restore.step)
                state.load(layer, load_layer(folder, assignment.restore, layer))
            elif is_new and (assignment.first_step == 0 or assignment.discard):
                state.begin(layer)
            else:
                raise ValueError(
                    f"no worker holds layer {layer} as of step {assignment.first_step}, and there "
                    "is no checkpoint to restore"
                )
        state.keep(mine)
        give_back(state.device)
        options = self._spec.options.optimizer
        groups = find_groups(model, options.groups, state.layers)
        self._optimizer = make_optimizer(options, state.parameters(), groups)
        state.give_to(self._optimizer)

    def _take_state(self, model: SplitModel, assignment: Assignment) -> tuple[ModelState, bool]:
        """The layers to work on, and whether they are untouched; none is held then."""
        if self._state is not None and not self.discards:
            if assignment.discard:
                raise ValueError("layers in training cannot be put aside for a run to discard")
            self._state.take_from(self._optimizer)
            self._optimizer = None  # until the new place is taken, the state is the only copy
            if self.next_step != assignment.first_step or assignment.restore is not None:
                self._state.forget()
            return self._state, False
        layers = model.layers
        if assignment.discard:  # copied together: ties stay ties
            layers = tuple(copy.deepcopy(nn.ModuleList(layers)))
        precision = self._spec.options.precision
        self._state = ModelState(layers, take(self._spec.device), precision)
        self.discards = assignment.discard
        return self._state, True

    def make_updater(self, lr: Callable[[int], float]) -> Updater:
        """What applies steps to these layers, at the learning rate of each step."""
        state, limit = self.state, self._spec.options.clip_grad_norm
        self._updater = Updater(self._optimizer, state.parameters(), state.loss_scale, limit, lr)
        return self._updater

    def state_bytes(self) -> int:
        """Size of parameters, gradients and optimizer state."""
        return self.state.state_bytes(self._optimizer)

    def live(self, layers: Sequence[int]) -> list[LayerState]:
        """The state of some layers as it is now."""
        state, model = self.state, self._model
        assert model is not None, "it comes with the first plan"
        state.take_from(self._optimizer)
        return [LayerState(i, state.tensors(i), model.state_keys(i)) for i in layers]

    def checksums(self) -> dict[int, str]:
        """SHA-256 of the state of each layer held here; the same on all owners of a layer."""
        if self._state is None:
            return {}
        self._state.take_from(self._optimizer)
        return self._state.checksums()

    # After a fault -----------------------------------------------------------------------

    def standing(self) -> Standing:
        """Where the worker stands; only while it does not run."""
        held = () if self._state is None or self.discards else sorted(self._state.held)
        return Standing(self.next_step, self.trace.summed, self.trace.verdict, tuple(held))

    def settle(self, step: int, verdict: Verdict | None, samples: Samples) -> None:
        """Come to the boundary before ``step``: apply the step that others applied, or discard it.

        Args:
            step: Where all workers go on; a worker without layers just follows.
            verdict: Of the step before it, from a worker that applied it.
            samples: Of every step.

        Raises:
            ValueError: If the worker holds layers of another step and cannot follow.
        """
        if self.standing().layers and self.next_step != step:
            if not (self.next_step == step - 1 and self.trace.summed and verdict):
                raise ValueError(f"stands before step {self.next_step}, and all before {step}")
            assert self._updater is not None, "whoever sums gradients has an updater"
            self._updater.apply(self.next_step, verdict, samples.num_samples(self.next_step))
        if self._updater is not None:
            self._updater.discard()
        self.next_step, self.trace = step, StepTrace(verdict=verdict)

    def rewind(self, step: int) -> None:
        """Forget every layer: all of them will be restored as of ``step``."""
        if self._state is not None:
            self._state.forget()
        self._optimizer, self._updater = None, None
        self.next_step, self.trace = step, StepTrace()
