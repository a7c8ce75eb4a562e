"""DeepSeek's names: `DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM`. They rotate neighbours where we rotate halves:
row i of a half is row 2 i, or 2 i + 1, there. A bias that chooses experts is a number of steps here, their sum there.
"""

from collections.abc import Iterator
from typing import Any

from planner.models.deepseek import DeepseekConfig
from planner.models.naming.parts import Built, Naming, Part, Value, rows, whole
from planner.models.naming.refusal import refuse
from planner.models.naming.rules import one_by_one, parts_of, rule

_SECOND, _THIRD = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
_EPSILON = 1e-6
"""What the norms of their latent vectors have, whatever the config says."""


def deepseek_naming(config: DeepseekConfig, built: Built, *, neighbours: bool = True) -> Naming:
    """What transformers calls the tensors of a DeepSeek; without `neighbours` their weights rotate halves, too
    (`rope_interleave`). Raises ModelError, saying what differs, where neither of its classes computes the same."""
    name = _class_of(config)

    def rotated(ours: str, theirs: str, shape: tuple[int, ...], heads: int, plain: int) -> Iterator[Part]:
        half = config.rotary_size // 2
        for head in range(heads):
            start = head * (plain + config.rotary_size)
            yield rows(ours, theirs, shape, start, start, plain)
            for number in range(2):
                at, there = start + plain + number * half, start + plain + number
                step, place = (2, there) if neighbours else (1, at)
                yield rows(ours, theirs, shape, at, place, half, step)

    def queries(ours: str, theirs: str, shape: tuple[int, ...]) -> Iterator[Part]:
        yield from rotated(ours, theirs, shape, config.num_heads, config.plain_size)

    def latent(ours: str, theirs: str, shape: tuple[int, ...]) -> Iterator[Part]:
        yield from rotated(ours, theirs, shape, 1, config.kv_rank)

    def biases(ours: str, theirs: str, shape: tuple[int, ...]) -> Iterator[Part]:
        yield whole(ours, theirs, shape, Value(scale=config.balance_speed, here="int64", there="float32"))

    layer = r"model\.layers\.(\d+)\."
    parts, fresh = parts_of(
        built,
        (
            rule(layer + r"self_attn\.(q_b_proj|q_proj)\.weight", r"model.layers.\1.self_attn.\2.weight", queries),
            rule(layer + r"self_attn\.kv_a_proj_with_mqa\.weight", r"\g<0>", latent),
            rule(layer + r"mlp\.experts\.(\w+)", r"model.layers.\1.mlp.experts.{}.\2.weight", one_by_one),
            rule(layer + r"mlp\.shared_expert\.(.*)", r"model.layers.\1.mlp.shared_experts.\2"),
            rule(layer + r"mlp\.router\.bias_steps", r"model.layers.\1.mlp.gate.e_score_correction_bias", biases),
            rule(r"(.*)", r"\1"),
        ),
        fresh=(r".*\.router\.loads",),
    )
    further = rf"model\.layers\.{config.num_layers}\..*"  # the module that predicts, in released files
    return Naming(
        parts=parts,
        fresh=fresh,
        config=_config(config, name),
        model_types=("deepseek_v3",) if name == _THIRD else ("deepseek_v2",),
        base="model.",
        unused=(further, r".*\.rotary_emb\.inv_freq"),
    )


def _class_of(config: DeepseekConfig) -> str:
    """The class that computes the same."""
    name = _THIRD if config.sigmoid_scores else _SECOND
    if config.predicted_tokens:
        refuse(f"predicted_tokens={config.predicted_tokens}: {name} predicts no further tokens")
    if config.norm_epsilon != _EPSILON:
        refuse(f"norm_epsilon={config.norm_epsilon:g}: norms of the latent vectors of {name} have {_EPSILON:g}")
    if not config.shared_size or config.shared_size % config.expert_size:
        refuse(
            f"shared_size={config.shared_size} is no multiple of expert_size={config.expert_size}: {name} has one or"
            " more experts of that size for all tokens"
        )
    if name == _SECOND:
        if config.normalised_weights:
            refuse(f"normalised_weights=True with scores of a softmax: {name} does not normalise")
        if config.balance_speed:
            refuse(f"balance_speed={config.balance_speed:g} with scores of a softmax: {name} has no biases")
        if config.groups_by != 1:
            refuse(
                f"groups_by={config.groups_by} with scores of a softmax: {name} compares groups by their best expert"
            )
        return name
    if not config.balance_speed:
        refuse(f"balance_speed=0 with scores of a sigmoid: {name} has biases that choose experts")
    if config.expert_groups > 1 and config.groups_by != 2:
        refuse(
            f"groups_by={config.groups_by} with scores of a sigmoid: {name} compares groups by their two best experts"
        )
    return name


def _config(config: DeepseekConfig, name: str) -> dict[str, Any] | None:
    """None where positions are stretched, of which the dimensions say less than a config does."""
    if config.rope_frequencies or config.rope_magnitude != 1.0 or config.score_scale != 1.0:
        return None
    found: dict[str, Any] = {
        "architectures": [name],
        "model_type": "deepseek_v3" if name == _THIRD else "deepseek_v2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": config.balance_loss,
        "first_k_dense_replace": config.dense_layers,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "kv_lora_rank": config.kv_rank,
        "max_position_embeddings": config.sequence_length,
        "moe_intermediate_size": config.expert_size,
        "n_group": config.expert_groups,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_size // config.expert_size,
        "norm_topk_prob": config.normalised_weights,
        "num_attention_heads": config.num_heads,
        "num_experts_per_tok": config.experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_rank or None,
        "qk_nope_head_dim": config.plain_size,
        "qk_rope_head_dim": config.rotary_size,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "routed_scaling_factor": config.weight_scale,
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": config.chosen_groups,
        "v_head_dim": config.value_size,
        "vocab_size": config.vocab_size,
    }
    if name == _THIRD:
        return {**found, "rope_interleave": True}
    return {**found, "topk_method": "group_limited_greedy" if config.expert_groups > 1 else "greedy"}
