"""Price a configuration, find the best plan of its engine, and list the changes that lead to it, cheapest first.

    as it is ──micro-batches──▶ · ──recomputation──▶ · ──offload──▶ · ──ZeRO──▶ · ──degrees──▶ the best

A change is cheap if it takes one line and needs no converted checkpoint. Changes are made one after the other and
priced together with those before them, so their savings sum to the total. A change that is not legal alone is made
together with the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from planner.api.engine_best import Patience, best_for_engine, priced
from planner.api.importing import refusing
from planner.errors import StoppedBy

if TYPE_CHECKING:
    from planner.api.engine_best import EngineBest
    from planner.api.importing import Imported
    from planner.export.description import Description
    from planner.plan.plan import Prediction

_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("micro-batches", ("micro_batch", "micro_batches", "interleave", "slices")),
    ("recomputation", ("full", "selective", "kept")),
    ("offload", ("states_at", "weights_at")),
    ("ZeRO", ("zero", "replicas", "update")),
    (
        "degrees",
        (
            "data",
            "tensor",
            "ring",
            "heads",
            "expert",
            "whole_experts",
            "layers",
            "virtual_stages",
            "schedule",
            "sequence_parallel",
            "vocabulary_parallel",
            "zigzag",
        ),
    ),
)
"""Fields of a description that change together, the cheapest first."""
_WORTH = 0.005  # share of a step that a change must save to be listed


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change in words, with the prediction before and after it."""

    name: str
    here: str
    there: str
    before: "Prediction"
    after: "Prediction"

    @property
    def seconds(self) -> float:
        """Seconds of a step that it saves; negative if it costs time."""
        return self.before.step_seconds - self.after.step_seconds


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A configuration and the best one of its engine; `best` is None if nothing was found that fits and is faster.
    `stopped_by`: what ended a search before its end."""

    found: "Imported"
    best: "EngineBest | None"
    changes: tuple[Change, ...]
    stopped_by: StoppedBy | None = None


def advice_on(found: "Imported", patience: Patience) -> Advice:
    """Search the best plan of the engine for the job of a configuration, and price each change on the way there."""
    here = found.reading.description
    best = best_for_engine(found.subject, found.target, here, patience)
    own = found.bound.plan.prediction
    fits = own.peak_bytes <= own.capacity_bytes
    if best is not None and fits and best.bound.plan.prediction.step_seconds > own.step_seconds * (1 - _WORTH):
        best = None
    changes = () if best is None else tuple(_way(found, best))
    return Advice(found=found, best=best, changes=changes, stopped_by=next(iter(patience.stops), None))


def changed_text(advice: Advice) -> str:
    """The user's file with the changes. Raises ExportError if the changed file would not mean what was intended."""
    from planner.api.exporting import per_node_of
    from planner.export.description import ExportError
    from planner.export.editing import edited
    from planner.export.target import Job

    found, best = advice.found, advice.best
    assert best is not None
    job = Job(
        model=found.model,
        description=found.reading.description,
        architecture=found.facts.architecture,
        per_node=per_node_of(found.subject.cluster),
    )
    with refusing(found.path, found.target.name):
        text = edited(found.target, found.text, job, best.description)
        if found.read_again(text) != best.description:
            raise ExportError(
                "the changes do not fit into this file, whose settings stand elsewhere too; make them by hand"
            )
    return text


def _way(found: "Imported", best: "EngineBest") -> Iterator[Change]:
    """The groups of fields in order. A group that is not legal yet comes after the others; one that is never legal
    alone is joined with as few others as possible."""
    now, figures = found.reading.description, found.bound.plan.prediction
    waiting = [group for group in _GROUPS if _differ(now, best.description, group[1])]
    while waiting:
        for together in (taken for size in range(1, len(waiting) + 1) for taken in combinations(waiting, size)):
            names = tuple(field for _, fields in together for field in fields)
            following = _with(now, best.description, names)
            bound = None if following is None else priced(found.subject, following)
            if following is None or bound is None:
                continue
            after = bound.plan.prediction
            title = " and ".join(name for name, _ in together)
            here, there = words_of(now, names), words_of(following, names)
            yield Change(name=title, here=here, there=there, before=figures, after=after)
            now, figures = following, after
            waiting = [group for group in waiting if group not in together]
            break
        else:
            return


def _differ(one: "Description", other: "Description", names: tuple[str, ...]) -> bool:
    return any(getattr(one, name) != getattr(other, name) for name in names)


def _with(now: "Description", then: "Description", names: tuple[str, ...]) -> "Description | None":
    """A description with some fields of another one; None if these contradict the others."""
    from planner.export.description import ExportError

    changes = {name: getattr(then, name) for name in names}
    try:
        following = replace(now, **changes)
    except ExportError:
        return None
    return following if following.global_batch == now.global_batch and following.devices == now.devices else None


def words_of(d: "Description", names: tuple[str, ...]) -> str:
    """Some fields of a description in words."""
    found = []
    if "micro_batch" in names:
        found.append(f"{d.micro_batches} of {d.micro_batch}")
    if "full" in names:
        found.append(_recomputation(d))
    if "states_at" in names:
        away = {"states": d.states_at, "weights": d.weights_at}
        words = [f"{what} on the {where}" for what, where in away.items() if where != "device"]
        found.append(" and ".join(words) or "nothing offloaded")
    if "zero" in names:
        found.append(f"ZeRO {d.zero}" + (f" in {d.replicas} replicas" if d.replicas > 1 else ""))
    if "data" in names:
        degrees = {"data": d.data, "tensor": d.tensor, "context": d.context, "pipeline": d.pipeline}
        degrees |= {"virtual stages": d.virtual_stages, "expert": d.expert or 1}
        along = ", norms along the sequence" if d.sequence_parallel else ""
        found.append(
            (" x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1) or "one device") + along
        )
    return ", ".join(found)


def _recomputation(d: "Description") -> str:
    if not d.recomputes:
        return "nothing recomputed"
    words = [f"{sum(d.full)} blocks whole"] if any(d.full) else []
    if any(d.selective):
        words.append(f"{sum(d.selective)} blocks but for {', '.join(d.kept.but or d.kept.calls)}")
    return "recomputed: " + " and ".join(words)
