"""A configuration in the terms of training engines: degrees, stages, micro-batches, ZeRO, recomputation.

A plan decides every operator. An engine has a fixed pattern for operators, and its users choose the degrees. The
pattern is that of Shoeybi et al. 2019 (Megatron-LM), and all engines agree with it:

    embedding, head     cut along the vocabulary          tensor parallel devices
    into a block's part columns: q, k, v, gate, up        tensor parallel devices
    out of it           rows: o, down                     tensor parallel devices
    norms               whole, or along the sequence      sequence parallel
    everything          along the batch, the sequence     data and context parallel devices
    experts             along the experts                 expert parallel devices, a part of those above

So a description says what is the same for all operators, and nothing about single ones. `planner.export.describe` makes
a description of a plan; `planner.strategy_search.fixed.megatron_layout` makes a plan of a description.
"""

import math
from dataclasses import dataclass, field

from costmodels import SCHEDULES
from hardware_profiles import Home
from planner.errors import PlannerError
from planner.graph.expert_load import EVEN
from planner.graph.fp8 import NO_FP8, Fp8
from planner.plan.layout.kept import Kept
from planner.plan.plan import INTERLEAVED
from planner.sharding.update import PLAIN, Update

LARGEST = 2**31
"""Limit of all counts that engines are told; no plan has a larger one."""


_ZERO = 3  # the last stage of ZeRO
_SHOWN = 8  # numbers of stages in an error
_IN_A_V = 2  # stages on each rank


