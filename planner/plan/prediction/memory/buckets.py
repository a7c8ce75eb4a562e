"""Memory of buckets in which gradients are reduced and new weights are gathered: flat copies and outputs.

    gradients   accumulated members ─> flat copy, and output ─> members freed ─> in progress ─> views of the output
    weights     updated members ─> flat copy, and output, row by row ─> each in its own memory

A bucket starts in the backward pass when the last of its members is fully accumulated, or after the pass
(`runtime.update.reduction`). So the copy of the first buckets may live while the pass still holds memory.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hardware_profiles import Bytes
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.per_step_communication import reduction_starts
from planner.plan.prediction.memory.account import MemoryAccount, Storage
from planner.sharding.buckets import Bucket
from planner.sharding.redistribute import COLLECTIVES


@dataclass(kw_only=True)
class BucketMemory:
    """The buckets of a rank. `gradients` has their memory by parameter. Each gradient is added to `expected` times in
    the step. `reduced` has the memory of reduced gradients, which the members of a bucket share."""

    bound: BoundPlan
    account: MemoryAccount
    gradients: dict[str, Storage]
    expected: Counter[str]
    reduced: dict[str, Storage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._starts = reduction_starts(self.bound, self.expected.keys())
        self._under_way: list[Storage | None] = []  # of each started bucket; None after it has finished
        self._missing = [sum(self.expected[name] for name in bucket.names) for bucket in self._starts.buckets]
        self._bucket_of = {name: at for at, bucket in enumerate(self._starts.buckets) for name in bucket.names}

    @property
    def members(self) -> Collection[str]:
        """The parameters whose gradients go in buckets."""
        return self._bucket_of.keys()

    def arrived(self, name: str) -> None:
        """Something was added to a gradient: complete buckets start, in their order."""
        if name in self._bucket_of:
            self._missing[self._bucket_of[name]] -= 1
        while len(self._under_way) < self._starts.early and self._missing[len(self._under_way)] == 0:
            self._start()

    def finish(self) -> None:
        """Start the remaining buckets, and wait for all."""
        while len(self._under_way) < len(self._starts.buckets):
            self._start()
        for at in range(len(self._under_way)):
            self._land(at)

    def _start(self) -> None:
        at = len(self._under_way)
        for earlier in range(self._starts.landed[at]):
            self._land(earlier)
        bucket = self._starts.buckets[at]
        members = [self.gradients.pop(name) for name in bucket.names if name in self.gradients]
        self._under_way.append(self._sent(members, bucket, 0))

    def _sent(self, members: list[Storage], bucket: Bucket, number: int) -> Storage:
        """The memory of a collective in progress, after its inputs are freed."""
        mesh = self.bound.plan.mesh
        comes = bucket.comes(mesh, number)
        flat: Bytes = bucket.takes(mesh, number) - comes
        copied = self.account.new(flat, members[0].of) if flat else self.account.hold(members[0])
        made = self.account.new(comes, members[0].of) if comes else self.account.hold(copied)
        for storage in (*members, copied):
            self.account.release(storage)
        return made

    def _land(self, at: int) -> None:
        """Wait for a bucket, and for the collectives that follow its first."""
        found, bucket = self._under_way[at], self._starts.buckets[at]
        if found is None:
            return
        self._under_way[at] = None
        for number in range(1, len(bucket.nbytes)):
            found = self._sent([found], bucket, number)
        for name in bucket.names:
            self.reduced[name] = self.account.hold(found)
        self.account.release(found)


def gather(bucket: Bucket, bound: BoundPlan, account: MemoryAccount, given: Sequence[Storage], of: str) -> None:
    """Transient memory to gather the new weights of a bucket. Those in `given` have separate memory, which is freed.
    With several members, the outputs are contiguous and are then split; members that are cut along a dim other than the
    first are transposed."""
    several, mesh = len(bucket.members) > 1, bound.plan.mesh
    held = list(given)
    for number, nbytes in enumerate(bucket.nbytes):
        steps = [[step for step in one.steps if step.kind in COLLECTIVES][number] for one in bucket.members]
        sizes = [one.nbytes[number] for one in bucket.members]
        flat = [account.new(nbytes / mesh.sizes[steps[0].axis], of)] if several else []
        whole = account.new(nbytes, of)
        for storage in (*flat, *held):
            account.release(storage)
        turned = sum(size for step, size in zip(steps, sizes, strict=True) if step.dim)
        held = [*([account.new(nbytes, of)] if several else [account.hold(whole)]), account.new(turned, of)]
        account.release(whole)
    for storage in held:
        account.release(storage)
