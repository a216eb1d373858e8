"""What this version can do of what the file may say, and whether the names in it exist."""

import ast
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from math import fsum
from pathlib import Path

from orchestrator.control.backend import ClusterOptions, EmulationOptions, PriceFeedOptions
from orchestrator.control.faults import Fault
from orchestrator.core.budget import BudgetOptions, LimitOptions
from orchestrator.core.training import TrainingOptions
from orchestrator.errors import ConfigError
from orchestrator.planning.lyapunov import ControlOptions
from orchestrator.training_support import NOT_YET, choice, training_problems

STRATEGIES = (
    "joint", "even-split", "proportional", "even-pipeline", "balanced-pipeline", "static",
    "static-rebalanced", "greedy", "cheapest", "slot-cap", "tuned-rate-cap", "tuned-price-cap",
    "frozen-price", "on-demand", "do-nothing",
)  # fmt: skip
"""Strategies that are built; a test compares them with the registry, which is heavier to load."""

LATER_STRATEGIES = ("pase", "ppo")
LATER_SECTIONS = ("ppo",)

_SHARE_TOLERANCE = 1e-9  # 0.1 ten times is a little more than 1


def check_supported(
    training: TrainingOptions,
    cluster: ClusterOptions,
    budget: BudgetOptions,
    control: ControlOptions,
    emulation: EmulationOptions | None,
) -> list[str]:
    """Return what cannot be done as asked, one message each: dotted path, value, mend.

    ``emulation`` is None where the file has no such section.
    """
    speedup = emulation.billing_speedup if emulation else 1.0
    problems = [
        *training_problems(training, cluster),
        *_cluster_problems(cluster),
        *_feed_problems(cluster.price_feed, speedup),
        *_limit_problems(budget.limits, cluster),
        *_strategy_problems(control.strategy),
    ]
    if (slot_s := control.slot_s * speedup) > (horizon_s := 3600.0 * budget.horizon_hours):
        problems.append(
            f"control.slot_s is {control.slot_s:g}, {slot_s:g} billed seconds, longer than "
            f"budget.horizon_hours of {budget.horizon_hours:g}: the average would be decided once; "
            f"write slot_s: {horizon_s / speedup:g} or less"
        )
    if emulation is None:
        return problems
    if cluster.source != "emulated":
        problems.append(
            f"emulation is only for cluster.source: emulated, and cluster.source is "
            f"{cluster.source}; remove the section"
        )
    pools = {offer.pool: offer.count for offer in cluster.offers}
    for event in emulation.happenings:
        if event.pool in pools:
            pools[event.pool] += event.joined
    for index, event in enumerate(emulation.events):
        named = {"device": event.device, "pool": event.pool}
        problems += _target_problems(f"emulation.events[{index}]", named, pools)
    for index, fault in enumerate(emulation.faults):
        problems += _fault_problems(f"emulation.faults[{index}]", fault, pools)
    return problems


def find_task(path: str, arguments: Mapping[str, object], folder: Path) -> Path | None:
    """Check that ``module:callable`` exists and takes the arguments; import and run nothing.

    Args:
        path: ``training.task``.
        arguments: ``training.task_args``.
        folder: The working directory, searched first.

    Returns:
        The file of the module; None where it is no Python source.

    Raises:
        ConfigError: If it cannot be found or called so, with the place and the mend.
    """
    module, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), name]):
        raise ConfigError(
            f"training.task is {path!r}; write package.module:callable, for example "
            "examples.byte_gpt:task"
        )
    spec = find_module(module, [str(folder), *sys.path])
    if spec is None:
        raise ConfigError(
            f"training.task is {path!r}, but there is no module {module!r} in {folder} or among "
            "the installed packages; start the command in the folder that holds it"
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None  # compiled or a namespace: only importing can tell
    try:
        tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)  # bytes may name a coding
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"training.task is {path!r}, but {spec.origin}{f' line {line}' if line else ''} is no "
            f"Python: {getattr(error, 'msg', error)}; mend it there"
        ) from None
    names = dict(_top_level_names(tree.body))
    if name not in names and "*" not in names:
        close = difflib.get_close_matches(name, names, 1)
        raise ConfigError(
            f"training.task is {path!r}, but {spec.origin} defines no {name!r}"
            + (f"; did you mean {module}:{close[0]}?" if close else "; define it there")
        )
    definition = names.get(name)
    if isinstance(definition, ast.FunctionDef) and not definition.decorator_list:
        _check_arguments(definition.args, name, arguments)
    return Path(spec.origin)


