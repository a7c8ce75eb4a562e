"""Models by name, those of a Hugging Face `config.json` by its path, and the user's own by `package.module:factory`.

Dimensions are those of the published configurations: Llama 2 (Touvron et al. 2023, table 1 and the released config
files), Llama 3.1 (Grattafiori et al. 2024, table 3), GPT-2 (Radford et al. 2019 and the released checkpoints), GPT-3
(Brown et al. 2020, table 2.1), BERT (Devlin et al. 2019, section 3), T5 (Raffel et al. 2020, section 3.7, and the
released config files), Mixtral (Jiang et al. 2024 and the released config files), Qwen3 (Yang et al. 2025 and the
released config files). DeepSeek models are in `deepseek_models.py`, those of images in `images.py`, those of clicks in
`clicks.py`.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from planner.errors import ModelError, unknown_name
from planner.models.clicks import CLICK_FAMILIES, CLICK_MODELS
from planner.models.deepseek_models import DEEPSEEK_FAMILIES, DEEPSEEK_MODELS
from planner.models.entry import TRACE_BATCH, Dimension, Example, ZooEntry
from planner.models.huggingface import from_config, is_config
from planner.models.images import IMAGE_FAMILIES, IMAGE_MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A module and example inputs on which calling it gives the loss.

    `sequence_length` is None where the model has no such thing. `bounds` has for each example tensor the number that
    its integers stay below, None where it is not known or the tensor has no integers.
    """

    reference: str
    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch: int
    sequence_length: int | None
    bounds: tuple[int | None, ...]


def _llama(
    source: str, layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int, seq: int, theta: float = 5e5
) -> ZooEntry:
    dimensions: dict[str, Dimension] = {
        "num_layers": layers, "hidden_size": hidden, "ffn_size": ffn, "num_heads": heads, "num_kv_heads": kv,
        "vocab_size": vocab, "sequence_length": seq, "rope_theta": theta,
    }  # fmt: skip
    return ZooEntry(family="llama", dimensions=tuple(dimensions.items()), source=source)


def _mixture(
    source: str, layers: int, hidden: int, heads: int, kv: int, vocab: int, seq: int, experts: tuple[int, int, int],
    **other: int | bool | float,
) -> ZooEntry:  # fmt: skip
    """`experts`: how many, how many of them a token takes, and the width of each."""
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
_MIXTRAL = "Jiang et al. 2024 (arXiv 2401.04088), table 1, and the released config files"
_QWEN3 = "Yang et al. 2025 (arXiv 2505.09388), table 2, and the released config files"
_GPT2 = "Radford et al. 2019"
_GPT3 = "Brown et al. 2020 (arXiv 2005.14165), table 2.1"
_BERT = "Devlin et al. 2019 (arXiv 1810.04805), section 3"
_T5 = "Raffel et al. 2020 (arXiv 1910.10683), section 3.7, and the released config files"
_TINY = "made for tests and demonstrations"

ZOO: Mapping[str, ZooEntry] = {
    "llama-tiny": _llama(_TINY, 4, 256, 512, 8, 4, 1024, 128),
    "llama2-7b": _llama(_LLAMA2, 32, 4096, 11008, 32, 32, 32000, 4096, 1e4),
    "llama2-13b": _llama(_LLAMA2, 40, 5120, 13824, 40, 40, 32000, 4096, 1e4),
    "llama2-70b": _llama(_LLAMA2, 80, 8192, 28672, 64, 8, 32000, 4096, 1e4),
    "llama8b": _llama(_LLAMA3, 32, 4096, 14336, 32, 8, 128256, 8192),
    "llama70b": _llama(_LLAMA3, 80, 8192, 28672, 64, 8, 128256, 8192),
    "llama405b": _llama(_LLAMA3, 126, 16384, 53248, 128, 8, 128256, 8192),
    "mixtral-tiny": _mixture(_TINY, 4, 256, 8, 4, 1024, 128, (8, 2, 256)),
    "mixtral-8x7b": _mixture(_MIXTRAL, 32, 4096, 32, 8, 32000, 32768, (8, 2, 14336)),
    "mixtral-8x22b": _mixture(_MIXTRAL, 56, 6144, 48, 8, 32768, 65536, (8, 2, 16384)),
    "qwen3-30b-a3b": _mixture(_QWEN3, 48, 2048, 32, 4, 151936, 4096, (128, 8, 768), head_size=128, qk_norm=True),
    "qwen3-235b-a22b": _mixture(_QWEN3, 94, 4096, 64, 4, 151936, 4096, (128, 8, 1536), head_size=128, qk_norm=True),
    "gpt-tiny": _gpt(_TINY, 4, 256, 8, 1024, 128),
    "gpt2": _gpt(_GPT2, 12, 768, 12, 50257, 1024),
    "gpt2-medium": _gpt(_GPT2, 24, 1024, 16, 50257, 1024),
    "gpt2-large": _gpt(_GPT2, 36, 1280, 20, 50257, 1024),
    "gpt2-xl": _gpt(_GPT2, 48, 1600, 25, 50257, 1024),
    "gpt3-1.3b": _gpt(_GPT3, 24, 2048, 16, 50257, 2048),
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
    **DEEPSEEK_MODELS,
    **IMAGE_MODELS,
    **CLICK_MODELS,
}


