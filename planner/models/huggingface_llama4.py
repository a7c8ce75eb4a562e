"""Experts of Llama 4 in transformers, of which a token passes those that are chosen for it.

Theirs are products of every expert with every token, of which what was not chosen is zeros: as many times the work as
there are experts for one of a token. A zero passes experts as a zero, and its score has no gradient, so the chosen rows
alone make the same result and the same gradients. Scores weigh what goes into experts, not what comes out.

Shape legend: T tokens, H hidden, E experts, K of a token, F width of an expert.
"""

from typing import Any

from planner.models.huggingface_any_experts import activation_name
from planner.models.huggingface_layers import give_forward

_ACTIVATION = "planner_activation"
"""Where a layer has the name of the activation of its experts."""


def with_chosen_rows(module: Any) -> None:
    """Have the experts of Llama 4 in a model of transformers be one operator each (`planner.models.experts`), in place.
    Where the operator has not their activation, and in other models, nothing changes."""
    for part in module.modules():
        if type(part).__name__ != "Llama4TextMoe" or type(part).forward is _forward:
            continue
        name = activation_name(part.experts.act_fn)
        if name is not None:
            setattr(part, _ACTIVATION, name)
            give_forward(part, _forward)


def _forward(self: Any, hidden_states: Any) -> tuple[Any, Any]:
    """What a layer's experts make of its tokens, and how they were scored, T E. The shared expert has samples and
    positions in dims of their own, so that context parallelism can cut it."""
    import torch

    from planner.models.experts import experts

    tokens_TH = hidden_states.reshape(-1, self.hidden_dim)
    _, logits_TE = self.router(tokens_TH)
    values_TK, chosen_TK = torch.topk(logits_TE, self.top_k, dim=1)
    scores_TK = values_TK.float().sigmoid().to(values_TK.dtype)
    scored_TKH = tokens_TH.unsqueeze(1) * scores_TK.unsqueeze(-1)
    gate_EFH, up_EFH = self.experts.gate_up_proj.transpose(1, 2).chunk(2, dim=1)
    ones_TK1 = torch.ones_like(scored_TKH[..., :1])
    one_each = scored_TKH, ones_TK1, chosen_TK.unsqueeze(-1)
    matrices = gate_EFH, up_EFH, self.experts.down_proj.transpose(1, 2)
    routed_TKH = experts(*one_each, *matrices, activation=getattr(self, _ACTIVATION))
    routed = routed_TKH.sum(1).view(hidden_states.shape)
    return self.shared_expert(hidden_states) + routed, logits_TE
