"""What becomes of gradients: how they are added up, reduced and clipped, and what the optimizer makes of them.

    backward ──add up──> gradient ──reduce (in buckets)──> clip ──> optimizer ──> weight ──gather (in buckets)──> ...

None of this changes how an operator is computed; all of it changes what is kept, sent or done once a step. The section
`training` of a plan has it; what is missing there is as in `PLAIN`. A search starts from `Update()`, and chooses the
size of buckets.

Gradients are those of the mean loss over the global batch ("mean"). With "sum" they are multiplied by the number of
micro-batches and by the number of pieces into which the plan cuts its inputs along the samples (`sample_pieces`): what
a data-parallel framework computes that adds up the gradients of its replicas' mean losses without dividing.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias

from costmodels import MOMENT_BYTES, UpdateVariant
from planner.errors import did_you_mean
from planner.faults import Fault
from planner.graph.part_names import parameter_matches
from planner.graph.placed import PLACES, Placed
from planner.sharding.layout import Layout

GRADIENTS = ("mean", "sum")
GRADIENT_DTYPES = ("mixed", "fp32", "parameter")
MOMENT_DTYPES = tuple(MOMENT_BYTES)
ZERO_BY = SLICES, PARAMETERS, SERVERS = ("slices", "parameters", "servers")
GATHERS = EACH, BLOCK, AHEAD = ("each", "block", "ahead")
AUTO_GATHERS = "auto"
AUTO_ZERO_BY = "auto"
NO_BUCKETS: Final = "none"
AUTO_BUCKETS: Final = "auto"

Buckets: TypeAlias = Literal["none", "auto"] | int | tuple[int, ...] | tuple[tuple[str, int], ...]
"""Which parameters share a message: each by itself ("none"), up to a size that fits the cluster ("auto"), up to a
number of bytes, parameters between these positions among the trainable ones of the model, or patterns of names with a
number each, where equal numbers go together."""

_NARROW = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The way from gradients to new weights.

    Attributes:
        gradients: "mean" or "sum", see above.
        gradient_dtype: of sums over micro-batches and over devices. "parameter": the dtype of the parameter, which in
            16 bits halves the bytes that are kept and sent; "fp32"; "mixed": in fp32, but what is reduced in every
            micro-batch (ZeRO-2 and ZeRO-3) in the dtype of the parameter.
        master_weights: whether weights of 16 bits have an fp32 copy that the optimizer updates. Without it each
            weight is converted to fp32 for its update and rounded back.
        moment_dtype: of what the optimizer keeps beside the weights (Adam's exp_avg and exp_avg_sq, momentum): "fp32",
            or "bf16", rounded to the nearest after an update that is computed in fp32. A second moment that loses
            1 - beta2 of itself stands still where that is less than half of a unit in the last place, which is 1/512 to
            1/256: under a beta2 of 0.999, not under the 0.95 that language models are trained with.
        clip_norm: the global norm to which gradients are clipped; None clips nothing.
        broadcast: whether the weights and buffers of rank 0 are sent to all others at the start. Without it, ranks
            that hold different values are an error.
        buckets: messages that are sent as one. A plan holds no "auto": the search writes the size it chose, or "none"
            where buckets would save nothing.
        gathers: how weights that are gathered for their use are gathered. "each": by itself, when it is used. "block":
            all of a block together, when it begins, and their gradients together, when all of them are there. "ahead":
            as "block", but while the block before it runs (prefetch), and the gradients while the next one does (see
            `planner.plan.layout.block_gathers`). A plan holds no "auto": with it the search tries all of them and
            writes the fastest.
        zero_by: how states are shared out among replicas of a weight. "slices": each state cut along a dim.
            "parameters": whole parameters, each to an owner that updates it and broadcasts the new weight, where a
            state is not cut (see `planner.plan.layout.parameter_owners`). "servers": whole, and the owners are
            parameter servers: the hosts of the devices, to which gradients are pushed, and which keep states and update
            weights. A plan holds no "auto": the search tries slices and parameters, and writes the better.
        local_parameters: patterns of parameters that every device has for itself: they are neither compared nor sent,
            and their gradients are not reduced.
        placed: patterns of tables that are not on the devices, and where they are: "host" or "servers" (see
            `planner.graph.placed`). The rows that a step has used are updated there.
        padded: patterns of weights, and the number of which their rows become a multiple, with zeros that change
            nothing (see `planner.sharding.padding`).
        padding_samples: samples of weight zero behind those of the global batch, so that devices divide it (see
            `planner.sharding.padded_batch`).
        per_replica: patterns of operators, or of modules, that compute over the samples of their own replica alone, as
            under DistributedDataParallel (see `planner.sharding.per_replica`).
        replicas: the number of replicas that a micro-batch is cut into for them. A request may leave it open with 0,
            for as many as data parallelism has; a plan holds the number.
    """

    gradients: str = "mean"
    gradient_dtype: str = "mixed"
    master_weights: bool = True
    moment_dtype: str = "fp32"
    clip_norm: float | None = None
    broadcast: bool = False
    buckets: Buckets = AUTO_BUCKETS
    gathers: str = "each"
    zero_by: str = SLICES
    local_parameters: tuple[str, ...] = ()
    placed: Placed = ()
    padded: tuple[tuple[str, int], ...] = ()
    padding_samples: int = 0
    per_replica: tuple[str, ...] = ()
    replicas: int = 0

    @property
    def bucketed(self) -> bool:
        """Whether several parameters share a message."""
        return self.buckets != NO_BUCKETS

    @property
    def bucket_size(self) -> int:
        """Bytes of a bucket; 0 where buckets are bounded otherwise."""
        return self.buckets if isinstance(self.buckets, int) else 0

    @property
    def composed(self) -> bool:
        """Whether the user has said which parameters share a bucket."""
        return isinstance(self.buckets, tuple)

    @property
    def owned(self) -> bool:
        """Whether states that are not cut have one owner among their copies."""
        return self.zero_by in (PARAMETERS, SERVERS)

    @property
    def served(self) -> bool:
        """Whether these owners are parameter servers."""
        return self.zero_by == SERVERS

    @property
    def by_block(self) -> bool:
        """Whether the weights of a block are gathered together."""
        return self.gathers in (BLOCK, AHEAD)

    @property
    def ahead(self) -> bool:
        """Whether weights are prefetched, and their gradients reduced, while other blocks run."""
        return self.gathers == AHEAD

    @property
    def variant(self) -> UpdateVariant:
        """What it changes about bytes kept and moved by the optimizer."""
        return UpdateVariant(
            narrow_gradients=self.gradient_dtype == "parameter",
            master_weights=self.master_weights,
            clipped=self.clip_norm is not None,
            moment_dtype=self.moment_dtype,
        )

    def seed(self, micro_batches: int, pieces: int) -> float:
        """The gradient with which the backward pass of a micro-batch starts at its mean loss, where the inputs are cut
        into `pieces` pieces along the samples."""
        return 1 / micro_batches if self.gradients == "mean" else float(pieces)

    def summed_in(self, dtype: str) -> str:
        """Dtype in which the gradients of a parameter of `dtype` are added up, and reduced once a step."""
        return "float32" if dtype in _NARROW and self.gradient_dtype != "parameter" else dtype

    def reduced_in(self, dtype: str) -> str:
        """Dtype in which the gradient of one use of a parameter of `dtype` is reduced in its micro-batch."""
        return "float32" if dtype in _NARROW and self.gradient_dtype == "fp32" else dtype

    def is_local(self, name: str) -> bool:
        """Whether every device has this parameter for itself."""
        return any(parameter_matches(name, pattern) for pattern in self.local_parameters)