def build_model(reference: str, *, dtype: str, device: str = "meta", sequence_length: int | None = None) -> BuiltModel:
    """The module that `reference` names, with example inputs.

    `reference` is a name of the zoo, a path to a `config.json` of Hugging Face (or to a folder with one), or
    `package.module:factory` (on the import path or in the current folder); the factory returns `(module, args)` or
    `(module, args, kwargs)`. Floating point parameters of a zoo model get `dtype`
    ("bfloat16", ...); a module of the user's is converted too. On "meta" nothing is allocated. Raises ModelError.
    """
    if ":" in reference:
        if sequence_length is not None:
            raise ModelError(
                f"--seq-len does not apply to {reference}: its factory fixes the shapes of the example inputs"
            )
        return _from_factory(reference, dtype=dtype, device=device)
    if reference not in ZOO and is_config(reference):
        return _from_config(reference, dtype=dtype, device=device, sequence_length=sequence_length)
    return _from_zoo(reference, dtype=dtype, device=device, sequence_length=sequence_length)


def _from_zoo(name: str, *, dtype: str, device: str, sequence_length: int | None) -> BuiltModel:
    if name not in ZOO:
        raise ModelError(unknown_name("model", name, ZOO) + _OTHER_MODELS)
    import torch

    entry = ZOO[name]
    dimensions = dict(entry.dimensions)
    sequence = _sequence(name, entry, sequence_length)
    if sequence is not None:
        dimensions["sequence_length"] = sequence
    with torch.device(device):
        example = _FAMILIES[entry.family](dimensions)
    floating = getattr(torch, dtype)
    return BuiltModel(
        reference=name,
        module=example.module.to(floating),
        args=_converted(example.args, floating),
        kwargs={},
        batch=TRACE_BATCH,
        sequence_length=sequence,
        bounds=example.bounds,
    )


_OTHER_MODELS = " Your own model: --model package.module:factory; of Hugging Face: --model path/to/config.json."
_LEARNED_POSITIONS = frozenset({"bert", "gpt"})


def _from_config(reference: str, *, dtype: str, device: str, sequence_length: int | None) -> BuiltModel:
    import torch

    made = from_config(reference, batch=TRACE_BATCH, device=device, sequence_length=sequence_length)
    floating = getattr(torch, dtype)
    inputs = _converted(made.inputs, floating)
    return BuiltModel(
        reference=reference,
        module=made.module.to(floating),
        args=tuple(inputs.values()) if made.positional else (),
        kwargs={} if made.positional else inputs,
        batch=TRACE_BATCH,
        sequence_length=made.sequence_length,
        bounds=made.bounds,
    )


def _sequence(name: str, entry: ZooEntry, wanted: int | None) -> int | None:
    """Tokens of a sample: as many as wanted, or as published; None for a model without sequences."""
    if wanted is None:
        return entry.sequence_length
    if entry.sequence_length is None:
        raise ModelError(f"--seq-len {wanted} does not apply to {name}: its samples are no sequences of tokens")
    if wanted < 1:
        raise ModelError(f"--seq-len {wanted}: a sequence has 1 token or more")
    if entry.family in _LEARNED_POSITIONS and wanted > entry.sequence_length:
        raise ModelError(
            f"{name} has learned positions for {entry.sequence_length} tokens; --seq-len {wanted} is longer"
        )
    return wanted