def find_module(name: str, search: list[str]) -> ModuleSpec | None:
    """Find a module without importing the packages around it, unlike ``importlib.util``."""
    spec: ModuleSpec | None = None
    places: list[str] | None = search
    for part in name.split("."):
        if places is None:
            return None
        # Not under its full name: a folder without __init__.py would ask for its parent, which
        # is not imported.
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        found = spec.submodule_search_locations
        places = list(found) if found is not None else None
    return spec


def _cluster_problems(cluster: ClusterOptions) -> Iterator[str]:
    if cluster.autoscaler.enabled and cluster.source != "ray":
        yield (
            f"cluster.autoscaler.enabled with cluster.source: {cluster.source}: only the devices "
            "of a Ray cluster come and go when asked; remove it, or write source: ray"
        )
    elif cluster.autoscaler.enabled and not any(offer.max_count for offer in cluster.offers):
        yield "cluster.autoscaler.enabled, but no offer has max_count; add it to the pools to grow"
    for index, offer in enumerate(cluster.offers):
        most, fixed = offer.max_price_per_hour, cluster.price_feed is None
        if most is not None and most < offer.price_per_hour and fixed and cluster.source == "ray":
            yield (
                f"cluster.offers[{index}].max_price_per_hour is {most:g}, less than price_per_hour "
                f"of {offer.price_per_hour:g}, and no price_feed could lower it: the pool would "
                "never be used; leave it out"
            )
    yield from _name_problems(cluster)


def _feed_problems(feed: PriceFeedOptions | None, speedup: float) -> Iterator[str]:
    """Prices of a server that are too old before they are read again."""
    if feed is None or feed.url is None or feed.every_s * speedup <= feed.max_age_s:
        return
    billed_s = feed.every_s * speedup
    yield (
        f"cluster.price_feed.every_s is {feed.every_s:g}, {billed_s:g} billed seconds, longer than "
        f"max_age_s of {feed.max_age_s:g}: every price would be too old before the next; write "
        f"max_age_s: {2 * billed_s:g}, or every_s: {feed.max_age_s / speedup / 2:g}"
    )


def _name_problems(cluster: ClusterOptions) -> Iterator[str]:
    """Link rules of what is not there, and names of pools that are taken for zones."""
    zone_of = {offer.pool: offer.zone for offer in cluster.offers}
    pools, zones = sorted(zone_of), sorted(set(zone_of.values()))
    for index, offer in enumerate(cluster.offers):
        if offer.pool in zones and offer.zone != offer.pool:
            path = f"cluster.offers[{index}].pool"
            yield f"{path} is {offer.pool!r}, which is a zone of other pools; rename one"
    for index, link in enumerate(cluster.links):
        path = f"cluster.links[{index}]"
        if link.pool is not None and link.pool not in pools:
            yield f"{path}.pool is {link.pool!r}; known: {', '.join(pools)}"
        elif link.pool is not None and [*zone_of.values()].count(link.pool) > 1:
            yield f"{path}.pool is {link.pool!r}, a zone of other pools too; rename one"
        names = link.between or ()
        unknown = [name for name in names if name not in {*pools, *zones}]
        if cluster.source == "ray":
            continue  # zones may come from labels
        if unknown:
            yield (
                f"{path}.between names zone {unknown[0]!r}, which no offer is in; known: "
                f"{', '.join(zones)}, or of pools: {', '.join(pools)}"
            )
        elif not (set(names) <= set(pools) or set(names) <= set(zones)):
            yield f"{path}.between is {list(names)}, a pool and a zone; write two of a sort"


def _limit_problems(limits: Sequence[LimitOptions], cluster: ClusterOptions) -> Iterator[str]:
    """Limits of what is not there, a limit twice, and shares that no plan can all give."""
    zones = sorted({offer.zone for offer in cluster.offers})
    pools = [offer.pool for offer in cluster.offers]
    seen: set[tuple[str | None, str | None]] = set()
    for index, limit in enumerate(limits):
        path = f"budget.limits[{index}]"
        if limit.zone is not None and limit.zone not in zones and cluster.source != "ray":
            yield f"{path}.zone is {limit.zone!r}; known: {', '.join(zones)}"
        if limit.pool is not None and limit.pool not in pools:
            yield f"{path}.pool is {limit.pool!r}; known: {', '.join(pools)}"
        if (limit.zone, limit.pool) in seen:
            yield f"{path} limits {limit.zone or limit.pool or 'egress'} twice; keep one"
        seen.add((limit.zone, limit.pool))
    shares = fsum(limit.min_share or 0.0 for limit in limits)
    if shares > 1 + _SHARE_TOLERANCE:
        each = ", ".join(f"{x.pool} {x.min_share:g}" for x in limits if x.min_share)
        yield (
            f"budget.limits: min_share of all pools is {shares:g} together, {shares - 1:.4g} more "
            f"than the batch ({each}); write 1 or less"
        )
    for index, limit in enumerate(limits):
        if limit.zone is not None and limit.max_per_hour_usd is not None:
            if cluster.price_feed is not None:
                continue  # the listed prices say little of those to come
            shared = {x.pool for x in limits if x.min_share}
            path = f"budget.limits[{index}]"
            yield from _zone_problems(path, limit.zone, limit.max_per_hour_usd, shared, cluster)


