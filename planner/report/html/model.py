"""The model as blocks, coloured by variant, and every variant as its operators, coloured by strategy.

These are not charts but cells and strips of plain HTML, which can be read, focused and printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.report.data.model import AFTER, BEFORE, Model, OperatorView, Variant
from planner.report.html.colours import series
from planner.report.html.figure import Table
from planner.report.units import bytes_text, percent_text, seconds_text, turn_text

_NAMED = 8  # maximum number of operators that are listed by name if variants differ
_LEAST_SHARE = 1e-4  # share of a variant from which an operator has a place in its strip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A block, or an operator of a strip: its text, its hover text, its colour (a word of the style sheet), its width,
    and whether it begins another stage on the same pipeline rank."""

    text: str
    tip: str
    colour: str
    share: float = 1.0
    first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """A pipeline rank: its name and its cells."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """A variant: its name, its difference from others, its operators and their table."""

    title: str
    colour: str
    text: str
    cells: tuple[Cell, ...]
    table: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """Rows of blocks and their table, a legend of strategies (colour, words), and strips of operators."""

    rows: tuple[StageRow, ...]
    table: Table
    legend: tuple[tuple[str, str], ...]
    strips: tuple[Strip, ...]


def model_view(model: Model) -> ModelView:
    """The cells of a model."""
    colours = _strategies(model)
    return ModelView(
        rows=tuple(_row(model, rank) for rank in range(model.ranks)),
        table=_blocks_table(model),
        legend=tuple((colour, words) for words, colour in colours.items()),
        strips=tuple(_strip(model, variant, colours) for variant in model.variants),
    )


def _strategies(model: Model) -> dict[str, str]:
    """A colour per strategy of the main operators, those with the most time first; the rest shares the last colour."""
    seconds: dict[str, float] = {}
    for variant in model.variants:
        for one in variant.operators:
            if one.total > _LEAST_SHARE * variant.seconds:
                words = _splits(model, one)
                seconds[words] = seconds.get(words, 0.0) + max(1, variant.blocks) * one.total
    ordered = sorted(seconds, key=lambda words: -seconds[words])
    return {words: series(min(place, 7)) for place, words in enumerate(ordered)}


def _splits(model: Model, one: OperatorView) -> str:
    """`axis0: data parallel, axis1: column parallel`."""
    if set(one.splits) <= {"-"}:
        return "replicated"
    return ", ".join(f"{axis}: {word}" for axis, word in zip(model.axes, one.patterns, strict=True))


def _row(model: Model, rank: int) -> StageRow:
    """The blocks of a pipeline rank in the order of the model, with gaps between its stages."""
    variants = {variant.name: variant for variant in model.variants}
    name = f"stage {rank}"
    cells = []
    stage = None
    for block in (block for block in model.blocks if block.rank == rank):
        where = f"{name}, chunk {block.stage // model.ranks}" if model.stages > model.ranks else name
        cells.append(
            Cell(
                text=block.variant,
                tip=f"Block {block.number}, {where}\nvariant {block.variant}: {variants[block.variant].words}\n"
                f"{seconds_text(variants[block.variant].seconds)} {turn_text(model.slices)}",
                colour=variant_colour(model, block.variant),
                first=stage is not None and block.stage != stage,
            )
        )
        stage = block.stage
    for end, at, place in ((BEFORE, 0, 0), (AFTER, model.last_rank, len(cells) + 1)):
        if at == rank and end in variants:
            tip = f"{end.capitalize()}, {name}\n{seconds_text(variants[end].seconds)} {turn_text(model.slices)}"
            cells.insert(place, Cell(text=end.partition(" ")[0], tip=tip, colour="@bubble"))
    return StageRow(name=name, cells=tuple(cells))


def _blocks_table(model: Model) -> Table:
    """The blocks of each variant, and their places."""
    rows = []
    for variant in model.variants:
        own = [block for block in model.blocks if block.variant == variant.name]
        at = {BEFORE: [0], AFTER: [model.last_rank]}.get(variant.name, sorted({block.rank for block in own}))
        rows.append(
            (
                variant.name,
                variant.words,
                _ranges([block.number for block in own]),
                _ranges(at),
                seconds_text(variant.seconds),
                bytes_text(max(0.0, variant.kept_bytes)),
            )
        )
    columns = (
        "variant",
        "recomputation",
        "blocks",
        "pipeline ranks",
        turn_text(model.slices),
        "activations of the first",
    )
    return Table(caption="Blocks by variant", columns=columns, texts=4, rows=tuple(rows))


def _ranges(numbers: Sequence[int]) -> str:
    """`0 to 16, 20` from increasing numbers."""
    texts = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        texts.append(str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}")
    return ", ".join(texts)


def variant_colour(model: Model, name: str) -> str:
    """The colour of the blocks of a variant."""
    lettered = [variant.name for variant in model.variants if variant.blocks]
    return series(lettered.index(name)) if name in lettered else "@bubble"


def _strip(model: Model, variant: Variant, colours: dict[str, str]) -> Strip:
    shown = [one for one in variant.operators if one.total > _LEAST_SHARE * variant.seconds]
    title = f"Variant {variant.name}, {_blocks(variant.blocks)}" if variant.blocks else variant.name.capitalize()
    return Strip(
        title=title,
        colour=variant_colour(model, variant.name),
        text=_about(model, variant),
        cells=tuple(
            Cell(
                text=one.short.rpartition(".")[2],
                tip=_tip(model, one, variant),
                colour=colours[_splits(model, one)],
                share=one.total / variant.seconds,
            )
            for one in shown
        ),
        table=_table(model, variant, title),
    )


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"


def _about(model: Model, variant: Variant) -> str:
    """The time of a variant, and its difference from the first."""
    if not variant.blocks:
        return f"{seconds_text(variant.seconds)} {turn_text(model.slices)}."
    text = f"{variant.words.capitalize()}; {seconds_text(variant.seconds)} {turn_text(model.slices)}."
    if variant.unlike:
        more = len(variant.unlike) - _NAMED
        named = ", ".join(variant.unlike[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        text += f" Sharded or stored differently from the first variant: {named}."
    return text


def _tip(model: Model, one: OperatorView, variant: Variant) -> str:
    lines = [
        f"{one.short}: {_call(one)} ({one.op_class})",
        _splits(model, one) if model.axes else "",
        f"operands {'; '.join(one.operands)} → result {'; '.join(one.results)}" if model.axes else "",
        f"weight kept as {one.kept_as}: {one.weight}, its gradient {one.gradient}, state {one.state}"
        if one.weight
        else "",
        f"{seconds_text(one.total)} {turn_text(model.slices)}"
        f" ({percent_text(one.total / variant.seconds)} of the block): "
        + ", ".join(f"{part} {seconds_text(seconds)}" for part, seconds in one.seconds),
        f"result {bytes_text(one.result_bytes)}, kept for the backward pass {bytes_text(max(0.0, one.kept_bytes))}",
    ]
    return "\n".join(line for line in lines if line)


def _call(one: OperatorView) -> str:
    """`linear` of `aten.linear.default`."""
    return one.op.split(".")[1]


def _table(model: Model, variant: Variant, title: str) -> Table:
    work: Sequence[OperatorView] = [one for one in variant.operators if one.total > _LEAST_SHARE * variant.seconds]
    return Table(
        caption=f"Operators: {title}",
        columns=(
            "operator",
            "call",
            "class",
            *model.axes,
            "kept as",
            "result",
            "weight",
            "gradient",
            "state",
            "time",
            "bytes",
            "kept",
        ),
        texts=8 + len(model.axes),
        rows=tuple(
            (
                one.short,
                _call(one),
                one.op_class,
                *one.splits,
                one.kept_as,
                "; ".join(one.results),
                one.weight,
                one.gradient,
                one.state,
                seconds_text(one.total),
                bytes_text(one.result_bytes),
                bytes_text(max(0.0, one.kept_bytes)),
            )
            for one in work
        ),
    )
