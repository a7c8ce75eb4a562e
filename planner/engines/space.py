"""The space of an engine: settings that go together, as data.

    EngineSpace  megatron                 its name, its training stack, optimizers, precisions
      Settings   ZeRO 0, 1, 2, 3          all combinations of what one row lists; rows say what goes together
                 recomputed: none, equal, all
                 context by heads, ring, both
                 fixed: pipeline 1, ...   degrees that the other settings of the row leave

A search over the space of an engine (`planner.strategy_search.within`) finds the best plan in it, and the engine's
exporter writes whatever lies in it. Operators are cut in one pattern (Shoeybi et al. 2019, see
`planner.sharding.usual_pattern`), which every engine applies.
"""

from dataclasses import dataclass, replace
from typing import Literal

from planner.plan.layout.kept import Kept
from planner.sharding.update import BLOCK, PLAIN, Update

Recomputed = Literal["none", "all", "equal", "any"]
"""Blocks that are recomputed: none, all, equally many of every stage (or all that it has), any number of each."""

SamplesBy = Literal["nothing", "context", "context and tensor"]

NARROW = ("bf16", "fp16")


def sample_step(by: SamplesBy, context: int, tensor: int) -> int:
    """The number of which the tokens of a sample must be a multiple: twice the devices of a context, where there is
    one, or always twice those of context and tensor parallelism."""
    if by == "context and tensor":
        return 2 * context * tensor
    return 2 * context if by == "context" and context > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of an engine that go together: every combination of them is a plan that it can run.

    Attributes:
        zero: what data and context parallel devices may share out (0 nothing to 3 weights too).
        recomputed: blocks that may be recomputed.
        selective: further ways, in which recomputed blocks keep the results of some operators: how many may be so, and
            what they keep.
        context: ways to split attention among the devices of a context: "heads", "ring", "hybrid"; none where it has
            no context parallelism.
        samples_by: what the tokens of a sample must divide over (`sample_step`).
        zigzag: whether rings cut sequences in zigzag order.
        sequence_parallel: whether norms are cut along the sequence, where there is tensor parallelism.
        vocabulary: whether the embedding and the head are cut along the vocabulary, where there is.
        whole_experts: whether tensor parallel devices may hold whole experts, and may cut each; none where the engine
            runs no expert parallelism.
        fixed: degrees that are as given: ("pipeline", 1).
        beside_experts: the same for a model with experts.
        over_context: whether experts that are cut over more than tensor parallel devices are cut over all of a context.
        selective_experts: whether `selective` is of models with experts, too.
        shards: data and context parallel devices that there are at least.
        interleaved: whether a pipeline rank may hold several stages.
        piped: whether there is a pipeline.
        filled: whether a pipeline takes at least as many micro-batches as it has ranks.
        even: whether all stages hold equally many blocks.
        replicated: whether what ZeRO shares out may be shared within groups, with copies between them (HSDP), where
            data parallel devices are left to share it.
        replicated_experts: whether they may be beside expert parallelism, too.
    """

    zero: tuple[int, ...]
    recomputed: tuple[Recomputed, ...]
    selective: tuple[tuple[Recomputed, Kept], ...] = ()
    context: tuple[str, ...] = ()
    samples_by: SamplesBy = "nothing"
    zigzag: bool = True
    sequence_parallel: bool = True
    vocabulary: bool = True
    whole_experts: tuple[bool, ...] = (False, True)
    fixed: tuple[tuple[str, int], ...] = ()
    beside_experts: tuple[tuple[str, int], ...] = ()
    over_context: bool = False
    selective_experts: bool = True
    shards: int = 1
    interleaved: bool = True
    piped: bool = False
    filled: bool = False
    even: bool = False
    replicated: bool = False
    replicated_experts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpace:
    """What an engine can be told.

    Attributes:
        name: as `--for` and `plan export --to` have it; `title` as people write it.
        software: the training stack that runs it (`hardware_profiles.software_names`).
        settings: what goes together.
        optimizers, precisions: that it has.
        wide: stages of ZeRO that reduce gradients in fp32 with every micro-batch; those of other stages are "mixed"
            (see `planner.sharding.update.Update`).
        experts: whether it trains models with experts.
        models: models of the zoo with degrees that are as given for them: ("qwen3-30b-a3b", (("pipeline", 1),)).
        fp8: recipes by which it computes linear layers in fp8; `leaves_out` says whether it can leave out some, and
            under the recipes that it `gathers` by weights may travel in fp8.
        narrow_moments: stages of ZeRO under which AdamW may keep its moments in bf16 beside weights of 16 bits.
    """

    name: str
    title: str
    software: str
    settings: tuple[Settings, ...]
    optimizers: tuple[str, ...] = ("adamw",)
    precisions: tuple[str, ...] = ("bf16",)
    wide: tuple[int, ...] = ()
    experts: bool = True
    models: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    fp8: tuple[str, ...] = ()
    leaves_out: bool = False
    gathers: tuple[str, ...] = ()
    narrow_moments: tuple[int, ...] = ()

    def update(self, asked: Update, zero: int, precision: str, *, in_fp8: bool = False) -> Update:
        """What becomes of gradients at a stage of ZeRO: what the engine does unless it is told otherwise, with the
        clipping and the dtype of moments that are asked for. Weights that travel `in_fp8` are cast for a block, and
        come together."""
        wide = zero in self.wide and precision in NARROW
        return replace(
            PLAIN,
            clip_norm=asked.clip_norm,
            moment_dtype=asked.moment_dtype,
            gradient_dtype="fp32" if wide else PLAIN.gradient_dtype,
            gathers=BLOCK if in_fp8 else PLAIN.gathers,
        )
