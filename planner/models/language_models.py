"""Models of language by name: decoders, encoders, and both.

Dimensions are those of the published configurations: Llama 2 (Touvron et al. 2023, table 1 and the released config
files), Llama 3.1 (Grattafiori et al. 2024, table 3), Llama 3.2 (its model card), Mistral and Mixtral (Jiang et al.
2023, 2024), Gemma (Gemma Team 2024), Qwen2.5 and Qwen3 (Yang et al. 2024, 2025), GPT-2 (Radford et al. 2019 and the
released checkpoints), GPT-3 (Brown et al. 2020, table 2.1; 1.3B and 13B with the heads and the width that the others
suggest), BERT (Devlin et al. 2019, section 3), T5 (Raffel et al. 2020, section 3.7, and the released config files).
"""

from collections.abc import Callable, Mapping
from typing import Any

from planner.models.entry import TRACE_BATCH, Dimension, Example, ZooEntry


def _llama(
    source: str, layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int, seq: int, theta: float = 5e5,
    **other: int | bool | float,
) -> ZooEntry:  # fmt: skip
    dimensions: dict[str, Dimension] = {
        "num_layers": layers, "hidden_size": hidden, "ffn_size": ffn, "num_heads": heads, "num_kv_heads": kv,
        "vocab_size": vocab, "sequence_length": seq, "rope_theta": theta, **other,
    }  # fmt: skip
    return ZooEntry(family="llama", dimensions=tuple(dimensions.items()), source=source)


def _gemma(layers: int, hidden: int, ffn: int, heads: int, kv: int) -> ZooEntry:
    return _llama(
        _GEMMA, layers, hidden, ffn, heads, kv, 256000, 8192, 1e4, head_size=256, norm_epsilon=1e-6, gelu=True,
        scaled_embeddings=True, tied_embeddings=True,
    )  # fmt: skip


def _qwen25(layers: int, hidden: int, ffn: int, heads: int, kv: int, *, tied_embeddings: bool = False) -> ZooEntry:
    """The vocabulary of the larger models is padded."""
    vocabulary = 152064 if hidden > 2048 else 151936
    return _llama(
        _QWEN25, layers, hidden, ffn, heads, kv, vocabulary, 4096, 1e6, qkv_bias=True, norm_epsilon=1e-6,
        tied_embeddings=tied_embeddings,
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, *, tied_embeddings: bool = False) -> ZooEntry:
    return _llama(
        _QWEN3, layers, hidden, ffn, heads, 8, 151936, 4096, 1e6, head_size=128, qk_norm=True, norm_epsilon=1e-6,
        tied_embeddings=tied_embeddings,
    )  # fmt: skip


def _mixture(
    source: str, layers: int, hidden: int, heads: int, kv: int, vocab: int, seq: int, experts: tuple[int, int, int],
    **other: int | bool | float,
) -> ZooEntry:  # fmt: skip
    """`experts`: their number, how many of them a token takes, and the width of each."""
    count, chosen, width = experts
    dimensions: dict[str, Dimension] = {
        "num_layers": layers, "hidden_size": hidden, "ffn_size": width, "num_heads": heads, "num_kv_heads": kv,
        "vocab_size": vocab, "sequence_length": seq, "rope_theta": 1e6, "num_experts": count,
        "experts_per_token": chosen, "expert_size": width, **other,
    }  # fmt: skip
    return ZooEntry(family="llama", dimensions=tuple(dimensions.items()), source=source)


def _gpt(source: str, layers: int, hidden: int, heads: int, vocab: int, seq: int, tied: bool = True) -> ZooEntry:
    dimensions: dict[str, Dimension] = {
        "num_layers": layers, "hidden_size": hidden, "num_heads": heads, "vocab_size": vocab, "sequence_length": seq,
        "tied_embeddings": tied,
    }  # fmt: skip
    return ZooEntry(family="gpt", dimensions=tuple(dimensions.items()), source=source)


def _bert(source: str, layers: int, hidden: int, heads: int, vocab: int, seq: int) -> ZooEntry:
    dimensions: dict[str, Dimension] = {
        "num_layers": layers, "hidden_size": hidden, "num_heads": heads, "vocab_size": vocab, "sequence_length": seq,
    }  # fmt: skip
    return ZooEntry(family="bert", dimensions=tuple(dimensions.items()), source=source)


