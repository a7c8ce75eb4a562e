"""How the graph of a model differs from the one that a plan was made for.

A fingerprint says that two graphs differ, but not where. So a plan keeps an outline of its graph: the types of inputs
and parameters, and a short digest of every kind of operator. Modules of one list mostly differ only in their number, so
they are listed once:

    layers.*.self_attn.q_proj.weight     float32 256x256         of all layers
    layers.*.self_attn/linear            91c4                    the first linear call in all of them

It is for people: a difference that it does not show (one layer of many that differs in an argument) changes the
fingerprint all the same.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping

from planner.graph.operator_graph import OperatorGraph, TensorType
from planner.graph.rewriting.fused_weights import PART
from planner.plan.carried import graph_text
from planner.plan.plan import ModelReference, Outline, Plan

_DIGITS = 4  # of a digest: misses one differing operator in 65,536
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=[./#]|$)")


def model_reference(
    graph: OperatorGraph, *, name: str, sequence_length: int | None, batch: int | None
) -> ModelReference:
    """What a plan says of the model whose graph was traced with `batch` samples. It carries the graph of a model that
    is not in the zoo."""
    from planner.models.overrides import canonical_reference
    from planner.models.zoo import is_of_zoo

    return ModelReference(
        reference=canonical_reference(name),
        sequence_length=sequence_length,
        parameters=graph.parameter_count(),
        fingerprint=graph.fingerprint(),
        batch=batch,
        outline=outline(graph),
        graph=None
        if is_of_zoo(name) or batch is None
        else graph_text(graph, batch=batch, sequence_length=sequence_length),
    )


def outline(graph: OperatorGraph) -> Outline:
    """What a plan keeps of a graph to explain differences to people."""
    return Outline(
        inputs=tuple((name, type_text(graph.types[name])) for name in graph.inputs),
        parameters=tuple(_parameters(graph).items()),
        operators="".join(digest for _, digest in _operators(graph)),
    )


def type_text(tensor: TensorType) -> str:
    """`float32 256x1024`; a scalar is `float32`."""
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape))}".rstrip()


def difference(plan: Plan, graph: OperatorGraph) -> str:
    """The first difference between a traced graph, which has another fingerprint, and the graph of a plan."""
    known = plan.model.outline
    if known is None:
        return "the plan was made by a version that does not say in what"
    wanted, inputs = dict(known.inputs), {name: type_text(graph.types[name]) for name in graph.inputs}
    return (
        _first_of("input", wanted, inputs)
        or _first_of("parameter", dict(known.parameters), _parameters(graph))
        or _first_operator(known.operators, graph)
        or _order_of(tuple(wanted), tuple(inputs))
        or _count_of(plan, graph)
        or "no input, parameter or operator by itself, but how often or where they are used"
    )


def has_other_parameters(plan: Plan, names: Iterable[str]) -> bool:
    """Whether a plan has a parameter that has none of these names; False where the plan does not say which it has."""
    known = plan.model.outline
    listed = list(names)
    given = {*listed, *map(_pattern, listed)}
    wanted = (PART.sub("", name) for name, _ in known.parameters) if known is not None else ()
    return any(name not in given for name in wanted)


def _first_of(kind: str, wanted: Mapping[str, str], found: Mapping[str, str]) -> str:
    for name, text in found.items():
        if name not in wanted:
            return f"{kind} '{name}' ({text}) is not in the plan, which has {_some(wanted)}"
        if wanted[name] != text:
            return f"{kind} '{name}' is {text}, the plan has {wanted[name]}"
    missing = [name for name in wanted if name not in found]
    return f"{kind} '{missing[0]}' ({wanted[missing[0]]}) of the plan is not in the model" if missing else ""


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "") if listed else "none"


def _first_operator(digests: str, graph: OperatorGraph) -> str:
    found = _operators(graph)
    wanted = [digests[at : at + _DIGITS] for at in range(0, len(digests), _DIGITS)]
    for at, (name, digest) in enumerate(found):
        if at >= len(wanted):
            return f"operator '{name}' follows after the last one of the plan"
        if digest != wanted[at]:
            return (
                f"operator '{name}' is called otherwise than in the plan, or stands in the place of another one there"
            )
    return f"the model ends after operator '{found[-1][0]}', the plan does not" if len(wanted) > len(found) else ""


def _order_of(wanted: tuple[str, ...], found: tuple[str, ...]) -> str:
    return (
        "" if wanted == found else f"the inputs come in the order {', '.join(found)}, in the plan {', '.join(wanted)}"
    )


def _count_of(plan: Plan, graph: OperatorGraph) -> str:
    """Lists of modules that have more or fewer modules than before."""
    count = graph.parameter_count()
    if count == plan.model.parameters:
        return ""
    return f"it has {count:,} parameters, the plan {plan.model.parameters:,}: equal layers, but another number of them"


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def _parameters(graph: OperatorGraph) -> dict[str, str]:
    """Types by name, one for all parameters that are alike; by full name where parameters that look alike differ in
    type."""
    texts = {p.name: type_text(graph.types[p.name]) + ("" if p.trainable else " frozen") for p in graph.parameters}
    by_pattern: dict[str, set[str]] = {}
    for name, text in texts.items():
        by_pattern.setdefault(_pattern(name), set()).add(text)
    return {(_pattern(name) if len(by_pattern[_pattern(name)]) == 1 else name): text for name, text in texts.items()}


def _operators(graph: OperatorGraph) -> list[tuple[str, str]]:
    """Name and digest of the first operator of each kind, in the order of the graph."""
    found: dict[str, tuple[str, str]] = {}
    for op in graph.operators:
        pattern = _pattern(op.name)
        if pattern not in found:
            text = json.dumps(_alike(graph.content_of(op)), separators=(",", ":"))
            found[pattern] = (op.name, hashlib.sha256(text.encode()).hexdigest()[:_DIGITS])
    return list(found.values())


def _alike(content: object) -> object:
    """JSON without the numbers of modules in the names of values."""
    if isinstance(content, str):
        return _pattern(content)
    if isinstance(content, list):
        return [_alike(item) for item in content]
    if isinstance(content, dict):
        return {key: _alike(value) for key, value in content.items()}
    return content
