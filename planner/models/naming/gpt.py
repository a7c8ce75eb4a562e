"""GPT-2's names: `GPT2LMHeadModel`, whose linear layers have their inputs first, and queries, keys and values of all
heads one after the other."""

from collections.abc import Iterator
from typing import Any

from planner.models.gpt import GPTConfig
from planner.models.naming.parts import Built, Naming, Part, rows, transposed
from planner.models.naming.rules import parts_of, rule, the_other_way_round


def gpt_naming(config: GPTConfig, built: Built) -> Naming:
    """What transformers calls the tensors of a GPT."""

    def fused(ours: str, theirs: str, shape: tuple[int, ...]) -> Iterator[Part]:
        size = config.hidden_size // config.num_heads
        for head in range(config.num_heads):
            for kind in range(3):
                at, there = (3 * head + kind) * size, kind * config.hidden_size + head * size
                yield transposed(rows(ours, theirs, shape, at, there, size))

    block = r"h\.(\d+)\."
    parts, _ = parts_of(
        built,
        (
            rule(r"(wte|wpe|ln_f)\.(\w+)", r"transformer.\1.\2"),
            rule(r"lm_head\.weight", "lm_head.weight"),
            rule(block + r"(ln_[12]\.\w+)", r"transformer.h.\1.\2"),
            rule(block + r"c_attn\.(\w+)", r"transformer.h.\1.attn.c_attn.\2", fused),
            rule(block + r"attn_proj\.(\w+)", r"transformer.h.\1.attn.c_proj.\2", the_other_way_round),
            rule(block + r"c_fc\.(\w+)", r"transformer.h.\1.mlp.c_fc.\2", the_other_way_round),
            rule(block + r"mlp_proj\.(\w+)", r"transformer.h.\1.mlp.c_proj.\2", the_other_way_round),
        ),
    )
    return Naming(
        parts=parts,
        config=_config(config),
        model_types=("gpt2",),
        base="transformer.",
        unused=(r".*\.attn\.(masked_)?bias",),
    )


def _config(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "layer_norm_epsilon": config.norm_epsilon,
        "n_embd": config.hidden_size,
        "n_head": config.num_heads,
        "n_inner": config.ffn_size,
        "n_layer": config.num_layers,
        "n_positions": config.sequence_length,
        "tie_word_embeddings": config.tied_embeddings,
        "vocab_size": config.vocab_size,
    }
