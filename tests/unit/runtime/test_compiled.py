"""Chains of elementwise operators: which operators they are of, that programs with them make the same, and what is said
where nothing can be compiled. But for what says otherwise nothing is compiled here: a chain runs as it is written."""

import shutil
import sysconfig
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from planner.errors import ModelError, RequestError
from runtime.executor.lowering.compiled import Compiled, check_compiler
from runtime.executor.lowering.programs import Programs
from runtime.observer import Observer
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans
from tests.long_lists import first
from tests.refusals import refused
from tests.unit.runtime import test_lowering

CPU = torch.device("cpu")
COMPILES = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
MODELS = ("llama", "mixture", "gpt", "resnet64", "assorted", "deepseek", "unusual", "wide-deep", "towers", "bags")
KEPT = ("linear", "norm", "conv2d")


def as_written(function, **settings):
    return function


def step_of(model: str, *, compiled: bool = True, **settings: object) -> TrainingStep:
    with patch("runtime.step.training_step.check_compiler"):
        return test_lowering.step_of(model, compiled=compiled, **settings)


def trained(step: TrainingStep, model: str, passes: int = 3) -> list[torch.Tensor]:
    """Losses, gradients and buffers of a step after some passes over a batch, of which the first is watched."""
    batch = plans.inputs(model, samples=step.plan.training.global_batch)
    losses = [step.accumulate(*batch) for _ in range(passes)]
    return [*losses, *step.full_gradients().values(), *step.changed_buffers().values()]


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((one.double() - other).norm() / other.double().norm().clamp_min(1e-12)) for one, other in pairs)


def chains_of(step: TrainingStep) -> list[list[str]]:
    """The operators of the distinct chains of all programs, by what they are of their module."""
    bound, compiled = step.rank.bound, Compiled(bound=step.rank.bound)
    found: list[list[str]] = []
    function = Compiled.function

    def noted(self, chain, instructions):
        found.append([instruction.bound.operator.name for instruction in instructions])
        return function(self, chain, instructions)

    programs = Programs(bound=bound, place=step.place, compiled=compiled)
    with patch.object(Compiled, "function", noted), patch("torch.compile", as_written):
        for section in step.rank.executors[0].sections:
            segment = section.segment
            programs.bodies(section.instructions, recomputed=segment.recomputed, departs=False, again=segment.again)
    return found


def test_the_chains_of_a_block() -> None:
    block = [chain for chain in chains_of(step_of("llama", compiled=False)) if "layers.0" in chain[0]]
    rotary, residual, gated = ([name.removeprefix("model.layers.0") for name in chain] for chain in block)
    assert rotary[0] == ".self_attn/unflatten"  # views of queries and keys, and not those of values
    assert not any("unflatten_3" in name or "transpose_3" in name for name in rotary)
    assert rotary[-2:] == [".self_attn/rotary", ".self_attn/rotary_2"]
    norm = ".post_attention_layernorm/rms_norm"
    assert residual == ["/add", "/add/shared", norm, f"{norm}/shared"]
    assert gated == [".mlp/silu", ".mlp/mul"]  # a product stands between them, and does not read the first


def test_equal_blocks_share_what_is_compiled() -> None:
    counts = []
    for model in ("llama4", "llama8"):
        with patch("torch.compile", side_effect=as_written) as compiler:
            trained(step_of(model), model)
        counts.append(compiler.call_count)
    assert counts == [3, 3]


def test_what_draws_or_is_kept_is_in_no_chain() -> None:
    assert not chains_of(step_of("dropping", compiled=False))  # nothing else works on elements there
    selective = step_of("llama", compiled=False, recomputation="selective", kept=("norm",))
    names = {name for chain in chains_of(selective) for name in chain}
    assert names
    assert not any("layers" in name and "norm" in name for name in names)


@pytest.mark.cases(2, 4)
@pytest.mark.slow
@pytest.mark.parametrize("recomputation", ["none", "full", "selective"])
@pytest.mark.parametrize("model", first(2, MODELS))
def test_programs_with_chains_make_the_same(model: str, recomputation: str) -> None:
    settings = {"recomputation": recomputation, "kept": KEPT}
    with patch("torch.compile", side_effect=as_written) as compiler:
        found = trained(step_of(model, **settings), model)
    assert compiler.call_count > 0 or recomputation == "selective"  # where all norms are kept
    assert worst(found, trained(step_of(model, compiled=False, **settings), model)) < 1e-5


def test_a_block_is_computed_again_as_it_ran() -> None:
    """The first pass watches operators one by one, the second runs the chains: of each micro-batch the same twice."""
    step = step_of("llama", recomputation="full", micro_batches=4)
    chains = []
    with patch("torch.compile", side_effect=lambda function, **_: lambda *given: chains.append(1) or function(*given)):
        for _ in range(2):
            step.accumulate(*plans.batch())
    first, others = 4 - 1, 4  # micro-batches that run the chains
    assert len(chains) == (first + others) * 2 * 3 * 2  # times blocks, chains, and twice


class Counter(Observer):
    def __init__(self) -> None:
        self.seen = 0

    def results(self, instruction, results) -> None:
        self.seen += 1


def test_an_observer_sees_operators() -> None:
    step = step_of("llama")
    with patch("torch.compile", as_written):
        step.accumulate(*plans.batch())
        step.rank.observer = Counter()
        step.accumulate(*plans.batch())
    assert step.rank.observer.seen == len(step.rank.bound.operators)


def test_the_general_executor_runs_no_chains() -> None:
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of())
    with refused(RequestError, "compiled=True", "lowered=False"):
        parallelize(plans.build("llama"), plan, device=CPU, lowered=False, compiled=True)


def test_what_is_missing_is_said() -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def missing(*given):
        raise InvalidCxxCompiler("no-such-compiler")

    with (
        patch("torch.compile", lambda function, **_: missing),
        refused(RequestError, "cpu", "InvalidCxxCompiler", "no-such-compiler"),
    ):
        check_compiler(CPU)


def test_an_operator_that_cannot_be_compiled_is_told_with_its_chain() -> None:
    from torch._dynamo.exc import Unsupported

    def unsupported(*given):
        raise Unsupported("no lowering")

    step = step_of("llama")
    with patch("torch.compile", lambda function, **_: unsupported):
        step.accumulate(*plans.batch())
        with refused(ModelError, "model.layers.0.self_attn/unflatten", "no lowering", "--compile"):
            step.accumulate(*plans.batch())


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(not COMPILES, reason="no C++ compiler, or no headers of Python")
def test_what_is_compiled_makes_the_same() -> None:
    check_compiler(CPU)
    found = trained(step_of("gpt", recomputation="full"), "gpt")
    assert worst(found, trained(step_of("gpt", compiled=False, recomputation="full"), "gpt")) < 1e-5
