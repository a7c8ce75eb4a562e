"""Layers of pipeline stages, as arguments of Megatron-LM, Megatron-DeepSpeed and MindSpeed give them."""

import re

from planner.export.description import ExportError, stages_of
from planner.export.files.arguments import Options
from planner.export.files.settings import size_of

_LAYOUT = 4096  # most characters of an expanded layout
_IN_A_V = 2  # stages of a rank in a V


def layers_of_stages(options: Options, layers: int, pipeline: int) -> tuple[tuple[int, ...], int]:
    """Layers of every stage, and stages on each rank."""
    idle = [size_of(f"{int(word) + 1}") for word in options.word("noop-layers").split(",") if word.isdecimal()]
    found, virtual = _stages(options, layers + len(idle), pipeline)
    before = 0
    for stage, count in enumerate(found):
        inside = sum(before < (place or 0) <= before + count for place in idle)
        found = (*found[:stage], count - inside, *found[stage + 1 :])
        before += count
    return found, virtual


def in_a_v(options: Options) -> bool:
    """Whether MindSpeed is told to run DualPipeV."""
    return options.word("schedules-method") == "dualpipev"


def _stages(options: Options, layers: int, pipeline: int) -> tuple[tuple[int, ...], int]:
    """Layers of every stage, no-op layers included, and stages on each rank."""
    layout = options.word("pipeline-model-parallel-layout")
    listed = options.word("num-layer-list")  # an option of MindSpeed
    if listed:
        stages = tuple(size_of(count) or 0 for count in listed.split(","))
        if sum(stages) != layers or len(stages) != pipeline:
            raise ExportError(
                f"--num-layer-list {listed:.80}: {sum(stages)} layers of {len(stages)} ranks; the model has {layers},"
                f" and there are {pipeline} pipeline ranks"
            )
        return stages, 1
    if layout:
        stages = _read_layout(layout)
        if sum(stages) != layers or len(stages) % pipeline:
            raise ExportError(
                f"--pipeline-model-parallel-layout {layout}: {sum(stages)} layers in {len(stages)} stages; the model"
                f" has {layers}, and there are {pipeline} pipeline ranks"
            )
        return stages, len(stages) // pipeline
    first, last = (options.size(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    virtual = options.degree("num-virtual-stages-per-pipeline-rank")
    each = options.size("num-layers-per-virtual-pipeline-stage")
    if in_a_v(options) and pipeline > 1:
        virtual = _IN_A_V
    if each:
        per_rank = stages_of(layers, pipeline)[0]
        if per_rank % each:
            raise ExportError(
                f"--num-layers-per-virtual-pipeline-stage {each} does not divide the {per_rank} layers of a rank"
            )
        virtual = per_rank // each
    if first is None and last is None:
        both = "embedding" in options.word("pp-partition-method")  # Megatron-DeepSpeed: at either end it is a layer
        ends = [int(both or options.flag(f"account-for-{end}-in-pipeline-split")) for end in ("embedding", "loss")]
        stages = stages_of(layers + sum(ends), pipeline, virtual)
        if len(stages) == 1:
            return (layers,), virtual
        return (stages[0] - ends[0], *stages[1:-1], stages[-1] - ends[1]), virtual
    ranks = _with_ends(layers, pipeline, first, last)
    odd = next((count for count in ranks if count % virtual), None)
    if odd is not None:
        raise ExportError(
            f"--num-virtual-stages-per-pipeline-rank {virtual} does not divide the {odd} layers of a rank; write"
            " --pipeline-model-parallel-layout"
        )
    return tuple(count // virtual for _ in range(virtual) for count in ranks), virtual


def _with_ends(layers: int, pipeline: int, first: int | None, last: int | None) -> tuple[int, ...]:
    """Layers of every rank if those of the first or the last one are given; the others share the rest."""
    before, after = (() if count is None else (count,) for count in (first, last))
    rest, ranks = layers - sum((*before, *after)), pipeline - len(before) - len(after)
    if ranks < 0 or (rest if ranks == 0 else rest < ranks):
        said = " and ".join(
            f"--decoder-{end}-pipeline-num-layers {count}"
            for end, count in (("first", first), ("last", last))
            if count is not None
        )
        raise ExportError(
            f"{said} leave {rest} of the model's {layers} layers for {ranks} other pipeline ranks; write numbers that"
            " come out even"
        )
    return (*before, *(stages_of(rest, ranks) if ranks else ()), *after)


def _read_layout(layout: str) -> tuple[int, ...]:
    """Decoder layers of every stage of a layout such as `Et*2|(tt|)*3tL`."""
    text = layout.replace(",", "").replace("\\", "")  # quoted for a shell that reads it twice
    _check_layout(layout, len(text))
    while match := re.search(r"(\([^()]*\)|[A-Za-z|])\*(\d+)", text):
        part, times = match[1].strip("()"), match[2]
        _check_layout(layout, len(text) + len(part) * int(times[:6]))
        text = text[: match.start()] + part * int(times[:6]) + text[match.end() :]
    strange = set(text) - set("EtmL|")
    if strange:
        raise ExportError(
            f"--pipeline-model-parallel-layout {layout:.80}: {', '.join(sorted(strange))} is neither E, t, m, L nor |"
        )
    return tuple(stage.count("t") for stage in text.split("|"))


def _check_layout(layout: str, size: int) -> None:
    if size > _LAYOUT:
        raise ExportError(
            f"--pipeline-model-parallel-layout {layout:.80}: it has more than {_LAYOUT} layers and stages"
        )
