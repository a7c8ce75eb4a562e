"""T5's names: `T5ForConditionalGeneration`, whose first blocks have the biases of all."""

from typing import Any

from planner.models.naming.parts import Built, Naming
from planner.models.naming.rules import parts_of, rule
from planner.models.t5 import T5Config

_ENCODER, _DECODER = r"encoder\.(\d+)\.", r"decoder\.(\d+)\."
_RULES = (
    rule(r"shared\.weight", "shared.weight"),
    rule(r"(encoder|decoder)_bias\.bias\.weight", r"\1.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    rule(r"(encoder|decoder)_norm\.weight", r"\1.final_layer_norm.weight"),
    rule(r"(encoder|decoder)\.(\d+)\.attention_norm\.weight", r"\1.block.\2.layer.0.layer_norm.weight"),
    rule(r"(encoder|decoder)\.(\d+)\.attention\.(\w)\.weight", r"\1.block.\2.layer.0.SelfAttention.\3.weight"),
    rule(_DECODER + r"cross_norm\.weight", r"decoder.block.\1.layer.1.layer_norm.weight"),
    rule(_DECODER + r"cross\.(\w)\.weight", r"decoder.block.\1.layer.1.EncDecAttention.\2.weight"),
    rule(_ENCODER + r"mlp_norm\.weight", r"encoder.block.\1.layer.1.layer_norm.weight"),
    rule(_ENCODER + r"mlp\.(w[io])\.weight", r"encoder.block.\1.layer.1.DenseReluDense.\2.weight"),
    rule(_DECODER + r"mlp_norm\.weight", r"decoder.block.\1.layer.2.layer_norm.weight"),
    rule(_DECODER + r"mlp\.(w[io])\.weight", r"decoder.block.\1.layer.2.DenseReluDense.\2.weight"),
)


def t5_naming(config: T5Config, built: Built) -> Naming:
    """What transformers calls the tensors of a T5."""
    parts, _ = parts_of(built, _RULES)
    return Naming(
        parts=parts,
        config=_config(config),
        model_types=("t5",),
        unused=(
            r"(encoder|decoder)\.embed_tokens\.weight",
            r"lm_head\.weight",
            r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        ),
    )


def _config(config: T5Config) -> dict[str, Any]:
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_ff": config.ffn_size,
        "d_kv": config.head_size,
        "d_model": config.hidden_size,
        "dropout_rate": 0.0,
        "feed_forward_proj": "relu",
        "is_encoder_decoder": True,
        "layer_norm_epsilon": config.norm_epsilon,
        "num_decoder_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_layers": config.num_layers,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "relative_attention_max_distance": config.farthest,
        "relative_attention_num_buckets": config.buckets,
        "tie_word_embeddings": True,
        "vocab_size": config.vocab_size,
    }
