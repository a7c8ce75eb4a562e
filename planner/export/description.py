"""A configuration as training engines name it: degrees, stages, micro-batches, ZeRO, recomputation.

A plan decides every operator. An engine has a fixed pattern for operators and lets people choose how far it goes; the
pattern is that of Shoeybi et al. 2019 (Megatron-LM), with which all of them agree:

    embedding, head     cut along the vocabulary          tensor parallel devices
    into a block's part columns: q, k, v, gate, up        tensor parallel devices
    out of it           rows: o, down                     tensor parallel devices
    norms               whole, or along the sequence      sequence parallel
    everything          along the batch, the sequence     data and context parallel devices
    experts             along the experts                 expert parallel devices, a part of those above

So a description says what is the same for all operators, and nothing of any one of them. `planner.export.describe`
draws one from a plan; `planner.strategy_search.fixed.megatron_layout` makes a plan of one.
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
"""Of all counts that engines are told; a plan has none that is larger."""


_ZERO = 3  # the last stage of ZeRO
_SHOWN = 8  # numbers of stages in an error
_IN_A_V = 2  # stages on each rank


class ExportError(PlannerError):
    """A plan that an engine cannot run, or settings of an engine that no plan can be made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One training step in the words of engines.

    Attributes:
        layers: blocks of every stage, virtual ones too, in the order of the model.
        virtual_stages: stages on each pipeline rank.
        data, tensor: degrees.
        ring, heads: devices round which keys come, and devices over which attention is split by heads; their product is
            the degree of context parallelism.
        zigzag: whether the ring cuts sequences in zigzag order.
        expert: parts into which experts are cut, over tensor (where `whole_experts` says so), context and data
            parallel devices, from the inside out; None in a model without experts.
        zero: what data and context parallel devices share out: 0 nothing, 1 optimizer states, 2 gradients too, 3
            weights too.
        replicas: groups of data and context parallel devices of which each shares that out among its own, with copies
            between them (hybrid sharding, HSDP). They divide `data`.
        vocabulary_parallel: whether tensor parallel devices cut the embedding and the head along the vocabulary.
        micro_batch: samples of a micro-batch on each of the `data` devices; `micro_batches` of them make a step.
        interleave: micro-batches that a stage takes at a time.
        slices: parts of the sequence that a stage takes one after the other.
        full, selective: blocks of every stage that are recomputed whole, and but for what `kept` says.
        states_at, weights_at: where the states of the optimizer are between their updates, and weights of blocks
            between the passes through their block: "device", "host" or "disk".
        sequence_length: tokens of a sample; None where samples are no sequences, or it is the model's own.
        imbalance: of routers, see `planner.graph.expert_load`.
        fp8: of linear layers, see `planner.graph.fp8`.

    Raises ExportError where numbers are none of a training step, or contradict each other.
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
                raise ExportError(f"{name}: {count} is none; write a number from 1 to {LARGEST}")
        if self.zero not in range(_ZERO + 1):
            raise ExportError(f"ZeRO {self.zero}: there are stages 0 to {_ZERO}; write one of them")
        if self.data % self.replicas:
            raise ExportError(
                f"{self.replicas} copies do not divide {self.data} data parallel devices; write a number that does"
            )
        clip = self.update.clip_norm
        if clip is not None and not (0 < clip < math.inf):
            raise ExportError(f"gradients clipped to a norm of {clip:g}: write a number above 0, or leave clipping out")
        self._check_stages()

    def _counts(self) -> dict[str, int]:
        """What there is one of at least, in the words of people."""
        given = {"expert parallel degree": self.expert, "tokens of a sample": self.sequence_length}
        return {
            "data parallel degree": self.data,
            "tensor parallel degree": self.tensor,
            "ring of the context": self.ring,
            "context by heads": self.heads,
            "copies of what is shared out": self.replicas,
            "samples of a micro-batch": self.micro_batch,
            "micro-batches": self.micro_batches,
            "micro-batches at a time": self.interleave,
            "slices of the sequence": self.slices,
            "stages on each pipeline rank": self.virtual_stages,
            **{name: count for name, count in given.items() if count is not None},
        }

    def _check_stages(self) -> None:
        """Raise ExportError where stages hold or recompute numbers of layers that none can."""
        stages = len(self.layers)
        if not stages or stages % self.virtual_stages or min(self.layers) < 0:
            raise ExportError(
                f"{_few(self.layers)} layers of stages, {self.virtual_stages} on each pipeline rank: write 0 or more"
                " for each stage, and equally many stages for every rank"
            )
        if {len(self.full), len(self.selective)} != {stages}:
            raise ExportError(
                f"recomputed layers of {len(self.full)} and {len(self.selective)} stages; there are {stages}: write a"
                " number for each"
            )
        if self.in_a_v and self.pipeline > 1 and self.virtual_stages != _IN_A_V:
            raise ExportError(
                f"{self.virtual_stages} stages on each pipeline rank: {self.schedule} has {_IN_A_V}; write as many, or"
                " another schedule"
            )
        for have, full, selective in zip(self.layers, self.full, self.selective, strict=True):
            if min(full, selective) < 0 or full + selective > have:
                raise ExportError(
                    f"{full} layers recomputed whole and {selective} selectively in a stage of {have}: write 0 to"
                    f" {have} of both together"
                )

    @property
    def pipeline(self) -> int:
        """Pipeline ranks."""
        return len(self.layers) // self.virtual_stages

    @property
    def context(self) -> int:
        return self.ring * self.heads

    @property
    def shards(self) -> int:
        """Devices that share out what `zero` says."""
        return self.data * self.context // self.replicas

    @property
    def devices(self) -> int:
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step."""
        return self.micro_batch * self.micro_batches * self.data

    @property
    def even(self) -> bool:
        """Whether all stages hold equally many blocks."""
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
        return any(self.full) or any(self.selective)


def _few(numbers: tuple[int, ...]) -> str:
    """The first ones of many numbers."""
    words = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{words} and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else words or "no"


def stages_for(layers: int, pipeline: int, virtual_stages: int = 1) -> int:
    """How many stages there are. Raises ExportError, before anything is made of them, where a stage would be empty."""
    stages = pipeline * virtual_stages
    if not 1 <= stages <= max(layers, 1):
        raise ExportError(
            f"{pipeline} pipeline ranks of {virtual_stages} stages each are {stages} stages, and there are {layers}"
            " layers for them; give each stage a layer at least"
        )
    return stages


def stages_of(layers: int, pipeline: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Equally many layers for every stage. Raises ExportError where they do not divide."""
    stages = stages_for(layers, pipeline, virtual_stages)
    if layers % stages:
        raise ExportError(
            f"{layers} layers do not divide over {pipeline} pipeline ranks of {virtual_stages} stages each; say how"
            " many each stage has"
        )
    return (layers // stages,) * stages


def schedule_of(pipeline: int, virtual_stages: int) -> str:
    """What engines run unless they are told otherwise."""
    return INTERLEAVED if virtual_stages > 1 and pipeline > 1 else "1f1b"


def micro_batches_of(global_batch: int, micro_batch: int, data: int) -> int:
    """Micro-batches of a step. Raises ExportError where they do not come out even."""
    if min(global_batch, micro_batch, data) < 1:
        raise ExportError(
            f"a global batch of {global_batch} in micro-batches of {micro_batch} samples on {data} data parallel"
            " devices: write numbers of 1 or more"
        )
    count, rest = divmod(global_batch, micro_batch * data)
    if rest or not count:
        raise ExportError(
            f"micro-batches of {micro_batch} samples on {data} data parallel devices do not divide a global batch of"
            f" {global_batch}"
        )
    return count


def data_of(devices: int, **degrees: int) -> int:
    """Data parallel devices that the other degrees leave. Raises ExportError where they do not divide."""
    rest = math.prod(degrees.values())
    if devices % rest:
        words = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        raise ExportError(f"{words} = {rest} do not divide {devices} devices; give --devices, or change a degree")
    return devices // rest


def default_gradient_dtype(d: Description) -> str:
    """What Megatron and MindFormers have gradients in unless told otherwise: fp32, also where ZeRO 2 and 3 reduce them
    with every micro-batch."""
    return "fp32" if d.zero > 1 and d.precision != "fp32" else "mixed"


def gradient_bytes(d: Description) -> int:
    """Bytes of an element of a gradient in a bucket."""
    return 2 if d.update.gradient_dtype == "parameter" and d.precision != "fp32" else 4
