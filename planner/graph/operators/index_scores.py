"""How much a query wants each key, by many small weighted heads: the scores by which an indexer chooses keys.

    y_bst = sum_h w_bsh relu(scale q_bsh . k_bt)        scale > 0

(The lightning indexer of DeepSeek-V3.2: DeepSeek-AI 2025, arXiv 2512.02556, section 2.1; GLM-5 and DeepSeek-V4 have it,
too.) All heads share one key. It is one operator, `planner::index_scores`, like the kernel mqa_logits of DeepGEMM:
scores of heads, B S H T, are made for some queries at a time. 16-bit products are summed in float32.
    B batch, S queries, H heads, D their elements, T keys
"""

import torch

from planner.graph.operators.recomputed import computed_again, recomputed
from planner.graph.rewriting.indexers import BLOCK


def composed(query_BSHD: torch.Tensor, key_BTD: torch.Tensor, weight_BSH: torch.Tensor, scale: float) -> torch.Tensor:
    """B S T, in the dtype of the weights, float32 at least."""
    batch, queries, heads, _ = query_BSHD.shape
    key_BDT = key_BTD.to(_wide(weight_BSH)).transpose(1, 2)  # once: the gradients of all queries accumulate in it
    each = max(1, BLOCK // max(1, batch * heads * key_BTD.shape[1]))
    pieces = zip(torch.split(query_BSHD, each, dim=1), torch.split(weight_BSH, each, dim=1), strict=True)
    made = [computed_again(_weighted, query, key_BDT, weight, scale) for query, weight in pieces]
    return made[0] if queries <= each else torch.cat(made, dim=1)


def _weighted(query_BSHD: torch.Tensor, key_BDT: torch.Tensor, weight_BSH: torch.Tensor, scale: float) -> torch.Tensor:
    batch, queries, heads, _ = query_BSHD.shape
    scores = torch.bmm(query_BSHD.flatten(1, 2).to(key_BDT.dtype), key_BDT).view(batch, queries, heads, -1)
    weights_BSH = weight_BSH.to(key_BDT.dtype) * scale
    return torch.matmul(weights_BSH.unsqueeze(-2), torch.relu(scores)).squeeze(-2)


def _wide(weight: torch.Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def empty(query_BSHD: torch.Tensor, key_BTD: torch.Tensor, weight_BSH: torch.Tensor, scale: float) -> torch.Tensor:
    """The result without data."""
    return weight_BSH.new_empty((*weight_BSH.shape[:2], key_BTD.shape[1]), dtype=_wide(weight_BSH))


index_scores = recomputed("planner::index_scores", composed, empty=empty)
