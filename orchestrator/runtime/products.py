"""What GPUs the nodes of a Ray cluster have: their drivers are asked where no label tells."""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.runtime.inventory import Product, unlabelled_gpus

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
"""So long a node may take: a process starts there, imports torch and wakes the driver."""


def seen_here() -> tuple[Product, ...]:
    """The GPUs that Ray leaves visible to this process, as torch finds them."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(Product(one.name, one.total_memory) for one in found)


@dataclass(slots=True)
class Products:
    """Asks each node once, with all its GPUs, as its workers will have them."""

    actors: Any = ray
    """Ray, or what offers as much of it."""

    _told: dict[str, tuple[Product, ...]] = field(default_factory=dict)
    _asked: dict[str, tuple[Any, float]] = field(default_factory=dict)  # answer to come, since when

    def ask(
        self, nodes: Iterable[Mapping[str, object]], wait_s: float = 0.0
    ) -> Mapping[str, tuple[Product, ...] | None]:
        """GPUs by Ray node, of the nodes without a label; None: one has not answered yet.

        Nothing is told of a node that does not answer in ``ANSWER_S``, or whose GPUs torch does
        not see: then goes what Ray says.

        Args:
            nodes: As ``ray.nodes()`` returns them.
            wait_s: How long to wait for those that are asked now.
        """
        wanted = unlabelled_gpus(nodes)
        now_s = time.monotonic()
        for ray_node_id, num_gpus in wanted.items():
            if ray_node_id not in self._told and ray_node_id not in self._asked:
                where = NodeAffinitySchedulingStrategy(ray_node_id, soft=False)
                task = self.actors.remote(
                    num_cpus=0, num_gpus=num_gpus, max_retries=0, scheduling_strategy=where
                )(seen_here)
                self._asked[ray_node_id] = task.remote(), now_s
        answers = [answer for answer, _ in self._asked.values()]
        if answers:
            self.actors.wait(answers, num_returns=len(answers), timeout=wait_s)
        for ray_node_id, (answer, since_s) in tuple(self._asked.items()):
            done, _ = self.actors.wait([answer], timeout=0)
            if done or time.monotonic() > since_s + ANSWER_S:
                del self._asked[ray_node_id]
                self._told[ray_node_id] = self._read(ray_node_id, answer if done else None)
        return {ray_node_id: self._told.get(ray_node_id) for ray_node_id in wanted}

    def _read(self, ray_node_id: str, answer: Any) -> tuple[Product, ...]:
        try:
            if answer is not None:
                return tuple(self.actors.get(answer))
            problem: object = f"no answer within {ANSWER_S:.0f} s: others may hold its GPUs"
        except Exception as error:  # torch cannot be imported there, the node went: Ray's word goes
            problem = error
        logger.warning("node %s was asked for its GPUs: %s", ray_node_id, problem)
        return ()
