"""Experts of transformers as one operator (`planner.models.experts`), which may be divided; its own are a loop that
depends on the tokens, or kernels whose rows do."""

from typing import Any

from planner.errors import ModelError

AS_ONE_OPERATOR = "planner_experts"


def check_experts(module: Any, where: str) -> None:
    """Raise ModelError, which begins with `where`, for experts in a model that the operator does not compute: it has
    three matrices each, stacked, and SiLU."""
    import torch

    for name, part in module.named_modules():
        if not hasattr(part, "is_concatenated") or not hasattr(part, "has_gate"):
            continue
        activation = type(getattr(part, "act_fn", None)).__name__
        found = [
            ("biases", part.has_bias),
            ("no gate", not part.has_gate),
            ("a gate of their own", type(part)._apply_gate.__name__ != "_default_apply_gate"),
            ("norms behind them", getattr(part, "has_post_expert_norm", False)),
            ("matrices that are transposed", part.is_transposed),
            ("rows of two matrices in turn", not part.is_concatenated),
            (f"the activation {activation}", activation not in (torch.nn.SiLU.__name__, "SiLUActivation")),
        ]
        unlike = [what for what, has in found if has]
        if unlike:
            raise ModelError(
                f"{where}: experts are planned that have a gate, SiLU and no biases; those of '{name}' have"
                f" {', '.join(unlike)}; write a factory whose experts are: --model package.module:factory"
            )


def experts_of(module: Any, tokens_TH: Any, chosen_TK: Any, weights_TK: Any) -> Any:
    """What `module`, experts of transformers, makes of T tokens."""
    from planner.models.experts import experts

    gate_EFH, up_EFH = module.gate_up_proj.chunk(2, dim=1)
    one_by_one = tokens_TH.unsqueeze(1), weights_TK.to(tokens_TH.dtype).unsqueeze(1), chosen_TK.unsqueeze(1)
    return experts(*one_by_one, gate_EFH, up_EFH, module.down_proj).squeeze(1)
