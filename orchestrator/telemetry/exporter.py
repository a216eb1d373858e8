"""The exporter that shows a run's metrics to Prometheus."""

import errno
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from orchestrator.core.durable import CheckpointManifest, LedgerEntry
from orchestrator.core.evaluation import LOSS, Evaluation
from orchestrator.core.slot import SlotJournal, SlotRecord, StepReport
from orchestrator.errors import ConfigError
from orchestrator.telemetry.gauges import (
    Gauges,
    Series,
    device_series,
    path_series,
    phase_series,
    plan_series,
)
from orchestrator.telemetry.metrics import METRICS, PREFIX, reason_label
from orchestrator.telemetry.spending import Spending

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Counter, Histogram

logger = logging.getLogger(__name__)

MAX_PORTS_TRIED = 100

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WORTH = ("marginal_value_samples_per_second", "break_even_usd_per_hour", "same_cost_usd_per_hour")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What metrics show of a run that neither a SlotRecord nor a SlotJournal holds."""

    strategy: str = ""
    zone_of_pool: Mapping[str, str] = field(default_factory=dict)
    num_samples: int = 0
    """Samples of the whole run."""

    billing_speedup: float = 1.0
    unix_time: Callable[[], float] | None = None
    """The clock; without one there are no timestamps."""


class Exporter:
    """Listens for Prometheus and holds every series of one run.

    ``slot`` and ``journal`` are sinks of the control loop. Series of what is gone vanish with
    the next slot. What is shown of a thousand devices is made of the newest slot when a scrape
    asks for it: there are fewer scrapes than slots.
    """

    def __init__(self, port: int, host: str, run: str, facts: RunFacts | None = None) -> None:
        """Start to listen, on the next free port when the wanted one is taken.

        Raises:
            ConfigError: If the address cannot be listened on at all.
        """
        import prometheus_client  # noqa: PLC0415 - `lyray validate` must not load it

        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._run = run
        self._facts = facts or RunFacts()
        self._registry: CollectorRegistry = prometheus_client.CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._declare()
        self._gauges = Gauges(run)
        self._spending = Spending()
        self._record: SlotRecord | None = None
        self._reports: tuple[StepReport, ...] = ()
        self._set("build_info", 1.0, _version())
        self._server: WSGIServer | None = self._listen(port, host)
        self.address = (host, int(self._server.server_port))
        """Host and port it listens on."""
        if self.address[1] != port:
            logger.info("metrics: listening on port %s instead of %s", self.address[1], port)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def page(self) -> str:
        """What a scrape is answered: every series, in the text format of Prometheus (0.0.4)."""
        from prometheus_client import generate_latest  # noqa: PLC0415 - as above

        more = phase_series(self._reports) if self._reports else {}
        if record := self._record:
            more |= device_series(record) | path_series(record.paths)
            more |= plan_series(record.next_plan, self._facts.strategy)
        return generate_latest(self._registry).decode() + self._gauges.text(more)

    def journal(self, journal: SlotJournal) -> None:
        """Count what a slot adds: steps, samples, dollars, losses."""
        for step in journal.steps:
            self._count("steps_total", 1)
            self._count("samples_total", step.samples)
            self._observe("step_duration_seconds", step.step_s)
            if step.skipped:
                self._count("steps_discarded_total", 1, reason_label("not_finite"))
        self._count_money(journal.ledger)
        for event in journal.events:
            if event.kind == "lost":
                self._count("losses_total", 1, reason_label(event.cause or "worker"))
            elif event.kind == "recovered" and event.cause:
                self._count("recoveries_total", 1, event.cause)
                self._observe("recovery_duration_seconds", event.duration_s or 0.0)
            elif event.kind in ("alarm", "warning"):
                self._count("warnings_total", 1, reason_label(event.detail))
        for manifest in journal.checkpoints:
            self._observe("checkpoint_duration_seconds", manifest.write_s)
            self.checkpoint(manifest)
        self._reports = journal.reports or self._reports  # the newest that there are

    def _count_money(self, ledger: Iterable[LedgerEntry]) -> None:
        """A line a device, a series a pool or zone."""
        bill: dict[str, float] = defaultdict(float)
        for entry in ledger:
            if entry.usd:
                bill[entry.pool] += entry.usd
            if entry.egress_usd:
                zone = self._facts.zone_of_pool.get(entry.pool, "")
                self._count("egress_usd_total", entry.egress_usd, zone)
                self._count("egress_bytes_total", entry.egress_bytes, zone)
        for pool, usd in bill.items():
            self._count("cost_usd_total", usd, pool)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Show the newest evaluation."""
        values = {LOSS: evaluation.loss, **evaluation.metrics}
        self._set_all("evaluation", {(k,): v for k, v in values.items() if v is not None})
        self._set("evaluation_step", evaluation.step)
        if evaluation.best:
            self._set("best_evaluation_step", evaluation.step)
        self._observe("evaluation_duration_seconds", evaluation.eval_s)

    def checkpoint(self, newest: CheckpointManifest) -> None:
        """Show the newest checkpoint."""
        self._set("checkpoint_bytes", newest.size_bytes)
        if newest.unix_s is not None:
            self._set("checkpoint_timestamp_seconds", newest.unix_s)

    def slot(self, record: SlotRecord) -> None:
        """Show the newest slot."""
        self._show_money(record)
        self._show_worth(record)
        self._show_rates(record)
        self._set_all("requested_devices", {(p,): float(n) for p, n in record.requested})
        self._record = record
        self._count("decisions_total", 1, record.decision, reason_label(record.reason))
        self._count("control_cpu_seconds_total", record.control_cpu_s)
        self._observe("planning_duration_seconds", record.solve_s)
        if record.decision in ("switch", "reassign"):
            self._count("replans_total", 1, record.decision, reason_label(record.reason))
            self._observe("replan_duration_seconds", record.migration_s)
            self._observe("migration_bytes", record.moved_bytes)
        for fallback in record.fallbacks:
            self._count("fallbacks_total", 1, reason_label(fallback))
        left = max(0, self._facts.num_samples - record.samples)
        samples: Series = {("committed",): record.samples, ("open",): left}
        self._set_all("lease_samples", samples)

    def _show_money(self, record: SlotRecord) -> None:
        self._set("spent_usd", record.spent_usd)
        if record.budget is not None:
            self._set("budget_usd_per_hour", record.budget.average_per_hour_usd)
            self._set("budget_spent_ratio", record.spent_usd / record.budget.whole_usd)
        self._show_exhaustion(self._spending.lasts_s(record))
        self._set("overspend_bound_usd", record.overspend_bound_usd)
        self._set("backlog_usd", record.backlog_usd)
        self._set("penalty_weight", record.penalty_weight)
        self._set("progress_backlog_usd", record.progress_backlog_usd)
        self._set("forgiven_usd", record.forgiven_usd)
        self._set("overhead_ratio", record.overhead_ratio)
        self._set("price_of_money_samples_per_usd", record.price_of_money_samples_per_usd)
        if record.time_constant_s is not None:
            self._set("time_constant_seconds", record.time_constant_s)
        if record.coherence_s is not None:
            self._set("coherence_seconds", record.coherence_s)
        self._set_all("price_age_seconds", {(p,): age_s for p, age_s in record.price_age_s})

    def _show_exhaustion(self, lasts_s: float | None) -> None:
        at: Series = {}
        if lasts_s is not None and self._facts.unix_time is not None:
            at = {(): self._facts.unix_time() + lasts_s / self._facts.billing_speedup}
        self._set_all("budget_exhaustion_timestamp_seconds", at)

    def _show_worth(self, record: SlotRecord) -> None:
        """Marginal values: their names end in the pool or zone, where they have one."""
        values: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for name, value in record.marginal_values:
            what, _, where = name.partition(".")
            if what == "device_break_even_per_hour_usd":
                values["break_even_usd_per_hour"][(where,)] = value
            elif what == "device_same_cost_per_hour_usd":
                values["same_cost_usd_per_hour"][(where,)] = value
            else:
                of = what.removesuffix("_samples_per_s")
                values["marginal_value_samples_per_second"][of, where] = value
        for name in _WORTH:
            self._set_all(name, values[name])

    def _show_rates(self, record: SlotRecord) -> None:
        predicted, measured = record.predicted, record.measured
        shown = {
            "predicted_step_seconds": predicted.step_s,
            "predicted_samples_per_second": predicted.samples_per_s,
            "predicted_cost_usd_per_hour": predicted.cost_per_hour_usd,
            "measured_step_seconds": measured.step_s,
            "samples_per_second": measured.samples_per_s,
            "cost_usd_per_hour": measured.cost_per_hour_usd,
            "loss": record.loss,
            "grad_norm": record.grad_norm,
            "learning_rate": record.lr if record.loss is not None else None,
        }
        for name, value in shown.items():
            if value is not None:
                self._set(name, value)
        if predicted.step_s and measured.step_s:
            self._set("prediction_error_ratio", measured.step_s / predicted.step_s - 1)
        if record.num_operations:
            self._set("emulation_late_ratio", record.num_late / record.num_operations)

    # Series --------------------------------------------------------------------------

    def _declare(self) -> None:
        import prometheus_client as client  # noqa: PLC0415 - as above

        for name, metric in METRICS.items():
            full, labels = PREFIX + name, ("run", *metric.labels)
            if metric.kind == "counter":
                self._counters[name] = client.Counter(
                    full, metric.text, labels, registry=self._registry
                )
            elif metric.kind == "histogram":
                self._histograms[name] = client.Histogram(
                    full, metric.text, labels, registry=self._registry, buckets=metric.buckets
                )

    def _listen(self, port: int, host: str) -> "WSGIServer":
        from prometheus_client import start_http_server  # noqa: PLC0415 - as above

        for tried in range(port, min(port + MAX_PORTS_TRIED, 65536)):
            try:
                server, _ = start_http_server(tried, host, self._registry)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"metrics.host {host!r}, port {tried}: {error.strerror or error}; write an "
                        "address of this machine, for example 127.0.0.1, and a port you may use"
                    ) from None
            else:
                server.set_app(self._answer)
                return server
        raise ConfigError(
            f"metrics.port: ports {port} to {port + MAX_PORTS_TRIED - 1} of {host} are taken; "
            "write 0 for any free port"
        )

    def _answer(
        self, request: Mapping[str, object], start: Callable[[str, list[tuple[str, str]]], object]
    ) -> list[bytes]:
        """Answer a request, whatever it asks for, with the page; it is called by its own thread."""
        body = b"" if request["REQUEST_METHOD"] == "OPTIONS" else self.page().encode()
        start("200 OK", [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(body)))])
        return [body]

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(self._run, *labels).inc(amount)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._gauges.show(name, {labels: value})

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].labels(self._run).observe(value)

    def _set_all(self, name: str, values: Series) -> None:
        self._gauges.show(name, values)


def _version() -> str:
    try:
        return version("lyray")
    except PackageNotFoundError:
        return "unknown"
