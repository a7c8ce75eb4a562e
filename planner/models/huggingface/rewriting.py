"""Modules of transformers, rewritten so that they can be traced and divided: attention as an operator, with masks only
where something is computed with them, and experts as one operator each.

While a model is exported, transformers writes out every mask; in training it leaves out a mask that is plainly causal
or hides nothing. So masks are left out here, too, if nothing is padded, no layer looks back through a window and
nothing else is computed with them.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

from planner.errors import ModelError
from planner.models.huggingface.any_experts import AS_ONE_OPERATOR, check_experts, experts_of
from planner.models.huggingface.library import errors_named, has_window, text_of, transformers_library
from planner.models.huggingface.llama4 import with_chosen_rows
from planner.models.huggingface.longcat import with_identities_apart

_WITHOUT_MASKS = "sdpa_without_masks"
WITH_MASKS = "sdpa"
_COMPOSED_WITHOUT_MASKS = "composed_without_masks"
_COMPOSED_WITH_MASKS = "composed"
"""Attention with sinks or capped scores, which PyTorch's own lacks (`planner.models.composed_attention`)."""


def register(transformers: Any) -> None:
    """Register two things with transformers: attention without a function that makes masks, and experts as one
    operator."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    transformers.AttentionInterface.register(_WITHOUT_MASKS, sdpa_attention_forward)
    for name in (_COMPOSED_WITH_MASKS, _COMPOSED_WITHOUT_MASKS):
        transformers.AttentionInterface.register(name, _composed_attention)
    AttentionMaskInterface.register(_COMPOSED_WITH_MASKS, sdpa_mask)
    ALL_EXPERTS_FUNCTIONS.register(AS_ONE_OPERATOR, experts_of)


def computes_with_masks(made: Any) -> bool:
    """Whether a class asks for a causal mask that its attention does not need: an indexer chooses keys by
    it (DeepSeek-V3.2), or biases are added to it (Falcon). Such code asks for attention by its usual name, too."""
    return "allow_is_causal_skip" in inspect.getsource(sys.modules[made.__module__])


def _has_sinks_or_cap(module: Any) -> bool:
    """Whether heads have sinks or scores are capped, and attention is called as transformers calls it."""
    sinks = any(name.rpartition(".")[2] == "sinks" for name, _ in module.named_parameters())
    capped = getattr(module.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return bool(module._supports_attention_backend) and (sinks or capped)


def set_attention(module: Any, *, masked: bool) -> None:
    """Make attention an operator with a rule, with masks or without."""
    if _has_sinks_or_cap(module):
        module.set_attn_implementation(_COMPOSED_WITH_MASKS if masked else _COMPOSED_WITHOUT_MASKS)
    elif module._supports_sdpa:
        module.set_attn_implementation(WITH_MASKS if masked else _WITHOUT_MASKS)


def _composed_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Any = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Any, None]:
    """Attention with sinks or capped scores as one operator, in the form of transformers' attention functions."""
    from planner.models.composed_attention import composed_attention

    if dropout:
        raise ModelError(
            f"attention_dropout {dropout:g}: attention with sinks or capped scores drops nothing here; leave it 0"
        )
    causal = attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True)
    made = composed_attention(query, key, value, s_aux, attention_mask, causal, scaling, softcap)
    return made.transpose(1, 2).contiguous(), None


def experts_as_one_operator(module: Any, where: str) -> None:
    """Make the experts of a model of transformers one operator each. Raises ModelError, which begins with `where`, for
    experts that the operator cannot compute."""
    from planner.models.huggingface.switch import stack_experts

    stack_experts(module, where)
    with_chosen_rows(module)
    with_identities_apart(module)
    found = _with_experts(module)
    for part in found:
        with errors_named(transformers_library(), f"{where}: its experts cannot be changed"):
            part.set_experts_implementation(AS_ONE_OPERATOR)
    if found:
        check_experts(module, where)


def _with_experts(module: Any) -> list[Any]:
    """Models of transformers in a module whose experts may be computed in other ways: the module itself, or, where it
    reads images beside tokens, the part that reads tokens (Kimi K2.5)."""
    models = (part for part in module.modules() if hasattr(part, "_can_set_experts_implementation"))
    return [part for part in models if part._can_set_experts_implementation()]


def trained_without_masks(module: Any) -> None:
    """Make a model of transformers build no masks except windows, and keep no keys and values, as `from_config`
    does where nothing is padded. Raises ModelError where its attention cannot be changed."""
    transformers, kind = transformers_library(), type(module).__name__
    register(transformers)
    text = text_of(module.config, Path(kind))
    module.config.use_cache = text.use_cache = False
    masked = has_window(text) or computes_with_masks(type(module))
    with errors_named(transformers, f"{kind}: its attention cannot be changed"):
        set_attention(module, masked=masked)


def with_experts_as_operators(module: Any) -> None:
    """Make the experts of a model of transformers operators, as `from_config` does. Raises ModelError for experts
    that the operator cannot compute."""
    register(transformers_library())
    experts_as_one_operator(module, type(module).__name__)


def experts_where_they_can(module: Any) -> None:
    """Make experts operators where a module is, or contains, a model of transformers, and the operator can compute
    them; other experts stay as they are. Raises ModelError for experts that are modules of their own and cannot be
    stacked (`planner.models.huggingface.switch`), because they cannot be traced."""
    if not type(module).__module__.startswith("transformers.") or not hasattr(module, "set_experts_implementation"):
        for part in module.children():
            experts_where_they_can(part)
        return
    before = [(part, part.config._experts_implementation) for part in _with_experts(module)]
    try:
        with_experts_as_operators(module)
    except ModelError:
        if not before:
            raise
        for part, implementation in before:
            part.set_experts_implementation(implementation)
