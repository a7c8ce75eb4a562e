"""Architectures with code of their own that compute the same as a class of transformers under other names of keys.

    InternLM2, InternLM3    Llama; InternLM2 stores query, key and value in one matrix
    MiMo                    Qwen2, with layers that predict further tokens, which are left out
    Ling 2.0 (Bailing MoE)  GLM-4.5 with norms of queries and keys
    Qwen2.5 and 3 Omni      their thinker, the part that is trained with a loss here: transformers lets the whole
                            generate alone

A config is rewritten for the class of transformers. The code that comes with the config never runs. A value that the
class cannot follow is refused; a key that it does not read is named in a note (`notes` beside this file).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Equivalent:
    """The class and the model_type that compute the same, the key of the part of the config that is theirs (empty: all
    of it), keys with their names there, values that keys must have (such keys are not passed on), and values that the
    class is given."""

    architecture: str
    model_type: str
    part: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    needed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)


_LING = _Equivalent(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    renamed={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    needed={
        "score_function": ("sigmoid",),
        "moe_router_enable_expert_bias": (True,),
        "use_qk_norm": (True,),
        "use_bias": (False,),
        "use_qkv_bias": (False,),
        "use_rmsnorm": (True,),
        "norm_head": (False,),
        "norm_topk_prob": (True,),
        "embedding_dropout": (0.0,),
        "output_dropout": (0.0,),
    },
    given={"attention_bias": False, "norm_topk_prob": True, "use_qk_norm": True},
)

EQUIVALENTS: Mapping[str, _Equivalent] = {
    "BailingMoeV2ForCausalLM": _LING,
    "InternLM2ForCausalLM": _Equivalent(
        architecture="LlamaForCausalLM",
        model_type="llama",
        renamed={"bias": "attention_bias"},
        given={"mlp_bias": False},
    ),
    "InternLM3ForCausalLM": _Equivalent(
        architecture="LlamaForCausalLM",
        model_type="llama",
        needed={"qkv_bias": (False,), "bias": (False,)},
    ),
    "MiMoForCausalLM": _Equivalent(
        architecture="Qwen2ForCausalLM", model_type="qwen2", needed={"attention_bias": (True,)}
    ),
    "Qwen2_5OmniForConditionalGeneration": _Equivalent(
        architecture="Qwen2_5OmniThinkerForConditionalGeneration",
        model_type="qwen2_5_omni_thinker",
        part="thinker_config",
    ),
    "Qwen3OmniMoeForConditionalGeneration": _Equivalent(
        architecture="Qwen3OmniMoeThinkerForConditionalGeneration",
        model_type="qwen3_omni_moe_thinker",
        part="thinker_config",
    ),
}
"""Each architecture by its name in configs."""


def rewritten(name: str, said: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """The architecture and the content of a config, for the class that computes the same where there is one. Raises
    ModelError, naming the file and the key, for a value that this class cannot follow."""
    same, content = EQUIVALENTS.get(name), said
    if same is None:
        return name, dict(said)
    for key, known in same.needed.items():
        if content.get(key, known[0]) not in known:
            raise ModelError(
                f"{path}: {key} is {content[key]!r}; {name} is built as {same.architecture}, which computes with"
                f" {' or '.join(map(repr, known))} only; write a factory instead: --model package.module:factory"
            )
    if same.part:
        content = said.get(same.part, {})
        if not isinstance(content, Mapping) or not content:
            raise ModelError(f"{path}: {same.part} is missing; of {name} that part is built, as {same.architecture}")
    own = {same.renamed.get(key, key): value for key, value in content.items() if key not in (*same.needed, "auto_map")}
    named = {"architectures": [same.architecture], "model_type": same.model_type}
    return same.architecture, {**own, **same.given, **named}


def note_on_part(name: str, path: Path) -> Iterator[str]:
    """A note where only a part of an architecture is built."""
    same = EQUIVALENTS.get(name)
    if same is not None and same.part:
        yield f"{path}: of {name} only {same.part} is planned, as {same.architecture}"
