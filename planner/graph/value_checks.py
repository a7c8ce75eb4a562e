"""Questions that PyTorch's own code asks of the values of tensors, while a module is traced on tensors without any.

    nn.TransformerEncoder()(x, mask=mask)    is this mask a causal one?    no answer is needed: the mask is applied
    torch.distributions.Normal(mean, scale)  are these values allowed?     taken as allowed

The answer to neither changes what is computed. A model that is run has the second one asked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributions import Distribution
from torch.nn.modules import transformer


@contextmanager
def without_value_checks() -> Iterator[None]:
    """While active, masks of `nn.Transformer` and its parts are causal only where a caller says so, and arguments of
    distributions are not checked unless a caller asks for it."""

    def as_said(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with (
        patch.object(transformer, "_detect_is_causal_mask", as_said),
        patch.object(Distribution, "_validate_args", False),
    ):
        yield
