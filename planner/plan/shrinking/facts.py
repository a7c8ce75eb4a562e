"""Everything that a bound plan decides, as a list that can be compared with that of another plan.

Nothing in it has a size: an axis is its name, a tensor its layout, a block what is done with it. So the list of a plan
on thousands of devices and that of a small one are equal where they decide the same. Each fact is counted: how many
operators, tensors, parameters or blocks of the plan it is true of.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from costmodels import Turn
from hardware_profiles import Machine
from planner.graph.blocks import block_parameters
from planner.graph.expert_load import EVEN
from planner.graph.operator_graph import CASTS
from planner.plan.binding.bind import BoundPlan, stage_of_operators
from planner.plan.layout.roles import call_word
from planner.plan.prediction.predict import stage_costs
from planner.plan.schedule import orders_of
from planner.sharding.layout import Layout, format_layout
from planner.sharding.redistribute import redistribution
from planner.sharding.rule import Duplex, strategy_names
from planner.sharding.stored import StoredParameter
from planner.sharding.update import Update, split_positions, update_words

Facts = Mapping[str, Counter[str]]
"""For each kind of decision how often each is made."""


def facts_of(bound: BoundPlan, machine: Machine) -> Facts:
    """What a plan decides; `machine` prices its collectives, which lists them."""
    return {
        "operators": Counter(_operators(bound)),
        "redistributions": Counter(_redistributions(bound)),
        "collectives": _collectives(bound, machine),
        "stored parameters": Counter(_stored(bound)),
        "recomputation": Counter(_recomputation(bound)),
        "schedule steps": Counter(_schedule_steps(bound)),
        "settings": Counter(_settings(bound)),
    }


def _operators(bound: BoundPlan) -> Iterator[str]:
    """Kind, strategy and layouts of every operator, forward and of the gradients."""
    for one in bound.operators:
        names = ",".join(name or "-" for name in strategy_names(one.rule, one.strategy))
        layouts = (_duplexes(one.layouts.operands), _duplexes(one.layouts.results))
        yield f"{one.operator.op} as {names or '-'}: {layouts[0]} -> {layouts[1]}"


def _duplexes(layouts: tuple[Duplex, ...]) -> str:
    return " ".join(_duplex(one) for one in layouts) or "nothing"


def _duplex(one: Duplex) -> str:
    forward, gradient = format_layout(one.forward) or "-", format_layout(one.gradient) or "-"
    return forward if forward == gradient else f"{forward}/{gradient}"


def _redistributions(bound: BoundPlan) -> Iterator[str]:
    """What becomes of a tensor between the operator that makes it, or the place where it is kept, and one that reads
    it, and of its gradient on the way back."""
    made = {
        name: layouts
        for one in bound.operators
        for name, layouts in zip(one.operator.results, one.layouts.results, strict=True)
        if name is not None
    }
    for one in bound.operators:
        for name, wanted in zip(one.operator.operands, one.layouts.operands, strict=True):
            kind, before = _source(bound, name, made)
            if before is None:
                continue
            yield from _moved(bound, name, kind, before.forward, wanted.forward)
            if name in bound.graph.differentiable:
                yield from _moved(bound, name, f"gradient of {kind}", wanted.gradient, before.gradient)


def _source(bound: BoundPlan, name: str, made: Mapping[str, Duplex]) -> tuple[str, Duplex | None]:
    if name in made:
        return "activation", made[name]
    if name in bound.parameters:
        stored = bound.parameters[name]
        return "weight", Duplex(forward=stored.weight, gradient=stored.gradient)
    if name in bound.inputs:
        return "input", Duplex(forward=bound.inputs[name], gradient=bound.inputs[name])
    return "constant", None


def _moved(bound: BoundPlan, name: str, kind: str, source: Layout, target: Layout) -> Iterator[str]:
    if source == target:
        return
    shape = bound.graph.types[name].shape
    steps = redistribution(shape, bound.plan.mesh, source, target, bound.sequences.get(name, ()))
    axes = bound.plan.mesh.names
    words = ", ".join(f"{step.kind} on {axes[step.axis]}{' zigzag' * bool(step.zigzag)}" for step in steps)
    yield f"{kind} {format_layout(source)} to {format_layout(target)}: {words}"


def _collectives(bound: BoundPlan, machine: Machine) -> Counter[str]:
    """Every collective of a step that the plan is charged for: in which pass, of what, kind and axis. Counted once for
    each operator, block or parameter that sends it."""
    calls = {one.operator.name: one.operator.op for one in bound.operators}
    found: Counter[str] = Counter()
    for cost in stage_costs(bound, machine):
        for sent, times in cost.messages.items():
            axis = "between stages" if sent.message.axis is None else f"on {bound.plan.mesh.names[sent.message.axis]}"
            owner = calls.get(sent.owner, sent.owner.strip("()") or "no operator")
            found[f"{sent.phase}, {owner}: {sent.message.kind} {axis}"] += times
    return found


def _stored(bound: BoundPlan) -> Iterator[str]:
    """How weight, gradient and state of every parameter are kept, and where."""
    for name, stored in bound.parameters.items():
        frozen = "" if name in bound.graph.differentiable else ", frozen"
        weight, gradient, state = (format_layout(one) or "-" for one in (stored.weight, stored.gradient, stored.state))
        homes = [f"{what} on the {home}" for what, home in _homes(stored) if home != "device"]
        layouts = f"weight {weight}, gradient {gradient}, state {state}"
        yield ", ".join([f"{layouts}{frozen}", *homes])


def _homes(stored: StoredParameter) -> tuple[tuple[str, str], ...]:
    return ("weight", stored.weight_home), ("state", stored.state_home)


def _recomputation(bound: BoundPlan) -> Iterator[str]:
    """What becomes of the activations of every block, and of which sort the next one is."""
    words = [_block_words(bound, block) for block in range(bound.blocks.count)]
    yield from words
    for one, other in pairwise(words):
        if one != other:
            yield f"{one}; then {other}"


def _block_words(bound: BoundPlan, block: int) -> str:
    kept, inside = bound.recompute_of(block), bound.blocks.operators(block)
    home = bound.offloaded_blocks.get(block)
    names = [call_word(bound.operators[inside[place]].operator.name, bound.operators[inside[place]].rule.op_class)
             for place in sorted(kept or ())
             if bound.operators[inside[place]].operator.op not in CASTS]  # fmt: skip
    word = "keeps all" if kept is None else f"keeps {' '.join(names)}" if names else "recomputes all"
    parameters = len(block_parameters(bound.graph, bound.blocks, block))
    return f"block with {parameters} parameters {word}" + (f", activations on the {home}" if home else "")


def _schedule_steps(bound: BoundPlan) -> Iterator[str]:
    """What a pipeline rank does behind what: by where the rank stands, the turn, and the next one."""
    plan = bound.plan
    for rank, turns in enumerate(orders_of(plan)):
        where = f"{plan.schedule}, {_place(rank, plan.pipeline, 'stage')}"
        if turns:
            yield f"{where}: starts with {_turn(turns[0], plan.virtual_stages)}"
            yield f"{where}: ends with {_turn(turns[-1], plan.virtual_stages)}"
        for turn, after in pairwise(turns):
            yield f"{where}: {_turn(turn, plan.virtual_stages)}, then {_turn(after, plan.virtual_stages)}"
    yield from _stage_ends(bound)


def _turn(turn: Turn, chunks: int) -> str:
    kind = turn.kind.replace("_", " ")
    return f"{kind} of {_place(turn.chunk, chunks, 'chunk')}" if chunks > 1 else kind


def _place(number: int, count: int, what: str) -> str:
    if count == 1:
        return f"the only {what}"
    return f"{'the first' if number == 0 else 'the last' if number == count - 1 else 'a middle'} {what}"


def _stage_ends(bound: BoundPlan) -> Iterator[str]:
    """What is handed from one stage to a later one, in which layout."""
    stages, plan = stage_of_operators(bound), bound.plan
    if len(plan.stages) == 1:
        return
    for at, one in enumerate(bound.operators):
        for name, layouts in zip(one.operator.results, one.layouts.results, strict=True):
            readers = {stages[use] for use in bound.graph.consumers.get(name or "", ())} - {stages[at]}
            if readers:
                count = f"{len(readers)} other stage{'s' * (len(readers) > 1)}"
                yield f"{one.operator.op} handed to {count} as {_duplex(layouts)}"


def _settings(bound: BoundPlan) -> Iterator[str]:
    """What holds for the whole step."""
    plan = bound.plan
    training = plan.training
    yield f"precision {training.precision}"
    yield f"optimizer {training.optimizer}"
    for name, value in update_words(training.update).items():
        yield f"{name} {_update_word(training.update, name, value)}"
    yield "several micro-batches" if training.micro_batches > 1 else "one micro-batch"
    conditions: tuple[tuple[bool, Callable[[], str]], ...] = (
        (training.interleave > 1, lambda: "interleaved micro-batches"),
        (training.tokens_once, lambda: "tokens once to a node"),
        (bool(training.tensor_overlap), lambda: "tensor parallelism under its products"),
        (bool(training.expert_overlap), lambda: "experts exchanged under other work"),
        (bool(training.fp8), lambda: f"fp8 {training.fp8.recipe}"),
        (training.fp8.experts, lambda: "experts in fp8"),
        (training.fp8.dispatch, lambda: "tokens sent to experts in fp8"),
        (training.imbalance != EVEN, lambda: "experts priced for an uneven load"),
        (plan.virtual_stages > 1, lambda: "virtual stages"),
        (not plan.mesh.alltoall, lambda: "no all-to-all"),
        (plan.slices > 1, lambda: "slices of the sequence"),
        (not plan.schedule_kind.trains, lambda: "forward only"),
        (bool(bound.graph.updates), lambda: "buffers that change in a step"),
        (bool(plan.rules), lambda: "rules found by trial"),
    )
    yield from (word() for true, word in conditions if true)


def _update_word(update: Update, name: str, value: object) -> object:
    """Sizes and positions of buckets, and numbers of samples, are no decisions of their own."""
    if name == "padding_samples":
        return "at the end of the batch"
    if name == "replicas":
        return "of each data-parallel replica"
    sized = isinstance(update.buckets, int) or split_positions(update.buckets)
    return "of a size" if name == "buckets" and sized else value
