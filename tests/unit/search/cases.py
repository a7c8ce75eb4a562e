"""Small models of every form that the search has to cut and fold, and plans made of arbitrary candidates."""

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from costmodels import SCHEDULES, moments_in_flight, step_time, usable_memory
from hardware_profiles import PYTORCH, Cluster, Machine, MixedCluster, load_profile
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.experts.mixture import Experts, SparseMLP, experts
from planner.models.gpt import GPT, GPTConfig
from planner.models.llama import Llama, LlamaConfig
from planner.models.zoo import ZOO, with_dimensions
from planner.plan.binding.bind import prepare
from planner.plan.binding.machine import cluster_reference, placed
from planner.plan.plan import ModelReference, Plan, Prediction, Provenance, Training
from planner.sharding.mesh import build_mesh
from planner.sharding.rescale import rescale_batch
from planner.sharding.update import PLAIN, Update
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.crossings import crossing_seconds
from planner.strategy_search.decomposition.cutting import cut
from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline
from planner.strategy_search.decomposition.pieces import Column, Piece
from planner.strategy_search.decomposition.priced import State
from planner.strategy_search.decomposition.setting import Setting
from planner.strategy_search.engine.assemble import assembly, groups_of, input_layouts, stages_of
from planner.strategy_search.engine.engine import setting_of
from planner.strategy_search.engine.families import engine_of as engine_of_request
from planner.strategy_search.engine.outcome import RankFilling
from planner.strategy_search.request.folding import fold
from planner.strategy_search.request.offload import NOTHING, Offload
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration, Pinned, Running
from planner.strategy_search.request.template import Key, Template
from planner.strategy_search.tables.table_builder import TableBuilder
from tests.kept import kept

BATCH = 2  # of the traced examples
SEQUENCE = 16
WIDTH = 32
WORK = 8192


def llama(layers: int, tied: bool = False, words: int = 64) -> nn.Module:
    return Llama(
        LlamaConfig(
            num_layers=layers, hidden_size=WIDTH, ffn_size=64, num_heads=8, num_kv_heads=4, vocab_size=words,
            sequence_length=SEQUENCE, tied_embeddings=tied,
        )
    )  # fmt: skip


def mixture(layers: int, **other: Any) -> nn.Module:
    """Four experts, two for each token."""
    return Llama(
        LlamaConfig(
            num_layers=layers, hidden_size=WIDTH, ffn_size=64, num_heads=8, num_kv_heads=4, vocab_size=64,
            sequence_length=SEQUENCE, num_experts=4, experts_per_token=2, expert_size=48, **other,
        )
    )  # fmt: skip


class FusedExperts(Experts):
    """Gates and the rest in one weight, of which chunks are multiplied, as transformers keeps them."""

    def __init__(self, like: Experts) -> None:
        nn.Module.__init__(self)
        assert like.gate_proj is not None
        self.gate_up_proj = nn.Parameter(torch.cat([like.gate_proj, like.up_proj], dim=1))
        self.down_proj = like.down_proj

    def forward(self, x_BSH: torch.Tensor, weights_BSK: torch.Tensor, chosen_BSK: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = experts(
            x_BSH, weights_BSK, chosen_BSK, *self.gate_up_proj.chunk(2, dim=1), self.down_proj, 0
        )
        return result


def fused(model: nn.Module) -> nn.Module:
    """The model with the gates of its experts and the rest in one weight."""
    for part in model.modules():
        if isinstance(part, SparseMLP):
            part.experts = FusedExperts(part.experts)
    return model


def gpt(layers: int, tied: bool = True) -> nn.Module:
    return GPT(
        GPTConfig(
            num_layers=layers, hidden_size=WIDTH, num_heads=4, vocab_size=64, sequence_length=SEQUENCE,
            tied_embeddings=tied,
        )
    )  # fmt: skip


class Entered(nn.Module):
    """Equal blocks behind layers that are like none of them, as a decoder behind an encoder."""

    def __init__(self, layers: int, enters: int) -> None:
        super().__init__()
        widths = [WIDTH * (2 + at) for at in range(enters)]
        self.enter = nn.ModuleList(
            nn.Linear(one, other, bias=False) for one, other in pairwise([WIDTH, *widths, WIDTH])
        )
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        for layer in self.enter:
            x_BI = torch.relu(layer(x_BI))
        for block in self.blocks:
            x_BI = x_BI + torch.relu(block(x_BI))
        return x_BI.pow(2).mean()


class Read(nn.Module):
    """Equal blocks that read the same two values, as the blocks of a decoder read what an encoder made."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        scale_BI, shift_BI = self.scale(x_BI).sigmoid(), self.shift(x_BI)
        for block in self.blocks:
            x_BI = x_BI + torch.relu(block(x_BI)) * scale_BI + shift_BI
        return x_BI.pow(2).mean()


class Perceptron(nn.Module):
    """No two layers alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(32, 64), nn.Linear(64, 48), nn.Linear(48, 16)

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.second(torch.relu(self.first(x_BI))))).pow(2).mean()


