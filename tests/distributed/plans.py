"""Plans made by hand or at random, and the small models they are for. Used inside the worker processes."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn

from costmodels import SCHEDULES
from planner.graph.fp8 import NO_FP8, Fp8
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.adapters import Adapters
from planner.models.deepseek import Deepseek, DeepseekConfig
from planner.models.dlrm import DLRM, DLRMConfig
from planner.models.gpt import GPT, GPTConfig
from planner.models.llama import DecoderLayer, Llama, LlamaConfig, initialise
from planner.models.low_rank import add_adapters
from planner.models.resnet import ResNet, ResNetConfig
from planner.models.vit import ViT, ViTConfig
from planner.models.wide_deep import WideDeep, WideDeepConfig
from planner.plan.binding.bind import prepare
from planner.plan.binding.slices import one_slice
from planner.plan.outline import model_reference
from planner.plan.plan import (
    ClusterReference,
    Group,
    Plan,
    Prediction,
    Provenance,
    Stage,
    Training,
)
from planner.sharding.discover import discover, written_rules
from planner.sharding.layout import PARTIAL, REPLICATE, Layout, divides, shard
from planner.sharding.legality import legal_strategies, strategy_fault
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.rescale import rescale_batch
from planner.sharding.rule import FactorKind, Rule, Strategy, named_strategy, strategy_names
from planner.sharding.rules import rule_of
from planner.sharding.stored import StoredParameter, legal_stored
from planner.sharding.update import Update
from tests.distributed.of_transformers import OfTransformers
from tests.distributed.towers import Towers, pairs
from tests.distributed.unusual import Gated, Unusual
from tests.kept import kept

BATCH, SEQUENCE, VOCABULARY = 4, 8, 32
LLAMA = LlamaConfig(
    num_layers=2,
    hidden_size=32,
    ffn_size=64,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=VOCABULARY,
    sequence_length=SEQUENCE,
)
MIXTURE = replace(LLAMA, num_experts=4, experts_per_token=2, expert_size=24, shared_size=16)
DEEPSEEK = DeepseekConfig(
    num_layers=4, hidden_size=32, ffn_size=48, num_heads=4, q_rank=16, kv_rank=8, plain_size=8, rotary_size=4,
    value_size=12, vocab_size=VOCABULARY, sequence_length=SEQUENCE, num_experts=4, experts_per_token=2, expert_size=24,
    shared_size=16, dense_layers=2, sigmoid_scores=True, weight_scale=2.5, expert_groups=2, balance_loss=0.1,
    balance_speed=0.5,
)  # fmt: skip
GPT_CONFIG = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
CLASSES, IMAGE, CHANNELS = 8, 16, 4
VIT = ViTConfig(
    num_layers=3, hidden_size=16, ffn_size=32, num_heads=4, patch_size=4, image_size=IMAGE, num_classes=CLASSES,
    channels=CHANNELS,
)  # fmt: skip
RESNET = ResNetConfig(
    blocks=(3,), bottleneck=True, width=8, image_size=IMAGE, num_classes=CLASSES, groups=2, channels=CHANNELS
)
TABLES = (16, 8, 12)
DLRM_CONFIG = DLRMConfig(table_rows=TABLES, table_width=8, dense_features=4, bottom_sizes=(16, 8), top_sizes=(16, 8))
WIDE_DEEP = WideDeepConfig(
    table_rows=TABLES,
    table_width=8,
    dense_features=4,
    hidden_sizes=(16, 8),
    crossed_features=2,
    crossed_rows=VOCABULARY,
)


STATE_SPACES = ("mamba2", "jamba", "nemotron-h-dense", "falcon-h1", "granite4", "bamba", "zamba2")
"""Models of transformers, by the names of their configs."""


def lively(module: nn.Module) -> nn.Module:
    """The model with weights so large that no gradient is as small as rounding."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(std=0.5)
    return module


