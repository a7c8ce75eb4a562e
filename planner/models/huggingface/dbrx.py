"""The experts of DBRX in transformers, as one operator (`planner.models.experts.mixture`).

transformers loops over the experts that were chosen. Its router multiplies hidden states by noise in training, which
would differ with the plan and is left out: the work is the same.

Shape legend: T tokens, H hidden, E experts, K of a token, F width of an expert.
"""

from collections.abc import Iterator
from typing import Any

from planner.models.huggingface.any_experts import activation_name
from planner.models.huggingface.layers import give_forward

_ACTIVATION = "planner_activation"
"""The attribute of experts for the name of their activation."""


def of_dbrx_as_operators(module: Any) -> Iterator[str]:
    """Make the experts of DBRX one operator each, in place, and say what is left out in a note. If the operator lacks
    their activation, and in other models, nothing changes."""
    noise = 0.0
    for part in module.modules():
        kind = type(part).__name__
        if kind == "DbrxRouter":
            noise, part.moe_jitter_eps = max(noise, part.moe_jitter_eps or 0.0), None
        if kind == "DbrxExperts" and type(part).forward is not _forward:
            name = activation_name(part.mlp.activation_fn)
            if name is not None:
                setattr(part, _ACTIVATION, name)
                give_forward(part, _forward)
    if noise:
        yield f"noise of the router (moe_jitter_eps {noise:g}) is left out: a step takes the same time"


def _forward(self: Any, hidden_states: Any, chosen_TK: Any, weights_TK: Any) -> Any:
    """The result of a layer's experts. Matrices of all experts lie below each other in three parameters."""
    from planner.models.experts.mixture import experts

    tokens_TH = hidden_states.reshape(-1, self.hidden_size)
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    gate_EFH, up_EFH, last_EFH = (one.view(shape) for one in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    weights_TK = weights_TK.to(tokens_TH.dtype)
    one_each = tokens_TH.unsqueeze(1), weights_TK.unsqueeze(1), chosen_TK.unsqueeze(1)
    down_EHF = last_EFH.transpose(1, 2)
    made_TH = experts(*one_each, gate_EFH, up_EFH, down_EHF, activation=getattr(self, _ACTIVATION)).squeeze(1)
    return made_TH.view(hidden_states.shape)