def _zone_problems(
    path: str, zone: str, limit: float, shared: set[str | None], cluster: ClusterOptions
) -> Iterator[str]:
    """What a zone must spend at its listed prices, whatever the plan, beyond its limit."""
    offers = [offer for offer in cluster.offers if offer.zone == zone]
    price = {offer.pool: offer.price_per_hour * offer.discount_ratio for offer in offers}
    standing = 0.0
    if cluster.source != "ray":  # there the devices found count, not the offers
        present = [offer for offer in offers if offer.billed == "while_present"]
        standing = fsum(offer.count * price[offer.pool] for offer in present)
    read = [o.pool for o in offers if o.pool in shared and o.billed == "while_used"]
    needed = standing + fsum(price[pool] for pool in read)
    if needed <= limit * (1 + _SHARE_TOLERANCE):
        return
    words = []
    if standing:
        words.append(f"its devices that are billed while present cost {standing:g} $/h")
    if read:
        words.append(f"min_share of {' and '.join(read)} needs a device of each")
    yield (
        f"{path}: zone {zone} may spend {limit:g} $/h, but {', and '.join(words)}: {needed:g} $/h "
        f"in all, {needed - limit:.4g} more; write max_per_hour_usd: {needed:g} or more"
        + (", or drop the min_share" if read and standing <= limit else "")
    )


def _strategy_problems(strategy: str) -> Iterator[str]:
    if strategy in LATER_STRATEGIES:
        yield f"control.strategy is {strategy}: {NOT_YET}; write {choice(STRATEGIES)}"
    elif strategy not in STRATEGIES:
        close = difflib.get_close_matches(strategy, STRATEGIES, 1)
        mend = f"did you mean {close[0]}?" if close else f"write {choice(STRATEGIES)}"
        yield f"control.strategy is {strategy!r}; {mend}"


def _fault_problems(path: str, fault: Fault, pools: Mapping[str, int]) -> Iterator[str]:
    named = {"device": fault.device, "pool": fault.pool, "peer": fault.peer}
    yield from _target_problems(path, named, pools)


def _target_problems(
    path: str, named: Mapping[str, str | None], pools: Mapping[str, int]
) -> Iterator[str]:
    """Devices and pools that are never there; ``pools``: how many devices each one ever has."""
    devices = [f"{pool}-{i}" for pool, count in pools.items() for i in range(count)]
    for key, name in named.items():
        known = list(pools) if key == "pool" else devices
        if name is not None and name not in known:
            yield f"{path}.{key} is {name!r}; known: {', '.join(known)}"


def _top_level_names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names bound at the top of a module; '*' where a star import may bind any."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield (alias.asname or alias.name).partition(".")[0], statement
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from _top_level_names(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _top_level_names(handler.body)
        else:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id, statement


def _check_arguments(signature: ast.arguments, name: str, arguments: Mapping[str, object]) -> None:
    positional = [a.arg for a in signature.args]
    known = [*positional, *(a.arg for a in signature.kwonlyargs)]
    for key in arguments:
        if key not in known and signature.kwarg is None:
            close = difflib.get_close_matches(key, known, 1)
            mend = (
                f"did you mean {close[0]}?" if close else f"it takes {', '.join(known) or 'none'}"
            )
            raise ConfigError(f"training.task_args.{key} is not an argument of {name}(); {mend}")
    optional = positional[len(positional) - len(signature.defaults) :]
    required = [a.arg for a in signature.posonlyargs]
    required += [key for key in positional if key not in optional]
    required += [
        a.arg
        for a, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
        if default is None
    ]
    missing = [key for key in required if key not in arguments]
    if missing:
        raise ConfigError(f"training.task_args.{missing[0]} is missing; {name}() needs it")