MOST_BUCKET = 2**50
"""Bytes of a bucket: more than the gradients of any model."""

PLAIN = Update(buckets=NO_BUCKETS)
"""What a plan means that says nothing of updates."""

DEFAULT = Update(gathers=AUTO_GATHERS)
"""What a search starts from that is told nothing of updates."""


def update_fault(update: Update) -> Fault | None:
    """What is contradictory in an update; None where nothing is."""
    words = (
        ("gradients", GRADIENTS),
        ("gradient_dtype", GRADIENT_DTYPES),
        ("moment_dtype", MOMENT_DTYPES),
        ("gathers", (*GATHERS, AUTO_GATHERS)),
        ("zero_by", (*ZERO_BY, AUTO_ZERO_BY)),
    )
    for name, known in words:
        if getattr(update, name) not in known:
            return Fault(option=name, value=f"'{getattr(update, name)}'", reason=f"is not one of {', '.join(known)}")
    for _, place in update.placed:
        if place not in PLACES:
            return Fault(option="place", value=f"'{place}'", reason=f"is not one of {', '.join(PLACES)}")
    for pattern, multiple in update.padded:
        if multiple < 1:
            return Fault(option="pad", value=f"{pattern}={multiple}", reason="is no multiple of which rows could be")
    if update.padding_samples and update.gradients == "sum":
        return Fault(
            option="gradients",
            value="'sum'",
            reason="adds up gradients of micro-batches, of which a padded batch has some with fewer samples",
            hint="take mean, or a global batch that divides",
        )
    if not all(pattern.strip() for pattern in update.per_replica):
        return Fault(option="per_replica", value="''", reason="means no operator", hint="write a pattern, as '*norm*'")
    if update.replicas and not update.per_replica:
        return Fault(
            option="replicas",
            value=f"{update.replicas}",
            reason="compute no operator by themselves",
            hint="name operators in per_replica, or leave it out",
        )
    if update.per_replica and update.padding_samples:
        return Fault(
            option="per_replica",
            reason="has equal replicas, and a padded batch has one with fewer samples",
            hint="take a global batch that divides",
        )
    if update.placed and update.clip_norm is not None:
        return Fault(
            option="place",
            reason="rows of tables are updated where they are, so that no norm over all gradients is known",
            hint="clip none",
        )
    if update.placed and update.moment_dtype != PLAIN.moment_dtype:
        return Fault(
            option="moment_dtype",
            value=f"'{update.moment_dtype}'",
            reason="is that of states on devices, and tables that are placed elsewhere keep theirs in fp32",
            hint="take fp32, or place none",
        )
    if update.clip_norm is not None and not 0 < update.clip_norm < math.inf:
        return Fault(
            option="clip_norm",
            value=f"{update.clip_norm}",
            reason="is no norm to clip to",
            hint="give a number above 0",
        )
    reason = _buckets_fault(update.buckets)
    return None if reason is None else Fault(option="buckets", reason=reason)


