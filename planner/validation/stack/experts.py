"""How a stack runs experts: the dispatcher that sends rows of tokens to them, the kernels that route and multiply, and
what is in CUDA graphs. Flags say so; else the recipe of NVIDIA decides (`planner.validation.frameworks.recipes`)."""

import re
from collections.abc import Mapping
from dataclasses import replace

from hardware_profiles import Dispatcher, Graphs, Software, load_profile
from planner.validation.frameworks.recipes import recipe_of, release_of
from planner.validation.frameworks.traits import TRANSFORMER_ENGINE, Trait, flags_of, uses_maxtext, uses_torchtitan
from planner.validation.frameworks.versions import SORTED_ROWS
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions, mentions_of, says
from planner.validation.stack.attention_masks import has_sinks

_FUSED_RECIPES = "26.06"
"""Container from which recipes with experts in MXFP8 run as one CUDA graph, with fused kernels (Megatron Bridge)."""

_ONCE = r"deep[-_ ]?ep\b|hybrid[-_ ]?ep\b|enable[-_]deepep"
"""Words for exchanges that send a token once to each node (DeepSeek's DeepEP, NVIDIA's HybridEP)."""

_ALL_TO_ALL = (
    r"dispatcher[-_]type\s*[=: ]\s*\W?alltoall|\ball[-_ ]?to[-_ ]?all (?:token )?dispatcher"
    r"|\bdispatcher\s*[=: ]\s*\W?all[-_ ]?to[-_ ]?all"
)
"""Words for the dispatcher of Megatron-Core that sends rows to their experts only."""

_ALL_GATHER = (
    r"dispatcher[-_]type\s*[=: ]\s*\W?all[-_ ]?gather|\ball[-_ ]?gather (?:token )?dispatcher"
    r"|\bdispatcher\s*[=: ]\s*\W?all[-_ ]?gather"
)
"""Words for the dispatcher of Megatron-Core that gathers the tokens of all devices on every one of them, and adds up
what their experts make of them by a reduce-scatter (megatron/core/transformer/moe/token_dispatcher.py)."""

_MEGATRON = ("megatron", "nemo")
"""Stacks with the dispatchers of Megatron-Core as they are priced (MindSpeed has its own)."""

_SENT: Mapping[Dispatcher, str] = {
    "alltoall": "rows are sent for each expert",
    "once": "rows are sent once to a node, whichever experts they go to",
    "allgather": "all devices that share experts gather each other's tokens",
}
"""What a note says of a dispatcher."""

_GRAPHS = r"cuda[-_ ]graphs?"
_STEP_IN_GRAPH = rf"full[-_ ](?:iteration[-_ ])?{_GRAPHS}"
"""Words for CUDA graphs: of parts of blocks if the parts follow (Megatron-Core's `cuda_graph_scope`), or of a whole
step (`cuda_graph_impl`; FULL_CUDA_GRAPH of MLPerf's NeMo)."""

CAPACITY = r"token[- ]?drop|moe[-_]expert[-_]capacity[-_]factor"
"""Words for experts that drop the rows beyond their capacity."""

_BUFFERS = r"\bdense[-_]matmul\b"
_FILL = r"(?<!expert[-_])capacity[-_]factor\s*[=: ]\s*(\d+(?:\.\d+)?)"
"""Words for experts of MaxText with buffers of a fixed size (`sparse_matmul` False), and for how large they are.
Without a factor, or with one below 0, every expert computes every token."""

_DROPS = Trait(words=CAPACITY, changes={"drops_tokens": True})

_BY_ELEMENT = (38.0, 38.0)
"""Bytes for each element of a row in Megatron-Core before 0.9 (`MoEAllGatherTokenDispatcher`), in either pass: `gather`
reads an index of 8 bytes and 2, and writes 2; scores in fp32 read 2 and write 4; `scatter_add` reads an index, 4 and 4,
and writes 4."""

_PUT_BACK = 0.68e-9
"""Seconds for each element, times the multiprocessors, of `indexing_backward_kernel`: the backward pass of `x[indices]`
with the zeros that it adds to and the sorting of the indices. Each warp adds 128 elements of a row one by one, and
waits for each of its loads, so that warps in flight set the time, not memory. 196,608 rows of 2,048 elements take
1.848 ms on the 148 of a B200 (pytorch/ao pull request 4623): as long as 22 bytes of each, where it moves 8."""

