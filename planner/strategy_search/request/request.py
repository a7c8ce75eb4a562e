"""The request to the search."""

from dataclasses import dataclass, replace
from typing import Literal

from hardware_profiles import PYTORCH, Machine, MixedCluster, of_one_kind
from planner.engines.space import EngineSpace
from planner.errors import RequestError, unknown_name
from planner.faults import refuse
from planner.graph.expert_load import EVEN, EXPERTS_OPERATOR, imbalance_fault
from planner.graph.fp8 import ALL_LAYERS, NO_FP8, Fp8, fp8_fault
from planner.graph.fused_dropout import with_fused_dropout
from planner.graph.operator_graph import OperatorGraph
from planner.graph.placed import placed_tables
from planner.plan.offload_checks import offload_fault, owners_fault, saved_fault, served_fault
from planner.plan.plan import INTERLEAVED, PRECISIONS, SLICED, ModelReference
from planner.plan.schedule_checks import gathers_fault, sliced_fp8_fault, sliced_replicas_fault
from planner.sharding.layout import Layout
from planner.sharding.mesh import NODE
from planner.sharding.mesh import Alltoall as Decided
from planner.sharding.per_replica import prepared_batch
from planner.sharding.update import AUTO_ZERO_BY, DEFAULT, NO_BUCKETS, Update, composed_fault, local_fault, update_fault
from planner.strategy_search.request.default_strategy import default_fault
from planner.strategy_search.request.offload import NOTHING, Offload
from planner.strategy_search.request.space import FREE, Pinned

ALGORITHMS = ("dynamic_programming", "recursive_programming", "sharding_propagation", "ilp", "exhaustive")
"""The available searches; `exhaustive` is the oracle, for the smallest models."""

OBJECTIVES = ("time", "memory", "cost")
"""What to minimise: seconds of a step, bytes per device, or device-seconds of a step."""

Objective = Literal["time", "memory", "cost"]

PLACINGS = ("given", "fit", "auto")
"""Embedding tables on the host: the given ones; more if nothing fits otherwise; more if that is better."""

Placing = Literal["given", "fit", "auto"]

PADDINGS = ("given", "auto")
"""Padded weights: the given ones; more if that is better."""

Padding = Literal["given", "auto"]

AUTO: Literal["auto"] = "auto"
Alltoall = Decided | Literal["auto"]
"""Which axes have the all-to-all: every axis, none, those inside a node, or the best of these."""

DEFAULTS = ("search", "data_parallel")
"""What operators without a given strategy do: whatever is best, or split the batch on every axis."""

Default = Literal["search", "data_parallel"]