def _build_llama(dimensions: dict[str, Any]) -> Example:
    from planner.models.llama import Llama, LlamaConfig

    return _decoder(Llama(LlamaConfig(**dimensions)), dimensions)


def _build_gpt(dimensions: dict[str, Any]) -> Example:
    from planner.models.gpt import GPT, GPTConfig

    return _decoder(GPT(GPTConfig(**dimensions)), dimensions)


def _build_bert(dimensions: dict[str, Any]) -> Example:
    """Tokens, their types, which are no padding, and labels, all B S."""
    from planner.models.bert import Bert, BertConfig

    (tokens, types, labels), vocabulary = _integers(3, dimensions), dimensions["vocab_size"]
    args = (tokens, types, _padded(dimensions), labels)
    return Example(module=Bert(BertConfig(**dimensions)), args=args, bounds=(vocabulary, 2, None, vocabulary))


def _build_t5(dimensions: dict[str, Any]) -> Example:
    """Tokens of the encoder, which are no padding, tokens of the decoder and labels, all B S."""
    from planner.models.t5 import T5, T5Config

    (tokens, decoded, labels), vocabulary = _integers(3, dimensions), dimensions["vocab_size"]
    args = (tokens, _padded(dimensions), decoded, labels)
    return Example(module=T5(T5Config(**dimensions)), args=args, bounds=(vocabulary, None, vocabulary, vocabulary))


def _padded(dimensions: dict[str, Any]) -> Any:
    """A mask of which an eighth is padding."""
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


_FAMILIES: Mapping[str, Callable[[dict[str, Any]], Example]] = {
    "llama": _build_llama,
    "bert": _build_bert,
    "gpt": _build_gpt,
    "t5": _build_t5,
    **DEEPSEEK_FAMILIES,
    **IMAGE_FAMILIES,
    **CLICK_FAMILIES,
}


def _converted(tree: Any, floating: Any) -> Any:
    """Arguments whose floating point tensors have this dtype."""
    import torch
    from torch.utils import _pytree as pytree

    def converted(leaf: Any) -> Any:
        return leaf.to(floating) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(converted, tree)


def _from_factory(reference: str, *, dtype: str, device: str) -> BuiltModel:
    import torch
    from torch.utils import _pytree as pytree

    factory = _load_factory(reference)
    try:
        with torch.device(device):
            made = factory()
    except Exception as error:
        raise ModelError(f"the factory {reference} raised {type(error).__name__}: {error}") from error
    parts = made if isinstance(made, tuple) else (made,)
    kinds = (torch.nn.Module, tuple | list, Mapping)
    if len(parts) not in (2, 3) or not all(isinstance(part, kind) for part, kind in zip(parts, kinds, strict=False)):
        raise ModelError(
            f"the factory {reference} must return (module, args) or (module, args, kwargs); it returned {_kinds(made)}"
        )
    floating = getattr(torch, dtype)
    args, kwargs = _converted((tuple(parts[1]), dict(parts[2]) if len(parts) == 3 else {}), floating)
    every = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    tensors = [tensor for tensor in every if tensor.dim()]
    if not tensors:
        raise ModelError(f"the factory {reference} returned no example tensor with a batch dim")
    return BuiltModel(
        reference=reference,
        module=parts[0].to(floating),
        args=args,
        kwargs=kwargs,
        batch=int(tensors[0].shape[0]),
        sequence_length=None,
        bounds=(None,) * len(every),
    )


def _load_factory(reference: str) -> Callable[[], Any]:
    path, _, name = reference.partition(":")
    if "/" in path or path.endswith(".py"):
        raise ModelError(f"--model {reference} names a file; write package.module:factory, with dots and without .py")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(path)
    except Exception as error:
        raise ModelError(
            f"cannot import '{path}' of --model {reference}: {type(error).__name__}: {error}; it is looked for on "
            "the import"
            f" path and in {here}"
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ModelError(unknown_name(f"factory in {path}", name, public))
    return partial(factory)


def _kinds(made: Any) -> str:
    return f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__


def with_dimensions(entry: ZooEntry, **changes: Dimension) -> ZooEntry:
    """A variant of a zoo entry, for tests and studies."""
    return replace(entry, dimensions=tuple({**dict(entry.dimensions), **changes}.items()))
