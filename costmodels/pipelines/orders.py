"""The order in which every stage of a pipeline takes its turns, for each named schedule.

    gpipe          F F F F ........ B B B B       all forwards, then all backwards; holds all m micro-batches
    1f1b           F F F B F B ....               `order_1f1b`; holds at most p - s
    eager_1f1b     F F F F F B F B ...             as 1f1b with twice the warm-up, which covers transfers both ways
    interleaved_1f1b  0 0 1 1 0 . 0 ...           `order_interleaved_1f1b`: v chunks a stage
    zb_h1          F F F B W F B W ... B W B W    backward in two parts: B, the gradient of the input, which the stage
                                                  before waits for, and W, that of the weights, which fills bubbles
    seqpipe        0.0 0.1 0.2 0.2' 0.1' ...      the sequence of a micro-batch cut into q slices: forwards in their
                                                  order, backwards in the reverse order, 1F1B over slices

    zb_v           two chunks a rank, down the ranks and back up; as zb_h1, and no bubble where F = B = W
    dualpipe_v     the same placement; a forward beside a backward pass in turn, backward passes whole but at the ends

    forward        F F F F                        forward passes alone, for a plan that evaluates and never trains;
                                                  nothing is held of a micro-batch that is through

    pipedream      F F F B F B F B ....           1F1B through all batches without a flush between them; pipedream_2bw
                                                  has the same order, but changes weights at other times

Eager 1F1B: stage s warms up with 2 (p-s-1) forwards instead of p-s-1. During each transfer of a micro-batch, forward or
back, the stage has a pass of another micro-batch. So a step takes (m + p-1) (F + B) + 2 (p-1) t, where t is a transfer
that takes no longer than F or B. 1F1B holds half as much, and waits for transfers in every round.

ZB-H1: stage s warms up with p-s-1 forwards, alternates F and B as 1F1B does, and defers each W by s of them. So the
late stages pass gradients on earlier, and the early ones have W to fill the end. Every stage holds at most p
micro-batches (until their W), which is what 1F1B holds on its first stage. The bubble is (p-1)(F + B - W) instead of
(p-1)(F + B + W), for stages of equal time, m >= p and W <= min(F, B).

Slices: a slice attends to the slices before it. So its forward needs theirs, and its backward needs the gradients of
keys and values from the slices after it. p-s-1 + q-1 forwards of slices warm up, and at most p-s + q-1 slices are held,
where 1F1B holds (p-s) q. The pipeline fills and drains q times as fast.

Slices with v chunks a stage take the rounds of interleaved 1F1B with slices in place of micro-batches, p of them a
round, backwards of a micro-batch from its last slice to its first. The k-th backward of a stage needs the forward of
its slice before it, so the warm-up has w more forwards than the 2 (p-s-1) that the pipeline takes to go there and back.
w is the most by which a backward would come before its forward if both were counted from 0. If q divides p, it is (v-1)
p + q-1.

Sources: Zhuang et al., "On optimizing the communication of model parallelism", MLSys 2023, section 4 (eager 1F1B);
Narayanan et al., "PipeDream", SOSP 2019, and "Memory-efficient pipeline-parallel DNN training", ICML 2021 (2BW); Huang
et al., "GPipe", NeurIPS 2019; Narayanan et al., SC 2021 (1F1B, interleaved); Qi et al., "Zero bubble pipeline
parallelism", ICLR 2024, section 2.3 and figure 3 (ZB-H1); Li et al., "TeraPipe", ICML 2021, and Sun et al., "Seq1F1B",
arXiv 2406.03488, 2024 (slices); those of `costmodels.pipelines.v_orders` (the V).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from costmodels.errors import CostModelError
from costmodels.pipelines.schedules import (
    Turn,
    TurnKind,
    in_flight,
    in_flight_of_chunks,
    in_turn,
    order_1f1b,
    order_interleaved_1f1b,
)
from costmodels.pipelines.v_orders import order_dualpipe_v, order_zb_v

FORWARD = "forward"
"""The schedule without backward passes."""

Orders = tuple[tuple[Turn, ...], ...]
"""The turns of each stage, in its order; the outer tuple is over stages."""


def _gpipe(stage: int, stages: int, micro_batches: int) -> tuple[Turn, ...]:
    """All forwards, then all backwards in the same order of micro-batches."""
    in_flight(stage, stages, micro_batches)  # checks the numbers
    kinds: tuple[TurnKind, ...] = ("forward", "backward")
    return tuple(Turn(kind, index) for kind in kinds for index in range(micro_batches))


def _eager(stage: int, stages: int, micro_batches: int) -> tuple[Turn, ...]:
    """1F1B whose stages warm up with a forward for each transfer to the last stage and back."""
    in_flight(stage, stages, micro_batches)  # checks the numbers
    return in_turn(min(2 * (stages - stage - 1), micro_batches), micro_batches)


def _zb_h1(stage: int, stages: int, micro_batches: int) -> tuple[Turn, ...]:
    """The order of 1F1B, with W deferred by `stage` backwards."""
    turns: list[Turn] = []
    for turn in order_1f1b(stage, stages, micro_batches):
        if turn.kind == "forward":
            turns.append(turn)
            continue
        turns.append(Turn("input_gradient", turn.micro_batch))
        if turn.micro_batch >= stage:
            turns.append(Turn("weight_gradient", turn.micro_batch - stage))
    deferred_weight_gradients = min(stage, micro_batches)
    turns += [
        Turn("weight_gradient", index) for index in range(micro_batches - deferred_weight_gradients, micro_batches)
    ]
    return tuple(turns)


@lru_cache(maxsize=1024)
def _sliced(stage: int, stages: int, micro_batches: int, virtual: int, slices: int) -> tuple[Turn, ...]:
    """1F1B over slices, interleaved if a stage has several chunks; backwards of a micro-batch from its last slice to
    its first."""
    in_flight(stage, stages, micro_batches)  # checks the numbers
    total = micro_batches * slices * virtual
    if virtual > 1 and micro_batches * slices % stages:
        raise CostModelError(
            f"{micro_batches} micro-batches of {slices} slices are no multiple of {stages} stages, which {virtual}"
            " chunks on each take in rounds"
        )
    rounds = stages if virtual > 1 else 1

    def forward(number: int) -> Turn:
        at, within = divmod(number, rounds * virtual)
        chunk, place = divmod(within, rounds)
        return Turn("forward", *_of_unit(at * rounds + place, chunk, slices))

    def backward(number: int) -> Turn:
        at, within = divmod(number, rounds * virtual)
        chunk, place = divmod(within, rounds)
        micro_batch, chunk, piece = _of_unit(at * rounds + place, virtual - 1 - chunk, slices)
        return Turn("backward", micro_batch, chunk, slices - 1 - piece)

    if virtual == 1:
        warm_up = min(stages - stage - 1 + slices - 1, total - 1)
    else:
        place = {(turn.micro_batch, turn.chunk, turn.slice): at for at, turn in enumerate(map(forward, range(total)))}
        behind = (backward(number) for number in range(total))
        before = max(place[one.micro_batch, one.chunk, one.slice] - at for at, one in enumerate(behind))
        warm_up = min(2 * (stages - stage - 1) + before, total)
    turns = [forward(number) for number in range(warm_up)]
    for number in range(total - warm_up):
        turns += [forward(warm_up + number), backward(number)]
    turns += [backward(number) for number in range(total - warm_up, total)]
    return tuple(turns)


def _forward(stage: int, stages: int, micro_batches: int) -> tuple[Turn, ...]:
    """Micro-batches one after the other."""
    in_flight(stage, stages, micro_batches)  # checks the numbers
    return tuple(Turn("forward", index) for index in range(micro_batches))


def _of_unit(unit: int, chunk: int, slices: int) -> tuple[int, int, int]:
    """Micro-batch, chunk and slice from the number of a slice in a step."""
    return unit // slices, chunk, unit % slices


def _sliced_flights(stage: int, stages: int, micro_batches: int, virtual: int, slices: int) -> tuple[int, ...]:
    turns = _sliced(stage, stages, micro_batches, virtual, slices)
    return tuple(most_in_flight(turn for turn in turns if turn.chunk == chunk) for chunk in range(virtual))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pipeline schedule, with everything that the planner and the runtime ask of it.

    A new schedule is an entry of `SCHEDULES`.

    Attributes:
        order: takes stage, stages, micro-batches, chunks per stage and slices per micro-batch; returns the turns of
            that stage.
        in_flight: takes the same; returns for each chunk the most micro-batches (or slices) that are held whole, with
            all that their backward pass needs. A micro-batch whose backward is split is whole until the first of its
            two turns.
        flushes: whether the pipeline drains before weights are updated; else micro-batches are in flight that began
            with older weights.
        interleaved: stages hold several chunks.
        virtual: stages may hold several chunks; all others hold one.
        v_shaped: the two chunks of a rank lie in a V: stages 0 to p-1 on ranks 0 to p-1, the others back.
        paired: a forward turn may run together with the backward turn of the other chunk that follows it.
        sliced: a stage takes a sequence in slices; all others take it whole.
        splits_backward: gradients of inputs and of weights are turns of their own.
        holds_all: every stage holds all micro-batches of a step.
        versions: versions of the weights that a stage holds; None for one per micro-batch in flight, at least two.
        updates_each: whether weights are updated after every micro-batch.
        in_rows: whether `costmodels.pipelines.rank_ends` gives the same result as the simulation.
        compared: whether the search also tries this schedule for the plans that it has found for 1F1B.
        trains: whether there are backward passes; else the pipeline only evaluates.
    """

    order: Callable[[int, int, int, int, int], tuple[Turn, ...]]
    in_flight: Callable[[int, int, int, int, int], tuple[int, ...]]
    flushes: bool = True
    interleaved: bool = False
    virtual: bool = False
    v_shaped: bool = False
    paired: bool = False
    sliced: bool = False
    splits_backward: bool = False
    holds_all: bool = False
    versions: int | None = 1
    updates_each: bool = False
    in_rows: bool = False
    compared: bool = False
    trains: bool = True

    def rank_of(self, stage: int, ranks: int) -> int:
        """The pipeline rank, of `ranks`, that holds a stage."""
        chunk, place = divmod(stage, ranks)
        return ranks - 1 - place if self.v_shaped and chunk % 2 else place

    def stage_of(self, rank: int, chunk: int, ranks: int) -> int:
        """The stage that is chunk `chunk` of a rank."""
        return chunk * ranks + (ranks - 1 - rank if self.v_shaped and chunk % 2 else rank)


def _order_1f1b(stage: int, stages: int, micro_batches: int, virtual: int, slices: int) -> tuple[Turn, ...]:
    return order_1f1b(stage, stages, micro_batches)


def _flights(stage: int, stages: int, micro_batches: int, virtual: int, slices: int) -> tuple[int, ...]:
    return in_flight_of_chunks(stage, stages, virtual, micro_batches)


def _v_shaped(order: Callable[[int, int, int], tuple[Turn, ...]], *, paired: bool = False) -> Schedule:
    """A schedule with two chunks a rank in a V and split backward passes.

    `order` takes stage, stages and micro-batches.
    """

    def flights(stage: int, stages: int, micro_batches: int, virtual: int, slices: int) -> tuple[int, ...]:
        return tuple(_whole_in_flight(order(stage, stages, micro_batches), chunk) for chunk in range(2))

    return Schedule(
        order=lambda stage, stages, micro_batches, virtual, slices: order(stage, stages, micro_batches),
        in_flight=flights,
        virtual=True,
        v_shaped=True,
        paired=paired,
        splits_backward=True,
    )


def _whole_in_flight(turns: Iterable[Turn], chunk: int) -> int:
    """Most micro-batches of a chunk between their forward turn and the first of their backward turns."""
    live = most = 0
    for turn in turns:
        if turn.chunk == chunk and turn.kind != "weight_gradient":
            live += 1 if turn.kind == "forward" else -1
            most = max(most, live)
    return most


SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": Schedule(order=_order_1f1b, in_flight=_flights, in_rows=True),
    "gpipe": Schedule(
        order=lambda stage, stages, micro_batches, virtual, slices: _gpipe(stage, stages, micro_batches),
        in_flight=lambda stage, stages, micro_batches, virtual, slices: (micro_batches,),
        holds_all=True,
        compared=True,
    ),
    "eager_1f1b": Schedule(
        order=lambda stage, stages, micro_batches, virtual, slices: _eager(stage, stages, micro_batches),
        in_flight=lambda stage, stages, micro_batches, virtual, slices: (
            min(micro_batches, 2 * (stages - stage - 1) + 1),
        ),
        compared=True,
    ),
    "interleaved_1f1b": Schedule(
        order=lambda stage, stages, micro_batches, virtual, slices: order_interleaved_1f1b(
            stage, stages, virtual, micro_batches
        ),
        in_flight=_flights,
        interleaved=True,
        virtual=True,
        in_rows=True,
    ),
    "seqpipe": Schedule(
        order=_sliced,
        in_flight=_sliced_flights,
        virtual=True,
        sliced=True,
    ),
    "zb_h1": Schedule(
        order=lambda stage, stages, micro_batches, virtual, slices: _zb_h1(stage, stages, micro_batches),
        in_flight=_flights,
        splits_backward=True,
        compared=True,
    ),
    "zb_v": _v_shaped(order_zb_v),
    "dualpipe_v": _v_shaped(order_dualpipe_v, paired=True),
    "pipedream": Schedule(order=_order_1f1b, in_flight=_flights, flushes=False, versions=None, updates_each=True),
    "pipedream_2bw": Schedule(order=_order_1f1b, in_flight=_flights, flushes=False, versions=2),
    FORWARD: Schedule(
        order=lambda stage, stages, micro_batches, virtual, slices: _forward(stage, stages, micro_batches),
        in_flight=lambda stage, stages, micro_batches, virtual, slices: (1,),
        trains=False,
    ),
}
"""Every schedule by its name."""


@lru_cache(maxsize=256)
def paired_turns(turns: tuple[Turn, ...]) -> frozenset[int]:
    """The indexes of forward turns that are directly followed by a backward turn of the other chunk."""
    return frozenset(
        at
        for at, (one, other) in enumerate(pairwise(turns))
        if one.kind == "forward" and other.kind in ("backward", "input_gradient") and one.chunk != other.chunk
    )


def ends(turn: Turn) -> bool:
    """Whether a turn is the last of its micro-batch (or slice) in its chunk; after it, nothing is kept for the
    micro-batch."""
    return turn.kind in ("backward", "weight_gradient")


def most_in_flight(turns: Iterable[Turn]) -> int:
    """Most micro-batches at once between their forward turn and the last of their backward turns.

    Each chunk counts. `runtime.step.pipeline` counts the same on the processes. Without backward turns it is 1, the
    micro-batch that runs.
    """
    turns = tuple(turns)
    if not any(map(ends, turns)):
        return min(1, len(turns))
    live = most = 0
    for turn in turns:
        live += (turn.kind == "forward") - ends(turn)
        most = max(most, live)
    return most


def schedule_orders(schedule: str, stages: int, micro_batches: int, *, virtual: int = 1, slices: int = 1) -> Orders:
    """The turns of all stages of a schedule.

    Raises:
        CostModelError: an unknown schedule, chunks or slices that it does not support, or numbers that it cannot take.
    """
    known = SCHEDULES.get(schedule)
    if known is None:
        raise CostModelError(f"unknown schedule {schedule!r}; known: {', '.join(sorted(SCHEDULES))}")
    if slices < 1 or (slices > 1 and not known.sliced):
        raise CostModelError(f"schedule {schedule!r} takes whole sequences, got {slices} slices; ask for 'seqpipe'")
    if known.v_shaped and virtual != 2:
        raise CostModelError(f"schedule {schedule!r} has two chunks a stage, got {virtual}")
    if virtual > 1 and not known.virtual:
        raise CostModelError(f"schedule {schedule!r} has one chunk a stage, got {virtual}; ask for 'interleaved_1f1b'")
    return tuple(known.order(stage, stages, micro_batches, virtual, slices) for stage in range(stages))