SIMPLICITY = 0.01
"""By default, the step of a simpler plan may be longer than the fastest by this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A strategy that the user has decided for the operators whose name matches.

    Attributes:
        pattern: operator names, with the wildcards of `fnmatch` (`*`, `?`, `[...]`).
        strategy: for each mesh axis the name of a factor of the operator's rule, or "batch" or "sequence", "-" for
            none, or "*" to leave it to the search.
        cuts: instead of `strategy`, the number of parts of each dim of each operand. If an operand has fewer entries
            than dims, its leading dims count as one: the rows of a product, for any order of batch and sequence.
    """

    pattern: str
    strategy: tuple[str, ...] = ()
    cuts: tuple[tuple[int, ...], ...] = ()

    def text(self) -> str:
        """The text for the command line."""
        cuts = "(" + ", ".join(f"({', '.join(map(str, dims))})" for dims in self.cuts) + ")"
        return f"{self.pattern}={','.join(self.strategy) if self.strategy else cuts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """How the user wants a parameter to be stored.

    Attributes:
        name: the parameter; a parameter of the first block stands for its twins in all blocks.
        weight: its layout between steps, for the axes of the given mesh (`Pinned.mesh`).
        state: for each axis whether the optimizer state is sharded on it, along any dim.
    """

    name: str
    weight: Layout
    state: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What to plan: a traced graph whose example inputs have `batch` samples, a cluster, the training step, and the
    decisions already made.

    Attributes:
        graph: attention in it drops probabilities as the software of the cluster does.
        imbalance: expert load imbalance of routers (see `planner.graph.expert_load`).
        placing: whether tables go to the host in addition to those that `update` places (see
            `planner.strategy_search.refinement.placing`).
        padding: whether weights are padded in addition to those that `update` pads
            (`planner.strategy_search.variants`).
        fp8: which linear layers are in fp8 (see `planner.graph.fp8`): those that `fp8_layers` matches, and of the
            others those for which the search finds that it pays.
        space: the space of an engine, which `planner.strategy_search.within` turns into `alternatives`. If there are
            alternatives, the search covers all of them together, each in place of `pinned`.
        shards, stores: decisions for operators and for parameters.
        default: what operators do that no shard matches (`planner.strategy_search.request.default_strategy`).
        top: how many plans to keep, best first, each of another configuration.
        time_limit: seconds; the best plan found by then is returned with its gap.
        memory_limit: bytes; lowers what a device may use.
        host_limit: bytes; lowers what the search lets a device fill of its host's memory.
        simplicity: the share by which the step of a simpler plan may be longer than the fastest and still be preferred
            (see `planner.strategy_search.refinement.simplicity`); 0 prefers none.
        tolerance: plans that are faster than the best known one by a smaller share than this are not of interest.
        alltoall: without it, redistributions use an all-gather and a slice, and experts exchange no rows;
            `planner.strategy_search.variants` decides "auto".
        prune: for tests: if False, every configuration is evaluated in full.
        certify: whether an integer program re-solves the best plans.
    """

    graph: OperatorGraph
    batch: int
    model: ModelReference
    cluster: Machine
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    update: Update = DEFAULT
    placing: Placing = "given"
    padding: Padding = "given"
    imbalance: float = EVEN
    tokens_once: bool = False
    fp8: Fp8 = NO_FP8
    fp8_layers: tuple[str, ...] = ALL_LAYERS
    algorithm: str = "dynamic_programming"
    pinned: Pinned = FREE
    alternatives: tuple[Pinned, ...] = ()
    space: EngineSpace | None = None
    shards: tuple[Shard, ...] = ()
    stores: tuple[Store, ...] = ()
    default: Default = "search"
    objective: Objective = "time"
    top: int = 1
    time_limit: float | None = None
    memory_limit: float | None = None
    host_limit: float | None = None
    simplicity: float = 0.0
    tolerance: float = 0.0
    alltoall: Alltoall = True
    prune: bool = True
    certify: bool = False

    def __post_init__(self) -> None:
        words = (
            ("algorithm", ALGORITHMS), ("objective", OBJECTIVES), ("precision", PRECISIONS), ("placing", PLACINGS),
            ("default", DEFAULTS), ("padding", PADDINGS),
        )  # fmt: skip
        for name, known in words:
            if getattr(self, name) not in known:
                raise RequestError(unknown_name(name, getattr(self, name), known))
        run = with_fused_dropout(self.graph, fused=self.cluster.software.drops_fused)
        object.__setattr__(self, "graph", run)
        refuse(update_fault(self.update), RequestError)
        if isinstance(self.cluster, MixedCluster):
            self._check_mixed(self.cluster)
        refuse(imbalance_fault(self.imbalance), RequestError)
        refuse(fp8_fault(self.fp8), RequestError)
        refuse(sliced_fp8_fault(self.fp8, self.pinned.slices), RequestError)
        refuse(sliced_replicas_fault(self.update, self.pinned.slices), RequestError)
        if self.imbalance != EVEN and not any(op.op == EXPERTS_OPERATOR for op in self.graph.operators):
            raise RequestError(f"imbalance = {self.imbalance:g}: no operator of this model routes to experts")
        self._check_tokens_once()
        _check_offload(self)
        _check_forward_only(self)
        self._check_places()
        for fault_of in (local_fault, composed_fault):
            refuse(fault_of(self.update, self.graph.parameter_names), RequestError)
        self._check_alltoall()
        self._check_owners()
        for name in ("batch", "global_batch", "top"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} = {getattr(self, name)}: it is 1 or more")
        refuse(default_fault(self.default, self.shards, self.pinned), RequestError)
        if self.stores and self.pinned.mesh is None:
            raise RequestError("stores: layouts are those of the axes of a mesh; decide it, too (mesh)")
        if self.time_limit is not None and self.time_limit < 0:
            raise RequestError(f"time_limit = {self.time_limit}: seconds are 0 or more")
        if not 0 <= self.simplicity <= 0.5:
            raise RequestError(
                f"simplicity = {self.simplicity:g}: it is a share of the step time, from 0 to 0.5, as in 0.01 for 1%"
            )
        if not 0 <= self.tolerance < 1:
            raise RequestError(f"tolerance = {self.tolerance:g}: it is a share of the step time, as in 0.01 for 1%")
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise RequestError(f"memory_limit = {self.memory_limit}: bytes are more than 0")

    @property
    def padded_batch(self) -> int:
        """The samples of the global batch, plus the samples of weight zero."""
        return self.global_batch + self.update.padding_samples

    @property
    def prepared_batch(self) -> int:
        """The samples of the prepared graph."""
        return prepared_batch(self.update, self.batch)

    @property
    def decided_alltoall(self) -> Decided:
        """Which axes have the all-to-all; must be decided, not "auto"."""
        assert self.alltoall != AUTO, "planner.strategy_search.variants decides it"
        return self.alltoall

    @property
    def offload(self) -> Offload:
        """What may be offloaded: the request, without saved activations if slices of the sequence or coalesced gathers
        exclude them, and without what only training has."""
        return self.offload_under(self.update.gathers)

    def offload_under(self, gathers: str) -> Offload:
        """The same if weights are gathered in this way; it may be "auto"."""
        asked = self.pinned.offload or NOTHING
        if self.pinned.forward_only:  # no optimizer states and no backward pass
            return replace(NOTHING, weights=asked.weights)
        if self.update.owned:  # balancing owners needs all states on devices
            asked = replace(asked, optimizer=NOTHING.optimizer)
        if self.update.served:  # offloading a weight needs its state
            asked = replace(asked, weights=NOTHING.weights)
        fault = saved_fault(replace(self.update, gathers=gathers), sliced=_sliced(self.pinned))
        return asked if fault is None else replace(asked, saved=NOTHING.saved)

    def _check_places(self) -> None:
        if self.placing == "auto" and self.space is not None:
            raise RequestError(
                f"--for {self.space.name}: place auto: {self.space.title} keeps all tables on the devices; leave it"
                " out, or the engine"
            )
        if not self.update.placed:
            return
        placed_tables(self.graph, self.update.placed)
        if self.optimizer == "lamb":
            raise RequestError(
                "place: lamb takes norms of whole weights, which tables elsewhere have not; take adamw or sgd"
            )
        if self.optimizer == "muon":
            raise RequestError("place: tables elsewhere have no muon, nor AdamW beside it; take adamw or sgd")

    def _check_alltoall(self) -> None:
        """Without the all-to-all, nothing that needs it may be requested."""
        if self.alltoall is True:
            return
        if self.space is not None:
            raise RequestError(
                f"alltoall = {self.alltoall}: an engine has collectives of its own; leave the engine out"
            )
        if self.alltoall not in (False, NODE, AUTO):
            raise RequestError(f"alltoall = {self.alltoall!r}: it is True, False, 'node' or 'auto'")
        if self.alltoall == AUTO:
            return
        if not self.alltoall and self.pinned.expert is not None and self.pinned.expert > 1:
            raise RequestError(
                f"expert = {self.pinned.expert}: counts the parts between which rows are exchanged by an all-to-all;"
                " leave it out: without alltoall experts are cut where tokens are gathered"
            )
        if self.update.placed or self.placing == "auto":
            raise RequestError(
                f"alltoall = {self.alltoall}: rows of tables outside of the devices are exchanged by an all-to-all;"
                " leave the tables on the devices (place none)"
            )

    def _check_owners(self) -> None:
        """States that are sharded by whole parameters require ZeRO-1, as our own runtime implements it."""
        if self.update.zero_by == AUTO_ZERO_BY and self.space is not None:
            raise RequestError(
                f"--for {self.space.name}: zero_by auto: {self.space.title} shards by slices; leave it out, or the"
                " engine"
            )
        if not self.update.owned:
            return
        where = f"zero_by = {self.update.zero_by}:"
        if self.pinned.zero not in (None, 1):
            raise RequestError(
                f"{where} owners of whole parameters have their states, and zero = {self.pinned.zero} is another stage;"
                " set zero to 1, or leave it out"
            )
        if "device" not in (self.pinned.offload or NOTHING).optimizer:
            kept = "are on the hosts of servers anyway" if self.update.served else "are kept on the device"
            raise RequestError(f"{where} states of owners {kept}; leave optimizer out of offload, or take slices")
        if self.update.served and "device" not in (self.pinned.offload or NOTHING).weights:
            raise RequestError(
                f"{where} servers give new weights to the devices, where they stay; leave weights out of offload, or"
                " take slices"
            )
        refuse(owners_fault(self.update, self.cluster), RequestError)
        refuse(served_fault(self.update, self.optimizer), RequestError)
        devices, pinned = self.cluster.devices, self.pinned
        if self.update.served and devices // ((pinned.tensor or 1) * (pinned.pipeline or 1)) < 2:
            split = (
                "" if devices == 1 else f", which tensor = {pinned.tensor or 1} x pipeline = {pinned.pipeline or 1} use"
            )
            raise RequestError(
                f"{where} workers are data parallel, and nothing is left for them of {devices}"
                f" device{'s' * (devices > 1)}{split}; take data parallelism of 2 or more, or leave it out"
            )

    def _check_tokens_once(self) -> None:
        """Raise RequestError if tokens cannot be sent once to each node."""
        node = self.pinned.node
        if node < 1:
            raise RequestError(f"tokens_once = {node}: a node has 1 device or more; give the devices of a node")
        if not self.tokens_once:
            return
        if not any(op.op == EXPERTS_OPERATOR for op in self.graph.operators):
            raise RequestError("tokens_once: no operator of this model routes to experts; leave it out")
        expert = self.pinned.expert or 0
        if node > 1 and (not expert or (expert % node and node % expert)):
            what = f"expert = {expert} does not divide so" if expert else "expert is not given"
            raise RequestError(
                f"tokens_once = {node}: experts are sharded over nodes and the {node} devices of each, and {what}; set"
                f" expert to a multiple of {node}, or tokens_once to 1"
            )
        if self.cluster.software.name != PYTORCH.name:
            raise RequestError(
                f"tokens_once: {self.cluster.software.name} sends tokens as its profile says; leave it out, or set"
                f" software to {PYTORCH.name}"
            )

    def _check_mixed(self, cluster: MixedCluster) -> None:
        """Raise RequestError for options that several kinds of devices do not support."""
        pinned, where = self.pinned, f"on {cluster.name}, which has several kinds of devices"
        if self.algorithm not in ("dynamic_programming", "ilp"):
            raise RequestError(f"algorithm = {self.algorithm} {where}: take dynamic_programming or ilp")
        if self.objective != "time":
            raise RequestError(f"objective = {self.objective} {where}: only time is searched there; leave it out")
        if pinned.in_a_v:
            raise RequestError(
                f"schedule = {pinned.schedule} {where}: its stages are divided for devices of one kind; take 1f1b"
            )
        if pinned.virtual_stages not in (None, 1) or pinned.schedule == INTERLEAVED:
            raise RequestError(
                f"virtual_stages {where}: virtual stages hold equally many blocks on every device, and a stage"
                " of slower devices gets fewer here; leave them at 1"
            )
        if pinned.offload not in (None, NOTHING):
            raise RequestError(f"offload {where}: nothing is offloaded there; leave it out")
        if pinned.even:
            raise RequestError(f"even {where}: stages are sized to their devices; leave it out")
        if self.update.placed:
            raise RequestError(f"place {where}: stages on each of them would read the tables; leave it out")


