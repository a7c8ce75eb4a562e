"""Lightning attention (MiniMax-01, arXiv 2501.08313, section 2.2.1): linear attention whose heads forget at a fixed
rate.

    S_t = S_{t-1} exp(-slope) + k_t v_t^T        y_t = S_t^T q_t

That is the scan of a state-space model with steps of one (`planner.graph.operators.state_space_scan`): heads are its
groups, keys write the state, queries read it. transformers spells it out as a loop in the forward pass of its module:
fifteen operators for every 256 tokens of a layer. `forward` computes the same with one operator.

    B batch, S steps, H heads of P
"""

from typing import Any

import torch
import torch.nn.functional as F

from planner.graph.operators.state_space_scan import state_space_scan


def forward(module: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, None]:
    """The result of a `MiniMaxLightningAttention`, and no state; tokens whose `attention_mask` is 0 write nothing."""
    batch, steps, _ = hidden_states.shape
    heads, width = module.num_attention_heads, module.head_dim
    made = module.act_fn(module.qkv_proj(hidden_states))
    if attention_mask is not None:
        made = (made * attention_mask[:, :, None]).to(made.dtype)
    q_BSHP, k_BSHP, v_BSHP = made.reshape(batch, steps, heads, 3 * width).split(width, dim=3)
    each = made.new_ones((batch, steps, heads))
    forgets_H = -module.slope_rate.reshape(heads)
    read = state_space_scan(v_BSHP, each, forgets_H, k_BSHP, q_BSHP, None, None, False, 0.0, None, module.block_size)
    read = module.norm(read.reshape(batch, steps, heads * width))
    return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * read), None
