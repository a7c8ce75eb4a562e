"""Descriptions of all kinds, models for them, and what the recorded parsers of engines know."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from hardware_profiles import load_profile
from planner.api.carrying import Subject
from planner.export.architecture import Architecture, architecture_of
from planner.export.description import Description
from planner.export.pytorch.torchtitan_writing import OPERATORS
from planner.export.target import Facts, Job
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.layout.kept import Kept
from planner.plan.outline import model_reference
from planner.plan.plan import PRECISIONS
from planner.sharding.update import Update

ENGINES = Path(__file__).parent / "engines"
MODELS = {"llama70b": 80, "gpt3-175b": 96, "qwen3-30b-a3b": 48}


@cache
def recorded(engine: str, version: str = "[0-9]*") -> dict[str, Any]:
    """What was read out of an engine's own parser or configuration classes."""
    (file,) = ENGINES.glob(f"{engine}-{version}.json")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


@cache
def architecture(model: str) -> Architecture:
    found = architecture_of(model, None)
    assert found is not None
    return found


def job_of(description: Description, model: str) -> Job:
    return Job(model=model, description=description, architecture=architecture(model), per_node=8)


def facts_of(description: Description, model: str, beside: str = "") -> Facts:
    layers = sum(description.layers)
    return Facts(layers=layers, devices=description.devices, architecture=architecture(model), beside=beside)


@st.composite
def descriptions(draw: st.DrawFn, model: str) -> Description:
    """Anything that a plan could be, whether or not any engine can say it."""
    blocks, powers = MODELS[model], st.sampled_from((1, 2, 4))
    pipeline = draw(powers)
    virtual = draw(st.sampled_from((1, 2))) if pipeline > 1 else 1
    layers = [blocks // (pipeline * virtual)] * (pipeline * virtual)
    if len(layers) > 1 and draw(st.booleans()):
        layers[0] -= 1
        layers[-1] += 1
    several = ("interleaved_1f1b", "seqpipe", "zb_v", "dualpipe_v")
    single = ("1f1b", "eager_1f1b", "gpipe", "zb_h1", "pipedream", "seqpipe")
    schedule = "1f1b" if pipeline == 1 else draw(st.sampled_from(several if virtual > 1 else single))
    data, tensor, ring, heads = (draw(powers) for _ in range(4))
    zero = draw(st.sampled_from((0, 1, 2, 3))) if data * ring * heads > 1 else 0
    replicas = draw(st.sampled_from([n for n in (1, 2, 4) if data % n == 0])) if zero else 1
    zero, replicas = (zero, replicas) if replicas < data * ring * heads else (0, 1)
    full = [draw(st.sampled_from((0, 3, count))) for count in layers]
    rest = [draw(st.sampled_from((0, count - have))) for count, have in zip(layers, full, strict=True)]
    ways = draw(st.sampled_from(("none", "full", "selective", "all selective", "mixed")))
    full = {"none": [0] * len(layers), "full": full, "mixed": full}.get(ways, [0] * len(layers))
    selective = {"selective": rest, "all selective": layers, "mixed": rest}.get(ways, [0] * len(layers))
    selective = [min(s, have - f) for s, have, f in zip(selective, layers, full, strict=True)]
    kept = (Kept(but=("attention",)), Kept(calls=("attention",)), Kept(but=OPERATORS))
    experts = architecture(model).experts is not None
    precision = draw(st.sampled_from(("bf16", "fp32")))
    expert = draw(st.sampled_from((1, tensor * ring * heads, data))) if experts else None
    return Description(
        layers=tuple(layers),
        virtual_stages=virtual,
        schedule=schedule,
        slices=2 if schedule == "seqpipe" else 1,
        data=data,
        tensor=tensor,
        ring=ring,
        heads=heads,
        zigzag=ring > 1 and draw(st.booleans()),
        expert=expert,
        whole_experts=expert is not None and tensor > 1 and expert % tensor == 0 and draw(st.booleans()),
        zero=zero,
        replicas=replicas,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        vocabulary_parallel=tensor == 1 or draw(st.booleans()),
        micro_batch=draw(powers),
        micro_batches=draw(st.sampled_from((4, 8))),
        interleave=draw(st.sampled_from((1, 2))),
        full=tuple(full),
        selective=tuple(selective),
        kept=draw(st.sampled_from(kept)) if any(selective) else Kept(),
        precision=precision,
        sequence_length=architecture(model).sequence,
        update=draw(updates()),
        states_at=draw(st.sampled_from(("device", "device", "host", "disk"))),
        weights_at=draw(st.sampled_from(("device", "device", "host"))),
    )


def updates() -> st.SearchStrategy[Update]:
    """What may become of gradients, but for what no engine does."""
    return st.builds(
        Update,
        clip_norm=st.sampled_from((None, 1.0, 0.5)),
        buckets=st.sampled_from(("none", 2**25)),
        gradient_dtype=st.sampled_from(("mixed", "fp32", "parameter")),
        master_weights=st.booleans(),
        moment_dtype=st.sampled_from(("fp32", "bf16")),
        broadcast=st.booleans(),
    )


@cache
def subject(model: str, profile: str, devices: int, precision: str = "fp32") -> Subject:
    """A model of the zoo on a machine."""
    built = build_model(model, dtype=PRECISIONS[precision])
    graph = trace(built.module, built.args, built.kwargs)
    return Subject(
        model=model_reference(graph, name=model, sequence_length=built.sequence_length, batch=built.batch),
        graph=graph,
        batch=built.batch,
        cluster=load_profile(profile).with_devices(devices),
    )
