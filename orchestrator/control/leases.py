"""Which samples are used for good: a step commits once every group of its plan has reported it."""

from collections.abc import Iterable, Sequence

from orchestrator.core.plan import Plan, step_range, step_shares
from orchestrator.core.slot import CommittedStep, StepReport


class LeaseBook:
    """Deals the run's one global sequence of samples to groups, step by step.

    Step k owns the positions [k B, min((k+1) B, total)), whatever the plan; group g takes
    the consecutive part after the groups before it. A step commits when every group of its
    plan has reported it, and only after the step before it: the committed range has no holes.
    """

    def __init__(
        self, *, batch_samples: int, num_samples: int, next_step: int = 0, num_skipped: int = 0
    ) -> None:
        """Start with everything before ``next_step`` committed.

        Args:
            batch_samples: B.
            num_samples: Positions of the whole run; only the last step may be short.
            next_step: First step not yet committed.
            num_skipped: Of the steps before it, how many changed nothing.
        """
        self._batch_samples = batch_samples
        self._num_samples = num_samples
        self.next_step = next_step
        self._skipped_before, self._skipped = num_skipped, set[int]()
        self._plans: dict[int, Plan] = {}  # by generation
        self._reports: dict[tuple[int, int], dict[int, list[StepReport]]] = {}

    @property
    def samples_committed(self) -> int:
        """Samples used for good."""
        return self.range_of(self.next_step)[0]

    @property
    def num_skipped(self) -> int:
        """Committed steps that changed nothing; of an earlier life all that it ever counted."""
        return self._skipped_before + len(self._skipped)

    def range_of(self, step: int) -> tuple[int, int]:
        """Positions (half-open) of a step."""
        return step_range(step, self._batch_samples, self._num_samples)

    def grant(self, plan: Plan) -> None:
        """Let a plan use the samples from the next step boundary on, until another is granted.

        Steps of the plan before it may still commit: they were under way at the boundary.
        """
        if not plan.is_idle:
            self._plans[plan.generation] = plan

    def granted_before(self, plan: Plan) -> tuple[Plan, ...]:
        """Earlier plans whose last step may still commit."""
        earlier = (self._plans[g] for g in sorted(self._plans) if g < plan.generation)
        return tuple(earlier)

    def knows(self, generation: int) -> bool:
        """Whether steps of that generation may still commit."""
        return generation in self._plans

    def commit(
        self, reports: Iterable[StepReport], *, applied_before: int = 0
    ) -> tuple[CommittedStep, ...]:
        """Take reports in and return the steps that are committed by them, in order.

        Reports of another generation, and of steps committed before, are ignored. Steps before
        ``applied_before`` commit even if a group, all of whose devices were lost, never came
        to report them: the others hold what it contributed.
        """
        for report in reports:
            if self.knows(report.generation) and report.step >= self.next_step:
                by_group = self._reports.setdefault((report.step, report.generation), {})
                by_group.setdefault(report.group_index, []).append(report)
        committed = []
        while (generation := self._complete(applied_before)) is not None:
            committed.append(self._commit_next(generation))
        self._skipped |= {step.step for step in committed if step.skipped}
        return tuple(committed)

    def restart_at(self, next_step: int) -> None:
        """Go on with the step that a restored checkpoint goes on with; later ones are undone."""
        self._reports.clear()
        self.next_step = next_step
        self._skipped = {step for step in self._skipped if step < next_step}

    def _complete(self, applied_before: int) -> int | None:
        """Generation in which the next step has been applied everywhere, if any."""
        for generation in sorted(self._plans, reverse=True):
            seen = self._reports.get((self.next_step, generation), {})
            is_applied = bool(seen) and self.next_step < applied_before
            if is_applied or len(seen) == len(self._plans[generation].groups):
                return generation
        return None

    def _commit_next(self, generation: int) -> CommittedStep:
        step, plan = self.next_step, self._plans[generation]
        by_group = self._reports[step, generation]
        first, end = self.range_of(step)
        for group_index, sizes in enumerate(step_shares(plan.groups, end - first)):
            used = {report.num_samples for report in by_group.get(group_index, ())}
            assert used <= {sum(sizes)}, (
                f"step {step}: group {group_index} reports {sorted(used)} samples, its lease "
                f"holds {sum(sizes)}"
            )
        reports = [report for found in by_group.values() for report in found]
        self.next_step += 1
        self._plans = {g: known for g, known in self._plans.items() if g >= generation}
        self._reports = {key: r for key, r in self._reports.items() if key[0] > step}
        return committed_step(reports, first, end)


def committed_step(
    reports: Sequence[StepReport], first_sample: int, end_sample: int
) -> CommittedStep:
    """A step as all its devices report it: as long as on the slowest, loss as the last stage says.

    Args:
        reports: Of one step in one generation, of every device of the plan.
        first_sample: Where its samples start in the run.
        end_sample: Where they end.
    """
    told = next((r for r in reports if r.loss is not None), reports[0])
    return CommittedStep(
        step=told.step,
        generation=told.generation,
        first_sample=first_sample,
        end_sample=end_sample,
        step_s=max(r.step_s for r in reports),
        ended_s=max(r.ended_s for r in reports),
        loss=told.loss,
        grad_norm=told.grad_norm,
        lr=told.lr,
        loss_scale=told.loss_scale,
        skipped=told.skipped,
    )
