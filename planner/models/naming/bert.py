"""BERT's names: `BertForMaskedLM`."""

from typing import Any

from planner.models.bert import BertConfig
from planner.models.naming.parts import Built, Naming
from planner.models.naming.rules import parts_of, rule

_BLOCK = r"layer\.(\d+)\."
_THERE = r"bert.encoder.layer.\1."
_RULES = (
    rule(r"((?:word|position|token_type)_embeddings\.weight)", r"bert.embeddings.\1"),
    rule(r"embedding_norm\.(\w+)", r"bert.embeddings.LayerNorm.\1"),
    rule(_BLOCK + r"((?:query|key|value)\.\w+)", _THERE + r"attention.self.\2"),
    rule(_BLOCK + r"attention_output\.(\w+)", _THERE + r"attention.output.dense.\2"),
    rule(_BLOCK + r"attention_norm\.(\w+)", _THERE + r"attention.output.LayerNorm.\2"),
    rule(_BLOCK + r"(intermediate|output)\.(\w+)", _THERE + r"\2.dense.\3"),
    rule(_BLOCK + r"output_norm\.(\w+)", _THERE + r"output.LayerNorm.\2"),
    rule(r"transform\.(\w+)", r"cls.predictions.transform.dense.\1"),
    rule(r"transform_norm\.(\w+)", r"cls.predictions.transform.LayerNorm.\1"),
    rule(r"decoder\.bias", "cls.predictions.bias"),
)


def bert_naming(config: BertConfig, built: Built) -> Naming:
    """What transformers calls the tensors of a BERT."""
    parts, _ = parts_of(built, _RULES)
    return Naming(
        parts=parts,
        config=_config(config),
        model_types=("bert",),
        base="bert.",
        unused=(r"cls\.predictions\.decoder\..*", r"bert\.pooler\..*", r"cls\.seq_relationship\..*", r".*position_ids"),
    )


def _config(config: BertConfig) -> dict[str, Any]:
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "layer_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.sequence_length,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": True,
        "type_vocab_size": config.token_types,
        "vocab_size": config.vocab_size,
    }