def _t5(source: str, layers: int, hidden: int, ffn: int, heads: int, head: int, vocab: int, seq: int) -> ZooEntry:
    dimensions: dict[str, Dimension] = {
        "num_layers": layers, "hidden_size": hidden, "ffn_size": ffn, "num_heads": heads, "head_size": head,
        "vocab_size": vocab, "sequence_length": seq,
    }  # fmt: skip
    return ZooEntry(family="t5", dimensions=tuple(dimensions.items()), source=source)


_LLAMA2 = "Touvron et al. 2023 (arXiv 2307.09288)"
_LLAMA3 = "Grattafiori et al. 2024 (arXiv 2407.21783), table 3"
_LLAMA32 = "Llama 3.2 model card (Meta, September 2024) and the released config files"
_MISTRAL = "Jiang et al. 2023 (arXiv 2310.06825), table 1, and the released config file of version 0.3"
_GEMMA = "Gemma Team 2024 (arXiv 2403.08295), table 1, and the released config files"
_QWEN25 = "Yang et al. 2024 (arXiv 2412.15115), table 1, and the released config files"
_MIXTRAL = "Jiang et al. 2024 (arXiv 2401.04088), table 1, and the released config files"
_QWEN3 = "Yang et al. 2025 (arXiv 2505.09388), tables 1 and 2, and the released config files"
_GPT2 = "Radford et al. 2019"
_GPT3 = "Brown et al. 2020 (arXiv 2005.14165), table 2.1"
_BERT = "Devlin et al. 2019 (arXiv 1810.04805), section 3"
_T5 = "Raffel et al. 2020 (arXiv 1910.10683), section 3.7, and the released config files"
_TINY = "made for tests and demonstrations"

LANGUAGE_MODELS: Mapping[str, ZooEntry] = {
    "llama-tiny": _llama(_TINY, 4, 256, 512, 8, 4, 1024, 128),
    "llama2-7b": _llama(_LLAMA2, 32, 4096, 11008, 32, 32, 32000, 4096, 1e4),
    "llama2-13b": _llama(_LLAMA2, 40, 5120, 13824, 40, 40, 32000, 4096, 1e4),
    "llama2-70b": _llama(_LLAMA2, 80, 8192, 28672, 64, 8, 32000, 4096, 1e4),
    "llama8b": _llama(_LLAMA3, 32, 4096, 14336, 32, 8, 128256, 8192),
    "llama70b": _llama(_LLAMA3, 80, 8192, 28672, 64, 8, 128256, 8192),
    "llama405b": _llama(_LLAMA3, 126, 16384, 53248, 128, 8, 128256, 8192),
    "llama3.2-1b": _llama(_LLAMA32, 16, 2048, 8192, 32, 8, 128256, 8192, tied_embeddings=True),
    "llama3.2-3b": _llama(_LLAMA32, 28, 3072, 8192, 24, 8, 128256, 8192, tied_embeddings=True),
    "mistral-7b": _llama(_MISTRAL, 32, 4096, 14336, 32, 8, 32768, 32768, 1e6),
    "gemma-2b": _gemma(18, 2048, 16384, 8, 1),
    "gemma-7b": _gemma(28, 3072, 24576, 16, 16),
    "qwen2.5-0.5b": _qwen25(24, 896, 4864, 14, 2, tied_embeddings=True),
    "qwen2.5-1.5b": _qwen25(28, 1536, 8960, 12, 2, tied_embeddings=True),
    "qwen2.5-3b": _qwen25(36, 2048, 11008, 16, 2, tied_embeddings=True),
    "qwen2.5-7b": _qwen25(28, 3584, 18944, 28, 4),
    "qwen2.5-14b": _qwen25(48, 5120, 13824, 40, 8),
    "qwen2.5-32b": _qwen25(64, 5120, 27648, 40, 8),
    "qwen2.5-72b": _qwen25(80, 8192, 29568, 64, 8),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied_embeddings=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied_embeddings=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    "qwen3-30b-a3b": _mixture(_QWEN3, 48, 2048, 32, 4, 151936, 4096, (128, 8, 768), head_size=128, qk_norm=True),
    "qwen3-235b-a22b": _mixture(_QWEN3, 94, 4096, 64, 4, 151936, 4096, (128, 8, 1536), head_size=128, qk_norm=True),
    "mixtral-tiny": _mixture(_TINY, 4, 256, 8, 4, 1024, 128, (8, 2, 256)),
    "mixtral-8x7b": _mixture(_MIXTRAL, 32, 4096, 32, 8, 32000, 32768, (8, 2, 14336)),
    "mixtral-8x22b": _mixture(_MIXTRAL, 56, 6144, 48, 8, 32768, 65536, (8, 2, 16384)),
    "gpt-tiny": _gpt(_TINY, 4, 256, 8, 1024, 128),
    "gpt2": _gpt(_GPT2, 12, 768, 12, 50257, 1024),
    "gpt2-medium": _gpt(_GPT2, 24, 1024, 16, 50257, 1024),
    "gpt2-large": _gpt(_GPT2, 36, 1280, 20, 50257, 1024),
    "gpt2-xl": _gpt(_GPT2, 48, 1600, 25, 50257, 1024),
    "gpt3-125m": _gpt(_GPT3, 12, 768, 12, 50257, 2048),
    "gpt3-350m": _gpt(_GPT3, 24, 1024, 16, 50257, 2048),
    "gpt3-760m": _gpt(_GPT3, 24, 1536, 16, 50257, 2048),
    "gpt3-1.3b": _gpt(_GPT3, 24, 2048, 16, 50257, 2048),
    "gpt3-2.7b": _gpt(_GPT3, 32, 2560, 32, 50257, 2048),
    "gpt3-6.7b": _gpt(_GPT3, 32, 4096, 32, 50257, 2048),
    "gpt3-13b": _gpt(_GPT3, 40, 5120, 40, 50257, 2048),
    "gpt3-175b": _gpt(_GPT3, 96, 12288, 96, 50257, 2048),
    "bert-tiny": _bert(_TINY, 4, 256, 8, 1024, 128),
    "bert-base": _bert(_BERT, 12, 768, 12, 30522, 512),
    "bert-large": _bert(_BERT, 24, 1024, 16, 30522, 512),
    "t5-tiny": _t5(_TINY, 3, 128, 256, 8, 16, 1024, 64),
    "t5-small": _t5(_T5, 6, 512, 2048, 8, 64, 32128, 512),
    "t5-base": _t5(_T5, 12, 768, 3072, 12, 64, 32128, 512),
    "t5-large": _t5(_T5, 24, 1024, 4096, 16, 64, 32128, 512),
    "t5-11b": _t5(_T5, 24, 1024, 65536, 128, 128, 32128, 512),
}


