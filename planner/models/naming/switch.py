"""Names of Switch Transformers as it is built here from a `config.json`: experts are stacked, and modules of their own
in transformers (`planner.models.huggingface.switch`)."""

from collections.abc import Mapping
from typing import Any

from planner.models.naming.parts import Built, Naming
from planner.models.naming.rules import one_by_one, parts_of, rule


def switch_of_config_naming(content: Mapping[str, Any], built: Built) -> Naming:
    """What transformers calls the tensors of such a model."""
    experts, there = r"(.*\.mlp\.experts)\.", r"\1.expert_{}."
    parts, _ = parts_of(
        built,
        (
            rule(experts + "up_proj", there + "wi.weight", one_by_one),
            rule(experts + "down_proj", there + "wo.weight", one_by_one),
            rule(r"(.*)", r"\1"),
        ),
    )
    return Naming(parts=parts, config=content, model_types=("switch_transformers",), unused=_TIED)


_TIED = (r"(encoder|decoder)\.embed_tokens\.weight", r"lm_head\.weight")
