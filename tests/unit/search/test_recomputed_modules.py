"""Stacks that recompute modules run nothing else of a block again, and keep of the rest what autograd keeps."""

from dataclasses import replace
from functools import cache

import pytest

from hardware_profiles import Software, load_profile, load_software
from planner.api.carrying import Subject, plan_of
from planner.export.description import Description
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.binding.bind import prepare
from planner.plan.layout.kept import Kept, kept_places, replayed_places
from planner.plan.layout.kept import block_words as words_of
from planner.plan.outline import model_reference
from planner.plan.plan import Prediction
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.search import search
from planner.strategy_search.within import within
from tests.unit.search.cases import traced

MEGATRON = replace(load_software("megatron"), host=0.0)  # a tiny model would wait for launches
CUT = Description(
    layers=(4,), data=2, tensor=4, zero=1, sequence_parallel=True, micro_batches=4, full=(0,), selective=(0,),
    sequence_length=128,
)  # fmt: skip


@cache
def subject(software: Software = MEGATRON) -> Subject:
    built = build_model("llama-tiny", dtype="bfloat16")
    graph = trace(built.module, built.args, built.kwargs)
    return Subject(
        model=model_reference(graph, name="llama-tiny", sequence_length=built.sequence_length, batch=built.batch),
        graph=graph,
        batch=built.batch,
        cluster=load_profile("h100-80gb").with_devices(8).with_software(software),
    )


def predicted(but: tuple[str, ...] | None, software: Software = MEGATRON) -> Prediction:
    """With all blocks computing some modules again; whole ones for None."""
    d = replace(CUT, full=(4,)) if but is None else replace(CUT, selective=(4,), kept=Kept(but=but)) if but else CUT
    return plan_of(subject(software), d).plan.prediction


def test_core_attention_takes_as_long_as_attention_that_its_backward_pass_computes_again() -> None:
    """Validated runs of Korthikanti et al. 2022 are priced so. Heads are laid side by side again, a copy."""
    core, back = predicted(("attention",)), predicted((), replace(MEGATRON, recomputed_in_backward=("attention",)))
    assert predicted(()).step_seconds < core.step_seconds
    assert core.objective_seconds == pytest.approx(back.objective_seconds, rel=0.01)
    assert core.peak_bytes <= back.peak_bytes


def test_each_module_that_is_computed_again_saves_memory() -> None:
    peaks = [predicted(but).peak_bytes for but in ((), ("mlp",), ("mlp", "attention"), None)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def test_torch_runs_the_rest_of_a_block_again_too() -> None:
    apart = replace(MEGATRON, modules=False)
    core, whole = predicted(("attention",)), predicted(("attention",), apart)
    assert core.step_seconds < whole.step_seconds


def names_again(graph: OperatorGraph, block: range, but: tuple[str, ...]) -> set[str]:
    kept = frozenset(kept_places(words_of(graph, block), Kept(but=but)))
    return {graph.operators[block[place]].name for place in replayed_places(graph, block, kept)}


def test_a_module_runs_from_what_enters_it_to_its_end() -> None:
    graph, blocks = prepare(traced("llama-4"))
    block = blocks.operators(1)
    found = names_again(graph, block, ("mlp",))
    own = {graph.operators[at].name for at in block if ".mlp" in graph.operators[at].name}
    assert own <= found
    assert not [name for name in found if "self_attn" in name or "input_layernorm" in name]


@pytest.mark.slow
def test_tables_keep_as_much_as_the_prediction_says() -> None:
    """What was found in the space fits in its own peak, and takes as long as its tables say."""
    from planner.engines.megatron import MEGATRON as SPACE

    one = subject()
    request = within(
        SPACE,
        SearchRequest(
            graph=one.graph, batch=one.batch, model=one.model, cluster=one.cluster, global_batch=8, space=SPACE,
            pinned=Pinned(pipeline=1, tensor=2, data=4, context=1, zero=1, micro_batches=2, recompute="selective"),
        ),
    )  # fmt: skip
    found = search(request)
    assert found.bound_seconds == pytest.approx(found.plans[0].objective, rel=1e-9)
    peak = found.plan.prediction.peak_bytes
    again = search(replace(request, memory_limit=peak * (1 + 1e-9)))
    assert again.plans[0].objective == pytest.approx(found.plans[0].objective, rel=1e-9)
    assert again.plan.prediction.peak_bytes <= peak * (1 + 1e-9)