def _build_llama(dimensions: dict[str, Any]) -> Example:
    from planner.models.llama import Llama, LlamaConfig

    return _decoder(Llama(LlamaConfig(**dimensions)), dimensions)


def _build_gpt(dimensions: dict[str, Any]) -> Example:
    from planner.models.gpt import GPT, GPTConfig

    return _decoder(GPT(GPTConfig(**dimensions)), dimensions)


def _build_bert(dimensions: dict[str, Any]) -> Example:
    """Tokens, their types, the mask of tokens that are no padding, and labels, all B S."""
    from planner.models.bert import Bert, BertConfig

    (tokens, types, labels), vocabulary = _integers(3, dimensions), dimensions["vocab_size"]
    args = (tokens, types, _padded(dimensions), labels)
    return Example(module=Bert(BertConfig(**dimensions)), args=args, bounds=(vocabulary, 2, None, vocabulary))


def _build_t5(dimensions: dict[str, Any]) -> Example:
    """Tokens of the encoder, the mask of those that are no padding, tokens of the decoder and labels, all B S."""
    from planner.models.t5 import T5, T5Config

    (tokens, decoded, labels), vocabulary = _integers(3, dimensions), dimensions["vocab_size"]
    args = (tokens, _padded(dimensions), decoded, labels)
    return Example(module=T5(T5Config(**dimensions)), args=args, bounds=(vocabulary, None, vocabulary, vocabulary))


def _padded(dimensions: dict[str, Any]) -> Any:
    """A mask in which an eighth is padding."""
    import torch

    sequence = dimensions["sequence_length"]
    return (torch.arange(sequence) < max(1, sequence - sequence // 8)).expand(TRACE_BATCH, -1).contiguous()


def _integers(count: int, dimensions: dict[str, Any]) -> list[Any]:
    import torch

    return [torch.zeros(TRACE_BATCH, dimensions["sequence_length"], dtype=torch.int64) for _ in range(count)]


def _decoder(module: Any, dimensions: dict[str, Any]) -> Example:
    """Tokens and labels, both B S."""
    (tokens, labels), vocabulary = _integers(2, dimensions), dimensions["vocab_size"]
    return Example(module=module, args=(tokens, labels), bounds=(vocabulary, vocabulary))


LANGUAGE_FAMILIES: Mapping[str, Callable[[dict[str, Any]], Example]] = {
    "bert": _build_bert,
    "gpt": _build_gpt,
    "llama": _build_llama,
    "t5": _build_t5,
}
