"""What stands ready before the first slot: workers, and what planning and running need of them."""

from dataclasses import dataclass

from orchestrator.core.cluster import ClusterState, Device
from orchestrator.core.code import Code
from orchestrator.core.model import ModelProfile
from orchestrator.runtime.crew import Crew
from orchestrator.runtime.presence import Presence, RayPresence
from orchestrator.runtime.truth import EmulatedTruth


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """Workers that are loaded and connected, and what there is to do with them."""

    crew: Crew
    cluster: ClusterState
    """What is present, at the prices of the start."""

    model: ModelProfile
    presence: Presence
    """Looks at the cluster while the run goes on."""

    truth: EmulatedTruth | None
    """The emulated cluster; None where devices are real."""

    num_steps: int
    num_samples: int
    """Of the whole run; only the last step may be short."""

    code: Code
    """What all workers have loaded."""

    nodes: RayPresence | None = None
    """The nodes that may be given back; None where devices are emulated."""

    rentable: tuple[Device, ...] = ()
    """A device, as it would be, of each pool that has none and can be asked for one."""

    evaluation_samples: int = 0
    """Of the evaluation dataset; 0 where none is evaluated."""