_PUT_BACK_MOVES = 8.0
"""Bytes for each element that it moves: zeros, the gradient, and what it adds to and writes."""

_TITAN_ADDS_UP = (36.0, 44.0, 1)
"""The same in torchtitan until 21 November 2025 (models/moe.py, distributed/expert_parallel.py at 46a32e788), without
what `costmodels.kernels.experts` counts, and how often `_PUT_BACK` counts besides. Operators run one by one, also where
layers are compiled (`apply_compile` of models/llama4/infra/parallelize.py at fbafd44da). Forward: `vstack` 4, the
sorting by expert 4 and back 4; scores: a cast, a product in fp32 and a cast 20; the sums of `scatter_add` 4. Backward:
scores 36 (casts 6 and 6, the product with scores 8, with rows 12, its sum 4); sorting 4, and back (`_PUT_BACK`); the
sums for `gather` 4."""

_TITAN_UNSORTS = (26.0, 20.0, 2)
"""The same since (e1f7f318a), until token dispatchers replace it on 17 April 2026 (09ea7d8e7). Forward: `vstack` and
both sortings 12; rows in the order of tokens 6, zeros included; `bmm` with a copy in fp32 10, of which 2 are counted.
Backward: gradients of `bmm` 8 and the cast 6; order 2; sorting 4, and back; the index of tokens, by the same kernel."""

_TITAN_DISPATCHES, _TITAN_HAS_ALL = (32.0, 40.0, 2), (24.0, 36.0, 1)
"""The same with token dispatchers (models/common/token_dispatcher.py at 51238014b), in eager mode, and on devices that
have all experts: scores after the experts again, rows padded no more. Forward: sorting by expert 4 and back 4; scores
20; the sums of `scatter_add` 4. Backward: scores 36; sorting 4, and back; the index of tokens. Blocks are compiled as a
whole by then (5242bdf71), which fuses what passes rows."""

_GPT_OSS = (66.0, 84.0)
"""What operators of GPT-OSS pass beside them, whose experts are as wide as its rows (models/gpt_oss/model/moe.py of
February 2026), without the activation that is counted. Forward: biases of a row each are gathered, padded and added, 24
and 12; the gate is seven operators, of which two read every second element, 36. Backward: the gate 88, both halves put
into zeros and added; biases 8."""

_UNSORTED = "2025-11-21"
_DISPATCHED = "2026-04-17"

_ONE_OPERATOR = r"deep[-_ ]?ep\b|hybrid[-_ ]?ep\b|minimal[-_ ]?async[-_ ]?ep\b|\bdist[-_ ]?moe\b"
"""Words for token dispatchers of torchtitan that move, sort and weigh rows in operators of their own."""

_GROUPED = r"_?grouped_mm\b"
GROUPED_SLOWER = 1.2
"""How many times longer `torch._grouped_mm` takes in 16 bits than products of these shapes in the tables of kernels:
1.23 on H100 (four shapes), 1.17 on H200 (eight), 1.24 on B200 (twelve): tests/validation/data/grouped_products.csv. It
follows examples of CUTLASS and chooses tiles by a few rules, where cuBLAS has tuned them (pytorch issue 163425)."""

_KERNELS = (
    # a router of few kernels (Megatron-LM, on Transformer Engine)
    Trait(words=r"moe[-_]router[-_]fusion", changes={"routes_fused": True}),
    # experts in one kernel of Transformer Engine, which Megatron-LM's paged stash needs
    # (docs/user-guide/features/paged_stash.md), or of DistMoE (models/common/dist_moe.py of torchtitan)
    Trait(
        words=r"paged[-_ ]stash|transformer[-_]engine[-_]op[-_]fuser|\bdist[-_ ]?moe\b",
        changes={"fused_experts": True, "grouped": 0.0},
    ),
)