class Row(nn.Module):
    """Blocks in a row without residuals: what one block makes has a single consumer in the next."""

    def __init__(self, layers: int, *, embedded: bool, end: str) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH) if embedded else None
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.end = end

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        x_BI = x_BI if self.enter is None else self.enter(x_BI)
        for block in self.blocks:
            x_BI = torch.relu(block(x_BI))
        return x_BI.pow(2).mean() if self.end == "keeps" else x_BI.mean()


class Residual(nn.Module):
    """Blocks with a residual, whose result has two readers in the next block and one, which keeps nothing, at the end.

    `every` block may also read the value that entered the first, or a mask that follows from the inputs.
    """

    def __init__(self, layers: int, *, every: str = "nothing", shared: bool = False, frozen: int = -1) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 64) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(64, WIDTH) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(WIDTH)) if shared else None
        self.every = every
        self.register_buffer("table", torch.ones(SEQUENCE, WIDTH), persistent=False)
        if frozen >= 0:
            self.rows.weight.requires_grad_(False)
            for part in (*self.norms[:frozen], *self.ups[:frozen], *self.downs[:frozen]):
                part.requires_grad_(False)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        first = x = self.rows(tokens_BS)
        mask = (tokens_BS == 3).unsqueeze(-1)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            y = norm(x)
            if self.scale is not None:
                y = y * self.scale
            if self.every == "first":
                y = y + first
            if self.every == "mask":
                y = y.masked_fill(mask, 0.0)
            if self.every == "constant":
                y = y + (self.table * 2.0).cos()
            x = x + down(F.gelu(up(y)))
        return x.mean()


class Towers(nn.Module):
    """Blocks between alike ones of two other towers, as those of images stand before those of tokens."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, WIDTH)
        self.before, self.blocks, self.after = (
            nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH)) for _ in range(n))
            for n, width in ((before, 48), (5, 64), (after, 96))
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens_BS)
        for block in self.before:
            x = x + block(x)
        x = x.tanh()
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        x = x.tanh()
        for block in self.after:
            x = x + block(x)
        return x.mean()


class Kind(nn.Module):
    """A block with a residual, of the kind of its letter; "d" reads what entered the first, too."""

    def __init__(self, letter: str) -> None:
        super().__init__()
        self.letter = letter
        self.norm = nn.LayerNorm(WIDTH) if letter in "ac" else None
        self.up = nn.Linear(WIDTH, 64 if letter == "a" else 128)
        self.down = nn.Linear(64 if letter == "a" else 128, WIDTH)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        y = x if self.norm is None else self.norm(x)
        y = y * first if self.letter == "d" else y
        y = torch.relu(self.up(y)) if self.letter == "b" else F.gelu(self.up(y))
        return x + self.down(y)


class Kinds(nn.Module):
    """Blocks of several kinds that hand on the same."""

    def __init__(self, letters: str) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(map(Kind, letters))

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        first = x = self.rows(tokens_BS)
        for block in self.blocks:
            x = block(x, first)
        return x.pow(2).mean()


class Aside(nn.Module):
    """Blocks of which the end reads a result inside the last one, beside what it hands on."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, WIDTH)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens_BS)
        y = x
        for up, down in zip(self.ups, self.downs, strict=True):
            y = F.gelu(up(x))
            x = x + down(y)
        return (x + y).pow(2).mean()


