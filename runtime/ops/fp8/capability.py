"""Which fp8 products a device has."""

import torch

NOTHING = (0, 0)

IN_FP8 = (8, 9)
"""The lowest capability of CUDA devices with fp8 casts and products."""

WORDS = 16
"""The multiple of CUDA's fp8 extents, and the alignment of their scales in bytes."""


def cuda_capability(device: torch.device) -> tuple[int, int]:
    """The capability of a CUDA device, which says which kernels it has; none for other devices, and for AMD's, which
    have other 8-bit formats before gfx950."""
    if device.type != "cuda" or torch.version.hip is not None:
        return NOTHING
    return torch.cuda.get_device_capability(device)
