"""A profile on a terminal: layers that are alike in one row, their bytes, FLOP and times."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from orchestrator.core.model import LayerTimes, ModelProfile
from orchestrator.reports import figures

_SIZE_HEAD = ("parameters", "boundary", "stash", "FLOP")
_CAPTION = (
    "Boundary, stash and FLOP are those of one sample, times of a microbatch: forward, backward, "
    "update."
)


def print_profile(
    console: Console, model: ModelProfile, words: Sequence[str], rules: Sequence[str]
) -> None:
    """The table, what is to be said beside it, and lines for the section ``cluster``."""
    console.print(profile_table(model))
    for text in words:
        console.print(text, style="dim", highlight=False)
    if rules:
        console.print("\nlinks:", *(f"  {rule}" for rule in rules), sep="\n", markup=False,
                      highlight=False, soft_wrap=True)  # fmt: skip


def profile_table(model: ModelProfile) -> Table:
    """One row for each run of layers that are alike, and what they come to."""
    largest = _largest(model)
    heads = [f"{t.kind}, microbatch {t.microbatch}" for t in largest]
    table = Table(caption=_CAPTION, caption_justify="left", show_footer=True)
    rows = [(range(model.num_layers), "all"), *_groups(model, largest)]
    totals, *shown = ((name, *_cells(model, largest, layers)) for layers, name in rows)
    for head, footer in zip(("layers", *_SIZE_HEAD, *heads), totals, strict=True):
        table.add_column(
            head, footer, justify="left" if head == "layers" else "right", overflow="fold"
        )
    for row in shown:
        table.add_row(*row)
    return table


def _largest(model: ModelProfile) -> list[LayerTimes]:
    """Times of every kind at its largest microbatch, of single devices."""
    alone = [t for t in model.times if t.team_size == 1]
    return [
        max((t for t in alone if t.kind == kind), key=lambda t: t.microbatch)
        for kind in dict.fromkeys(t.kind for t in alone)
    ]


def _groups(model: ModelProfile, largest: list[LayerTimes]) -> Iterator[tuple[range, str]]:
    """Neighbours with equal figures, and what they are called."""

    def figures_of(layer: int) -> tuple[float, ...]:
        return *_sizes(model, layer), *(s for t in largest for s in _times(t, layer))

    for _, members in groupby(range(model.num_layers), figures_of):
        first, *rest = members
        last = rest[-1] if rest else first
        name = model.layers[first]
        if rest:
            name = f"{name} ... {model.layers[last]} ({len(rest) + 1})"
        yield range(first, last + 1), name


def _cells(model: ModelProfile, largest: list[LayerTimes], layers: range) -> list[str]:
    """Figures of one layer of a group; of all layers together."""
    whole = len(layers) == model.num_layers and len(layers) > 1
    counted = layers if whole else layers[:1]
    params, boundary, stash, flop = (
        sum(column) for column in zip(*(_sizes(model, i) for i in counted), strict=True)
    )
    times = [
        ", ".join(
            figures.seconds(sum(column))
            for column in zip(*(_times(t, i) for i in counted), strict=True)
        )
        for t in largest
    ]
    crossing = "" if whole else figures.size(boundary)
    told = figures.count(flop if model.forward_flop_per_sample else None)
    return [figures.size(params), crossing, figures.size(stash), told, *times]


def _sizes(model: ModelProfile, layer: int) -> tuple[float, ...]:
    sizes = model.sizes[0]
    flop = model.forward_flop_per_sample
    return (
        sizes.param_bytes[layer],
        sizes.boundary_bytes_per_sample[layer],
        sizes.stash_bytes_per_sample[layer],
        flop[layer] if flop else 0.0,
    )


def _times(times: LayerTimes, layer: int) -> tuple[float, ...]:
    return times.forward_s[layer], times.backward_s[layer], times.update_s[layer]
