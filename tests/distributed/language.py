"""Language models and what users write, under random plans against themselves unsharded. Used inside the worker
processes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from planner.graph.trace import trace
from planner.graph.tracing.returned import loss_in
from planner.models.bert import Bert, BertConfig
from planner.models.huggingface.from_config import from_config
from planner.models.t5 import T5, T5Config
from runtime.step.training_step import parallelize
from tests.distributed import plans
from tests.distributed.tasks import CPU, known, relative

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BATCH, SEQUENCE, VOCABULARY = plans.BATCH, plans.SEQUENCE, plans.VOCABULARY
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


class Scores(nn.Module):
    """Tied weights, several inputs by name, some of them nested or unused, and a dict with the loss and more."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)
        self.head.weight = self.words.weight
        self.mix = nn.Linear(16, 16)
        self.register_buffer("places", torch.arange(SEQUENCE) / SEQUENCE)

    def forward(
        self, pair: tuple[torch.Tensor, Any], *, weight: torch.Tensor, unused: Any, labels: Any = None
    ) -> dict[str, torch.Tensor]:
        tokens, seen = pair[0], pair[1]["mask"].bool()
        hidden = torch.tanh(self.mix(self.words(tokens)) + self.places[:, None]) * weight[:, None, None]
        causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
        mask = seen[:, None, None, :].logical_and(causal).logical_or(torch.eye(SEQUENCE, dtype=torch.bool))
        heads = hidden.unflatten(-1, (4, 4)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).flatten(2)
        logits = self.head(mixed + hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        near = torch.maximum(hidden, hidden.roll(1, -1)).clamp(-0.4, 0.4).square().mean()
        chosen = logits.gather(-1, labels[..., None]).mean() + self.words.weight.index_select(0, tokens[:, 0]).mean()
        return {"far": near * 2, "loss": loss + 0.3 * near + 0.1 * chosen}


def tokens(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)


MASK = (torch.arange(SEQUENCE) < torch.tensor([8, 5, 7, 2])[:, None]).contiguous()
LABELS = tokens(1).masked_fill(~MASK, -100)
BERT = BertConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
T5_CONFIG = T5Config(
    num_layers=2, hidden_size=32, num_heads=4, head_size=8, ffn_size=32, vocab_size=VOCABULARY,
    sequence_length=SEQUENCE, buckets=8, farthest=8,
)  # fmt: skip
MODELS: Mapping[str, tuple[Callable[[], nn.Module], Call]] = {
    "bert": (lambda: Bert(BERT), ((tokens(0), tokens(2) % 2, MASK, LABELS), {})),
    "t5": (lambda: T5(T5_CONFIG), ((tokens(0), MASK, tokens(2), tokens(1)), {})),
    "user": (
        Scores,
        (
            ((tokens(0), {"mask": MASK.long()}),),
            {"labels": tokens(1), "unused": torch.ones(BATCH), "weight": torch.linspace(1, 2, BATCH)},
        ),
    ),
}


def build(name: str) -> tuple[nn.Module, Call]:
    torch.manual_seed(1)
    if name in MODELS:
        made, call = MODELS[name]
        return made(), call
    length = None if name == "vit" else SEQUENCE
    found = from_config(str(CONFIGS / name), batch=BATCH, device="cpu", sequence_length=length)
    given = {
        "input_ids": tokens(0),
        "attention_mask": MASK.long(),
        "decoder_input_ids": tokens(2),
        "labels": tokens(1)[:, 0] % 2 if name == "vit" else LABELS,
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(3)),
    }
    return found.module, ((), {key: given[key] for key in found.inputs})


def parity(name: str, sizes: tuple[int, ...], seeds: list[int], recomputation: str) -> list[float]:
    """The worst error of loss and gradients under each random plan."""
    module, (args, kwargs) = build(name)
    loss = loss_in(module(*args, **kwargs))
    loss.backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    graph = trace(build(name)[0], args, kwargs)
    errors = []
    for seed in seeds:
        plan = plans.random_plan(name, plans.mesh_of(*sizes), seed, graph=graph, recomputation=recomputation)
        step = parallelize(build(name)[0], plan, traced=graph, device=CPU, known=known())
        found = float(step.accumulate(*args, **kwargs))
        whole = step.full_gradients()
        assert gradients.keys() <= whole.keys()
        errors.append(
            max(abs(found - float(loss)) / abs(float(loss)), *(relative(whole[n], g) for n, g in gradients.items()))
        )
    return errors