def local_fault(update: Update, parameters: Collection[str]) -> Fault | None:
    """The first pattern of local parameters that matches no parameter of a model; None where all match some."""
    for pattern in update.local_parameters:
        if not any(parameter_matches(name, pattern) for name in parameters):
            return Fault(
                option="local_parameters",
                reason=f"no parameter of the model matches '{pattern}'",
                hint=did_you_mean(pattern, parameters, "plan show lists those of a plan"),
            )
    return None


def composed_fault(update: Update, parameters: Collection[str]) -> Fault | None:
    """What of a list of buckets means none of the parameters of a model: a pattern that matches none, or a position
    behind the last; None where all of it means some."""
    for pattern, number in bucket_numbers(update.buckets):
        if not any(parameter_matches(name, pattern) for name in parameters):
            return Fault(
                option="buckets",
                value=f"{pattern}={number}",
                reason="matches no parameter of the model",
                hint=did_you_mean(pattern, parameters, "plan show lists those of a plan"),
            )
    splits = split_positions(update.buckets)
    if splits and splits[-1] >= len(parameters):
        return Fault(
            option="buckets",
            value=f"{splits[-1]}",
            reason=f"is behind the last of {len(parameters)} parameters, which count from 0",
            hint="leave that position out",
        )
    return None


def _buckets_fault(buckets: Buckets) -> str | None:
    if isinstance(buckets, str):
        known = (NO_BUCKETS, AUTO_BUCKETS)
        return None if buckets in known else f"'{buckets}' is not one of {', '.join(known)}, nor a size or a list"
    if isinstance(buckets, int):
        return None if 0 < buckets <= MOST_BUCKET else f"{buckets} bytes; a bucket has 1 to {MOST_BUCKET:,}"
    if not buckets:
        return "the list is empty; write none to send each parameter by itself"
    splits = split_positions(buckets)
    if splits and (splits[0] < 1 or any(later <= earlier for earlier, later in pairwise(splits))):
        return f"the positions {', '.join(map(str, splits))} do not rise from 1 on"
    return None


def split_positions(buckets: Buckets) -> tuple[int, ...]:
    """The positions at which buckets end; empty where buckets are not given by positions."""
    return tuple(b for b in buckets if isinstance(b, int)) if isinstance(buckets, tuple) else ()


def bucket_numbers(buckets: Buckets) -> tuple[tuple[str, int], ...]:
    """Patterns and their numbers; empty where buckets are not given by patterns."""
    return tuple(b for b in buckets if isinstance(b, tuple)) if isinstance(buckets, tuple) else ()


def sample_pieces(layouts: Iterable[Layout], sizes: Sequence[int]) -> int:
    """Number of pieces into which inputs with a leading dim of samples are cut along it: the most of any of them."""
    cut = (
        math.prod(size for placement, size in zip(layout, sizes, strict=True) if placement.dim == 0)
        for layout in layouts
    )
    return max(cut, default=1)


def update_words(update: Update) -> dict[str, Any]:
    """The fields that differ from `PLAIN`, by name, as plan files write them."""
    found = {name: getattr(update, name) for name in Update.__slots__}
    different = {name: value for name, value in found.items() if value != getattr(PLAIN, name)}
    if numbers := bucket_numbers(update.buckets):
        different["buckets"] = dict(numbers)
    if update.placed:
        different["placed"] = dict(update.placed)
    if update.padded:
        different["padded"] = dict(update.padded)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in different.items()}
