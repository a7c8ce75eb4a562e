"""What every engine's module offers, and how it says what the engine cannot.

    write   a description that the engine can say   -> files
    read    files                                   -> a description, the inverse
    nearest any description                         -> what has to be given up, one thing after the other

`write(read(files))` gives the same files, and `read(write(description))` the same description.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hardware_profiles import PYTORCH as _PYTORCH
from planner.export.architecture import Architecture, architecture_of
from planner.export.description import Description
from planner.graph.blocks import Blocks
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundPlan
from planner.sharding.layout import Layout

PYTORCH = _PYTORCH.name

NVIDIA, AMD, ASCEND = "nvidia.com/gpu", "amd.com/gpu", "huawei.com/Ascend910"
"""What device plugins of Kubernetes call a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One thing that an engine cannot say: what it is, as the description has it and as the engine will do it, and the
    description after that."""

    what: str
    here: str
    there: str
    description: Description


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be written: a description for a model, on devices of which `per_node` share a node.

    `architecture` is None for a model that is known by its graph alone. `overlapped` is what travels under work where
    the plan was priced, which is switched on where an engine has a switch for it: "tensor", "gathers", "reductions", as
    in `hardware_profiles.Hidden`. `gave_up` is what the engine cannot be told of a plan at all, in whose place another
    one is written; else empty. `resource` is what device plugins of Kubernetes call a device of the plan.
    """

    model: str
    description: Description
    architecture: Architecture | None
    per_node: int
    overlapped: tuple[str, ...] = ()
    gave_up: str = ""
    resource: str = NVIDIA

    @property
    def nodes(self) -> int:
        return max(1, self.description.devices // self.per_node)

    @property
    def processes(self) -> int:
        """On each node."""
        return min(self.per_node, self.description.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a file does not say itself: blocks of the model, devices, where they are given, the text of the file beside
    it (`Target.beside`), "" where there is none, which recipe or row of a file with several is meant, and the name of
    the model, where there is one. `experts` and `sequence_length` are those of a model that has no `Architecture`."""

    layers: int
    devices: int | None
    architecture: Architecture | None
    beside: str = ""
    recipe: str = ""
    model: str = ""
    experts: bool = False
    sequence_length: int | None = None

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.experts or (self.architecture is not None and self.architecture.experts is not None)

    @property
    def own_length(self) -> int | None:
        """Tokens of the model's own samples, where they are sequences and that is known."""
        return self.sequence_length if self.architecture is None else self.architecture.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What files say, and what a reader should know of it.

    Attributes:
        unmodelled: settings that no plan has and that change time or memory: what they do to the price.
        notes: what is priced otherwise than the file has it.
        unread: names of settings that were not understood, or are no part of a plan.
        stack: the training stack (`hardware_profiles.software_names`) that runs these settings.
    """

    description: Description
    unmodelled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    stack: str = PYTORCH


Asked = tuple[tuple[str, str], ...]
"""What a person has to fill in: a variable of the environment of `launch.sh`, "" where it is none, and what it is, in
Markdown."""


def _nothing(_: Job) -> Asked:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An engine.

    Attributes:
        about: the engine and the version whose settings are written.
        main: the file that is read back.
        beside: a file of the same folder that is read with it, where there is one.
        needs_architecture: whether nothing can be written for a model that is known by its graph alone.
        writes_model: whether it builds models itself, every decoder that has an `Architecture`.
        latent: whether it is told of latent attention and how routers of DeepSeek choose.
        fill_in: what exported settings leave to whoever starts them.
    """

    name: str
    about: str
    main: str
    nearest: Callable[[Description], tuple[Loss, ...]]
    write: Callable[[Job], Mapping[str, str]]
    read: Callable[[str, Facts], Reading]
    needs_architecture: bool = False
    writes_model: bool = False
    latent: bool = False
    beside: str | None = None
    fill_in: Callable[[Job], Asked] = _nothing

    def architecture_of(self, reference: str, sequence_length: int | None) -> Architecture | None:
        """The architecture of a model as the engine is told it; None where it is told none."""
        return architecture_of(reference, sequence_length, every=self.writes_model, latent=self.latent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a file says of an operator: pieces of each dim of its operands, where leading dims of an operand may count
    as one; and for each mesh axis the name of the factor that it cuts, "*" where that is not said."""

    cuts: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorReading:
    """What a file says operator by operator of a model, on the graph that plans speak about (`prepare`).

    Attributes:
        mesh: sizes of the axes of a stage's devices.
        stages: blocks of every stage, virtual ones too; `pipeline` of them stand side by side.
        operators: by their place in the graph; what is missing is left open.
        parameters: the layout of the weight, and the axes on which states are cut.
        notes: what of the file has no place in the model, and what of the model it says nothing of.
    """

    mesh: tuple[int, ...]
    pipeline: int
    stages: tuple[int, ...]
    operators: Mapping[int, Wish]
    parameters: Mapping[str, tuple[Layout, tuple[bool, ...]]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTarget:
    """An engine that takes strategies operator by operator, from the bound plan itself. Nothing is given up of them.

    `read` takes the text of the file `main`, the graph and its blocks, and the devices where they are given.
    """

    name: str
    about: str
    main: str
    write: Callable[[BoundPlan], Mapping[str, str]]
    read: Callable[[bytes, OperatorGraph, Blocks, int | None], OperatorReading]


class Giving:
    """Gives up one thing after the other."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.losses: list[Loss] = []

    def up(self, what: str, here: object, there: object, **changes: Any) -> None:
        """Note one thing that an engine cannot say."""
        self.description = replace(self.description, **changes)
        self.losses.append(Loss(what=what, here=str(here), there=str(there), description=self.description))