class PostNorm(nn.Module):
    """Blocks that end in a norm, as in the first transformers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, WIDTH)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 64) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(64, WIDTH) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens_BS)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = norm(x + down(F.gelu(up(x))))
        return x.pow(2).mean()


class Skips(nn.Module):
    """Alike blocks, of which the end reads every result: nothing can be folded."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, WIDTH)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens_BS)
        results = []
        for up in self.ups:
            x = torch.relu(up(x))
            results.append(x)
        return torch.stack(results).mean()


class Single(nn.Module):
    """So small that every choice can be looked at."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 * 2**at, 8 * 2 ** (at + 1), bias=False) for at in range(layers))

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_BI = layer(x_BI)
        return x_BI.mean()


class TwoMasks(nn.Module):
    """The same comparison of an input and of a constant: one is decided, the other made everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("never", torch.zeros(WIDTH, dtype=torch.int64), persistent=False)

    def forward(self, x_BI: torch.Tensor, keep_I: torch.Tensor) -> torch.Tensor:
        y_BI = self.linear(x_BI).masked_fill(self.never == 3, 0.0)
        return y_BI.masked_fill(keep_I == 3, 0.0).pow(2).mean()


class Wide(nn.Module):
    """So much work that latency does not matter."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(WORK, WORK, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WORK, WORK, bias=False) for _ in range(layers))

    def forward(self, x_BSI: torch.Tensor) -> torch.Tensor:
        x_BSI = self.enter(x_BSI)
        for layer in self.layers:
            x_BSI = torch.relu(layer(x_BSI))
        return x_BSI.mean()


Model = tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]

TOKENS = lambda: (torch.zeros(BATCH, SEQUENCE, dtype=torch.int64),)  # noqa: E731
PAIR = lambda: (*TOKENS(), *TOKENS())  # noqa: E731
FLOATS = lambda: (torch.zeros(BATCH, WIDTH),)  # noqa: E731
SHORT = lambda: (torch.zeros(BATCH, 8),)  # noqa: E731

MODELS: Mapping[str, Model] = {
    "llama-1": (lambda: llama(1), PAIR),
    "llama-2": (lambda: llama(2), PAIR),
    "llama-4": (lambda: llama(4), PAIR),
    "llama-6-tied": (lambda: llama(6, tied=True), PAIR),
    "mixture": (lambda: mixture(3, shared_size=32), PAIR),
    "mixture-fused": (lambda: fused(mixture(3, shared_size=32)), PAIR),
    "mixture-after-dense": (lambda: mixture(4, dense_layers=1, head_size=8, qk_norm=True), PAIR),
    "gpt-1": (lambda: gpt(1), PAIR),
    "gpt-3": (lambda: gpt(3, tied=False), PAIR),
    "gpt-4-tied": (lambda: gpt(4), PAIR),
    "perceptron": (Perceptron, FLOATS),
    "chain": (lambda: Row(4, embedded=True, end="keeps"), FLOATS),
    "chain-from-input": (lambda: Row(5, embedded=False, end="keeps"), FLOATS),
    "chain-keeps-nothing": (lambda: Row(4, embedded=True, end="mean"), FLOATS),
    "chain-from-input-4": (lambda: Row(4, embedded=False, end="keeps"), FLOATS),
    "post-norm": (lambda: PostNorm(4), TOKENS),
    "aside": (lambda: Aside(4), TOKENS),
    "residual": (lambda: Residual(4), TOKENS),
    "residual-8": (lambda: Residual(8), TOKENS),
    "residual-shared": (lambda: Residual(4, shared=True), TOKENS),
    "residual-first": (lambda: Residual(4, every="first"), TOKENS),
    "towers": (lambda: Towers(3, 3), TOKENS),
    "residual-mask": (lambda: Residual(4, every="mask"), TOKENS),
    "residual-constant": (lambda: Residual(4, every="constant"), TOKENS),
    "residual-frozen-rows": (lambda: Residual(5, frozen=0), TOKENS),
    "residual-frozen-half": (lambda: Residual(6, frozen=3), TOKENS),
    "mixture-after-two-dense": (lambda: mixture(5, dense_layers=2), PAIR),
    "kinds-first": (lambda: Kinds("aabbbb"), TOKENS),
    "kinds-in-turn": (lambda: Kinds("abababab"), TOKENS),
    "kinds-one-before": (lambda: Kinds("abbb"), TOKENS),
    "kinds-one-after": (lambda: Kinds("aaab"), TOKENS),
    "kinds-three": (lambda: Kinds("aabbbccb"), TOKENS),
    "kinds-read-first": (lambda: Kinds("aaddaa"), TOKENS),
    "skips": (lambda: Skips(3), TOKENS),
    "two-masks": (TwoMasks, lambda: (torch.zeros(BATCH, WIDTH), torch.zeros(WIDTH, dtype=torch.int64))),
    "wide": (lambda: Wide(4), lambda: (torch.zeros(BATCH, WORK, WORK),)),
    "single": (Single, SHORT),
    "single-2": (lambda: Single(2), SHORT),
}


def large(name: str, layers: int, precision: str = "bfloat16") -> Model:
    """A model of the zoo in its real size with another depth."""
    entry = with_dimensions(ZOO[name], num_layers=layers)
    dimensions: dict[str, Any] = dict(entry.dimensions)
    length = entry.sequence_length
    return (
        lambda: Llama(LlamaConfig(**dimensions)).to(getattr(torch, precision)),
        lambda: (torch.zeros(BATCH, length, dtype=torch.int64), torch.zeros(BATCH, length, dtype=torch.int64)),
    )


def few_experts() -> torch.nn.Module:
    """Four experts beside a shared one, in sizes of real models."""
    return Llama(
        LlamaConfig(
            num_layers=2, hidden_size=4096, ffn_size=8192, num_heads=32, num_kv_heads=8, vocab_size=32000,
            sequence_length=4096, num_experts=4, experts_per_token=2, expert_size=2048, shared_size=8192,
        )
    ).to(torch.bfloat16)  # fmt: skip


LARGE: Mapping[str, Model] = {
    "entered": (lambda: Entered(4, 3), FLOATS),
    "read": (lambda: Read(4), FLOATS),
    "entered-by-one": (lambda: Entered(4, 0), FLOATS),
    "few-experts": (few_experts, lambda: (torch.zeros(BATCH, 4096, dtype=torch.int64),) * 2),
    "llama-4-words": (lambda: llama(4, words=4096), PAIR),
    "llama-12": (lambda: llama(12), PAIR),
    "llama-tiny": large("llama-tiny", 4, "float32"),
    "llama8b": large("llama8b", 32),
    "llama70b-4-layers": large("llama70b", 4),
    "llama70b-16-layers": large("llama70b", 16),
}


@cache
def traced(name: str) -> OperatorGraph:
    """The graph of one of the models; the small ones are in fp32."""
    return kept(f"case {name}", lambda: _traced(name))


def _traced(name: str) -> OperatorGraph:
    make, example = {**MODELS, **LARGE}[name]
    with torch.device("meta"):
        return trace(make(), example())


@cache
def template_of(name: str) -> Template:
    return fold(*prepare(traced(name)))


@cache
def with_quick_host(cluster: Cluster) -> Cluster:
    """Machines whose hosts launch in no time: models of tests have kernels shorter than any launch."""
    return replace(cluster, device=replace(cluster.device, host_latency=cluster.device.host_latency / 4))


def cluster_of(profile: str, devices: int) -> Cluster:
    return load_profile(profile).with_devices(devices)


def with_own_network(cluster: Cluster) -> Cluster:
    """Machines whose collectives occupy nothing that computes, and set out soon, as CPUs have none."""
    levels = tuple(
        replace(level, protocols=tuple(replace(one, latency=one.latency / 8) for one in level.protocols))
        for level in cluster.levels
    )
    return replace(cluster, levels=levels, device=replace(cluster.device, communication_units=0))


@cache
def builder(profile: str, devices: int, mesh: tuple[int, ...], precision: str, optimizer: str) -> TableBuilder:
    cluster = cluster_of(profile, devices)
    return TableBuilder(
        mesh=build_mesh(cluster, mesh), cluster=cluster, precision=precision, optimizer=optimizer, dominated=True
    )


ALL_WAYS: tuple[Running, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a cluster in one configuration, cut into pieces; `mixed` where it has several kinds of devices, of
    which `chain` is the first."""

    model: str
    cluster: Machine
    configuration: Configuration
    global_batch: int
    precision: str
    optimizer: str
    chain: Chain
    setting: Setting
    mixed: HeterogeneousPipeline | None = None

    @property
    def pipeline_of_kinds(self) -> HeterogeneousPipeline:
        return HeterogeneousPipeline.alike(self.chain, self.setting) if self.mixed is None else self.mixed

    @property
    def inner_blocks(self) -> int:
        """Blocks of which none stands in the head or in the tail."""
        chain = self.chain
        if not chain.inner:
            return 0
        return chain.tables.template.blocks.count - chain.blocks_in_head - chain.blocks_in_tail


