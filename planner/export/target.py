"""The interface of every engine's module, and how it reports what the engine cannot express.

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
"""Kubernetes resource names of devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One thing that an engine cannot express: what it is, in the description and in the engine, and the description
    after that."""

    what: str
    here: str
    there: str
    description: Description


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is written: a description for a model, on nodes of `per_node` devices.

    Attributes:
        model: name of the model.
        description: the description.
        architecture: None for a model that is known only by its graph.
        per_node: devices of a node.
        overlapped: what overlaps in the price of the plan, and is switched on if an engine has a switch for it:
            "tensor", "gathers", "reductions", "exchange", as in `hardware_profiles.Hidden`.
        dispatcher: library that sends a token once to each node ("deepep", "hybridep"), if the price of the plan counts
            on that; else empty.
        unsaid: what the price counts on, but no engine is told, in words.
        gave_up: what the engine cannot be told about a plan at all, so that another plan is written; else empty.
        resource: Kubernetes resource name of a device.
    """

    model: str
    description: Description
    architecture: Architecture | None
    per_node: int
    overlapped: tuple[str, ...] = ()
    dispatcher: str = ""
    unsaid: tuple[str, ...] = ()
    gave_up: str = ""
    resource: str = NVIDIA

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(1, self.description.devices // self.per_node)

    @property
    def processes(self) -> int:
        """Processes on each node."""
        return min(self.per_node, self.description.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a file itself does not say.

    Attributes:
        layers: blocks of the model.
        devices: number of devices, if given.
        architecture: of the model, if it has one.
        beside: text of the file beside it (`Target.beside`), empty if there is none.
        recipe: which recipe or row is meant, for a file with several.
        model: name of the model, if known.
        experts: whether a model without `Architecture` has experts.
        sequence_length: tokens of a sample of a model without `Architecture`.
    """

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
        """Tokens of the model's own samples, if they are sequences and their length is known."""
        return self.sequence_length if self.architecture is None else self.architecture.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What files say, and what the reader should know about it.

    Attributes:
        description: the configuration.
        unmodelled: settings that no plan has but that change time or memory, with their effect on the price.
        notes: what is priced differently from the file.
        unread: names of settings that were not understood, or are not part of a plan.
        stack: the training stack (`hardware_profiles.software_names`) that runs these settings.
    """

    description: Description
    unmodelled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    stack: str = PYTORCH


Asked = tuple[tuple[str, str], ...]
"""What a person must fill in: an environment variable of `launch.sh` (empty if it is none), and what it is, in
Markdown."""


def _nothing(_: Job) -> tuple[Any, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An engine.

    Attributes:
        name: name of the engine.
        about: the engine and the version whose settings are written.
        main: the file that is read back.
        nearest: what has to be given up of a description.
        write: makes the files of a job.
        read: makes a reading of a file.
        needs_architecture: whether it cannot write models that are known only by their graph.
        writes_model: whether it builds every decoder that has an `Architecture` itself.
        latent: whether it can be told about latent attention and the routers of DeepSeek.
        beside: a file of the same folder that is read too, if any.
        fill_in: what exported settings leave to the user.
        tells: of what the price counts on for experts, what the settings of a job switch on: "once" (a token is sent
            once to each node) and "exchange" (this overlaps with other work).
        ignores: what else the price counts on and the engine does not do, in words.
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
    tells: Callable[[Job], tuple[str, ...]] = _nothing
    ignores: Callable[[Job], tuple[str, ...]] = _nothing

    def architecture_of(self, reference: str, sequence_length: int | None) -> Architecture | None:
        """The architecture of a model as the engine is told it; None if it cannot be told any."""
        return architecture_of(reference, sequence_length, every=self.writes_model, latent=self.latent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a file says about an operator.

    `cuts` has the pieces of each dim of its operands; leading dims of an operand may count as one. `axes` has for each
    mesh axis the name of the factor that it cuts, "*" if unknown.
    """

    cuts: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorReading:
    """What a file says about a model operator by operator, on the graph of plans (`prepare`).

    Attributes:
        mesh: sizes of the axes of a stage's devices.
        pipeline: number of pipeline ranks.
        stages: blocks of every stage, virtual ones too.
        operators: by their index in the graph; missing ones are left open.
        parameters: the layout of the weight, and the axes on which states are cut.
        notes: parts of the file that have no place in the model, and parts of the model that the file does not mention.
    """

    mesh: tuple[int, ...]
    pipeline: int
    stages: tuple[int, ...]
    operators: Mapping[int, Wish]
    parameters: Mapping[str, tuple[Layout, tuple[bool, ...]]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTarget:
    """An engine that takes strategies operator by operator, from the bound plan itself, without giving anything up.

    `read` takes the text of the file `main`, the graph and its blocks, and the devices if they are given.
    """

    name: str
    about: str
    main: str
    write: Callable[[BoundPlan], Mapping[str, str]]
    read: Callable[[bytes, OperatorGraph, Blocks, int | None], OperatorReading]


class Giving:
    """Collects what has to be given up, one thing after the other."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.losses: list[Loss] = []

    def up(self, what: str, here: object, there: object, **changes: Any) -> None:
        """Note one thing that an engine cannot express, and change the description."""
        self.description = replace(self.description, **changes)
        self.losses.append(Loss(what=what, here=str(here), there=str(there), description=self.description))
