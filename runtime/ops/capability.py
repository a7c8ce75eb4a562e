"""What products in fp8 a device has."""

import torch

NOTHING = (0, 0)

IN_FP8 = (8, 9)
"""The least capability of CUDA devices that round to 8 bits and multiply what they have rounded."""

WORDS = 16
"""What extents of CUDA's products in fp8 are multiples of, and where their scales begin, in bytes."""


def cuda_capability(device: torch.device) -> tuple[int, int]:
    """That of a CUDA device, by which its kernels are known; none of others, and of AMD's, whose formats of 8 bits are
    other ones before gfx950."""
    if device.type != "cuda" or torch.version.hip is not None:
        return NOTHING
    return torch.cuda.get_device_capability(device)
