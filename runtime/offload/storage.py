"""Room outside of the device: page-locked memory of the host, or a file on one of its disks.

    host    a tensor in page-locked memory, which the device copies from and to by itself
    disk    a tensor that is a part of a file: reading it reads the file, and what is written there goes to the file

Files have no name from the moment that they are there, so that nothing is left behind however a process ends. They are
as large as they will get from the start: a full disk is met before training, not in the midst of it.
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
    """Where a rank offloads what is not needed at the moment.

    Attributes:
        folder: where files are made; that of temporary files where not given.
        pretended: nothing is real, so that there are no files either.
    """

    folder: Path | None = None
    pretended: bool = False

    def room(self, home: str, nbytes: int, device: torch.device) -> torch.Tensor:
        """So many bytes on the "host" or the "disk", zeros, uint8 (nbytes,). Raises RequestError where a file of that
        size cannot be made."""
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
    """A tensor in memory of the host, page-locked where it comes from a device; itself where it is there."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
