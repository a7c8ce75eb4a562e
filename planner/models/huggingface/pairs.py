"""Models of transformers that compare texts with images: the loss of SigLIP in any batch, and what a micro-batch is.

SigLIP (Zhai et al. 2023, arXiv 2303.15343, section 3) makes a matrix of its signs with `eye`, whose size is that of the
batch that is traced. Here it comes from a comparison of places, which has any size; results are the same.

Shape legend: B samples.
"""

from typing import Any

from planner.models.huggingface.layers import give_forward

NOTE = (
    "every sample is compared with all others of its micro-batch: --micro-batches 1 compares those of a whole step, as"
    " training without micro-batches does"
)


def compared_in_any_batch(module: Any) -> None:
    """Make SigLIP compute its loss in batches of any size, in place; other models stay as they are."""
    if type(module).__name__ == "SiglipModel" and type(module).forward is not _forward:
        give_forward(module, _forward)


def _forward(self: Any, *args: Any, return_loss: bool | None = None, **kwargs: Any) -> Any:
    import torch
    import torch.nn.functional as F

    original: Any = type(self).__base__
    made = original.forward(self, *args, **kwargs)
    if return_loss:
        scores_BB = made.logits_per_text
        places_B = torch.arange(len(scores_BB), device=scores_BB.device)
        is_pair_BB = places_B[:, None] == places_B[None, :]
        made.loss = -F.logsigmoid(torch.where(is_pair_BB, scores_BB, -scores_BB)).sum(dim=-1).mean()
    return made
