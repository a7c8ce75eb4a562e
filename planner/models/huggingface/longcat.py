"""Experts of LongCat-Flash in transformers, some of which return their tokens as they are, as one operator.

    transformers   router ─> numbers of experts and of identities ─> a loop over both
    here           router ─> experts ────> one operator ─────────────┬─> sum
                         └─> identities ─> tokens times their weights┘

The number of experts of a token depends on the token (LongCat-Flash technical report, 2025, arXiv 2509.01322), and the
operator takes the same number of rows for each. So an identity is also a row of an expert, with a weight of 0: results
and gradients are the same, and the work is that of a token without identities. These rows are spread evenly.
transformers 5.24 allocates two of the three matrices for identities, too, and never reads them: they are left out.

Shape legend: T tokens, H hidden, E experts, K of a token.
"""

from typing import Any

from planner.models.huggingface.any_experts import activation_name
from planner.models.huggingface.layers import give_forward
from planner.models.huggingface.taken_apart import gate_and_up, mark_halved

_ACTIVATION = "planner_activation"
"""The attribute of experts for the name of their activation."""


def with_identities_apart(module: Any) -> None:
    """Make the experts of LongCat-Flash in a model of transformers one operator each
    (`planner.models.experts.mixture`), in place. If the operator lacks their activation, and in other models, nothing
    changes."""
    import torch

    for part in module.modules():
        if type(part).__name__ != "LongcatFlashExperts" or type(part).forward is _forward or part.down_proj is None:
            continue
        name = activation_name(part.act_fn)
        if name is not None:
            setattr(part, _ACTIVATION, name)
            used = part.gate_up_proj.detach()[: part.num_routed_experts].clone()
            part.gate_up_proj = torch.nn.Parameter(used)
            mark_halved(part, 1)
            give_forward(part, _forward)


def _forward(self: Any, tokens_TH: Any, chosen_TK: Any, weights_TK: Any) -> Any:
    import torch

    from planner.models.experts.mixture import experts

    weights_TK = weights_TK.to(tokens_TH.dtype)
    is_identity_TK = chosen_TK >= self.num_routed_experts
    places_T1 = torch.arange(len(chosen_TK), device=chosen_TK.device).unsqueeze(-1)
    spread_TK = torch.where(is_identity_TK, (chosen_TK + places_T1) % self.num_routed_experts, chosen_TK)
    of_experts_TK = weights_TK.masked_fill(is_identity_TK, 0.0)
    of_identity_T1 = (weights_TK - of_experts_TK).sum(-1, keepdim=True)
    one_each = tokens_TH.unsqueeze(1), of_experts_TK.unsqueeze(1), spread_TK.unsqueeze(1)
    gate_EFH, up_EFH = gate_and_up(self)
    made_TH = experts(*one_each, gate_EFH, up_EFH, self.down_proj, activation=getattr(self, _ACTIVATION)).squeeze(1)
    return made_TH + tokens_TH * of_identity_T1