def _check_offload(request: SearchRequest) -> None:
    """Raise RequestError if the requested offload is not possible, `UnknownKeyError` if the profile has no place for
    it."""
    asked = request.pinned.offload or NOTHING
    for home in asked.stores:
        of_one_kind(request.cluster, "offload").store(home)
    states = asked.optimizer != NOTHING.optimizer
    if asked != NOTHING:
        refuse(offload_fault(request.optimizer if states else "", request.pinned.schedule), RequestError)
    refuse(gathers_fault(request.update, request.pinned.interleave or 1), RequestError)
    _check_activations(request.pinned, request.update)


def _check_forward_only(request: SearchRequest) -> None:
    """Raise RequestError if only a forward pass is requested, together with something that only training has."""
    pinned, asked = request.pinned, request.pinned.offload or NOTHING
    if not pinned.forward_only:
        return
    away = next((word for word in ("optimizer", "activations", "saved") if "device" not in getattr(asked, word)), None)
    reason = None
    if request.space is not None:
        reason = f"the settings of {request.space.name} are those of training; leave the engine out"
    elif pinned.recompute not in (None, "none"):
        reason = f"recompute = {pinned.recompute}: nothing is kept for a backward pass; leave it out"
    elif away is not None:
        reason = f"offload: there are no {_OFFLOADED[away]}; leave {away} out"
    elif pinned.zero in (1, 2):
        reason = f"zero = {pinned.zero}: there are no gradients and no states to shard; 0 or 3, which shards weights"
    elif (name := _training_only(request.update)) is not None:
        lacking = (
            "no weights are updated"
            if name in ("master_weights", "moment_dtype", "zero_by")
            else "there are no gradients"
        )
        reason = f"{name}: {lacking}; leave it out"
    if reason is not None:
        raise RequestError(f"forward only: {reason}")


