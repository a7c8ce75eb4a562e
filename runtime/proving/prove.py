"""Proves a plan at small scale: shrink it, list which of its decisions the small plans cover, run them, compare.

    large plan ─ shrink ─┬─ in float64 ────────────┬─ processes of this machine ─> gradients, weights, losses, buffers
                         └─ in its own precision ──┘
               └─ facts of all three ─> what is covered, and what is not

Two small plans: in float64 no error hides in rounding; in the precision of the plan the same operators run as on the
cluster. A plan in fp32 is run in float64 only: its operators are the same, and for some models fp32 itself deviates by
more than an error would (gradients of a small ResNet-50 by 3e-2, because batch norm amplifies rounding). Where one of
the user's operators has no float64, fp32 is used instead, and the proof says so. Nothing is proved about time, memory,
kernels and links of the cluster, or about sizes larger than those that ran: two devices on an axis stand for
sixty-four.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hardware_profiles import Machine
from planner.errors import RunError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import bind
from planner.plan.carried import graph_text
from planner.plan.file import save_plan
from planner.plan.plan import Plan
from planner.plan.prediction.predict import predict
from planner.plan.shrinking.coverage import Covered
from planner.plan.shrinking.facts import facts_of
from planner.plan.shrinking.limits import PROCESSES
from planner.plan.shrinking.precisions import precisions_of
from planner.plan.shrinking.shrink import EXACT, SmallPlan
from planner.plan.shrinking.smallest import SmallRequest, smallest
from runtime.processes.ranks import run_ranks
from runtime.processes.run_servers import servers_of
from runtime.proving.differences import Differences
from runtime.proving.rank import PHASE, TIMEOUT, Request, read_answer
from runtime.run_settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was run, which decisions of the plan it covers, and the differences from the unsharded model.
    `not_in_float64` is the operator that has no float64, so that narrower precisions prove the plan; empty where all
    have it."""

    large: Plan
    small: tuple[SmallPlan, ...]
    covered: tuple[Covered, ...]
    differences: tuple[Differences, ...]
    blocks: int
    not_in_float64: str

    @property
    def agrees(self) -> bool:
        return len(self.differences) == len(self.small) and all(one.agrees for one in self.differences)

    @property
    def complete(self) -> bool:
        """Whether a small plan has every decision of the plan."""
        return all(one.complete for one in self.covered)


def prove(
    plan: Plan,
    graph: OperatorGraph,
    batch: int,
    machine: Machine,
    *,
    reference: str,
    given: bool = False,
    small: str | None = None,
    processes: int = PROCESSES,
    on_phase: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Prove a plan whose model has `graph` on `batch` samples, by small plans on at most `processes` processes.

    `reference` describes how its model is built, `given` by the user where it is not in the zoo; `small` is a small
    model of the user's. Raises RequestError for a plan without a small version, RunError where a process fails.
    """
    on_phase("listing the decisions of the plan")
    large = bind(plan, graph, batch)
    facts = facts_of(large, machine)
    on_phase("making small plans with the same decisions")
    precisions, why = precisions_of(large.graph, plan.training.precision)
    request = SmallRequest(
        machine=machine, reference=reference, small=small, processes=processes, precisions=precisions
    )
    found, covered = smallest(large, facts, request)
    on_phase(f"starting {found[0].plan.cluster.devices} processes")
    model = found[0].model if given or small is not None else None
    return Proof(
        large=plan,
        small=found,
        covered=covered,
        differences=_run(found, model, on_phase),
        blocks=large.blocks.count,
        not_in_float64=why,
    )


def _run(small: Sequence[SmallPlan], model: str | None, on_phase: Callable[[str], None]) -> tuple[Differences, ...]:
    """Train all small plans on processes of this machine."""
    settings, lines = RunSettings(), list[str]()
    with tempfile.TemporaryDirectory(prefix="plan-prove-") as name, servers_of(small[0].plan, settings) as servers:
        folder = Path(name)
        paths = [folder / f"{EXACT if one.exact else one.plan.training.precision}.json" for one in small]
        for one, path in zip(small, paths, strict=True):
            save_plan(replace(one.plan, prediction=predict(one.bound, one.machine)), path)
        request = Request(
            plans=tuple(map(str, paths)),
            graphs=tuple(_graph_text(one) for one in small),
            exact=tuple(one.exact for one in small),
            model=model,
            servers=settings.servers,
            server_folder=servers,
            answer=str(folder / "answer"),
        )
        request.write(folder / "request")
        devices = small[0].plan.cluster.devices

        def told(line: str) -> None:
            if line.startswith(PHASE):
                on_phase(f"{line.removeprefix(PHASE).strip()} on {devices} processes, beside the unsharded model")
            else:
                lines.append(line)

        code = run_ranks("runtime.proving", [str(folder / "request")], devices, told, TIMEOUT)
        if code or not Path(request.answer).exists():
            raise RunError(f"the small plan could not be run: {' '.join(lines[-3:]) or f'exit code {code}'}")
        return read_answer(Path(request.answer))


def _graph_text(small: SmallPlan) -> str:
    """The graph of a small model, so that not every process has to trace it. Empty where it cannot be written, or has
    the user's own operators: such a function exists only in processes that have traced a model that calls it."""
    model = small.plan.model
    if any(op.rule is not None for op in small.traced.operators):
        return ""
    assert model.batch is not None, "it was traced just now"
    return graph_text(small.traced, batch=model.batch, sequence_length=model.sequence_length) or ""
