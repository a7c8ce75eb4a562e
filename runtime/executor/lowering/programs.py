"""The programs of one rank: Python functions that are written from the plan, one for each distinct block.

    plan ──bind──> instructions ──emit──> text ──compile──> program ──bodies──> block 0, block 1, ...

The general executor decides for every operator, in every run, which redistributions its operands need, whether an
observer is present, and which values are dropped. All of that is known from the plan, so a program contains only the
decisions (see `runtime.executor.lowering.emit`). Blocks that do the same share one program and differ in the names of
their weights and values; the first and the last block of a stage often have separate programs, because they read other
values. Autograd records a program as it would record a model, so the backward pass, recomputation, accumulation and
schedules are the same as in the general executor.

Every program is written twice. The bare one only computes. The watched one compares all results with the promises of
their rules and calls observers. A body runs the watched program the first time, and whenever there is an observer;
nothing is checked after that. A recomputation runs the same program as the first run.

Where the programs are `compiled`, the bare ones have one call for each chain of elementwise operators, of a function
compiled by `torch.compile` (see `runtime.executor.lowering.chains`).
"""

import linecache
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from costmodels import Then
from planner.plan.binding.bind import BoundPlan
from runtime.comm.device_mesh import RankMesh
from runtime.executor.instruction import Instruction, MicroBatch, called
from runtime.executor.interleaving import depart
from runtime.executor.lowering.calls import Text
from runtime.executor.lowering.chains import in_chains
from runtime.executor.lowering.compiled import Compiled
from runtime.executor.lowering.emit import emit

Program = Callable[[MicroBatch, "Body"], Iterator[Then] | None]


@dataclass(kw_only=True)
class Body:
    """A program on the values and weights of one block: `bare` and `watched`. `seen` says whether the latter has
    run."""

    instructions: tuple[Instruction, ...]
    names: tuple[str, ...]
    bare: Program
    watched: Program
    seen: bool = False

    def __call__(self, batch: MicroBatch) -> None:
        """Run it; the values that others read are then in the batch's values."""
        self.chosen(batch)(batch, self)
        self.seen = True

    def chosen(self, batch: MicroBatch) -> Program:
        """The program to run for a batch."""
        watches = batch.watched if batch.watched is not None else not self.seen
        return self.watched if watches or batch.observer is not None else self.bare


def one_after_the_other(bodies: Sequence[Body], batch: MicroBatch) -> Iterator[Then]:
    """Run bodies one after the other; their programs yield to other micro-batches after each send, and at pauses."""
    for body in bodies:
        turns = body.chosen(batch)(batch, body)
        assert turns is not None, "written as a generator"
        yield from turns
        body.seen = True


@dataclass(kw_only=True)
class Programs:
    """The programs of the stages of one rank, each written when it is first needed; `compiled`: with compiled
    chains."""

    bound: BoundPlan
    place: RankMesh
    compiled: Compiled | None = None
    texts: dict[str, Text] = field(default_factory=dict)  # of each distinct program, by its name
    _programs: dict[Hashable, Program] = field(default_factory=dict)
    _bodies: dict[tuple[int, int, bool, bool], tuple[Body, ...]] = field(default_factory=dict)

    def bodies(
        self, instructions: Sequence[Instruction], *, recomputed: bool, departs: bool, again: int = 0
    ) -> tuple[Body, ...]:
        """The programs of consecutive instructions, block by block. The first `again` of them may be recomputed without
        the others, if any are recomputed."""
        if not instructions:
            return ()
        key = (instructions[0].index, instructions[-1].index, recomputed, departs)
        if key not in self._bodies:
            border = instructions[again].index if again < len(instructions) else None
            parts = groupby(instructions, key=lambda instruction: self.bound.blocks.block_of(instruction.index))
            self._bodies[key] = tuple(self._body(tuple(part), recomputed, departs, border) for _, part in parts)
        return self._bodies[key]

    def _body(self, instructions: tuple[Instruction, ...], recomputed: bool, departs: bool, border: int | None) -> Body:
        write = partial(emit, self.bound, instructions, recomputed=recomputed, departs=departs)
        watched = write(watched=True)
        units = in_chains(self.bound, instructions, recomputed=recomputed, border=border) if self.compiled else ()
        bare = write(watched=False, units=units, compiled=self.compiled, names=watched.names)
        assert bare.names == watched.names, "the same values in the same order"
        return Body(
            instructions=instructions,
            names=tuple(bare.names),
            bare=self._program(bare),
            watched=self._program(watched),
        )

    def _program(self, text: Text) -> Program:
        if text.key not in self._programs:
            name = f"<program {len(self._programs)}>"
            source = text.source
            known: dict[str, Any] = {"called": called, "depart": depart, "place": self.place}
            known["lines"] = text.lines  # for the diagnosis of waiting ranks
            known |= text.known
            exec(compile(source, name, "exec"), known)
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks
            self._programs[text.key] = known["program"]
            self.texts[name] = text
        return self._programs[text.key]
