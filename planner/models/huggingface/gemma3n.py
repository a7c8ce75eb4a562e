"""Gemma 3n in transformers, rewritten so that it can be traced and divided.

Gates of sparse layers keep the values above a quantile of a normal distribution with their mean and deviation. The
quantile is a number here, and mean and deviation are sums, which tensor parallelism can divide.

In training transformers clips the coefficients of AltUp's predictions in the parameter itself, during the forward
pass. Here the forward pass clips a copy, as transformers does with the coefficients of the corrections. The results are
the same. A coefficient beyond the limit has no gradient, so only weight decay moves it back; transformers moves it to
the limit.

Shape legend: P inputs of AltUp, B batch, S sequence, H hidden, F width of a layer.
"""

from statistics import NormalDist
from typing import Any

from planner.models.huggingface.layers import give_methods


def made_traceable(module: Any) -> None:
    """Make AltUp of Gemma 3n clip copies of its coefficients, and its sparse layers divisible, in place; other models
    stay as they are."""
    for part in module.modules():
        kind: Any = type(part)
        if kind.__name__ == "Gemma3nTextAltUp" and kind.predict is not _predict:
            give_methods(part, predict=_predict)
        if kind.__name__ == "Gemma3nTextMLP" and kind._gaussian_topk is not _largest:
            give_methods(part, _gaussian_topk=_largest)


def _predict(self: Any, hidden_states: Any) -> Any:
    """The predictions P B S H of a layer for its inputs P B S H."""
    import torch.nn.functional as F

    inputs, clip = self.config.altup_num_inputs, self.config.altup_coef_clip
    chosen = self.compute_router_modalities(hidden_states[self.config.altup_active_idx])
    weight = self.prediction_coefs.weight
    if self.training and clip is not None:
        weight = weight.clamp(-clip, clip)
    coefficients = F.linear(chosen, weight).reshape(*chosen.shape[:-1], inputs, inputs).permute(0, 1, 3, 2)
    made_BSHP = hidden_states.permute(1, 2, 3, 0) @ coefficients
    return (made_BSHP.permute(3, 0, 1, 2) + hidden_states).contiguous().type_as(hidden_states)


def _largest(self: Any, inputs: Any) -> Any:
    """How far values B S F lie above the quantile of their sparsity, and 0 below it."""
    import torch.nn.functional as F

    mean_BS1 = inputs.mean(dim=-1, keepdim=True)
    deviation_BS1 = (inputs - mean_BS1).square().mean(dim=-1, keepdim=True).sqrt()
    return F.relu(inputs - (mean_BS1 + deviation_BS1 * NormalDist().inv_cdf(self.activation_sparsity)))
