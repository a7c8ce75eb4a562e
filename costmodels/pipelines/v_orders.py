"""The orders of schedules whose ranks hold two stages in a V: stage i and stage 2p-1-i.

    rank 0   stage 0          stage 2p-1        down the ranks and back up: the first rank has the first and the
    rank 1     stage 1      stage 2p-2          last stage, and what the last rank hands on stays where it is
    rank 2       stage 2  stage 2p-3            (p = 3)

The backward pass of a micro-batch begins on the rank on which its forward pass began. All ranks hold the same: 2p
stages of a micro-batch, which is what 1F1B holds on its first rank. A turn is half as long as with one stage a rank.

    zb_v         rank r warms up with 2(p-r)-1 forwards, r pairs of forwards of both chunks, p-r forwards of the second
                 chunk with its backwards, then F0 B0 W0 F1 B1 W1 in turn; weight gradients fill the end
    dualpipe_v   DualPipe cut in half: 2(p-r-1) forwards, r+1 pairs, p-r-1 times B1 W1 F1, then F0 B1 F1 B0 in turn;
                 backward passes are whole (B, then W at once), except at the ends, where weight gradients fill bubbles

Both are made for at least 2p-1 or 2p micro-batches. With fewer, the turns of the missing ones are left out; every wait
for another rank stays as it is.

Sources: Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024, section 4 (V-ZB is the ZB-V of Qi et
al., "Zero bubble pipeline parallelism", 2024); DeepSeek-AI, "DualPipe" (github.com/deepseek-ai/DualPipe), dualpipev.py,
and arXiv 2412.19437, section 3.2.1. Its forward and backward passes at the same time are the pairs of
`costmodels.pipelines.timeline`.
"""

from collections import deque
from functools import lru_cache

from costmodels.pipelines.schedules import Turn, TurnKind, in_flight


class _Turns:
    """The turns of a rank while they are written down; each chunk and kind goes through the micro-batches in order."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.found: list[Turn] = []
        self.counts: dict[tuple[TurnKind, int], int] = {}
        self.deferred: deque[Turn] = deque()

    def forward(self, chunk: int) -> None:
        self._next("forward", chunk)

    def backward(self, chunk: int, *, apart: bool = False) -> None:
        """The gradient of the input; then that of the weights at once, or deferred if they come `apart`."""
        later = self._next("input_gradient", chunk)
        self.deferred.append(Turn("weight_gradient", later, chunk))
        if not apart:
            self._append(self.deferred.pop())

    def weights(self, chunk: int | None = None) -> None:
        """The oldest deferred weight gradient, of any chunk or of one."""
        oldest = next(turn for turn in self.deferred if chunk in (None, turn.chunk))
        self.deferred.remove(oldest)
        self._append(oldest)

    def all_weights(self, chunk: int) -> None:
        """All deferred weight gradients of a chunk."""
        for _ in range(sum(turn.chunk == chunk for turn in self.deferred)):
            self.weights(chunk)

    def _next(self, kind: TurnKind, chunk: int) -> int:
        number = self.counts.get((kind, chunk), 0)
        self.counts[kind, chunk] = number + 1
        self._append(Turn(kind, number, chunk))
        return number

    def _append(self, turn: Turn) -> None:
        if turn.micro_batch < self.micro_batches:
            self.found.append(turn)


@lru_cache(maxsize=256)
def order_zb_v(stage: int, stages: int, micro_batches: int) -> tuple[Turn, ...]:
    """The turns of rank `stage` of `stages` ranks under ZB-V.

    Raises: as `costmodels.in_flight`.
    """
    in_flight(stage, stages, micro_batches)  # checks the numbers
    turns, total = _Turns(micro_batches), max(2 * stages - 1, micro_batches)
    for _ in range(2 * (stages - stage) - 1):
        turns.forward(0)
    for _ in range(stage):
        turns.forward(1)
        turns.forward(0)
    for _ in range(stages - stage):
        turns.forward(1)
        turns.backward(1)
    begun = 2 * stages - stage - 1  # forwards of the first chunk; the second has had `stages` of them
    for number in range(total - stages):
        if begun + number < total:
            turns.forward(0)
        turns.backward(0)
        turns.forward(1)
        turns.backward(1)
    for _ in range(stage):
        turns.backward(0, apart=True)
        turns.backward(1, apart=True)
    for _ in range(stages - stage):
        turns.backward(0, apart=True)
        turns.weights(0)
    for chunk in (1, 0):
        turns.all_weights(chunk)
    return tuple(turns.found)


@lru_cache(maxsize=256)
def order_dualpipe_v(stage: int, stages: int, micro_batches: int) -> tuple[Turn, ...]:
    """The turns of rank `stage` of `stages` ranks under DualPipeV.

    Raises: as `costmodels.in_flight`.
    """
    in_flight(stage, stages, micro_batches)  # checks the numbers
    turns, total, later = _Turns(micro_batches), max(2 * stages, micro_batches), stages - stage - 1
    for _ in range(2 * later):
        turns.forward(0)
    for _ in range(stage + 1):
        turns.forward(0)
        turns.forward(1)
    for _ in range(later):
        turns.backward(1)
        turns.forward(1)
    for _ in range(total - 2 * stages + stage + 1):
        turns.forward(0)
        turns.backward(1)
        turns.forward(1)
        turns.backward(0)
    for _ in range(later):
        turns.backward(1)
        turns.forward(1)
        turns.backward(0)
    half = (stage + 1) // 2
    for number in range(stage + 1):
        turns.backward(1, apart=number > half or (number == half and stage % 2 == 1))
        turns.backward(0, apart=number >= half)
    for _ in range(later):
        turns.weights()
        turns.backward(0, apart=True)
    for _ in range(stage + 1):
        turns.weights()
    return tuple(turns.found)
