"""What is counted as alive."""

import torch

from runtime.executor.live_tensors import LiveTensors

KIB = 1024


def kib() -> torch.Tensor:
    return torch.zeros(KIB, dtype=torch.uint8)


def test_memory_in_place_of_an_old_tensor_is_counted_once() -> None:
    live = LiveTensors()
    old = kib()
    live.add(old)
    new = old + 1
    live.add_instead(new, old)
    del old
    other = kib()
    live.add(other)
    assert (live.peak, sum(live.now.values())) == (2 * KIB, 2 * KIB)


def test_an_old_tensor_that_lives_on_has_memory_of_its_own() -> None:
    live = LiveTensors()
    old = kib()
    live.add(old)
    new = old + 1
    live.add_instead(new, old)
    other = kib()
    live.add(other)
    assert live.peak == sum(live.now.values()) == 3 * KIB
