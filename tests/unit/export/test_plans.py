"""Plans of descriptions: what is read back makes the same plan, and a plan's description makes it again."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner.api.carrying import plan_of, priced_losses
from planner.export.describe import describe, differences
from planner.export.description import Description, ExportError
from planner.export.target import Facts, Loss
from planner.export.targets import TARGETS
from planner.plan.binding.bind import bind
from planner.plan.file import dump_plan
from planner.plan.layout.kept import Kept
from planner.plan.layout.roles import roles
from planner.sharding.update import Update
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.search import search
from tests.refusals import refused
from tests.unit.export.descriptions import architecture, facts_of, job_of, subject

TINY = Description(
    layers=(4,), full=(0,), selective=(0,), precision="fp32", sequence_length=128, micro_batches=4, micro_batch=2
)
PIPELINE = replace(TINY, layers=(2, 2), full=(0, 0), selective=(0, 0))
CASES = {
    "data": ("llama-tiny", 4, replace(TINY, data=4)),
    "ZeRO 3": ("llama-tiny", 4, replace(TINY, data=4, zero=3)),
    "tensor and data": ("llama-tiny", 4, replace(TINY, data=2, tensor=2, sequence_parallel=True, zero=1)),
    "one sample": ("llama-tiny", 2, replace(TINY, tensor=2, sequence_parallel=True, micro_batch=1)),
    "copies of shards": ("llama-tiny", 8, replace(TINY, data=4, tensor=2, sequence_parallel=True, zero=1, replicas=2)),
    "HSDP": ("llama-tiny", 4, replace(TINY, data=4, zero=3, replicas=2)),
    "whole norms": ("gpt-tiny", 2, replace(TINY, tensor=2)),
    "uneven stages": ("llama-tiny", 4, replace(PIPELINE, layers=(1, 3), data=2)),
    "virtual stages": ("llama-tiny", 2, replace(PIPELINE, layers=(1,) * 4, virtual_stages=2, full=(0, 0, 1, 0),
                                                 selective=(0,) * 4, schedule="interleaved_1f1b")),
    "recomputed": ("llama-tiny", 2, replace(PIPELINE, full=(1, 1))),
    "attention again": ("llama-tiny", 1, replace(TINY, selective=(4,), kept=Kept(but=("attention",)))),
    "attention kept": ("llama-tiny", 1, replace(TINY, full=(1,), selective=(2,), kept=Kept(calls=("attention",)))),
    "a ring": ("llama-tiny", 4, replace(TINY, ring=2, zigzag=True, data=2, zero=2)),
    "heads": ("llama-tiny", 4, replace(TINY, heads=4)),
    "experts": ("mixtral-tiny", 4, replace(TINY, data=4, expert=2)),
    "experts over all": ("mixtral-tiny", 4, replace(TINY, data=2, tensor=2, expert=4, whole_experts=True,
                                                      sequence_parallel=True)),
    "experts on every device": ("mixtral-tiny", 4, replace(TINY, data=4, zero=2, expert=4)),
    "updates": ("llama-tiny", 2, replace(TINY, data=2, update=Update(clip_norm=1.0, buckets=2**20))),
}  # fmt: skip


REFUSED: dict[tuple[str, str], tuple[object, ...]] = {
    ("torch", "experts over all"): ("tensor 2", "--tensor 1"),
    ("accelerate", "whole norms"): ("tensor 2", "--data 2"),
    ("accelerate", "one sample"): ("tensor 2", "--data 2"),
    ("accelerate", "uneven stages"): ("2 stages", "--pipeline 1"),
    ("accelerate", "virtual stages"): ("2 stages", "--pipeline 1"),
    ("accelerate", "recomputed"): ("2 stages", "--pipeline 1"),
}


def _last(losses: tuple[Loss, ...], description: Description) -> Description:
    return losses[-1].description if losses else description


QUICK = ("data", "tensor and data", "one sample", "uneven stages", "recomputed", "attention kept", "experts")
LISTED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]


@pytest.mark.cases(1, 3)
@pytest.mark.parametrize("name", LISTED)
def test_a_description_is_drawn_from_its_plan(name: str) -> None:
    model, devices, description = CASES[name]
    bound = plan_of(subject(model, "cpu", devices), description)
    assert describe(bound) == description
    assert differences(bound, bound) == ()


def test_states_outside_of_the_devices_are_not_left_out_in_silence() -> None:
    model, devices, description = CASES["data"]
    bound = plan_of(subject(model, "cpu", devices), description)
    offloaded = {name: replace(stored, state_home="host") for name, stored in bound.parameters.items()}
    found = describe(replace(bound, parameters=offloaded))
    assert (found.states_at, found.weights_at) == ("host", "device")
    assert describe(bound).states_at == "device"
    lost = TARGETS["torchtitan"].nearest(found)
    assert ("optimizer states", "on the host") in [(loss.what, loss.here) for loss in lost]
    assert lost[-1].description.states_at == "device"
    part = {**bound.parameters, **dict(list(offloaded.items())[:2])}
    some = replace(bound, parameters=part)
    assert any(one.what == "offload" for one in differences(some, bound))


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("name", LISTED)
def test_what_is_written_and_read_makes_the_same_plan(name: str) -> None:
    model, devices, description = CASES[name]
    found = subject(model, "cpu", devices)
    for target in TARGETS.values():
        if (target.name, name) in REFUSED:
            with refused(ExportError, *REFUSED[target.name, name]):
                target.write(job_of(_last(target.nearest(description), description), model))
            continue
        losses = target.nearest(description)
        nearest = _last(losses, description)
        files = target.write(job_of(nearest, model))
        facts = facts_of(nearest, model, files.get(target.beside or "", ""))
        read = target.read(files[target.main], facts).description
        assert dump_plan(plan_of(found, read).plan) == dump_plan(plan_of(found, nearest).plan)


def test_the_published_configuration_of_llama_70b_is_read() -> None:
    """MindSpore Transformers' own, as docs/exports.md prices it."""
    text = (Path(__file__).resolve().parents[3] / "docs/examples/llama3_1_70b.yaml").read_text(encoding="utf-8")
    facts = Facts(layers=80, devices=None, architecture=architecture("llama70b"))
    reading = TARGETS["mindformers"].read(text, facts)
    found = reading.description
    assert (found.data, found.tensor, found.pipeline, found.devices) == (1, 8, 8, 64)
    assert (found.sequence_parallel, found.vocabulary_parallel, found.global_batch) == (True, True, 256)
    assert (found.layers, found.selective) == ((10,) * 8, (10, 8, 6, 4, 2, 0, 0, 0))
    assert found.zero == 0, "nobody shares anything where data parallelism is 1"
    assert [note.partition(":")[0] for note in reading.notes] == ["fine_grain_interleave"]
    halves = text.replace("batch_size: 1", "batch_size: 2").replace("micro_batch_num: 256", "micro_batch_num: 128")
    both = TARGETS["mindformers"].read(halves, facts)
    assert (both.description.interleave, both.description.micro_batch, both.notes) == (2, 1, ())
    assert both.description.global_batch == 256