def make_case(
    model: str,
    profile: str | Cluster,
    configuration: Configuration,
    global_batch: int,
    precision: str = "fp32",
    optimizer: str = "adamw",
    recomputation: Sequence[Running] = ALL_WAYS,
    update: Update = PLAIN,
    offload: Offload = NOTHING,
) -> Case:
    devices = configuration.pipeline * math.prod(configuration.mesh)
    part = global_batch // configuration.micro_batches
    cluster = cluster_of(profile, devices) if isinstance(profile, str) else profile
    trains = SCHEDULES[configuration.schedule].trains
    template = template_of(model)
    if cluster.software != PYTORCH or not trains:
        template = fold(*prepare(traced(model), trains=trains), cluster.software)
    template = replace(template, graph=rescale_batch(template.graph, BATCH, part))
    building = builder(cluster.name, devices, configuration.mesh, precision, optimizer)
    if cluster.software != PYTORCH or update != PLAIN or offload != NOTHING or not trains:
        building = TableBuilder(
            mesh=building.mesh,
            cluster=cluster,
            precision=precision,
            optimizer=optimizer,
            update=update,
            gradients=template.gradient_bytes(update),
            offload=offload,
            together=update.by_block,
            dominated=True,
        )
    tables = building.build(template)
    return Case(
        model=model,
        cluster=cluster,
        configuration=configuration,
        global_batch=global_batch,
        precision=precision,
        optimizer=optimizer,
        chain=cut(
            tables,
            cluster,
            recomputation=recomputation,
            stages=configuration.pipeline,
            activations=offload.activations,
            saved=offload.saved,
            gathers=update.gathers,
        ),
        setting=setting_of(configuration, usable_memory(cluster.device)),
    )


