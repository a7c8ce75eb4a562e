"""Experts of transformers as one operator (`planner.models.experts.mixture`), which may be divided; transformers
computes them in a loop that depends on the tokens, or in kernels whose rows do."""

from typing import Any

from planner.errors import ModelError
from planner.models.huggingface.taken_apart import gate_and_up, mark_halved

AS_ONE_OPERATOR = "planner_experts"

_FORM = "planner_form"
"""The attribute in which checked experts keep the operator's settings for their activation."""

_USUAL = "silu"
"""The activation of the operator by default."""

_RANGE, _POINTS = 32.0, 641
"""Activations are told apart by this many numbers, up to this far from 0 on both sides, where some are clamped."""


def check_experts(module: Any, where: str) -> None:
    """Check the experts of a model, before they are called. Raises ModelError, which begins with `where`, for experts
    that the operator cannot compute: they must have two or three matrices each, stacked, and a known activation."""
    from planner.models.experts.rows import ACTIVATIONS

    for name, part in module.named_modules():
        if not hasattr(part, "is_concatenated") or not hasattr(part, "has_gate"):
            continue
        form, own = _form_of(part), part.has_gate and not _has_default_gate(part)
        setattr(part, _FORM, form)
        if part.has_gate and part.is_concatenated:
            mark_halved(part, 2 if part.is_transposed else 1)
        function = getattr(part, "act_fn", None)
        found = [
            ("a gate of their own", form is None and own),
            ("norms behind them", getattr(part, "has_post_expert_norm", False)),
            (
                f"the activation {getattr(function, '__name__', type(function).__name__)}",
                form is None and not own,
            ),
        ]
        unlike = [what for what, has in found if has]
        if unlike:
            raise ModelError(
                f"{where}: experts are planned that have two matrices or a gate, and {', '.join(ACTIVATIONS)} or a"
                f" bounded gate as in gpt-oss; those of '{name}' have {', '.join(unlike)}; write a factory whose"
                " experts are: --model package.module:factory"
            )


def _form_of(part: Any) -> dict[str, Any] | None:
    """The operator's settings for the activation of experts; None for experts that it cannot compute."""
    if part.has_gate and not _has_default_gate(part):
        bounds = _bounds(part)
        return None if bounds is None else dict(zip(("limit", "slope", "offset"), bounds, strict=True))
    name = activation_name(getattr(part, "act_fn", None))
    return None if name is None else {} if name == _USUAL else {"activation": name}


def activation_name(function: Any) -> str | None:
    """The activation in `planner.models.experts.rows.ACTIVATIONS` with the same results for numbers on both sides of 0;
    None where there is none."""
    import torch

    from planner.models.experts.rows import ACTIVATIONS

    if not callable(function) or (isinstance(function, torch.nn.Module) and any(True for _ in function.parameters())):
        return None
    values = torch.linspace(-_RANGE, _RANGE, _POINTS, dtype=torch.float64, device="cpu")
    made = function(values)
    known = ((name, own(values)) for name, (own, _) in ACTIVATIONS.items())
    return next((name for name, wanted in known if torch.allclose(made, wanted, rtol=1e-6, atol=1e-9)), None)


def _has_default_gate(part: Any) -> bool:
    return bool(type(part)._apply_gate.__name__ == "_default_apply_gate")


def _bounds(part: Any) -> tuple[float, float, float] | None:
    """The limit, slope and offset of experts with a gate of their own (`planner.models.experts.rows.Activation`); None
    for another gate. Gates are compared by their results for numbers on both sides of the limit."""
    import torch

    limit = _number(part, "limit", "swiglu_limit")
    if limit is None or not limit > 0:
        return None
    values = torch.linspace(-2.0 * limit, 2.0 * limit, 9, dtype=torch.float32, device="cpu")
    gate, up = (each.flatten() for each in torch.meshgrid(values, values, indexing="ij"))
    both = torch.cat((gate, up)) if part.is_concatenated else torch.stack((gate, up), dim=-1).flatten()
    made, bounded = part._apply_gate(both), gate.clamp(max=limit)
    for slope, offset in ((_number(part, "alpha", "swiglu_alpha"), 1.0), (1.0, 0.0)):
        if slope is not None:
            wanted = bounded * torch.sigmoid(slope * bounded) * (up.clamp(-limit, limit) + offset)
            if torch.allclose(made, wanted, rtol=1e-5, atol=1e-5):
                return limit, slope, offset
    return None


def _number(part: Any, *names: str) -> float | None:
    """The first of these attributes that is a number."""
    found = (getattr(part, name, None) for name in names)
    return next((float(each) for each in found if isinstance(each, float | int)), None)


def experts_of(module: Any, tokens_TH: Any, chosen_TK: Any, weights_TK: Any) -> Any:
    """The result of `module`, experts of transformers, for T tokens. Biases behind the last matrix are added outside of
    the operator, each with the weight of its expert: a device that has a part of the width has all of these biases."""
    from planner.models.experts.mixture import experts

    (gate_EFH, up_EFH), down_EHF = _halves(module), module.down_proj
    if module.is_transposed:
        down_EHF = down_EHF.transpose(1, 2)
    weights = weights_TK.to(tokens_TH.dtype)
    one_by_one = tokens_TH.unsqueeze(1), weights.unsqueeze(1), chosen_TK.unsqueeze(1)
    further = dict[str, Any]()
    if module.has_bias:
        biases = _halves(module, "_bias")
        further = {key: one for key, one in zip(("gate_bias", "up_bias"), biases, strict=True) if one is not None}
    further |= getattr(module, _FORM)
    result_TH = experts(*one_by_one, gate_EFH, up_EFH, down_EHF, **further).squeeze(1)
    if not module.has_bias:
        return result_TH
    return result_TH + _spread(weights, chosen_TK, len(down_EHF)) @ module.down_proj_bias


def _halves(module: Any, ending: str = "") -> tuple[Any, Any]:
    """The matrices of gate and up, E F H each, or with the ending "_bias" their biases, which lie behind each other or
    alternate. Without a gate there is only up."""

    def turned(matrices: Any) -> Any:
        return matrices.transpose(1, 2) if module.is_transposed and not ending else matrices

    if not module.has_gate:
        return None, turned(getattr(module, f"up_proj{ending}"))
    if module.is_concatenated:
        gate, up = gate_and_up(module, ending)
        return turned(gate), turned(up)
    gate, up = turned(getattr(module, f"gate_up_proj{ending}")).unflatten(1, (-1, 2)).unbind(2)
    return gate, up


def _spread(weights_TK: Any, chosen_TK: Any, count: int) -> Any:
    """The weight of every expert for every token, T E; 0 for experts that were not chosen."""
    import torch

    numbers_E = torch.arange(count, device=chosen_TK.device)
    here_TKE = chosen_TK.unsqueeze(-1) == numbers_E
    return (here_TKE.to(weights_TK.dtype) * weights_TK.unsqueeze(-1)).sum(1)
