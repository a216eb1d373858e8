"""The control loop: one slot at a time, the same code against Ray and against the simulation."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestrator.control.backend import Backend
from orchestrator.control.books import Books, LoopOptions
from orchestrator.control.chooser import CAP_REACHED, Choice, Chooser, incumbent_estimate
from orchestrator.control.headway import Headway
from orchestrator.control.records import Settled, all_done, make_record
from orchestrator.control.recovery import judge
from orchestrator.control.scaling import Autoscaler, Scene
from orchestrator.control.statement import control_state, totals
from orchestrator.core.cluster import ClusterState
from orchestrator.core.durable import ControlState
from orchestrator.core.edits import BudgetNews, NewsOfBudget
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Plan
from orchestrator.core.slot import (
    IDLE_ESTIMATE,
    Candidate,
    Decision,
    Observation,
    Outcome,
    OutcomeStatus,
    PlanningProblem,
    SlotJournal,
    SlotRecord,
    first_problem,
)
from orchestrator.errors import OrchestratorError
from orchestrator.planning.constraints import make_rows
from orchestrator.planning.cost import CostModel
from orchestrator.planning.guards import affordable_s
from orchestrator.planning.lyapunov import idle_decision

if TYPE_CHECKING:
    from orchestrator.control.treasury import Treasury
    from orchestrator.planning.assignment import SlotAssignment
    from orchestrator.strategies.registry import Strategy

logger = logging.getLogger(__name__)


_NOTHING_YET = "nothing ran yet"


def _ignore(_: object) -> None:
    """Sink of what nobody wants to see."""


@dataclass(kw_only=True)
class ControlLoop:
    """Runs one slot at a time against a backend. Owns no thread and reads no clock.

    ``book`` takes what a slot adds to the append-only files, before ``save`` takes the state
    that refers to it; both happen before the decision is applied, ``sinks`` after it.
    """

    backend: Backend
    strategy: "Strategy"
    assignment: "SlotAssignment"
    options: LoopOptions
    cluster: ClusterState
    model: ModelProfile
    state: ControlState | None = None
    autoscaler: Autoscaler | None = None
    sinks: Sequence[Callable[[SlotRecord], None]] = ()
    save: Callable[[ControlState], None] = _ignore
    book: Callable[[SlotJournal], None] = _ignore
    stopwatch: Callable[[], float] = lambda: 0.0
    cpu_clock: Callable[[], float] = lambda: 0.0
    news_of_budget: NewsOfBudget = BudgetNews
    outcome: Outcome | None = field(default=None, init=False)
    is_billed: bool = field(default=True, init=False)
    """Whether all that was held is on the ledger; False while a plan runs."""

    def __post_init__(self) -> None:
        options, state = self.options, self.state
        self._chooser = Chooser(
            strategy=self.strategy,
            assignment=self.assignment,
            rows=(),
            control=options.control,
            stopwatch=self.stopwatch,
        )
        self._books = Books(options=options, cluster=self.cluster, model=self.model, state=state)
        self._follow_limits()
        self._at_start = BudgetNews(options.budget, "start")  # an earlier life may know another
        self._headway = Headway()
        self._restarted = state is not None
        self._incumbent = state.plan if state else None
        plan = state.plan if state else Plan(0, options.training.schedules[0])
        self._decision = Decision("idle", plan, IDLE_ESTIMATE, _NOTHING_YET)
        if state and (
            estimate := incumbent_estimate(CostModel(self.problem()), self._chooser.rows)
        ):
            self._decision = replace(
                self._decision, kind="keep", predicted=estimate, run_until_s=state.run_until_s
            )

    def tick(self) -> SlotRecord:
        """Run one slot to its end, decide the next one and return the record of the slot.

        Raises:
            UserCodeError: If the user's code raised in a worker.
            LostWorkerError: If a device of the plan is gone.
            InfeasibleError: If the model fits on no combination of the devices.
        """
        slot, started_cpu_s = self._look()
        if self._all_done and not self._books.owes_evaluation:
            reason = all_done(self.options.num_steps, self._books.leases.num_skipped)
            return self._finish("finished", reason, slot)
        with self._kept(slot):
            self._follow_budget()
            choice = self._choose(slot)
            exhausted = self._exhausted(choice.decision, slot)
            if not exhausted:
                self._hand_over(choice)
                choice = self._scaled(choice)
                self.save(self._state())
                self.is_billed = False
                self.backend.apply(choice.decision)
        if exhausted:
            return self._finish("budget", exhausted, slot)
        return self._publish(slot, choice, started_cpu_s)

    def end(self, status: OutcomeStatus, reason: str) -> SlotRecord:
        """Stop at the next step boundary, write a checkpoint, settle the rest: no slot follows.

        Sets ``outcome``. For requests from outside, between two slots.
        """
        return self._finish(status, reason, None)

    # A slot that is over -------------------------------------------------------------

    def _look(self) -> tuple[Settled, float]:
        """Close a slot, write down what it brought, and judge whether that ends the run.

        Returns:
            The slot, and what the CPU clock showed when it was over.
        """
        observation = self.backend.observe()
        started_cpu_s = self.cpu_clock()
        settled = self._settle(observation)
        # A life that ends while it decides has billed this slot, and told nobody of it.
        self.save(replace(self._state(), slot=self._books.slot))
        self._judge(observation, settled, started_cpu_s)
        return settled, started_cpu_s

    def _settle(self, observation: Observation) -> Settled:
        """Bill what an observation brought, and write it down."""
        settled, journal = self._books.settle(observation, self._decision)
        self.book(journal)
        self.is_billed = True
        return settled

    @contextmanager
    def _kept(self, slot: Settled | None) -> Iterator[None]:
        """Whatever goes wrong inside, what was held until then is billed, and the state is saved.

        Args:
            slot: What is not published yet of what was settled before.
        """
        try:
            yield
        except Exception as error:
            started_cpu_s = self.cpu_clock()
            status = error.status if isinstance(error, OrchestratorError) else "failed"
            if not self.is_billed:
                last = self._settle(self.backend.observe())
                slot = slot.then(last) if slot else last
            self.save(self._state())
            if slot:
                self._publish_last(slot, f"{status}: {error}", started_cpu_s)
            raise

    def _judge(self, observation: Observation, slot: Settled, started_cpu_s: float) -> None:
        books, in_use = self._books, self._decision.plan.device_ids
        try:
            judge(
                observation.events,
                in_use=in_use,
                survives=books.survives(observation.events, in_use),
                checkpoint_step=books.checkpoint_step,
                predicted_bytes=dict(slot.predicted.peak_memory_bytes),
            )
            self._headway.look(observation, in_use)
            self._headway.learn(slot.steps)
        except OrchestratorError as error:
            self.save(self._state())  # what was spent and done so far is not forgotten
            self._publish_last(slot, error.status, started_cpu_s)
            raise

    # The next one --------------------------------------------------------------------

    def _follow_budget(self) -> None:
        """Go by a budget that was edited, from this slot edge on, and write that down."""
        news, books, before = self.news_of_budget(), self._books, self.treasury.budget
        if news.wanted is None:
            news = replace(self._at_start, warnings=news.warnings)
        self._at_start = BudgetNews()
        noted = books.follow(news)
        if self.treasury.budget != before:
            self._follow_limits()
            self._restarted = False  # what was decided before goes by the budget of then
        for event in noted:
            level = logging.WARNING if event.kind == "warning" else logging.INFO
            logger.log(level, "slot %s: %s", books.slot, event.detail)
        if noted:
            self.book(SlotJournal(events=noted))
            self.save(replace(self._state(), slot=books.slot))

    def _follow_limits(self) -> None:
        limits, speedup = self.treasury.budget.limits, self.options.billing_speedup
        rows = make_rows(limits, billing_speedup=speedup)
        self._chooser = replace(self._chooser, rows=rows)

    def _choose(self, slot: Settled) -> Choice:
        problem, treasury, surveyed = self.problem(), self._books.treasury, None
        if not problem.cluster.devices:
            reason = self._books.why_none_plannable
            return Choice(idle_decision(self._incumbent, problem.schedules[0], reason))
        if not treasury.is_priced:
            surveyed = self._chooser.survey(problem, treasury)
            problem = self.problem()
        stood = not (slot.reports or slot.elapsed_s)  # else the cluster went on by itself
        go_on, self._restarted = self._restarted and stood, False
        choice = self._chooser.choose(
            problem,
            treasury,
            self._books.view(slot),
            expected=slot.predicted,
            go_on=go_on,
            surveyed=surveyed,
        )
        if go_on and choice.decision.kind == "keep":
            reason = "keep: the plan decided before the restart goes on"
            choice = replace(choice, decision=replace(choice.decision, reason=reason))
        return choice

    @property
    def treasury(self) -> "Treasury":
        """What the run knows of its money, to be looked at."""
        return self._books.treasury

    def problem(self) -> PlanningProblem:
        """What the next slot would be planned for."""
        options, can, treasury = self.options, self.backend.capabilities, self._books.treasury
        problem = first_problem(
            self._books.surcharged(self._books.plannable(self._incumbent)),
            self.model,
            options.training,
            max_team=min(options.control.max_team, can.max_team),
            budget_usd_per_s=treasury.budget_usd_per_s,
            seed=options.seed,
        )
        return replace(
            problem,
            schedules=tuple(s for s in problem.schedules if s in can.schedules),
            overlap=problem.overlap and can.overlap,
            penalty_weight=treasury.scored_weight,
            backlog_usd=treasury.queues.backlog_usd,
            incumbent=self._incumbent,
            under_notice=self._books.leaving,
            rentable=self.autoscaler.rentable if self.autoscaler else (),
        )

    def _exhausted(self, decision: Decision, slot: Settled) -> str | None:
        """Why ``total_usd`` lets nothing more run, None while it does."""
        total_usd, spent_usd = self.treasury.budget.total_usd, self._books.ledger.spent_usd
        if total_usd is None:
            return None
        if spent_usd >= total_usd:
            return f"{CAP_REACHED}: {spent_usd:.6g} $ of {total_usd:.6g} $ are spent"
        if decision.kind == "idle":
            if decision.reason.startswith(CAP_REACHED):
                return decision.reason
            view = self._books.view(slot)
            idle, slot_s = Candidate(decision.plan, IDLE_ESTIMATE), self.options.control.slot_s
            if affordable_s(self.problem(), idle, ledger=view, slot_s=slot_s) < slot_s:
                return f"{CAP_REACHED}: the devices present cost more than is left, even unused"
        elif decision.run_until_s and self._decision.run_until_s and not slot.steps:
            return f"{CAP_REACHED}: what is left does not pay for another step"
        return None

    def _hand_over(self, choice: Choice) -> None:
        """Make the decision the running one and let its plan use samples."""
        decision, scribe = choice.decision, self._books.scribe
        if decision.kind != "keep":
            self.treasury.slots_to_follow = 0
        for fallback in choice.fallbacks:
            logger.warning("slot %s: fallback: %s", self._books.slot, fallback)
        logger.info("slot %s: %s", self._books.slot, decision.reason)
        if self._incumbent is None or decision.plan.generation != self._incumbent.generation:
            self._books.take_over(decision, replans=self._incumbent is not None)
        fallbacks = (scribe.note("fallback", fallback) for fallback in choice.fallbacks)
        changes = () if self._waits_on(decision) else scribe.decision(decision)
        self.book(SlotJournal(events=(*fallbacks, *changes)))
        self._incumbent, self._decision = decision.plan, decision

    def _scaled(self, choice: Choice) -> Choice:
        """Wish for the devices that pay, and give back those that no plan uses."""
        if self.autoscaler is None:
            return choice
        cluster, scribe = self._books.estimator.cluster, self._books.scribe
        staying = (d for d in cluster.devices if d.device_id not in self._books.leaving)
        decision, there = choice.decision, replace(cluster, devices=tuple(staying))
        scene = Scene(there, decision.plan, decision.predicted.step_s, choice.marginal_values)
        scaling = self.autoscaler.follow(scene)
        if scaling.reasons:
            events = (scribe.note("scale", reason) for reason in scaling.reasons)
            self.book(SlotJournal(events=tuple(events)))
        return replace(choice, requested=tuple(scaling.counts.items()))

    def _waits_on(self, decision: Decision) -> bool:
        """Whether nothing runs for the same cause as before, which is no news."""
        before = self._decision
        resumed = self.state is not None and before.reason == _NOTHING_YET  # who waited already
        known = resumed or _cause(decision) == _cause(before)
        return decision.kind == before.kind == "idle" and known

    @property
    def _all_done(self) -> bool:
        return self._books.leases.next_step >= self.options.num_steps

    def _finish(self, status: OutcomeStatus, reason: str, slot: Settled | None) -> SlotRecord:
        started_cpu_s, was_done = self.cpu_clock(), self._all_done
        self.save(self._state())  # a checkpoint may fail, and what was booked stays spent
        self.is_billed = False
        with self._kept(slot):
            manifest = self.backend.checkpoint()
        if manifest:
            self.book(SlotJournal(events=self._books.checkpointed(manifest.step)))
        last, _ = self._look()
        whole = slot.then(last) if slot else last
        if was_done and status == "finished" and not self._all_done:
            self.save(self._state())  # the last steps were lost before they were written
            return self._publish_last(whole, "steps are run again", started_cpu_s)
        paused = status == "budget" and self.treasury.budget.on_exhausted == "pause"
        self.outcome = Outcome(status, reason, resumable=paused or status == "stopped")
        self.book(SlotJournal(events=(self._books.scribe.note(status, reason),)))
        self.save(self._state())
        return self._publish_last(whole, f"{status}: {reason}", started_cpu_s)

    # What is kept and shown ----------------------------------------------------------

    def _state(self) -> ControlState:
        plan = self._incumbent or self._decision.plan
        return control_state(self._books, plan, self._decision.run_until_s)

    def _publish_last(self, slot: Settled, reason: str, started_cpu_s: float) -> SlotRecord:
        idle = Plan(slot.plan.generation, slot.plan.schedule)
        choice = Choice(Decision("idle", idle, IDLE_ESTIMATE, reason))
        return self._publish(slot, choice, started_cpu_s)

    def _publish(self, slot: Settled, choice: Choice, started_cpu_s: float) -> SlotRecord:
        come_to = totals(self._books, self.cpu_clock() - started_cpu_s)
        record = make_record(slot, choice, come_to, self._books.clock)
        for sink in self.sinks:
            sink(record)
        self._books.slot += 1
        return record


def _cause(decision: Decision) -> str:
    return decision.reason.partition(":")[0]
