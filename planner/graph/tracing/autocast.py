"""`torch.autocast` inside a model: the precision of a plan takes its place.

A plan says in which dtype operators compute (`--precision`), for all devices. A model is traced without data, where
autocast does nothing or refuses the device ("meta"); so the model is also compared without it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

_WITHOUT_DATA = "meta"


@contextmanager
def without_autocast() -> Iterator[None]:
    """While active, regions of autocast change no dtype, whatever device they are for."""
    begin = torch.autocast.__init__

    def beginning(region: Any, device_type: str, *arguments: Any, **keywords: Any) -> None:
        begin(region, "cpu" if device_type == _WITHOUT_DATA else device_type, *arguments, **keywords)

    def entering(region: Any) -> Any:
        return region

    def leaving(region: Any, *raised: Any) -> None:
        """Nothing: `entering` began nothing."""

    with (
        patch.object(torch.autocast, "__init__", beginning),
        patch.object(torch.autocast, "__enter__", entering),
        patch.object(torch.autocast, "__exit__", leaving),
    ):
        yield
