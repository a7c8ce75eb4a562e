"""DeepSeek models by name. Dimensions are those of the publications and of the released config files."""

from collections.abc import Callable, Mapping
from typing import Any

from planner.models.entry import TRACE_BATCH, Dimension, Example, ZooEntry


def _deepseek(
    source: str, layers: int, hidden: int, ffn: int, heads: int, ranks: tuple[int, int], vocab: int, seq: int,
    experts: tuple[int, int, int], shared: int, **other: int | bool | float,
) -> ZooEntry:  # fmt: skip
    """`ranks`: of queries, 0 for none, and of keys and values. `experts`: their number, how many of them a token takes,
    and the width of each; `shared`: how many more all tokens take."""
    count, chosen, width = experts
    dimensions: dict[str, Dimension] = {
        "num_layers": layers, "hidden_size": hidden, "ffn_size": ffn, "num_heads": heads, "q_rank": ranks[0],
        "kv_rank": ranks[1], "plain_size": 128, "rotary_size": 64, "value_size": 128, "vocab_size": vocab,
        "sequence_length": seq, "num_experts": count, "experts_per_token": chosen, "expert_size": width,
        "shared_size": shared * width, "dense_layers": 1, **other,
    }  # fmt: skip
    return ZooEntry(family="deepseek", dimensions=tuple(dimensions.items()), source=source)


_V2 = "DeepSeek-AI 2024 (arXiv 2405.04434), section 3.1 and appendix B, and the released config files"
_V3 = "DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2, and the released config file"
_TINY = "made for tests and demonstrations"

_TINY_ROUTING = {
    "sigmoid_scores": True, "weight_scale": 2.5, "expert_groups": 4, "chosen_groups": 2, "groups_by": 2,
    "balance_loss": 1e-4, "balance_speed": 1e-3,
}  # fmt: skip
_V2_ROUTING = {
    "normalised_weights": False, "weight_scale": 16.0, "expert_groups": 8, "chosen_groups": 3, "balance_loss": 1e-3,
}  # fmt: skip
_V3_ROUTING = {**_TINY_ROUTING, "expert_groups": 8, "chosen_groups": 4}

DEEPSEEK_MODELS: Mapping[str, ZooEntry] = {
    "deepseek-tiny": _deepseek(
        _TINY, 5, 128, 256, 8, (64, 32), 1024, 64, (8, 2, 64), 1,
        plain_size=16, rotary_size=8, value_size=16, dense_layers=2, **_TINY_ROUTING,
    ),
    "deepseek-v2-lite": _deepseek(
        _V2, 27, 2048, 10944, 16, (0, 512), 102400, 4096, (64, 6, 1408), 2,
        normalised_weights=False, balance_loss=1e-3,
    ),
    "deepseek-v2": _deepseek(_V2, 60, 5120, 12288, 128, (1536, 512), 102400, 4096, (160, 6, 1536), 2, **_V2_ROUTING),
    "deepseek-v3": _deepseek(
        _V3, 61, 7168, 18432, 128, (1536, 512), 129280, 4096, (256, 8, 2048), 1, dense_layers=3, **_V3_ROUTING
    ),
}  # fmt: skip


def _build(dimensions: dict[str, Any]) -> Example:
    """Tokens B S; labels with one more column for every token that is predicted beyond the next."""
    import torch

    from planner.models.deepseek import Deepseek, DeepseekConfig

    config = DeepseekConfig(**dimensions)
    tokens, vocabulary = torch.zeros(TRACE_BATCH, config.sequence_length, dtype=torch.int64), config.vocab_size
    labels = torch.zeros(TRACE_BATCH, config.sequence_length + config.predicted_tokens, dtype=torch.int64)
    return Example(module=Deepseek(config), args=(tokens, labels), bounds=(vocabulary, vocabulary))


DEEPSEEK_FAMILIES: Mapping[str, Callable[[dict[str, Any]], Example]] = {"deepseek": _build}
