"""A file of tokens as a dataset, for pre-training language models.

    file      t0 t1 t2 t3 t4 t5 t6 t7 t8 ...            all documents, one after the other
    sample 0  t0 t1 t2 t3   labels  t1 t2 t3 t4         windows of the sequence length, none of which overlap
    sample 1  t4 t5 t6 t7   labels  t5 t6 t7 t8

The file is mapped into memory: only the pages that are read use memory, and all processes of a host share them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from planner.errors import RequestError

SUFFIXES = (".bin", ".npy")


class TokensDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a file of tokens: sample i is `sequence_length` tokens (int64) and as labels the tokens after each.

    A `.npy` file stores its integer type; a `.bin` file has only tokens of type `dtype`, as nanoGPT writes it. Raises
    RequestError for any other file, or one that is shorter than one sample.
    """

    def __init__(self, path: str | Path, sequence_length: int, *, dtype: str = "uint16") -> None:
        self._path, self._length, self._dtype = Path(path), sequence_length, dtype
        self._tokens: Any = None  # opened in each process that reads
        self._count = self._checked()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= number < self._count:
            raise IndexError(f"sample {number} of {self._count}")
        if self._tokens is None:
            self._tokens = self._opened()
        start = number * self._length
        window = torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))
        return window[:-1], window[1:]

    def __getstate__(self) -> dict[str, Any]:
        """Workers are sent only the path, and open the file themselves."""
        return {**self.__dict__, "_tokens": None}

    def _checked(self) -> int:
        try:
            tokens = self._opened()
        except OSError as error:
            raise RequestError(f"{self._path}: {error.strerror or error}") from error
        except Exception as error:  # numpy raises many types for a bad header: ValueError, EOFError, TokenError
            raise RequestError(f"{self._path}: not a token file: {error!s:.200}") from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise RequestError(
                f"{self._path} holds {tokens.dtype} of shape {tokens.shape}; tokens are integers in one row"
            )
        count = (len(tokens) - 1) // self._length
        if count < 1:
            raise RequestError(
                f"{self._path} has {len(tokens)} tokens; a sample of {self._length} with its labels takes"
                f" {self._length + 1}"
            )
        return count

    def _opened(self) -> Any:
        if self._path.suffix == ".npy":
            return np.load(self._path, mmap_mode="r", allow_pickle=False)
        size, width = self._path.stat().st_size, np.dtype(self._dtype).itemsize
        if size == 0 or size % width:
            raise ValueError(f"{size} bytes are no {self._dtype} tokens of {width} bytes each")
        return np.memmap(self._path, dtype=self._dtype, mode="r")
