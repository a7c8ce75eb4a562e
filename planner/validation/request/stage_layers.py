"""Layers of pipeline stages that do not all have the same number.

    what the row says                                      layers of its stages
    layers_per_stage, or num-layer-list among its flags    those
    nanotron                                               by their weights (`nanotron.py`)
    torchtitan since August 2025                           embedding and head are layers, the first stages have one more
    stages divide the layers                               the same number
    stages divide the layers and two more                  embedding and head are layers: one less at both ends
    a DeepSeek                                             the same number, rounded up, and the last what is left
    anything else                                          virtual stages: not evaluated; else as the search divides

The fifth is what Megatron-LM demands for such numbers (--account-for-embedding-in-pipeline-split and the same for the
loss), and what Llama 3 405B was trained with (Grattafiori et al. 2024, section 3.3.2: 126 layers on 16 stages). The
sixth is the layout of the recipes of Megatron Bridge for DeepSeek-V3 (61 layers), without its layer that predicts
further tokens.
"""

import re

from planner.errors import RequestError
from planner.models.dimensions import Dimensions
from planner.validation.frameworks.nanotron import is_nanotron, nanotron_stages
from planner.validation.reading.cells import layer_counts
from planner.validation.reading.rows import Row
from planner.validation.unsupported import UnsupportedError

_DEALT_OUT = "2025-08"
"""Month from which torchtitan assigns layers this way (`generate_llm_fqn_per_model_part`, 3c84ce095)."""


def stage_layers(row: Row, model: Dimensions, virtual: int, notes: list[str]) -> tuple[int, ...] | None:
    """Layers of every stage in the order of the model, with `virtual` stages on a rank.

    None if all stages have the same number, or if the search decides. Raises UnsupportedError for a division that is
    impossible or unknown.
    """
    pipeline, layers = row.integer("pp") or 1, model.layers
    stages = pipeline * virtual
    given = _given(row)
    if given is not None:
        if len(given) == pipeline and virtual > 1 and not any(count % virtual for count in given):
            given = tuple(count // virtual for count in given) * virtual
        if len(given) != stages or sum(given) != layers:
            raise UnsupportedError(
                f"layers_per_stage names {len(given)} stages of {sum(given)} layers; pp {pipeline} x vpp {virtual} ="
                f" {stages} stages hold n_layers={layers}"
            )
        return given if len(set(given)) > 1 else None
    if pipeline > 1 and virtual == 1 and is_nanotron(row):
        dealt = nanotron_stages(model, pipeline)
        notes.append(f"layers of stages as nanotron deals them out: {' '.join(map(str, dealt))}")
        return dealt if len(set(dealt)) > 1 else None
    if pipeline > 1 and row.text("stack").lower() == "torchtitan" and row.date() >= _DEALT_OUT:
        dealt = _as_torchtitan(layers, stages)
        notes.append(f"layers of stages as torchtitan deals them out: {' '.join(map(str, dealt))}")
        return dealt if len(set(dealt)) > 1 else None
    share, rest = divmod(layers, stages)
    if not rest:  # the search divides equally only if all blocks are of one kind
        mixed = pipeline > 1 and model.experts is not None and model.experts.dense_layers > 0
        return (share,) * stages if mixed else None
    if (layers + 2) % stages == 0:
        notes.append("embedding and head are counted as layers of the pipeline")
        share = (layers + 2) // stages
        return (share - 1, *(share,) * (stages - 2), share - 1)
    left = layers - (share + 1) * (stages - 1)
    if model.like and left > 0:
        notes.append(f"layers of stages as in the recipes for DeepSeek-V3: {share + 1}, the last {left}")
        return (*(share + 1,) * (stages - 1), left)
    if virtual > 1:
        raise UnsupportedError(
            f"n_layers={layers} on pp {pipeline} x vpp {virtual} = {stages} stages: say in layers_per_stage how many"
            " each holds"
        )
    notes.append("layers of each stage unknown: as the search divides them")
    return None


def _as_torchtitan(layers: int, stages: int) -> tuple[int, ...]:
    share, more = divmod(layers + 2, stages)
    first, *others = (share + (stage < more) for stage in range(stages))
    return (first - 1, *others[:-1], others[-1] - 1)


def _given(row: Row) -> tuple[int, ...] | None:
    """Layers of the stages that a row states; None if it does not."""
    column = row.layers_per_stage()
    flag = re.search(r"num[-_]layer[-_]list\s*[=: ]\s*([\d,]{1,999})", row.text("other_flags").lower())
    if column is not None or flag is None:
        return column
    try:
        return layer_counts(flag[1].strip(",").replace(",", " "))
    except ValueError as error:
        raise RequestError(f"line {row.line}, column other_flags: '{flag[0]:.60}' has no numbers of layers") from error
