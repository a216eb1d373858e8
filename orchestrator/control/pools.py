"""From the user's offers and links to devices, prices and times in the run's own seconds."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from orchestrator.control.backend import (
    ClusterOptions,
    EmulationOptions,
    OfferOptions,
)
from orchestrator.control.links import build_links
from orchestrator.core.cluster import ClusterState, Device, DeviceKind, Offer, known_kinds
from orchestrator.core.model import LayerTimes, ModelProfile, microbatch_sizes
from orchestrator.core.training import TrainingOptions
from orchestrator.errors import ConfigError

REFERENCE_KIND = "a100-40"  # speed_ratio 1
REFERENCE_TIMES = "cpu"  # measured here; stand for the reference kind on emulated devices
GIB, HOUR_S = 2**30, 3600.0
STEP_OVERHEAD_S = 0.030  # end of an emulated step: six workers vote and report in less
OPERATION_S = 0.010  # emulated operations shorter than this come late (docs/operations.md)
RUNTIME_OVERHEAD = 2.2  # CPU time of workers and loop over that of the bare layers
EFFICIENCY_RATIO = 0.4  # of its peak that a kind reaches whose times are priced from FLOP
CPU_SHARE_RATIO = 0.45  # of the cores, for real work behind emulated time


def build_kinds(options: ClusterOptions) -> dict[str, DeviceKind]:
    """Data sheets of the kinds on offer: the catalogue, overridden by the offers.

    Pools that give one kind unlike speeds get kinds of their own, called ``kind@pool``.

    Raises:
        ConfigError: If a kind is unknown and its offer lacks speed_ratio or memory_gib.
    """
    kinds = {}
    for index, offer in enumerate(options.offers):
        sheet = _sheet(index, offer)
        kinds[kind_name(offer, options)] = replace(sheet, kind=kind_name(offer, options))
    return kinds


def kind_name(offer: OfferOptions, options: ClusterOptions) -> str:
    """The kind of an offer's devices: the user's, unless another pool runs it at another speed."""
    speeds = {other.speed_ratio for other in options.offers if other.kind == offer.kind}
    if len(speeds) == 1 or offer.speed_ratio is None:
        return offer.kind
    return f"{offer.kind}@{offer.pool}"


def _sheet(index: int, offer: OfferOptions) -> DeviceKind:
    known = known_kinds().get(offer.kind)
    if known is None and (offer.speed_ratio is None or offer.memory_gib is None):
        raise ConfigError(
            f"cluster.offers[{index}].kind is {offer.kind!r}, which is not in the catalogue; "
            f"write one of {', '.join(known_kinds())}, or add both speed_ratio and memory_gib"
        )
    reference = known_kinds()[REFERENCE_KIND]
    sheet = known or replace(reference, memory_bandwidth_bytes_per_s=None)
    if offer.speed_ratio is not None:
        bf16 = reference.bf16_flop_per_s
        sheet = replace(
            sheet,
            fp32_flop_per_s=offer.speed_ratio * reference.fp32_flop_per_s,
            fp16_flop_per_s=offer.speed_ratio * reference.fp16_flop_per_s,
            bf16_flop_per_s=None if bf16 is None else offer.speed_ratio * bf16,
            source=f"speed_ratio {offer.speed_ratio} of pool {offer.pool}",
        )
    return replace(sheet, memory_bytes=_memory_bytes(offer, sheet))


def _memory_bytes(offer: OfferOptions, sheet: DeviceKind) -> int:
    return sheet.memory_bytes if offer.memory_gib is None else round(offer.memory_gib * GIB)


def build_devices(options: ClusterOptions) -> tuple[Device, ...]:
    """The devices on offer. Raises ConfigError if a kind is unknown."""
    kinds = build_kinds(options)
    return tuple(
        Device(
            device_id=f"{offer.pool}-{i}",
            pool=offer.pool,
            kind=kind_name(offer, options),
            node_id=f"{offer.pool}-node{i // offer.devices_per_node}",
            zone=offer.zone,
            memory_bytes=_memory_bytes(offer, kinds[kind_name(offer, options)]),
        )
        for offer in options.offers
        for i in range(offer.count)
    )


def build_rentable(options: ClusterOptions) -> tuple[Device, ...]:
    """A device, as it would be, of each pool that has none and whose first can be asked for."""
    wanted = {
        offer.pool
        for offer in options.offers
        if options.autoscaler.enabled and not offer.count and offer.max_count
    }
    offers = (replace(o, count=1) if o.pool in wanted else o for o in options.offers)
    devices = build_devices(replace(options, offers=tuple(offers)))
    return tuple(
        replace(device, device_id=f"{device.pool} (first)")
        for device in devices
        if device.pool in wanted
    )


def build_cluster(
    options: ClusterOptions, *, billing_speedup: float = 1.0, time_scale: float = 1.0
) -> ClusterState:
    """The whole cluster at second 0: devices ``pool-index`` on nodes ``pool-nodeN``.

    Links reach pools whose first device can be asked for, too. Prices become dollars per second
    of the run, of which each is billed as ``billing_speedup`` seconds; bytes keep their price.
    Latency grows by ``time_scale``, bandwidth falls by it.

    Raises:
        ConfigError: If a kind is unknown, or a link that may be needed is not described.
    """
    devices = build_devices(options)
    connected = (*devices, *build_rentable(options))
    return ClusterState(
        now_s=0.0,
        devices=devices,
        links=build_links(connected, options.links, time_scale=time_scale),
        offers=tuple(
            _offer(offer, kind_name(offer, options), billing_speedup) for offer in options.offers
        ),
    )


def _offer(offer: OfferOptions, kind: str, billing_speedup: float) -> Offer:
    def paid_usd_per_s(per_hour: float) -> float:  # to the bit as a feed's rows are
        return per_hour / HOUR_S * billing_speedup * offer.discount_ratio

    limit = offer.max_price_per_hour
    return Offer(
        pool=offer.pool,
        kind=kind,
        zone=offer.zone,
        price_usd_per_s=paid_usd_per_s(offer.price_per_hour),
        spot=offer.spot,
        minimum_s=offer.minimum_s / billing_speedup,
        quantum_s=offer.quantum_s / billing_speedup,
        max_price_usd_per_s=None if limit is None else paid_usd_per_s(limit),
        billed=offer.billed,
        discount_ratio=offer.discount_ratio,
    )


def complete_profile(
    profile: ModelProfile,
    kinds: Mapping[str, DeviceKind],
    precision: str = "fp32",
    *,
    microbatch: int | None = None,
) -> ModelProfile:
    """Add ``estimated`` times for kinds that were not measured.

    Forward: FLOP at ``EFFICIENCY_RATIO`` of the peak, and no faster than the memory moves
    parameters and activations; backward: twice that. A kind ``kind@pool`` takes the measured
    times of ``kind`` by the ratio of their peaks. Sizes are the halves of ``microbatch``
    (default: the largest measured one).

    Raises:
        ConfigError: If such a kind is needed and the profile has no forward_flop_per_sample.

    Source: docs/model.md, section 3.2.
    """
    largest = microbatch or max((t.microbatch for t in profile.times), default=1)
    added: list[LayerTimes] = []
    for name, kind in kinds.items():
        if _is_measured(profile, name):
            continue
        if relatives := _scaled_from(profile, name.split("@")[0], kind, precision):
            added += [replace(t, estimated=True) for t in relatives]
            continue
        if not sum(profile.forward_flop_per_sample) > 0:
            raise ConfigError(_unpriced(profile, name))
        added += [
            _priced(profile, kind, precision, size) for size in sorted(microbatch_sizes(largest))
        ]
    return replace(profile, times=(*profile.times, *added))


def _unpriced(profile: ModelProfile, kind: str) -> str:
    teams = sorted({t.team_size for t in profile.times if t.kind == kind})
    if teams:
        return (
            f"the profile of {profile.model!r} has times for kind {kind!r} in teams of "
            f"{', '.join(map(str, teams))} only; measure single devices of it too, or add "
            "forward_flop_per_sample"
        )
    known = ", ".join(map(repr, profile.kinds)) or "none"
    return (
        f"the profile of {profile.model!r} has no times for kind {kind!r} and no "
        "forward_flop_per_sample to price them from; measure the kind, name it as the profile "
        f"does ({known}), or add the FLOP"
    )


def _is_measured(profile: ModelProfile, kind: str) -> bool:
    return any(time.kind == kind and time.team_size == 1 for time in profile.times)


def _scaled_from(
    profile: ModelProfile, base: str, kind: DeviceKind, precision: str
) -> list[LayerTimes]:
    """The measured times of a kind of the catalogue, by the ratio of the peaks."""
    if base not in known_kinds():
        return []
    ratio = known_kinds()[base].peak_flop_per_s(precision) / kind.peak_flop_per_s(precision)
    if not _is_measured(profile, base):
        return []
    return [t.scaled(ratio, kind=kind.kind) for t in profile.times if t.kind == base]


def _priced(profile: ModelProfile, kind: DeviceKind, precision: str, size: int) -> LayerTimes:
    sizes, rate = profile.sizes[0], EFFICIENCY_RATIO * kind.peak_flop_per_s(precision)
    forward_s = [size * flop / rate for flop in profile.forward_flop_per_sample]
    update_s = (0.0,) * profile.num_layers
    if bandwidth := kind.memory_bandwidth_bytes_per_s:
        activations = zip(
            sizes.boundary_bytes_per_sample, sizes.stash_bytes_per_sample, strict=True
        )
        moved = zip(sizes.param_bytes, map(sum, activations), strict=True)
        moved_s = ((params + size * each) / bandwidth for params, each in moved)
        forward_s = [max(times) for times in zip(forward_s, moved_s, strict=True)]
        # The update reads all state and writes all but gradients.
        ratio = 1.0 + 2.0 * profile.optimizer_bytes_per_param_byte
        pairs = zip(sizes.param_bytes, sizes.frozen_bytes, strict=True)
        update_s = tuple(ratio * (whole - frozen) / bandwidth for whole, frozen in pairs)
    return LayerTimes(
        kind=kind.kind,
        team_size=1,
        microbatch=size,
        forward_s=tuple(forward_s),
        backward_s=tuple(2.0 * t for t in forward_s),
        update_s=update_s,
        estimated=True,
    )


def emulated_profile(
    profile: ModelProfile,
    kinds: Mapping[str, DeviceKind],
    *,
    reference: str = REFERENCE_TIMES,
    time_scale: float = 1.0,
    precision: str = "fp32",
) -> ModelProfile:
    """Times of emulated kinds, in seconds of the run.

    Kinds that were measured keep their times. For the others the measured times of
    ``reference`` stand for an a100-40 and are divided by the kind's speed over an a100-40's.
    All are multiplied by ``time_scale``. Every step ends with a pad for reduce and vote.

    Raises:
        ConfigError: If a kind has no times and the reference was not measured either.
    """
    standard = [replace(t, kind=REFERENCE_KIND) for t in profile.times if t.kind == reference]
    as_standard = replace(profile, times=tuple(standard))
    times = [t for t in profile.times if t.kind in kinds]
    for name, kind in kinds.items():
        if _is_measured(profile, name):
            continue
        found = _scaled_from(profile, name.split("@")[0], kind, precision)
        found = found or _scaled_from(as_standard, REFERENCE_KIND, kind, precision)
        if not found:
            raise ConfigError(
                f"the profile of {profile.model!r} has times for neither {name!r} nor "
                f"{reference!r}; measure one of them, or leave cluster.profile out"
            )
        times += found
    return replace(
        profile,
        times=tuple(t.scaled(time_scale) for t in times),
        step_overhead_s=max(STEP_OVERHEAD_S, time_scale * profile.step_overhead_s),
    )


def auto_time_scale(
    profile: ModelProfile,
    kinds: Mapping[str, DeviceKind],
    counts: Mapping[str, int],
    *,
    num_cores: float,
    global_batch: int,
    microbatch: int,
) -> float:
    """The least time scale at which emulated devices keep to their clock.

    With F_i and W_i the forward and whole time of one microbatch through the whole model on
    device i at scale 1, a chain of all devices, cut so that they finish together, runs a
    forward in 1 / sum(1 / F_i): that must reach 10 ms. When all devices are busy, real work
    takes 2.2 (W_cpu + D U_cpu / NB) sum(1 / W_i) / scale cores, with D updates of U_cpu for
    NB microbatches: that must stay within 45 % of the cores. A profile without times of
    the CPU gives no real work to bound.

    Args:
        profile: As measured, unscaled.
        kinds: Their data sheets.
        counts: Devices of each kind.
        num_cores: Cores for all workers together.
        global_batch: Samples of a step.
        microbatch: Samples of a microbatch.

    Source: docs/model.md, section 3.2.
    """
    emulated = emulated_profile(profile, kinds)
    forward_rate, work_rate = 0.0, 0.0
    for name, count in counts.items():
        forward_s, backward_s, _ = _whole_model_s(emulated, name, microbatch)
        forward_rate += count / forward_s
        work_rate += count / (forward_s + backward_s)
    scale = OPERATION_S * forward_rate
    if _is_measured(profile, REFERENCE_TIMES):
        forward_s, backward_s, update_s = _whole_model_s(profile, REFERENCE_TIMES, microbatch)
        num_microbatches = max(1.0, global_batch / microbatch)
        real_s = forward_s + backward_s + sum(counts.values()) * update_s / num_microbatches
        scale = max(scale, RUNTIME_OVERHEAD * real_s * work_rate / (CPU_SHARE_RATIO * num_cores))
    return scale


def run_figures(
    options: ClusterOptions,
    emulation: EmulationOptions,
    training: TrainingOptions,
    measured: ModelProfile,
    *,
    num_cores: int,
) -> tuple[ClusterState, ModelProfile]:
    """Cluster and profile in seconds of the run; emulated ones are stretched here, once.

    Args:
        options: The cluster as described, or as found.
        emulation: Counts where the cluster is emulated.
        training: Batch, microbatch and precision.
        measured: As measured or read, unscaled.
        num_cores: Of this machine, for the workers of emulated devices.

    Raises:
        ConfigError: If the options or the profile do not serve the cluster.
    """
    kinds = build_kinds(options)
    if options.source != "emulated":
        model = complete_profile(
            measured, kinds, training.precision, microbatch=training.microbatch
        )
        return build_cluster(options), model
    scale = emulation.time_scale
    if isinstance(scale, str):
        scale = auto_time_scale(
            measured,
            kinds,
            Counter(device.kind for device in build_cluster(options).devices),
            num_cores=num_cores,
            global_batch=training.global_batch,
            microbatch=training.microbatch,
        )
    cluster = build_cluster(options, billing_speedup=emulation.billing_speedup, time_scale=scale)
    model = emulated_profile(measured, kinds, time_scale=scale, precision=training.precision)
    return cluster, model


def _whole_model_s(profile: ModelProfile, kind: str, microbatch: int) -> tuple[float, float, float]:
    """Forward, backward and update of the whole model, from the nearest measured size."""
    rows = [t for t in profile.times if t.kind == kind and t.team_size == 1]
    nearest = min(rows, key=lambda t: (abs(t.microbatch - microbatch), t.microbatch))
    ratio = microbatch / nearest.microbatch
    return (
        ratio * sum(nearest.forward_s),
        ratio * sum(nearest.backward_s),
        sum(nearest.update_s),
    )