def make_mixed(
    model: str,
    machine: MixedCluster,
    configuration: Configuration,
    global_batch: int,
    recomputation: Running | None = None,
    never_kept: tuple[str, ...] = (),
) -> Case:
    """A model on several kinds of devices."""
    pinned = Pinned(recompute=recomputation, never_kept=never_kept)
    engine, _ = engine_of_request(request_of(model, machine, global_batch, pinned=pinned))
    pipeline_of_kinds = engine.store.pieces(configuration, "each")
    return Case(
        model=model,
        cluster=engine.machine(configuration),
        configuration=configuration,
        global_batch=global_batch,
        precision="fp32",
        optimizer="adamw",
        chain=pipeline_of_kinds.chain,
        setting=engine.setting(configuration),
        mixed=pipeline_of_kinds,
    )


def random_state(case: Case, draw: random.Random) -> State:
    return tuple(draw.randrange(size) for size in case.chain.shape)


def random_column(case: Case, pieces: Sequence[Piece], state: State, draw: random.Random) -> Column:
    """Any way to run the blocks of a piece, any candidate of everything but the boundary, and some results kept."""
    piece = draw.choice(pieces)
    candidates = {key: draw.randrange(size) for key, size in zip(piece.keys, piece.sizes, strict=True)}
    candidates.update({key: state[case.chain.boundary.index(key)] for key in piece.boundary})
    kept = {key for key in keepable(piece) if draw.random() < draw.choice((0.0, 0.3, 1.0))}
    return column_of(piece, candidates, kept)


def keepable(piece: Piece) -> list[int]:
    """Operators of a piece whose results may be kept."""
    return [
        key
        for place, key in enumerate(piece.keys)
        if isinstance(key, int) and piece.keeping_part[piece.node_cells(place)].any()
    ]


def column_of(piece: Piece, candidates: Mapping[Key, int], kept: Collection[int] = ()) -> Column:
    return Column(
        recompute=piece.recompute,
        candidates=dict(candidates),
        kept=frozenset(kept),
        amounts=piece.amounts_of(candidates, kept),
        kind=piece.kind,
        home=piece.home,
    )