def _training_only(update: Update) -> str | None:
    """A chosen setting of an update that has no meaning for a forward pass; None if there is none."""
    if update.buckets not in (DEFAULT.buckets, NO_BUCKETS):
        return "buckets"
    names = (
        *("clip_norm", "gradients", "gradient_dtype", "master_weights", "moment_dtype", "zero_by"),
        "local_parameters",
    )
    return next((name for name in names if getattr(update, name) != getattr(DEFAULT, name)), None)


_OFFLOADED = {
    "optimizer": "states of an optimizer",
    "activations": "recomputed blocks",
    "saved": "tensors saved for a backward pass",
}
"""What forward passes do not have, by its word in `Offload`."""


def _check_activations(pinned: Pinned, update: Update) -> None:
    """Raise RequestError if activations are to be offloaded that do not exist."""
    offload, recompute = pinned.offload or NOTHING, pinned.recompute
    if "device" not in offload.saved:
        refuse(saved_fault(update, sliced=_sliced(pinned)), RequestError)
    for word, homes, lacking in (
        ("saved", offload.saved, recompute not in (None, "none")),
        ("activations", offload.activations, recompute == "none"),
    ):
        if "device" not in homes and lacking:
            blocks = "recomputed" if word == "activations" else "not recomputed"
            raise RequestError(
                f"offload: {word} are those of blocks that are {blocks}, and --recompute {recompute} leaves none; leave"
                f" {word} out of --offload, or --recompute"
            )


def _sliced(pinned: Pinned) -> bool:
    """Whether stages may process a sequence in slices."""
    return pinned.schedule == SLICED or pinned.slices not in (None, 1)
