"""Our decoders compute what those of transformers do, given the same weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from planner.models.llama import Llama, LlamaConfig

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "ffn_size": 48, "num_heads": 4, "num_kv_heads": 2}
OURS = {
    "Mistral": {},
    "Qwen2": {"qkv_bias": True, "tied_embeddings": True},
    "Qwen3": {"qk_norm": True, "head_size": 16},
    "Gemma": {"gelu": True, "scaled_embeddings": True, "head_size": 16, "tied_embeddings": True},
}


@pytest.mark.parametrize("family", OURS)
def test_the_loss_is_that_of_transformers(family: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **OURS[family], vocab_size=64, sequence_length=8, rope_theta=1e4, norm_epsilon=1e-6)
    ours, theirs = Llama(config), theirs_of(family, config)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.3)
    weights = ours.state_dict()
    if family == "Gemma":  # keeps what its norms multiply by less 1
        weights = {name: weight - 1 if "norm" in name else weight for name, weight in weights.items()}
    theirs.load_state_dict(weights)
    tokens, labels = torch.randint(64, (2, 8)), torch.randint(64, (2, 8))
    expected = F.cross_entropy(theirs(input_ids=tokens).logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(ours(tokens, labels), expected, rtol=1e-5, atol=1e-6)


def theirs_of(family: str, config: LlamaConfig) -> Any:
    made = getattr(transformers, f"{family}Config")(
        num_hidden_layers=config.num_layers, hidden_size=config.hidden_size, intermediate_size=config.ffn_size,
        num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim,
        vocab_size=64, max_position_embeddings=8, rms_norm_eps=1e-6, tie_word_embeddings=config.tied_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, pad_token_id=0,
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(made).eval()