def random_counts(case: Case, draw: random.Random) -> list[int]:
    """Inner blocks of a chunk of every rank: as many for each where there are virtual stages."""
    chain, setting, blocks = case.chain, case.setting, case.inner_blocks
    if setting.chunks > 1:
        return [blocks // setting.chunks // setting.ranks] * setting.ranks
    counts = [0 if setting.ranks == 1 else 1] * setting.ranks
    if setting.ranks > 1:
        counts[0] -= chain.blocks_in_head
        counts[-1] -= chain.blocks_in_tail
    for _ in range(blocks - sum(counts)):
        counts[draw.randrange(setting.ranks)] += 1
    return counts


def random_ranks(case: Case, draw: random.Random, state: State) -> tuple[RankFilling, ...]:
    """Any way to run every block: some lean ones first, then others, on every rank and, where its chunks may run unlike
    each other, in each of them. Their peaks are left at zero."""
    ranks: list[RankFilling] = []
    done = 0
    for rank, count in enumerate(random_counts(case, draw)):
        chain = case.pipeline_of_kinds.chain_of(rank)
        kinds = chain.block_ranges.kinds[done : done + count]
        done = done + count if case.setting.chunks == 1 else 0
        lean, fast = (
            {kind: random_column(case, chain.kinds[kind], state, draw) for kind in sorted(set(kinds))} for _ in range(2)
        )
        unlike = case.setting.unlike(chain)
        firsts = [draw.randint(0, count) for _ in range(case.setting.chunks if unlike else 1)]
        firsts = firsts if unlike else firsts * case.setting.chunks
        ranks.append(
            RankFilling(
                head=random_column(case, chain.head, state, draw) if rank == 0 else None,
                inner=tuple((lean if at < first else fast)[kind] for first in firsts for at, kind in enumerate(kinds)),
                tail=random_column(case, chain.tail, state, draw)
                if rank == case.setting.ranks - 1 and chain.tail
                else None,
                peak=0.0,
                beside=0.0,
            )
        )
    return tuple(ranks)


def columns_of(case: Case, ranks: Sequence[RankFilling], rank: int) -> list[Column]:
    """All that a rank runs, in the order of the model."""
    held, found = ranks[rank], []
    for chunk, inner in enumerate(held.of_chunks(case.setting.chunks)):
        found += [held.head] if held.head is not None and chunk == 0 else []
        found += inner
        found += [held.tail] if held.tail is not None and chunk == case.setting.chunks - 1 else []
    return found


def total(columns: Sequence[Column], name: str) -> float:
    return math.fsum(getattr(column.amounts, name) for column in columns)


def bytes_of(
    case: Case, state: State, ranks: Sequence[RankFilling], rank: int, in_flight: Sequence[float] | None = None
) -> tuple[float, float]:
    """Bytes of a rank by the words of the pieces, block for block, and how much of it may be counted in vain; with so
    many micro-batches of every chunk `in_flight`, by default as many as bounds count.

    In vain is what a recomputed block hands to one that is not, where this one wants it in another layout and keeps
    that; what is handed on past blocks of several kinds, which those keep that read it; and in the interior of the last
    block, if it is recomputed, what only a next one would keep, or in that of another one what only those after the
    last would.
    """
    chain, held, setting = case.chain, ranks[rank], case.setting
    counted = doubtful = 0.0
    handed, crossing = float(chain.handed[state]), chain.crossing
    received, passing, staying = (float(n[state]) for n in (crossing.nbytes, crossing.passing, crossing.staying))
    for chunk, (flights, inner) in enumerate(
        zip(in_flight or setting.in_flight[rank], held.of_chunks(setting.chunks), strict=True)
    ):
        first = rank == 0 and chunk == 0
        last = rank == setting.ranks - 1 and chunk == setting.chunks - 1
        head = [held.head] if first and held.head is not None else []
        tail = [held.tail] if last and held.tail is not None else []
        counted += math.fsum(c.amounts.fixed + flights * c.amounts.live for c in (*head, *inner, *tail))
        blocks = [*head * chain.blocks_in_head, *inner, *tail * chain.blocks_in_tail]
        if not blocks:
            continue
        if setting.ranks > 1 and not first:
            counted += flights * (0.0 if blocks[0].recompute else received)
            counted += flights * (0.0 if any(block.recompute for block in blocks) else passing)
            counted += flights * staying
            doubtful += flights * staying * (len(template_of(case.model).held) > 1)
        changes = sum(one.recompute and not other.recompute for one, other in pairwise(blocks))
        counted += changes * flights * handed
        doubtful += changes * flights * handed
        if last and not chain.blocks_in_tail and not blocks[-1].recompute:
            counted += flights * float(chain.ending[state])
        if last:
            doubtful += (1 if blocks[-1].recompute else flights) * handed
        doubtful += any(one.recompute for one in blocks) * max(float(chain.ending[state]), 0.0)
    columns = columns_of(case, ranks, rank)
    counted += max(c.amounts.replay for c in columns) + max(c.amounts.transient for c in columns)
    return counted, doubtful


def seconds_of(case: Case, state: State, ranks: Sequence[RankFilling]) -> float:
    """A step by the prices of the pieces."""
    numbers = range(case.setting.ranks)
    crossing = [float(crossing_seconds(case.chain, case.setting, rank)[state]) for rank in numbers]
    parts = [total(columns_of(case, ranks, rank), "part") + crossing[rank] for rank in numbers]
    steps = [total(columns_of(case, ranks, rank), "step") for rank in numbers]
    return float(step_time(parts, steps, case.setting.micro_batches, case.setting.chunks))


def peak_of(case: Case, state: State, ranks: Sequence[RankFilling]) -> float:
    """Bytes of the fullest rank at its fullest moment by the words of the pieces."""
    return max(rank_peak_of(case, state, ranks, rank) for rank in range(case.setting.ranks))


def rank_peak_of(case: Case, state: State, ranks: Sequence[RankFilling], rank: int) -> float:
    """Bytes of a rank at its fullest moment by the words of the pieces: chunks are not at their most together."""
    setting = case.setting
    moments: Sequence[Sequence[float]] = setting.in_flight[rank : rank + 1]
    if setting.chunks > 1:
        moments = moments_in_flight(rank, setting.ranks, setting.chunks, setting.micro_batches)
    return max(bytes_of(case, state, ranks, rank, moment)[0] for moment in moments)


def plan_of(case: Case, ranks: Sequence[RankFilling]) -> Plan:
    """The plan that the search would write for these ranks, without prices."""
    graph = traced(case.model)
    configuration = case.configuration
    prepared, _ = prepare(graph, trains=SCHEDULES[configuration.schedule].trains)
    whole = assembly(case.chain, ranks, case.setting)
    return Plan(
        model=ModelReference(
            reference=case.model, sequence_length=SEQUENCE, parameters=1, fingerprint=graph.fingerprint()
        ),
        training=Training(
            global_batch=case.global_batch,
            micro_batches=configuration.micro_batches,
            precision=case.precision,
            optimizer=case.optimizer,
            update=case.chain.tables.update,
        ),
        cluster=cluster_reference(case.cluster),
        mesh=case.chain.tables.mesh,
        stages=placed(stages_of(whole), configuration.pipeline, case.cluster, "1f1b"),
        virtual_stages=configuration.virtual_stages,
        schedule=configuration.schedule if configuration.virtual_stages == 1 else "interleaved_1f1b",
        inputs=input_layouts(whole),
        groups=groups_of(prepared, case.chain.tables.template.blocks, whole),
        prediction=Prediction.unknown(),
        provenance=Provenance(planner="test", search="none", status="feasible", gap=0.0),
    )


def small_memory(cluster: Cluster, memory: float) -> Cluster:
    """The same machine with `memory` usable bytes and nothing set aside."""
    device = replace(cluster.device, memory=memory, reserved=0.0, allocator_slack=0.0)
    return replace(cluster, device=device)


def launched_at_once(cluster: Cluster) -> Cluster:
    """The same devices on hosts that launch in no time: small models take what their kernels take."""
    return replace(cluster, device=replace(cluster.device, host_latency=0.0))


def request_of(model: str, cluster: Machine, global_batch: int, **options: object) -> SearchRequest:
    graph = traced(model)
    reference = ModelReference(
        reference=model, sequence_length=SEQUENCE, parameters=graph.parameter_count(), fingerprint=graph.fingerprint()
    )
    settings: dict[str, object] = {"precision": "fp32", **options}
    return SearchRequest(
        graph=graph, batch=BATCH, model=reference, cluster=cluster, global_batch=global_batch,
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip
