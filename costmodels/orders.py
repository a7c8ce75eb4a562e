"""The order in which every stage of a pipeline takes its turns, for each schedule that has a name.

    gpipe          F F F F ........ B B B B       all forwards, then all backwards; holds all m micro-batches
    1f1b           F F F B F B ....               `order_1f1b`; holds at most p - s
    interleaved_1f1b  0 0 1 1 0 . 0 ...           `order_interleaved_1f1b`: v chunks a stage
    zb_h1          F F F B W F B W ... B W B W    backward in two parts: B, the gradient of the input, which the stage
                                                  before waits for, and W, that of the weights, which fills bubbles
    seqpipe        0.0 0.1 0.2 0.2' 0.1' ...      the sequence of a micro-batch cut into q slices: forwards in their
                                                  order, backwards in the reverse order, 1F1B over slices

    pipedream      F F F B F B F B ....           1F1B through all batches without a flush between them; so is
                                                  pipedream_2bw, they differ in when weights change

ZB-H1: stage s warms up with p-s-1 forwards, alternates F and B as 1F1B does, and puts each W off by s of them, so that
the late stages pass gradients on earlier and the early ones have W to fill the end with. It holds p micro-batches at
most on any stage (until their W), which is what 1F1B holds on its first one. The bubble is (p-1)(F + B - W) in place of
(p-1)(F + B + W), for stages of equal time, m >= p and W <= min(F, B).

Slices: a slice attends to the slices before it, so its forward needs theirs, and its backward the gradients of keys and
values from those behind it. p-s-1 + q-1 forwards of slices warm up, and no more than p-s + q-1 slices are held, where
1F1B holds (p-s) q. The pipeline fills and drains q times as fast.

Sources: Narayanan et al., "PipeDream", SOSP 2019, and "Memory-efficient pipeline-parallel DNN training", ICML 2021
(2BW); Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., SC 2021 (1F1B, interleaved); Qi et al., "Zero bubble
pipeline parallelism", ICLR 2024, section 2.3 and figure 3 (ZB-H1); Li et al., "TeraPipe", ICML 2021, and Sun et al.,
"Seq1F1B", arXiv 2406.03488, 2024 (slices).
"""

from collections.abc import Callable

from costmodels.errors import CostModelError
from costmodels.schedules import Turn, TurnKind, in_flight, order_1f1b, order_interleaved_1f1b

Orders = tuple[tuple[Turn, ...], ...]
"""What each stage does, in its order; outermost the stages."""


def _gpipe(stage: int, stages: int, micro_batches: int) -> tuple[Turn, ...]:
    """All forwards, then all backwards in the same order of micro-batches."""
    in_flight(stage, stages, micro_batches)  # checks the numbers
    kinds: tuple[TurnKind, ...] = ("forward", "backward")
    return tuple(Turn(kind, index) for kind in kinds for index in range(micro_batches))


def _zb_h1(stage: int, stages: int, micro_batches: int) -> tuple[Turn, ...]:
    """The order of 1F1B, with W put off by `stage` backwards."""
    turns: list[Turn] = []
    for turn in order_1f1b(stage, stages, micro_batches):
        if turn.kind == "forward":
            turns.append(turn)
            continue
        turns.append(Turn("input_gradient", turn.micro_batch))
        if turn.micro_batch >= stage:
            turns.append(Turn("weight_gradient", turn.micro_batch - stage))
    put_off = min(stage, micro_batches)
    turns += [Turn("weight_gradient", index) for index in range(micro_batches - put_off, micro_batches)]
    return tuple(turns)


def _sliced(stage: int, stages: int, micro_batches: int, slices: int) -> tuple[Turn, ...]:
    """1F1B over slices, backwards of a micro-batch from its last slice to its first."""
    warm_up = min(stages - stage - 1 + slices - 1, micro_batches * slices - 1)
    in_flight(stage, stages, micro_batches)  # checks the numbers
    total = micro_batches * slices

    def forward(number: int) -> Turn:
        return Turn("forward", number // slices, 0, number % slices)

    def backward(number: int) -> Turn:
        return Turn("backward", number // slices, 0, slices - 1 - number % slices)

    turns = [forward(number) for number in range(warm_up)]
    for number in range(total - warm_up):
        turns += [forward(warm_up + number), backward(number)]
    turns += [backward(number) for number in range(total - warm_up, total)]
    return tuple(turns)


ORDERS: dict[str, Callable[[int, int, int, int, int], tuple[Turn, ...]]] = {
    "1f1b": lambda stage, stages, micro_batches, virtual, slices: order_1f1b(stage, stages, micro_batches),
    "gpipe": lambda stage, stages, micro_batches, virtual, slices: _gpipe(stage, stages, micro_batches),
    "interleaved_1f1b": lambda stage, stages, micro_batches, virtual, slices: order_interleaved_1f1b(
        stage, stages, virtual, micro_batches
    ),
    "pipedream": lambda stage, stages, micro_batches, virtual, slices: order_1f1b(stage, stages, micro_batches),
    "pipedream_2bw": lambda stage, stages, micro_batches, virtual, slices: order_1f1b(stage, stages, micro_batches),
    "seqpipe": lambda stage, stages, micro_batches, virtual, slices: _sliced(stage, stages, micro_batches, slices),
    "zb_h1": lambda stage, stages, micro_batches, virtual, slices: _zb_h1(stage, stages, micro_batches),
}
"""Every schedule: stage, stages, micro-batches, chunks a stage and slices a micro-batch to the turns of that stage."""


def schedule_orders(schedule: str, stages: int, micro_batches: int, *, virtual: int = 1, slices: int = 1) -> Orders:
    """The turns of all stages of a schedule.

    Raises:
        CostModelError: an unknown schedule, chunks or slices that it has no place for, or numbers it cannot take.
    """
    order = ORDERS.get(schedule)
    if order is None:
        raise CostModelError(f"unknown schedule {schedule!r}; known: {', '.join(sorted(ORDERS))}")
    if slices < 1 or (slices > 1 and schedule != "seqpipe"):
        raise CostModelError(f"schedule {schedule!r} takes whole sequences, got {slices} slices; ask for 'seqpipe'")
    if virtual > 1 and schedule != "interleaved_1f1b":
        raise CostModelError(f"schedule {schedule!r} has one chunk a stage, got {virtual}; ask for 'interleaved_1f1b'")
    return tuple(order(stage, stages, micro_batches, virtual, slices) for stage in range(stages))