class Assorted(nn.Module):
    """One use of many operators that the language models lack."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(VOCABULARY, 16, padding_idx=3)
        self.weight = nn.Parameter(torch.randn(4, 16, 8))
        self.scale = nn.Parameter(torch.randn(1, 8))
        self.offset = nn.Parameter(torch.randn(16))

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens_BS) + self.offset.expand(SEQUENCE, 16)
        y = torch.bmm(x, self.weight) * self.scale.expand(8, 8).narrow(0, 0, 8)
        low, high = y.split_with_sizes([4, 4], dim=-1)
        z = torch.stack([low, high], dim=1).unbind(1)
        probable = torch.softmax(z[0], dim=-1).cumsum(-1) + torch.where(labels_BS.unsqueeze(-1) > 7, z[1], z[0])
        kept = probable.masked_fill((labels_BS == 2).unsqueeze(-1), 0.5).pow(2).permute(0, 2, 1).reshape(BATCH, -1)
        inner = torch.matmul(kept, kept.t()).relu().mean(dim=0, keepdim=True)
        addmm = torch.addmm(self.offset, y.mean(dim=1), self.weight[0].t()).exp()
        return inner.sum() + addmm.mean() + x.split_with_sizes([16], -1)[0].sigmoid().sum(dim=(1, 2)).mean()


class DroppingBlock(nn.Module):
    """Attention in which two heads share keys, and an MLP; both drop elements in the ways that there are."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 64)
        self.out = nn.Linear(32, 32)
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)
        self.dropout = nn.Dropout(p)
        self.p = p

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x_BSH)).split([32, 16, 16], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        p = self.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, scale=0.4, enable_gqa=True)
        x = x_BSH + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.dropout(torch.relu(self.up(x)), self.p, self.training)))


class Dropping(nn.Module):
    """A language model that drops embeddings, attention probabilities, hidden units, results of layers, channels."""

    def __init__(self, layers: int, p: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.channels = nn.Dropout1d(p)
        self.blocks = nn.ModuleList(DroppingBlock(p) for _ in range(layers))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x = self.channels(self.tokens(tokens_BS))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels_BS.flatten())


class Skipping(nn.Module):
    """Blocks that all read a mask and a memory made before them, both of which the end reads too."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.memory = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        mask, memory = (tokens_BS > 3).unsqueeze(-1), torch.tanh(self.memory(tokens_BS))
        x = self.tokens(tokens_BS)
        for block in self.blocks:
            x = x + torch.tanh(block(x * mask) + memory)
        return F.cross_entropy(self.head(x * mask + memory).flatten(0, 1), labels_BS.flatten())


class LateTable(nn.Module):
    """Blocks, and a table whose rows are looked up after them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.late = nn.Embedding(VOCABULARY, 32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens_BS)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.cross_entropy(self.head(x + self.late(tokens_BS)).flatten(0, 1), labels_BS.flatten())


class Sharing(nn.Module):
    """Blocks, each with a linear layer of its own and one that all of them share."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.own = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.shared, self.head = nn.Linear(32, 32, bias=False), nn.Linear(32, VOCABULARY)

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens_BS)
        for own in self.own:
            x = x + self.shared(torch.tanh(own(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels_BS.flatten())


class TiedLinears(nn.Module):
    """Two linear layers that share a weight, and nothing that repeats: the last one is not in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, VOCABULARY)
        self.first, self.head = nn.Linear(VOCABULARY, VOCABULARY), nn.Linear(VOCABULARY, VOCABULARY)
        self.head.weight = self.first.weight

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(self.tokens(tokens_BS)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels_BS.flatten())


