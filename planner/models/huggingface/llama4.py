"""Experts of Llama 4 in transformers, rewritten so that a token passes only the experts that are chosen for it.

In transformers every expert multiplies every token, with zeros where the expert was not chosen: the work is E / K times
as much. An expert maps zeros to zeros, and their scores have no gradient, so the chosen rows alone give the same
results and gradients. Scores weigh the inputs of experts, not their outputs.

Shape legend: T tokens, H hidden, E experts, K of a token, F width of an expert.
"""

from typing import Any

from planner.models.huggingface.any_experts import activation_name
from planner.models.huggingface.layers import give_forward
from planner.models.huggingface.taken_apart import gate_and_up, mark_halved

_ACTIVATION = "planner_activation"
"""The attribute of a layer for the name of its experts' activation."""


def with_chosen_rows(module: Any) -> None:
    """Make the experts of Llama 4 in a model of transformers one operator each (`planner.models.experts.mixture`), in
    place. If the operator lacks their activation, and in other models, nothing changes."""
    for part in module.modules():
        if type(part).__name__ == "Llama4ForConditionalGeneration":
            _let_images_be_absent(part.language_model)
        if type(part).__name__ != "Llama4TextMoe" or type(part).forward is _forward:
            continue
        name = activation_name(part.experts.act_fn)
        if name is not None:
            setattr(part, _ACTIVATION, name)
            mark_halved(part.experts, 2)
            give_forward(part, _forward)


def _forward(self: Any, hidden_states: Any) -> tuple[Any, Any]:
    """The result of a layer's experts for its tokens, and their scores, T E. The shared expert has samples and
    positions in dims of their own, so that context parallelism can cut it."""
    import torch

    from planner.models.experts.mixture import experts

    tokens_TH = hidden_states.reshape(-1, self.hidden_dim)
    _, logits_TE = self.router(tokens_TH)
    values_TK, chosen_TK = torch.topk(logits_TE, self.top_k, dim=1)
    scores_TK = values_TK.float().sigmoid().to(values_TK.dtype)
    scored_TKH = tokens_TH.unsqueeze(1) * scores_TK.unsqueeze(-1)
    gate_EFH, up_EFH = (half_EHF.transpose(1, 2) for half_EHF in gate_and_up(self.experts))
    ones_TK1 = torch.ones_like(scored_TKH[..., :1])
    one_each = scored_TKH, ones_TK1, chosen_TK.unsqueeze(-1)
    matrices = gate_EFH, up_EFH, self.experts.down_proj.transpose(1, 2)
    routed_TKH = experts(*one_each, *matrices, activation=getattr(self, _ACTIVATION))
    routed = routed_TKH.sum(1).view(hidden_states.shape)
    return self.shared_expert(hidden_states) + routed, logits_TE


def _let_images_be_absent(text: Any) -> None:
    """Give the result of the text model the attribute that the model of text and images of transformers 5.24 reads
    from it, images or none, and that it lacks."""
    if type(text).forward is not _text_alone:
        give_forward(text, _text_alone)


def _text_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
    original: Any = type(self).__base__
    made = original.forward(self, *args, **kwargs)
    if not hasattr(made, "image_outputs") and not isinstance(made, tuple):
        made.image_outputs = None
    return made