def with_experts(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with what flags, or else recipes, say about experts, and how its dispatcher sorts rows."""
    flags = flags_of(row)
    stack = _DROPS.given(f"{row.text('model')}; {flags}; {row.text('notes')}".lower(), stack, notes)
    for trait in _KERNELS:
        stack = trait.given(flags, stack, notes)
    sent, moe = _sent_by_flags(flags), row.text("arch").lower() == "moe"
    sent = None if sent == "allgather" and stack.name not in _MEGATRON else sent
    if moe and not stack.fused_experts and (uses_torchtitan(row) or mentions(flags, _GROUPED)):
        notes.append(
            f"products of experts take {GROUPED_SLOWER:g} times as long as those of tables (torch._grouped_mm)"
        )
        stack = replace(stack, grouped_slower=GROUPED_SLOWER)
    if moe and stack.name == "nemo" and (release := release_of(row)):
        recipe = recipe_of(row, release)
        sent, stack = sent or recipe.dispatcher, replace(stack, graphs=recipe.graphs)
    if stack.name == "mindspeed" and row.date() < SORTED_ROWS and sent is None:
        return replace(stack, row_bytes=_BY_ELEMENT)
    if moe and uses_torchtitan(row) and (moved := _moved_by_torchtitan(row, flags)) is not None:
        notes.append("rows of experts pass memory as often as torchtitan's operators read and write them")
        stack = replace(stack, row_bytes=moved)
    if moe and uses_maxtext(row) and mentions(flags, _BUFFERS) and (fill := re.search(_FILL, flags)) is not None:
        notes.append(f"tokens reach their experts by products with masks, in buffers {fill[1]} times the average")
        stack = replace(stack, buffers_of_experts=(row.needed("seq_len"), float(fill[1])))
    if moe and sent is not None:
        notes.append(_SENT[sent])
        stack = replace(stack, dispatcher=sent)
    return stack


def with_graphs(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with what flags put into CUDA graphs, else what its recipe does."""
    if stack.name not in TRANSFORMER_ENGINE or (graphs := _graphs_by_flags(flags_of(row)) or stack.graphs) == "none":
        return stack
    notes.append(f"in CUDA graphs: {graphs}")
    return replace(stack, graphs=graphs)


def _moved_by_torchtitan(row: Row, flags: str) -> tuple[float, float] | None:
    """Bytes for each element of a row of experts that torchtitan moves in either pass, None if nothing is known."""
    date = row.date()
    if "" < date < _DISPATCHED:
        ahead, back, put_back = _TITAN_UNSORTS if date > _UNSORTED else _TITAN_ADDS_UP
        own = _GPT_OSS if mentions(row.text("model").lower(), r"gpt[-_ ]?oss") else (0.0, 0.0)
        return ahead + own[0], back + own[1] + put_back * _put_back(row)
    if not date or row.stack() == "fsdp-compiled" or mentions(flags, _ONE_OPERATOR):
        return None
    ahead, back, put_back = _TITAN_HAS_ALL if row.integer("ep") in (None, 1) else _TITAN_DISPATCHES
    return ahead, back + put_back * _put_back(row)


def _put_back(row: Row) -> float:
    """Bytes for each element that elementwise kernels pass in the time of `_PUT_BACK` on the device of a row."""
    device = load_profile(row.text("profile")).device
    rate = device.memory_bandwidth * device.efficiency("elementwise").bandwidth
    return max(_PUT_BACK_MOVES, _PUT_BACK / device.compute_units * rate)


def fuses_experts(row: Row) -> bool:
    """Whether the recipe of Megatron Bridge for experts in fp8 fuses kernels: on GB200, GB300 and, except for GPT-OSS,
    on B300 (perf_recipes at 067f987d)."""
    if row.text("arch").lower() != "moe" or row.precision() != "fp8" or release_of(row) < _FUSED_RECIPES:
        return False
    if _graphs_by_flags(row.text("other_flags").lower()) in ("router", "attention"):
        return False
    return row.text("profile").startswith(("gb", "vr") if has_sinks(row) else ("gb", "vr", "b300"))


def _sent_by_flags(flags: str) -> Dispatcher | None:
    """How rows reach their experts, by flags; None if they do not say."""
    if mentions(flags, _ONCE):
        return "once"
    if mentions(flags, _ALL_GATHER):
        return "allgather"
    return "alltoall" if mentions(flags, _ALL_TO_ALL) else None


def _graphs_by_flags(flags: str) -> Graphs | None:
    """What is in CUDA graphs by flags: modules of Megatron-Core (`cuda_graph_scope`) or all; None if they name
    neither."""
    if says(flags, _GRAPHS) is False or says(flags, rf"{_GRAPHS}[-_ ]impl") is False:
        return "none"
    if mentions(flags, _STEP_IN_GRAPH) or mentions_of(flags, _GRAPHS, r"\bfull[-_ ]iteration"):
        return "step"
    if mentions_of(flags, _GRAPHS, r"\battn\b(?!\s*[=:])"):
        return "attention"
    return "router" if mentions_of(flags, _GRAPHS, r"\bmoe_(?:router|preprocess)\b") else None