class Bags(nn.Module):
    """Bags of embeddings, losses of pairs, and norms and pools that the image models lack; in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(TABLES[0], 8, mode="mean")
        self.sums = nn.EmbeddingBag(TABLES[1], 8, mode="sum", padding_idx=2)
        self.conv = nn.Conv2d(CHANNELS, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, stride=2, groups=8)
        self.group_norm = nn.GroupNorm(4, 8)
        self.untracked = nn.BatchNorm2d(8, track_running_stats=False)
        self.register_buffer("average", torch.zeros(8))
        self.double()

    def forward(self, images: torch.Tensor, labels_B: torch.Tensor, numbers_BK: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(self.untracked(self.conv(images)), 2)
        x = self.group_norm(self.depthwise(F.max_pool2d(x, 2))).mean(dim=(2, 3))
        self.average.mul_(0.9).add_(x.detach().mean(dim=0), alpha=0.1)
        bags, sums = self.bags(numbers_BK), self.sums(numbers_BK[:, :2])
        pairs = F.mse_loss(x, bags) + F.huber_loss(x, sums) + F.l1_loss(bags, sums) + F.smooth_l1_loss(x, sums * 2)
        apart = F.kl_div(F.log_softmax(x, -1), F.softmax(bags, -1), reduction="sum")
        return pairs + apart + F.nll_loss(F.log_softmax(sums, -1), labels_B) * 0.5


class Residual(nn.Module):
    """Two convolutions, the last of which makes what is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first = nn.BatchNorm2d(width), nn.Conv2d(width, width, 5, padding=2, groups=2)
        self.last = nn.Conv2d(width, width, 3, padding=2, dilation=2)

    def forward(self, x_BCXX: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x_BCXX + self.last(F.silu(self.first(self.norm(x_BCXX))))
        return result


class Pixels(nn.Module):
    """Stencils of many kinds over images, rows of images and stacks of them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.stem = nn.Conv2d(CHANNELS, 8, 2, stride=2), nn.Conv2d(CHANNELS, 8, 7, stride=2, padding=3)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(2))
        self.wide = nn.Conv2d(8, 8, 3, padding=(3, 6), dilation=(3, 6))  # further than a piece of four: 2 hops, and 3
        self.pointwise, self.stack = nn.Conv2d(8, 8, 1, stride=2), nn.Conv3d(1, 2, (3, 3, 1), padding="same")
        self.larger = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2)
        self.spread = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1, bias=False)
        self.rows = nn.Conv1d(8, 8, 3, padding=1, bias=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        x = self.stem(images) + self.patches(images)
        for block in self.blocks:
            x = block(x)
        x = x + self.wide(x)
        x = F.max_pool2d(x, 3, 1, 1) + F.avg_pool2d(x, (3, 1), 1, (1, 0))
        x = x + self.stack(x.unsqueeze(1)).sum(1)
        x = x + F.avg_pool2d(self.larger(x) + self.spread(x), 2)
        x = F.avg_pool2d(self.pointwise(x) + F.max_pool2d(x, 2), 2)
        x = self.rows(F.adaptive_avg_pool2d(x, 2).flatten(2)) + F.adaptive_avg_pool2d(x, 1).flatten(2)
        return F.cross_entropy(self.head(x.mean(2)), labels_B)


def bags(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    pixels, labels = wide_images(samples, generator)
    return pixels, labels, torch.randint(TABLES[1], (samples, 3), generator=generator)


class Scan(nn.Module):
    """A selective scan (Gu and Dao 2023) h = a h + b, y = c h, along time: step by step, or associative."""

    def __init__(self, associative: bool) -> None:
        super().__init__()
        self.rows, self.steps = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16)
        self.conv = nn.Conv1d(16, 16, 4, groups=16, padding=3)
        self.gates, self.decay = nn.Linear(16, 8), nn.Parameter(torch.rand(16, 4))
        self.head, self.associative = nn.Linear(16, VOCABULARY), associative
        self.double()

    def forward(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.rows(tokens_BS)
        x_BSD = F.silu(self.conv(x_BSD.transpose(1, 2))[..., : tokens_BS.shape[1]].transpose(1, 2))
        b_BSN, c_BSN = self.gates(x_BSD).chunk(2, -1)
        step_BSD = F.softplus(self.steps(x_BSD))
        a_BSDN = torch.exp(-step_BSD.unsqueeze(-1) * self.decay)
        b_BSDN = step_BSD.unsqueeze(-1) * b_BSN.unsqueeze(2) * x_BSD.unsqueeze(-1)
        h_BSDN = _associative(a_BSDN, b_BSDN) if self.associative else _step_by_step(a_BSDN, b_BSDN)
        y_BSD = (h_BSDN * c_BSN.unsqueeze(2)).sum(-1) + x_BSD
        return F.cross_entropy(self.head(y_BSD).flatten(0, 1), targets_BS.flatten())


def _step_by_step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    state, states = torch.zeros_like(b[:, 0]), []
    for time in range(b.shape[1]):
        state = a[:, time] * state + b[:, time]
        states.append(state)
    return torch.stack(states, 1)


def _associative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    def both(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return one[0] * other[0], other[0] * one[1] + other[1]

    return associative_scan(both, (a, b), 1, combine_mode="generic")[1]


class Loss(nn.Module):
    """Cross entropy and nothing else, with logits that are parameters."""

    def __init__(self, reduction: str, label_smoothing: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.logits_NV = nn.Parameter((torch.randn(16, VOCABULARY) * 3).to(dtype))
        self.reduction, self.label_smoothing = reduction, label_smoothing

    def forward(self, targets_N: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            self.logits_NV,
            targets_N,
            ignore_index=5,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


def adapted() -> nn.Module:
    """Four layers with adapters, which do something."""
    model = Llama(replace(LLAMA, num_layers=4))
    add_adapters(model, Adapters(rank=4, alpha=6.0), "llama")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.2)
    return model.double()


def frozen_products() -> nn.Module:
    """Layers of which only the norms are trained."""
    model = Llama(replace(LLAMA, num_layers=4))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


def frozen_experts() -> nn.Module:
    """Experts that are not trained; gradients go through them to what is."""
    model = Llama(MIXTURE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    return model


def lonely_experts() -> nn.Module:
    """Experts of which the router chooses the same two for every token: the others get none."""
    model = Llama(replace(MIXTURE, num_layers=2, expert_size=144, shared_size=32))
    for name, parameter in model.named_parameters():
        if ".router." in name or name.endswith("gate.weight"):
            nn.init.zeros_(parameter)
    return model


class Mixtures(nn.Module):
    """Two mixtures of experts that read the same."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x_BSH: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.one(x_BSH)[0] + self.other(x_BSH)[0], None


def mixtures() -> nn.Module:
    """Blocks with two mixtures of experts each, side by side."""
    model, more = Llama(MIXTURE), Llama(MIXTURE)
    for layer, other in zip(model.model.layers, more.model.layers, strict=True):
        layer.mlp = Mixtures(layer.mlp, other.mlp)
    return model


class Beside(DecoderLayer):
    """Attention and experts side by side."""

    def forward(
        self, x_BSH: torch.Tensor, balance: torch.Tensor | None, cos_SD: torch.Tensor, sin_SD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result_BSH, _ = self.mlp(self.post_attention_layernorm(x_BSH))
        return x_BSH + self.self_attn(self.input_layernorm(x_BSH), cos_SD, sin_SD) + result_BSH, balance


def beside() -> nn.Module:
    """Blocks that start their experts before attention."""
    model = Llama(MIXTURE)
    model.model.layers = nn.ModuleList(Beside(MIXTURE, sparse=True) for _ in model.model.layers)
    initialise(model)
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "llama": lambda: Llama(LLAMA),
    "llama64": lambda: Llama(LLAMA).double(),
    "gpt": lambda: GPT(GPT_CONFIG),
    "gpt64": lambda: GPT(GPT_CONFIG).double(),
    "llama4": lambda: Llama(replace(LLAMA, num_layers=4)),
    "llama-uneven": lambda: Llama(replace(LLAMA, hidden_size=34, head_size=4, ffn_size=66, vocab_size=63)),
    "llama-odd": lambda: Llama(replace(LLAMA, ffn_size=62)),
    "llama-one": lambda: Llama(replace(LLAMA, num_kv_heads=1, tied_embeddings=True)),
    "llama-two": lambda: Llama(replace(LLAMA, num_kv_heads=2)),
    "llama-heads": lambda: Llama(replace(LLAMA, num_kv_heads=8, head_size=8, qk_norm=True)),
    "llama6": lambda: Llama(replace(LLAMA, num_layers=6)),
    "llama8": lambda: Llama(replace(LLAMA, num_layers=8)),
    "gpt4": lambda: GPT(replace(GPT_CONFIG, num_layers=4)),
    "gpt-untied": lambda: GPT(replace(GPT_CONFIG, tied_embeddings=False)),
    "mixture": lambda: Llama(MIXTURE),
    "mixture4": lambda: Llama(replace(MIXTURE, num_layers=4)),
    "mixture64": lambda: Llama(MIXTURE).double(),
    "lonely": lonely_experts,
    "lonely64": lambda: lonely_experts().double(),
    "wide4": lambda: Llama(replace(MIXTURE, num_layers=4, expert_size=144, shared_size=32)),
    "wide": lambda: Llama(replace(MIXTURE, num_layers=2, expert_size=144, shared_size=32)),
    "wide64": lambda: Llama(replace(MIXTURE, num_layers=2, expert_size=144, shared_size=32)).double(),
    "ungated": lambda: Llama(replace(MIXTURE, gated=False)),
    "ungated-wide": lambda: Llama(replace(MIXTURE, num_layers=2, expert_size=144, shared_size=32, gated=False)),
    "ungated64": lambda: Llama(replace(MIXTURE, num_layers=2, expert_size=144, shared_size=32, gated=False)).double(),
    "mixture-frozen": frozen_experts,
    "frozen": frozen_products,
    "adapted64": adapted,
    "mixtures": mixtures,
    "beside": beside,
    "capped": lambda: Llama(replace(MIXTURE, capacity_factor=0.75)),
    "balanced": lambda: Llama(replace(MIXTURE, balance_loss=0.1, balance_speed=0.5)),
    "deepseek": lambda: Deepseek(DEEPSEEK),
    "deepseek-direct": lambda: Deepseek(replace(DEEPSEEK, num_layers=3, dense_layers=1, q_rank=0, balance_speed=0.0)),
    "assorted": Assorted,
    "dropping": lambda: Dropping(2),
    "dropping4": lambda: Dropping(4),
    "vit": lambda: ViT(VIT),
    "resnet": lambda: ResNet(RESNET),
    "resnet64": lambda: ResNet(RESNET).double(),  # in float32 its gradients are off by 1e-5 themselves
    "dlrm": lambda: lively(DLRM(DLRM_CONFIG)),
    "bags": Bags,
    "pixels": Pixels,
    "scan64": lambda: Scan(associative=False),
    "associative64": lambda: Scan(associative=True),
    "pixels64": lambda: Pixels().double(),
    "wide-deep": lambda: lively(WideDeep(WIDE_DEEP)),
    "gated": lambda: Gated(VOCABULARY),
    "unusual": lambda: Unusual(VOCABULARY),
    "skipping": lambda: Skipping(4),
    "late-table": lambda: LateTable(4),
    "sharing": lambda: Sharing(4),
    "sharing64": lambda: Sharing(4).double(),
    "tied-linears": TiedLinears,
    "tied-linears64": lambda: TiedLinears().double(),
    "towers": lambda: Towers(VOCABULARY),
    **{name: partial(OfTransformers, name, BATCH, SEQUENCE) for name in (*STATE_SPACES, "gpt-oss")},
}

Choose = Callable[[str, Rule, Mesh], Strategy]
Store = Callable[[str, tuple[int, ...], Mesh], StoredParameter]
Load = Callable[[str, tuple[int, ...], Mesh], Layout]


def build(model: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[model]()


def batch(samples: int = BATCH, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(VOCABULARY, (samples, SEQUENCE), generator=generator)  # noqa: E731
    return draw(), draw()


def images(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    pixels = torch.randn(samples, CHANNELS, IMAGE, IMAGE, generator=generator)
    return pixels, torch.randint(CLASSES, (samples,), generator=generator)


def wide_images(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    pixels, labels = images(samples, generator)
    return pixels.double(), labels


def clicks(samples: int, generator: torch.Generator, crossed: bool) -> tuple[object, ...]:
    dense = torch.randn(samples, DLRM_CONFIG.dense_features, generator=generator)
    fields = [torch.randint(rows, (samples,), generator=generator) for rows in TABLES]
    features = torch.randint(VOCABULARY, (samples, WIDE_DEEP.crossed_features), generator=generator)
    labels = torch.randint(2, (samples,), generator=generator)
    return (dense, fields, *((features,) if crossed else ()), labels)


INPUTS: Mapping[str, Callable[[int, torch.Generator], tuple[object, ...]]] = {
    "bags": bags,
    "pixels": images,
    "pixels64": wide_images,
    "vit": images,
    "resnet": images,
    "resnet64": wide_images,
    "dlrm": lambda samples, generator: clicks(samples, generator, crossed=False),
    "wide-deep": lambda samples, generator: clicks(samples, generator, crossed=True),
    "towers": lambda samples, generator: pairs(samples, SEQUENCE, VOCABULARY, generator),
}
"""Arguments of models that are no language models."""


def inputs(model: str, seed: int = 0, samples: int = BATCH) -> tuple[object, ...]:
    """A batch for a model, as the arguments of a call."""
    make = INPUTS.get(model)
    return batch(samples, seed) if make is None else make(samples, torch.Generator().manual_seed(seed))


@cache
def traced(model: str) -> OperatorGraph:
    return kept(f"traced {model}", lambda: discover(trace(build(model), inputs(model))))


def mesh_of(*sizes: int) -> Mesh:
    axes, stride = [], 1
    for size in reversed(sizes):
        axes.append(MeshAxis(name=f"axis{len(sizes) - 1 - len(axes)}", size=size, stride=stride, bandwidth=1e9))
        stride *= size
    return Mesh(axes=tuple(reversed(axes)))


def make_plan(
    model: str,
    mesh: Mesh,
    choose: Choose,
    store: Store,
    load: Load,
    *,
    micro_batches: int = 1,
    recomputation: str | tuple[str, ...] = "none",
    kept: Sequence[str] = (),
    optimizer: str = "adamw",
    stages: tuple[int, ...] = (),
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    slices: int = 1,
    interleave: int = 1,
    graph: OperatorGraph | None = None,
    samples: int = BATCH,
    global_batch: int = BATCH,
    placed: tuple[tuple[str, str], ...] = (),
    padded: tuple[tuple[str, int], ...] = (),
    fp8: Fp8 = NO_FP8,
) -> Plan:
    """A plan with one group outside the blocks and one per block, so that every operator is chosen by itself.

    `graph` is that of `model` on an example of so many `samples`; without it, that of one of `MODELS`. `stages` has the
    number of blocks of each pipeline stage, of which every rank with its mesh holds `virtual_stages`. `recomputation`
    is that of all blocks or one for each; blocks under "selective" keep the operators whose names end as one of `kept`.
    """
    original = graph or traced(model)
    prepared, blocks = prepare(original, placed=placed, fp8=fp8, padded=padded, trains=SCHEDULES[schedule].trains)
    scaled = one_slice(rescale_batch(prepared, samples, global_batch // micro_batches), SEQUENCE, slices)
    found: dict[int | None, tuple[list[tuple[str, tuple[str | None, ...]]], list[tuple[str, StoredParameter]]]] = {}
    for index, op in enumerate(scaled.operators):
        rule = rule_of(scaled, op)
        operators, _ = found.setdefault(blocks.block_of(index), ([], []))
        operators.append((op.name, strategy_names(rule, choose(op.name, rule, mesh))))
    for parameter in scaled.parameters:
        stored = store(parameter.name, scaled.types[parameter.name].shape, mesh)
        homes = {blocks.block_of(use) for use in scaled.consumers[parameter.name]}
        found[homes.pop() if len(homes) == 1 else None][1].append((parameter.name, stored))
    words = (recomputation,) * blocks.count if isinstance(recomputation, str) else recomputation
    groups = tuple(
        Group(
            recomputation="none" if block is None else words[block],
            kept=tuple(
                op
                for op, _ in operators
                if block is not None and words[block] == "selective" and op.endswith(tuple(kept))
            ),
            name="outside" if block is None else f"block {block}",
            first_block=block or 0,
            blocks=0 if block is None else 1,
            operators=tuple(operators),
            parameters=tuple(parameters),
        )
        for block, (operators, parameters) in found.items()
    )
    return Plan(
        model=model_reference(original, name=model, sequence_length=SEQUENCE, batch=samples),
        training=Training(
            global_batch=global_batch, micro_batches=micro_batches, precision="fp32", optimizer=optimizer,
            interleave=interleave, update=Update(buckets="none", placed=placed, padded=padded), fp8=fp8,
        ),
        cluster=ClusterReference(profile="cpu", digest="", devices=mesh.size * max(1, len(stages) // virtual_stages)),
        mesh=mesh,
        stages=tuple(
            Stage(first_block=sum(stages[:index]), blocks=held) for index, held in enumerate(stages or (blocks.count,))
        ),
        virtual_stages=virtual_stages,
        slices=slices,
        schedule=schedule,
        inputs=tuple((name, load(name, scaled.types[name].shape, mesh)) for name in scaled.inputs),
        groups=groups,
        rules=written_rules(original),
        prediction=Prediction(
            step_seconds=1.0, objective_seconds=1.0, peak_bytes=1.0, capacity_bytes=1.0, model_flops=0.0,
            model_flops_utilisation=0.0, samples_per_second=0.0, time=(), memory=(),
        ),
        provenance=Provenance(planner="test", search="none", status="feasible", gap=0.0),
    )  # fmt: skip


def plan_of_one(model: str, graph: OperatorGraph, *, samples: int) -> Plan:
    """A plan for one process of a model whose graph is on an example of so many samples."""
    return make_plan(
        model,
        mesh_of(1),
        lambda name, rule, mesh: (None,),
        store_zero1,
        lambda name, shape, mesh: (REPLICATE,),
        graph=graph,
        samples=samples,
    )


def random_layout(random_: random.Random, shape: tuple[int, ...], mesh: Mesh, partial: bool = False) -> Layout:
    """Any layout that divides the shape."""
    choices = [REPLICATE, *(shard(dim) for dim in range(len(shape))), *([PARTIAL] if partial else [])]
    while True:
        layout = tuple(random_.choice(choices) for _ in mesh.axes)
        if divides(shape, layout, mesh.sizes):
            return layout


UNRUN = (FactorKind.RING,)
"""Kinds of factors that the runtime refuses to split."""


def random_plan(model: str, mesh: Mesh, seed: int, **settings: object) -> Plan:
    """Any legal strategy of every operator that the runtime executes, any legal stored layouts of every parameter, any
    layout of the inputs."""
    random_ = random.Random(seed)

    def choose(name: str, rule: Rule, mesh: Mesh) -> Strategy:
        run = [i for i, factor in enumerate(rule.factors) if factor.kind not in UNRUN]
        return random_.choice(legal_strategies(rule, mesh, [[None, *run]] * len(mesh.axes)))

    def store(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
        return random_.choice(legal_stored(shape, mesh.sizes, trainable=True))

    def load(name: str, shape: tuple[int, ...], mesh: Mesh) -> Layout:
        return random_layout(random_, shape, mesh)

    return make_plan(model, mesh, choose, store, load, **settings)  # type: ignore[arg-type]


def sample_factor(rule: Rule) -> str | None:
    """The factor that counts samples, in the operators of the language models."""
    return next((name for name in ("b", "n", "d0") if name in rule.index), None)


def on_samples(name: str, rule: Rule, mesh: Mesh) -> Strategy:
    """Data parallel: every axis splits the samples where that is legal."""
    factor = sample_factor(rule)
    strategy = tuple(None if factor is None else rule.index[factor] for _ in mesh.axes)
    return strategy if strategy_fault(rule, strategy, mesh) is None else (None,) * len(mesh.axes)


def pixels(name: str, rule: Rule, mesh: Mesh) -> Strategy:
    """Rows of images on the last axis, columns where there are none; samples on the others. Operators that take images
    as they come name their dims by numbers."""
    samples, rank = sample_factor(rule), max(len(dims) for dims in (*rule.operands, *rule.results))
    rows = [name for name in ("h@ph", "w@pw", "h", "w", f"d{rank - 2}") if name in rule.index]
    for last in (*rows, None):
        outer = (None if samples is None else rule.index[samples],) * (len(mesh.axes) - 1)
        strategy = (*outer, None if last is None else rule.index[last])
        if strategy_fault(rule, strategy, mesh) is None:
            return strategy
    return (None,) * len(mesh.axes)


def megatron(name: str, rule: Rule, mesh: Mesh) -> Strategy:
    """Samples on the first axis; heads, hidden units of the MLP and the vocabulary of a Llama on the second."""
    place, _, call = name.partition("/")
    tensor = None
    if name.endswith("rms_norm/shared"):
        tensor = "copies"
    elif call == "linear":
        tensor = "i" if place.endswith(("o_proj", "down_proj")) else "o"
    elif "v" in rule.index or "g" in rule.index:
        tensor = "v" if "v" in rule.index else "g"
    elif place.endswith("self_attn"):
        outer = call in (
            "unflatten",
            "unflatten_2",
            "unflatten_3",
            "transpose",
            "transpose_2",
            "transpose_3",
            "flatten",
        )
        tensor = "d2" if outer else "d1"
    elif place.endswith("mlp") or name in ("to", "flatten"):
        tensor = "d2"
    return named_strategy(rule, (sample_factor(rule), tensor), name)


def sequence(name: str, rule: Rule, mesh: Mesh) -> Strategy:
    """As `megatron`, with norms and sums of a Llama in pieces of the sequence on the second axis."""
    if name.endswith("rms_norm"):
        return named_strategy(rule, (sample_factor(rule), "s"), name)
    _, _, call = name.partition("/")
    between = call.startswith("add") or call == "embedding/shared"
    if between and "self_attn" not in name:
        return named_strategy(rule, (sample_factor(rule), "d1"), name)
    return megatron(name, rule, mesh)


def store_megatron(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
    """Weights cut as they are used on the tensor axis, full copies and one sum a step on the data axis."""
    cut = REPLICATE if len(shape) == 1 else shard(1) if "o_proj" in name or "down_proj" in name else shard(0)
    return StoredParameter(weight=(REPLICATE, cut), gradient=(PARTIAL, cut), state=(REPLICATE, cut))


def store_zero1(name: str, shape: tuple[int, ...], mesh: Mesh, *, whole: bool = False) -> StoredParameter:
    axes = len(mesh.axes)
    state = REPLICATE if whole else shard(0)
    return StoredParameter(weight=(REPLICATE,) * axes, gradient=(PARTIAL,) * axes, state=(state,) * axes)


def store_zero2(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
    axes = len(mesh.axes)
    return StoredParameter(weight=(REPLICATE,) * axes, gradient=(shard(0),) * axes, state=(shard(0),) * axes)


def store_divided(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
    """As `store_zero2` where that divides, else whole."""
    cut = store_zero2(name, shape, mesh)
    return cut if divides(shape, cut.gradient, mesh.sizes) else store_zero1(name, shape, mesh, whole=True)


def store_zero3(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
    cut = (shard(0),) * len(mesh.axes)
    return StoredParameter(weight=cut, gradient=cut, state=cut)


def store_outer(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
    """Cut over the first axis, copies over the others: what the others cut differently is gathered, and cut again."""
    cut = (shard(0), *(REPLICATE,) * (len(mesh.axes) - 1))
    return StoredParameter(weight=cut, gradient=cut, state=cut)


def load_samples(name: str, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """Samples on all axes where they divide, else whole."""
    everywhere = (shard(0),) * len(mesh.axes)
    return everywhere if divides(shape, everywhere, mesh.sizes) else (REPLICATE,) * len(mesh.axes)


def load_megatron(name: str, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    return (shard(0), REPLICATE)


def load_rows(name: str, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    layout = (*(shard(0),) * (len(mesh.axes) - 1), shard(2) if len(shape) == 4 else REPLICATE)
    return layout if divides(shape, layout, mesh.sizes) else (REPLICATE,) * len(mesh.axes)


def hand_plan(kind: str, model: str, mesh: Mesh, **settings: object) -> Plan:
    """'megatron', 'sequence' and 'outer' (of a Llama, on two axes), 'pixels' (of images), 'zero1', 'zero2', 'zero3' or
    'whole' (samples on all axes)."""
    choose, store, load = {
        "megatron": (megatron, store_megatron, load_megatron),
        "sequence": (sequence, store_megatron, load_megatron),
        "sequence_zero3": (sequence, store_outer, load_megatron),
        "outer": (megatron, store_outer, load_megatron),
        "pixels": (pixels, store_divided, load_rows),
        "zero1": (on_samples, store_zero1, load_samples),
        "whole": (on_samples, partial(store_zero1, whole=True), load_samples),
        "zero2": (on_samples, store_zero2, load_samples),
        "zero3": (on_samples, store_zero3, load_samples),
    }[kind]
    return make_plan(model, mesh, choose, store, load, **settings)  # type: ignore[arg-type]