class ExportError(PlannerError):
    """A plan that an engine cannot run, or settings of an engine from which no plan can be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One training step in the terms of engines.

    Attributes:
        layers: blocks of every stage, virtual ones too, in the order of the model.
        virtual_stages: stages on each pipeline rank.
        schedule: name of the pipeline schedule (`costmodels.SCHEDULES`).
        slices: parts of the sequence that a stage takes one after the other.
        data, tensor: degrees.
        ring, heads: degrees of ring attention and of Ulysses; their product is the degree of context parallelism.
        zigzag: whether the ring cuts sequences in zigzag order.
        expert: expert-parallel degree, over tensor (if `whole_experts`), context and data parallel devices, from the
            inside out; None in a model without experts.
        whole_experts: whether tensor-parallel devices have whole experts.
        zero: ZeRO stage, what data and context parallel devices shard: 0 nothing, 1 optimizer states, 2 gradients too,
            3 weights too.
        replicas: replicas of the groups of data and context parallel devices that shard (hybrid sharding, HSDP). They
            divide `data`.
        sequence_parallel: whether norms are sharded along the sequence.
        vocabulary_parallel: whether tensor-parallel devices shard the embedding and the head along the vocabulary.
        micro_batch: samples of a micro-batch on each of the `data` devices.
        micro_batches: micro-batches of a step.
        interleave: micro-batches that a stage takes at a time.
        full, selective: blocks of every stage that are recomputed whole, and except for what `kept` says.
        kept: what selectively recomputed blocks keep.
        precision: training precision.
        optimizer: name of the optimizer.
        update: gradients, moments, clipping, buckets.
        states_at, weights_at: where optimizer states are between updates, and weights of blocks between the passes
            through their block: "device", "host" or "disk".
        sequence_length: tokens of a sample; None if samples are no sequences, or if it is the model's own.
        imbalance: of routers, see `planner.graph.expert_load`.
        fp8: of linear layers, see `planner.graph.fp8`.

    Raises:
        ExportError: numbers that no training step has, or that contradict each other.
    """

    layers: tuple[int, ...]
    virtual_stages: int = 1
    schedule: str = "1f1b"
    slices: int = 1
    data: int = 1
    tensor: int = 1
    ring: int = 1
    heads: int = 1
    zigzag: bool = False
    expert: int | None = None
    whole_experts: bool = False
    zero: int = 0
    replicas: int = 1
    sequence_parallel: bool = False
    vocabulary_parallel: bool = True
    micro_batch: int = 1
    micro_batches: int = 1
    interleave: int = 1
    full: tuple[int, ...]
    selective: tuple[int, ...]
    kept: Kept = field(default_factory=Kept)
    precision: str = "bf16"
    optimizer: str = "adamw"
    update: Update = PLAIN
    states_at: Home = "device"
    weights_at: Home = "device"
    sequence_length: int | None = None
    imbalance: float = EVEN
    fp8: Fp8 = NO_FP8

    def __post_init__(self) -> None:
        for name, count in self._counts().items():
            if not 1 <= count <= LARGEST:
                raise ExportError(f"{name}: {count}; write a number from 1 to {LARGEST}")
        if self.zero not in range(_ZERO + 1):
            raise ExportError(f"ZeRO {self.zero}: there are stages 0 to {_ZERO}; write one of them")
        if self.data % self.replicas:
            raise ExportError(
                f"{self.replicas} replicas (HSDP) do not divide {self.data} data-parallel devices; write a number"
                " that does"
            )
        clip = self.update.clip_norm
        if clip is not None and not (0 < clip < math.inf):
            raise ExportError(f"gradients clipped to a norm of {clip:g}: write a number above 0, or leave clipping out")
        self._check_stages()

    def _counts(self) -> dict[str, int]:
        """Counts of which there is at least one, by their names in messages."""
        given = {"expert parallel degree": self.expert, "tokens of a sample": self.sequence_length}
        return {
            "data parallel degree": self.data,
            "tensor parallel degree": self.tensor,
            "ring-attention degree": self.ring,
            "Ulysses degree": self.heads,
            "HSDP replicas": self.replicas,
            "samples of a micro-batch": self.micro_batch,
            "micro-batches": self.micro_batches,
            "interleaved micro-batches": self.interleave,
            "slices of the sequence": self.slices,
            "stages on each pipeline rank": self.virtual_stages,
            **{name: count for name, count in given.items() if count is not None},
        }

    def _check_stages(self) -> None:
        """Raise ExportError for impossible numbers of layers in stages."""
        stages = len(self.layers)
        if not stages or stages % self.virtual_stages or min(self.layers) < 0:
            raise ExportError(
                f"stages of {_few(self.layers)} layers, {self.virtual_stages} on each pipeline rank: every rank has"
                " the same number of stages, and every stage 0 layers or more"
            )
        if {len(self.full), len(self.selective)} != {stages}:
            raise ExportError(
                f"recomputed layers are given for {len(self.full)} and {len(self.selective)} stages, and there are"
                f" {stages}: write a number for each"
            )
        if self.in_a_v and self.pipeline > 1 and self.virtual_stages != _IN_A_V:
            raise ExportError(
                f"{self.virtual_stages} stages on each pipeline rank: {self.schedule} has {_IN_A_V}; write as many, or"
                " another schedule"
            )
        for have, full, selective in zip(self.layers, self.full, self.selective, strict=True):
            if min(full, selective) < 0 or full + selective > have:
                raise ExportError(
                    f"{full} fully and {selective} selectively recomputed layers in a stage of {have}: write {have}"
                    " at most, both together"
                )

    @property
    def pipeline(self) -> int:
        """Number of pipeline ranks."""
        return len(self.layers) // self.virtual_stages

    @property
    def context(self) -> int:
        """Degree of context parallelism."""
        return self.ring * self.heads

    @property
    def shards(self) -> int:
        """Number of devices that shard what `zero` says."""
        return self.data * self.context // self.replicas

    @property
    def devices(self) -> int:
        """Number of all devices."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step."""
        return self.micro_batch * self.micro_batches * self.data

    @property
    def even(self) -> bool:
        """Whether all stages have the same number of blocks."""
        return len(set(self.layers)) == 1

    @property
    def in_a_v(self) -> bool:
        """Whether the two stages of a rank lie in a V: the first and the last one on the first rank."""
        return SCHEDULES[self.schedule].v_shaped

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Numbers of the stages of a pipeline rank, in the order of the model."""
        kind = SCHEDULES[self.schedule]
        return tuple(kind.stage_of(rank, chunk, self.pipeline) for chunk in range(self.virtual_stages))

    @property
    def recomputes(self) -> bool:
        """Whether any block is recomputed."""
        return any(self.full) or any(self.selective)


def _few(numbers: tuple[int, ...]) -> str:
    """The first ones of many numbers."""
    words = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{words} and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else words or "no"


def stages_for(layers: int, pipeline: int, virtual_stages: int = 1) -> int:
    """The number of stages. Raises ExportError if a stage would be empty."""
    stages = pipeline * virtual_stages
    if not 1 <= stages <= max(layers, 1):
        raise ExportError(
            f"{pipeline} pipeline ranks of {virtual_stages} stages each are {stages} stages, and there are {layers}"
            " layers for them; give each stage a layer at least"
        )
    return stages


def stages_of(layers: int, pipeline: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Equal numbers of layers for every stage. Raises ExportError if they do not divide."""
    stages = stages_for(layers, pipeline, virtual_stages)
    if layers % stages:
        raise ExportError(
            f"{layers} layers do not divide over {pipeline} pipeline ranks of {virtual_stages} stages each; say how"
            " many each stage has"
        )
    return (layers // stages,) * stages


def schedule_of(pipeline: int, virtual_stages: int) -> str:
    """The schedule that engines run by default."""
    return INTERLEAVED if virtual_stages > 1 and pipeline > 1 else "1f1b"


def micro_batches_of(global_batch: int, micro_batch: int, data: int) -> int:
    """Micro-batches of a step. Raises ExportError if the batch does not divide."""
    if min(global_batch, micro_batch, data) < 1:
        raise ExportError(
            f"a global batch of {global_batch} in micro-batches of {micro_batch} samples on {data} data-parallel"
            " devices: write numbers of 1 or more"
        )
    count, rest = divmod(global_batch, micro_batch * data)
    if rest or not count:
        raise ExportError(
            f"micro-batches of {micro_batch} samples on {data} data-parallel devices do not divide a global batch of"
            f" {global_batch}"
        )
    return count


def data_of(devices: int, **degrees: int) -> int:
    """The data-parallel degree that the other degrees leave. Raises ExportError if they do not divide the devices."""
    rest = math.prod(degrees.values())
    if devices % rest:
        words = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        raise ExportError(f"{words} = {rest} do not divide {devices} devices; give --devices, or change a degree")
    return devices // rest


def default_gradient_dtype(d: Description) -> str:
    """The default dtype of gradients in Megatron and MindFormers: fp32, also if ZeRO 2 and 3 reduce them with every
    micro-batch."""
    return "fp32" if d.zero > 1 and d.precision != "fp32" else "mixed"


def gradient_bytes(d: Description) -> int:
    """Bytes of a gradient element in a bucket."""
    return 2 if d.update.gradient_dtype == "parameter" and d.precision != "fp32" else 4
