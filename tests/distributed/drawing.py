"""Draws combinations of what a plan with layers in fp8 may say, from a seed: recipe, model, how it is cut and stored,
pipelines of every schedule, gathers, recomputation, what else is in fp8, and the plan that goes on in the middle."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import GATHERED, Fp8
from tests.distributed.dividing import WAYS

STAGES = {"micro_batches": 4, "global_batch": 8, "stages": (2, 2)}
CHUNKS = {"micro_batches": 4, "global_batch": 8, "stages": (1,) * 4, "virtual_stages": 2}
SCHEDULES = {
    **dict.fromkeys(("1f1b", "gpipe", "zb_h1", "eager_1f1b"), STAGES),
    **dict.fromkeys(("interleaved_1f1b", "zb_v", "dualpipe_v"), CHUNKS),
}
TRAVELLING = 120
"""The first seed of plans whose weights are gathered in fp8."""
LEFT_OUT = {"llama4": ("*.mlp.*",), "gpt4": ("*.c_fc.*",), "sharing": ()}
DENSE = {"llama4": ("megatron", "sequence", "sequence_zero3", "outer", "zero3"), "gpt4": ("zero1", "zero2", "zero3")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A plan of a model in float64: by hand, at random from a number, or with experts in one of the `WAYS`; and the
    gathers, the norm to which gradients are clipped, whether tokens are sent once, and axes without the all-to-all."""

    model: str
    kind: str | int
    sizes: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    gathers: str = "each"
    clip_norm: float | None = None
    once: bool = False
    lacking: tuple[int, ...] = ()
    lowered: bool = True


def drawn(seed: int) -> Drawn:
    """One of them, always the same for a seed; those from `TRAVELLING` on gather weights in fp8."""
    draw = random.Random(seed)
    if seed >= TRAVELLING:
        return _travelling(draw)
    recipe = draw.choice(list(RECIPES))
    family = draw.choice((_dense, _pipelines, _experts, _experts, _anything))
    found = family(draw, recipe)
    found.settings.setdefault("recomputation", draw.choice(("none", "full", "selective")))
    return found


def _fp8(draw: random.Random, recipe: str, *, experts: bool = False) -> Fp8:
    delayed = {"history": 2, "margin": 1} if RECIPES[recipe].delayed else {}
    more = {"experts": draw.random() < 0.8, "dispatch": draw.random() < 0.5} if experts else {}
    return Fp8(recipe=recipe, **delayed, **more)  # type: ignore[arg-type]


def _travelling(draw: random.Random) -> Drawn:
    """Weights that are gathered in fp8, of some layers or of all."""
    recipe, gathers = draw.choice(GATHERED), draw.choice(("block", "ahead"))
    model = draw.choice(("llama4", "gpt4", "sharing"))
    fp8 = replace(_fp8(draw, recipe), gathered=True, left_out=draw.choice(((), (), LEFT_OUT[model])))
    if draw.random() < 0.4:
        schedule = draw.choice([one for one in SCHEDULES if one != "eager_1f1b"])
        sizes, more = (2,), {**SCHEDULES[schedule], "schedule": schedule}
    else:
        sizes = draw.choice(((2, 2), (4,)))
        more = {"micro_batches": draw.choice((1, 2)), "global_batch": 8}
    kinds: list[str | int] = ["zero3", "zero3", "zero2", draw.randrange(1000)]
    kinds += ["outer", "sequence_zero3", "megatron"] if sizes == (2, 2) and model == "llama4" else []
    more["recomputation"] = draw.choice(("none", "full", "selective"))
    return Drawn(
        model=model,
        kind=draw.choice(kinds),
        sizes=sizes,
        settings={**more, "fp8": fp8},
        gathers=gathers,
        clip_norm=draw.choice((None, 0.05)),
        lowered=draw.random() < 0.7,
    )


def _dense(draw: random.Random, recipe: str) -> Drawn:
    kind = draw.choice(DENSE["llama4"])
    settings = {"micro_batches": draw.choice((1, 2)), "global_batch": 8, "fp8": _fp8(draw, recipe)}
    gathers = draw.choice(("each", "block", "ahead")) if kind in ("outer", "sequence_zero3", "zero3") else "each"
    return Drawn(
        model="llama4", kind=kind, sizes=(2, 2), settings=settings, gathers=gathers, lowered=draw.random() < 0.7
    )


def _pipelines(draw: random.Random, recipe: str) -> Drawn:
    schedule, model = draw.choice(list(SCHEDULES)), draw.choice(("llama4", "gpt4", "sharing", "wide4"))
    kind: str | int = draw.choice(("zero1", "zero3", "zero3", draw.randrange(1000)))
    fp8 = _fp8(draw, recipe, experts=model == "wide4")
    gathers = draw.choice(("each", "block", "ahead")) if kind == "zero3" else "each"
    settings = {**SCHEDULES[schedule], "schedule": schedule, "fp8": fp8}
    return Drawn(model=model, kind=kind, sizes=(2,), settings=settings, gathers=gathers)


def _experts(draw: random.Random, recipe: str) -> Drawn:
    way = draw.choice(list(WAYS))
    settings = {"micro_batches": draw.choice((1, 2)), "global_batch": 8, "fp8": _fp8(draw, recipe, experts=True)}
    once = "exchanged" not in way and WAYS[way][0][0].startswith("e@") and draw.random() < 0.4
    lacking = () if once else draw.choice(((), *((at,) for at in (0, 1) if "@" not in WAYS[way][0][at])))
    model = draw.choice(("wide", "lonely"))
    return Drawn(model=model, kind=f"experts: {way}", sizes=(2, 2), settings=settings, once=once, lacking=lacking)


def _anything(draw: random.Random, recipe: str) -> Drawn:
    model = draw.choice(("llama", "gpt", "wide", "sharing", "tied-linears"))
    settings = {
        "micro_batches": draw.choice((1, 2)),
        "global_batch": 8,
        "fp8": _fp8(draw, recipe, experts=model == "wide"),
    }
    sizes = draw.choice(((2, 2), (4,)))
    return Drawn(model=model, kind=draw.randrange(1000), sizes=sizes, settings=settings, lowered=draw.random() < 0.7)
