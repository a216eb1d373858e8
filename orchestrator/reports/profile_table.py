"""A profile on a terminal: layers that are alike in one row, their bytes, FLOP and times."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from orchestrator.core.model import LayerTimes, ModelProfile
from orchestrator.reports import figures

_SIZE_HEAD = ("parameters", "boundary", "stash", "FLOP")
_CAPTION = (
    "Boundary, stash and FLOP are those of one sample, times of a microbatch: forward, backward, "
    "update."
)

_ORDINALS = ("", "", "second", "third", "fourth", "fifth", "sixth")
_LONGEST_PERIOD = len(_ORDINALS) - 1


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
    """One row for each run of layers that are alike or take turns, and what they come to."""
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
    """Neighbours with equal figures, and what they are called; also where a few take turns."""
    figures_of = [
        (*_sizes(model, layer), *(s for t in largest for s in _times(t, layer)))
        for layer in range(model.num_layers)
    ]
    first = 0
    while first < model.num_layers:
        # Automatic cuts go through blocks, too: the parts of a block then come again and again.
        period = max(range(1, _LONGEST_PERIOD + 1), key=lambda p: _repeated(figures_of[first:], p))
        end = first + max(1, _repeated(figures_of[first:], period))
        for start in range(first, min(first + period, end)):
            layers = range(start, end, period)
            name = model.layers[start]
            if len(layers) > 1:
                turns = "" if period == 1 else f", every {_ORDINALS[period]}"
                name = f"{name} ... {model.layers[layers[-1]]} ({len(layers)}{turns})"
            yield layers, name
        first = end


def _repeated(figures_of: Sequence[tuple[float, ...]], period: int) -> int:
    """How many of the first layers repeat ``period`` layers; 0 where not even once."""
    same = 0
    while same + period < len(figures_of) and figures_of[same] == figures_of[same + period]:
        same += 1
    return same + period if same >= period else 0


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
