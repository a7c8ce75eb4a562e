"""The router of Phi-3.5-MoE in transformers, rewritten so that it draws no random numbers.

In training transformers samples each of a token's experts among those whose scores are near the best (SparseMixer-v2,
Microsoft 2024, arXiv 2409.12136), and multiplies hidden states by noise. Numbers drawn so would differ with the plan.
Here a token goes to the experts with the highest scores, as transformers has it in evaluation, without noise: the same
work and the same weights of experts, with the gradient of their softmax.
"""

import sys
from collections.abc import Iterator
from typing import Any

from planner.models.huggingface.layers import give_forward

_ROUTER = "PhimoeTopKRouter"
_MIXTURE = "PhimoeSparseMoeBlock"


def without_sampling(module: Any) -> Iterator[str]:
    """Make routers of Phi-3.5-MoE draw nothing, in place, and say so in a note; other models stay as they are."""
    noise, routers = 0.0, [part for part in module.modules() if type(part).__name__ == _ROUTER]
    for part in (*routers, *(part for part in module.modules() if type(part).__name__ == _MIXTURE)):
        noise, part.input_jitter_noise = max(noise, part.input_jitter_noise), 0.0
    for router in routers:
        if type(router).forward is not _route:
            give_forward(router, _route)
    if routers:
        left = f", and input_jitter_noise {noise:g} is left out" if noise else ""
        yield (
            "a token goes to the experts with the highest scores, where transformers draws them at random in"
            f" training{left}: a step takes the same time"
        )


def _route(self: Any, hidden_states: Any) -> tuple[Any, Any, Any]:
    """Scores T E of T tokens, and weights and numbers of the experts that each token takes, T K."""
    import torch.nn.functional as F

    scores_TE = F.linear(hidden_states, self.weight, self.bias)
    mixer = sys.modules[type(self).__module__].sparsemixer
    weights_TK, chosen_TK = mixer(scores_TE, jitter_eps=self.router_jitter_noise, training=False, top_k=self.top_k)
    return scores_TE, weights_TK, chosen_TK