def test_products_are_cut_as_everybody_cuts_them() -> None:
    _, _, description = CASES["tensor and data"]
    for model in ("llama-tiny", "gpt-tiny"):
        bound = plan_of(subject(model, "cpu", 4), description)
        chosen = {
            o.operator.name.rpartition(".")[2].partition("/")[0]: {
                o.rule.factors[choice].name for choice in o.strategy if choice is not None
            }
            for o in bound.operators
            if o.rule.op_class in ("matmul", "embedding")
        }
        rows = {"o_proj", "down_proj", "attn_proj", "mlp_proj"}
        words = {"embed_tokens", "wte"}
        for name, factors in chosen.items():
            if name != "wpe":  # positions, of which nothing is said
                assert ("i" if name in rows else "v" if name in words else "o") in factors, name


def test_what_a_search_finds_differs_by_name_and_price() -> None:
    """Memory that is short makes blocks differ from each other, which no engine can say."""
    found = subject("llama-tiny", "h100-80gb", 4, "bf16")
    request = SearchRequest(
        graph=found.graph, batch=found.batch, model=found.model, cluster=found.cluster, global_batch=8,
        pinned=Pinned(mesh=(4,), pipeline=1, micro_batches=1),
    )  # fmt: skip
    bound = search(request).bound
    description = describe(bound)
    usual = plan_of(found, description)
    told = differences(bound, usual)
    steps, last = priced_losses(found, bound, usual, told, TARGETS["megatron"].nearest(description))
    assert describe(usual) == description
    assert roles(usual).tensor == roles(bound).tensor
    if told:
        assert all(step.step_seconds == usual.plan.prediction.step_seconds for step in steps[: len(told)])
    assert last.plan.prediction.step_seconds == (
        steps[-1].step_seconds if steps else bound.plan.prediction.step_seconds
    )
    assert bind(last.plan, found.graph, found.batch).plan == last.plan


def test_collectives_under_products_are_told_to_no_engine_and_listed_as_lost() -> None:
    one = subject("llama-tiny", "h100-80gb", 4)
    pinned = Pinned(tensor=4, pipeline=1, tensor_overlap=2, micro_batches=2)
    request = SearchRequest(
        graph=one.graph, batch=one.batch, model=one.model, cluster=one.cluster, global_batch=16, pinned=pinned,
        precision="fp32",
    )  # fmt: skip
    found = search(request).bound
    assert found.plan.training.tensor_overlap
    usual = plan_of(one, describe(found))
    steps, last = priced_losses(one, found, usual, differences(found, usual), ())
    assert "collectives of tensor parallelism" in [step.what for step in steps]
    assert last.plan.prediction.step_seconds != found.plan.prediction.step_seconds
