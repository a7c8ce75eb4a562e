"""Offload storage: page-locked host memory, or a file on one of the host's disks.

    host    a tensor in page-locked memory, which the device reads and writes directly
    disk    a tensor that maps a part of a file: reading it reads the file, and writes go to the file

Files are unlinked as soon as they are created, so nothing is left behind however a process ends. They have their full
size from the start, so a full disk is found before training.
"""

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from planner.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """The offload storage of a rank.

    Attributes:
        folder: where files are made; the folder of temporary files by default.
        pretended: tensors have no data, so there are no files either.
    """

    folder: Path | None = None
    pretended: bool = False

    def room(self, home: str, nbytes: int, device: torch.device) -> torch.Tensor:
        """`nbytes` of zeros on the "host" or the "disk", uint8 (nbytes,). Raises RequestError where a file of that size
        cannot be made."""
        if home == "disk" and not self.pretended:
            return self._in_a_file(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu" and not self.pretended)

    def _in_a_file(self, nbytes: int) -> torch.Tensor:
        folder = Path(tempfile.gettempdir()) if self.folder is None else self.folder
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                mapped = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise RequestError(
                f"{folder}: cannot keep {nbytes / 2**30:.3f} GiB of what the plan offloads on a disk:"
                f" {error.strerror}; name another folder for it"
            ) from error
        return torch.frombuffer(mapped, dtype=torch.uint8)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in host memory, page-locked where it comes from a device; itself where it is there already."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
