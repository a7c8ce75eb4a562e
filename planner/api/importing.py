"""Settings of another engine as a plan: engine and model, the settings, and their price."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hardware_profiles.foreign import SETTINGS, ForeignTextError, read_text
from hardware_profiles.nicknames import full_profile
from planner.api.carrying import Subject, plan_of, target_named
from planner.api.checks import file_path, names, numbers, profile
from planner.api.exported_folders import exported_as
from planner.errors import ModelError, RequestError

if TYPE_CHECKING:
    from planner.export.description import Description
    from planner.export.target import Facts, Reading, Target
    from planner.graph.operator_graph import OperatorGraph
    from planner.models.zoo import BuiltModel
    from planner.plan.binding.bind import BoundPlan


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is given for a file. Engine, model, number of devices, sample length and training stack may be left to the
    file. Global batch and micro-batches are for files that list strategies of operators."""

    file: Path
    engine: str | None
    model: str | None
    devices: int | None
    recipe: str
    hardware: str
    cluster: str | None
    software: str | None
    sequence_length: int | None = None
    global_batch: int | None = None
    micro_batches: int | None = None


def asked_for(
    path: str | os.PathLike[str],
    hardware: str | os.PathLike[str],
    *,
    engine: str | None,
    model: str | None,
    devices: int | None,
    seq_len: int | None,
    cluster: str | None,
    software: str | None,
    recipe: str,
    global_batch: int | None = None,
    micro_batches: int | None = None,
) -> Asked:
    """What a Python function was given for a file, with nicknames in full. Raises RequestError for wrong types."""
    from planner.models.nicknames import full_model

    names(engine=engine, model=model, cluster=cluster, software=software, recipe=recipe)
    numbers(devices=devices, seq_len=seq_len, global_batch=global_batch, micro_batches=micro_batches)
    return Asked(
        file=file_path("path", path),
        engine=engine,
        model=None if model is None else full_model(model),
        devices=devices,
        recipe=recipe,
        hardware=full_profile(profile(hardware)),
        cluster=cluster,
        software=software,
        sequence_length=seq_len,
        global_batch=global_batch,
        micro_batches=micro_batches,
    )


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A configuration that was read and priced.

    Attributes:
        text: of the file that `path` names.
        facts: what the reader was told of the model.
        subject: the model and the machine that all plans of this file are for.
        bound: the plan of the file. It may not fit.
    """

    path: Path
    text: str
    target: "Target"
    model: str
    facts: "Facts"
    reading: "Reading"
    subject: Subject
    bound: "BoundPlan"

    def read_again(self, text: str) -> "Description":
        """The description of another text for the same job."""
        return self.target.read(text, self.facts).description


@contextlib.contextmanager
def refusing(file: Path, engine: str) -> Iterator[None]:
    """Add the file name to a reader's error; also to an error that the reader did not check for, which is not a fault
    of the planner."""
    from planner.export.description import ExportError

    try:
        yield
    except ExportError as error:
        raise ExportError(f"{file}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise ExportError(f"{file}: its values are none of {engine}'s ({fault:.200}); mend them") from error


def imported(asked: Asked, traced: "Callable[[BuiltModel], OperatorGraph]", noted: Callable[[str], None]) -> Imported:
    """Read a file and price it by the training stack of its engine, unless another one is named. `traced` traces a
    model; `noted` gets notes on its operators.

    Raises RequestError or ExportError, with the name of the file.
    """
    from planner.export.adapters_in import trains_all
    from planner.export.unmodelled import besides_adapters

    target, path, text, beside = _found(asked)
    words = f"{text}\n{beside}"
    model, notes = _with_adapters(_model(asked, target, path, text), words)
    facts, traced_model = _traced(asked, target, beside, model, traced)
    reading = read_settings(asked.file, target, text, facts)
    if notes or trains_all(words):
        reading = replace(reading, unmodelled=besides_adapters(reading.unmodelled), notes=(*notes, *reading.notes))
    devices = reading.description.devices
    if asked.devices is not None and asked.devices != devices:
        raise RequestError(f"{asked.file}: its degrees make {devices} devices, --devices says {asked.devices}")
    length = reading.description.sequence_length
    if asked.sequence_length is not None and length not in (None, asked.sequence_length):
        raise RequestError(f"{asked.file}: its samples have {length} tokens, --seq-len says {asked.sequence_length}")
    subject = _on_machine(asked, traced_model, reading, model, traced, noted)
    return Imported(
        path=path,
        text=text,
        target=target,
        model=model,
        facts=facts,
        reading=reading,
        subject=subject,
        bound=plan_of(subject, reading.description),
    )


def _found(asked: Asked) -> "tuple[Target, Path, str, str]":
    """The engine, its file, the text of that, and the text of the file that belongs to it."""
    from planner.export.guessing import guessed_engine
    from planner.export.targets import TARGETS

    engine = asked.engine or exported_as(asked.file).engine
    if engine is None:
        path = asked.file
        if path.is_dir():
            mains = tuple(dict.fromkeys(target.main for target in TARGETS.values()))
            inside = [name for name in mains if (path / name).is_file()]
            if not inside:
                raise RequestError(
                    f"{path}: this folder has no settings of an engine, which are in {', '.join(mains)}; give the file,"
                    " or a folder that plan export wrote"
                )
            path = path / min(inside, key=_starts)
        with refusing(asked.file, "an engine"):
            engine = guessed_engine(_settings_of(path), TARGETS)
    target = target_named(engine)
    path = asked.file / target.main if asked.file.is_dir() else asked.file
    also = None if target.beside is None else path.parent / target.beside
    return target, path, _settings_of(path), _settings_of(also) if also is not None and also.is_file() else ""


_LAUNCH = "launch.sh"


def _starts(name: str) -> bool:
    """Whether a file only starts an engine in some folders; such a file comes last."""
    return name == _LAUNCH


def _settings_of(path: Path) -> str:
    """The text of a hand-written file. Raises RequestError."""
    try:
        text = read_text(path)
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}") from error
    if len(text) > SETTINGS.size:
        raise RequestError(f"{path}: {len(text)} characters are too many for settings; at most {SETTINGS.size}")
    return text


def _model(asked: Asked, target: "Target", path: Path, text: str) -> str:
    from planner.export.models_of import model_of

    if asked.model is not None:
        return asked.model
    with refusing(asked.file, target.name):
        found = model_of(target.name, text, asked.recipe)
    found = found or exported_as(asked.file).model
    if found is None:
        raise RequestError(f"{path}: the file does not say which model it trains; name it with --model")
    return found


def _with_adapters(model: str, text: str) -> tuple[str, tuple[str, ...]]:
    """A model with the adapters of the settings, unless its name has some, and notes on them."""
    from planner.export.adapters_in import adapters_in
    from planner.models.adapters import adapters_of
    from planner.models.overrides import changed_reference
    from planner.models.zoo import build_model

    asked = adapters_in(text)
    if asked is None or adapters_of(model) is not None:
        return model, ()
    wider = ("DoRA: priced as LoRA, so a step takes longer than this",) if asked.wider else ()
    named, plain = (changed_reference(model, asked.changes(names)) for names in (True, False))
    beside = ", ".join(asked.layers) if asked.layers else "every linear layer of the blocks"
    full = f", {', '.join(asked.trained)} trained in full" if asked.trained else ""
    try:
        build_model(named, dtype="bfloat16")
        return named, (*wider, f"adapters (LoRA) of rank {asked.rank} beside {beside}{full}")
    except ModelError as error:
        build_model(plain, dtype="bfloat16")
        return plain, (*wider, f"adapters (LoRA) of rank {asked.rank}, priced beside every linear layer: {error}")


def _traced(
    asked: Asked, target: "Target", beside: str, model: str, traced: "Callable[[BuiltModel], OperatorGraph]"
) -> "tuple[Facts, tuple[BuiltModel, OperatorGraph]]":
    """The facts that a reader needs about the model, and the model as built and traced."""
    from planner.export.architecture import architecture_of
    from planner.export.target import Facts
    from planner.graph.expert_load import EXPERTS_OPERATOR
    from planner.models.zoo import build_model
    from planner.plan.binding.bind import prepare
    from planner.plan.plan import PRECISIONS
    from planner.strategy_search.job import PRECISION

    built = build_model(model, dtype=PRECISIONS[PRECISION], sequence_length=asked.sequence_length)
    graph = traced(built)
    facts = Facts(
        layers=prepare(graph)[1].count,
        devices=asked.devices,
        architecture=architecture_of(model, built.sequence_length, latent=target.latent),
        beside=beside,
        recipe=asked.recipe,
        model=model,
        experts=any(op.op == EXPERTS_OPERATOR for op in graph.operators),
        sequence_length=built.sequence_length,
    )
    return facts, (built, graph)


def read_settings(file: Path, target: "Target", text: str, facts: "Facts") -> "Reading":
    """The description of a file for a model with that many layers. Raises ExportError with the file name."""
    from planner.export.description import ExportError

    with refusing(file, target.name):
        reading = target.read(text, facts)
    layers = sum(reading.description.layers)
    if layers != facts.layers:
        raise ExportError(
            f"{file}: its stages have {layers} layers, the model has {facts.layers}; name the right model"
        )
    return reading


def _on_machine(
    asked: Asked,
    traced_model: "tuple[BuiltModel, OperatorGraph]",
    reading: "Reading",
    model: str,
    traced: "Callable[[BuiltModel], OperatorGraph]",
    noted: Callable[[str], None],
) -> Subject:
    """The model with the sequence length and precision of the file, on the machine, with the stack of its engine."""
    from hardware_profiles import of_one_kind
    from planner.models.zoo import build_model
    from planner.plan.outline import model_reference
    from planner.plan.plan import PRECISIONS
    from planner.sharding.discover import discover
    from planner.strategy_search.job import PRECISION, machine_from

    built, graph = traced_model
    description = reading.description
    length = description.sequence_length if ":" not in model else None
    if length not in (None, built.sequence_length) or description.precision != PRECISION:
        built = build_model(model, dtype=PRECISIONS[description.precision], sequence_length=length)
        graph = traced(built)
    graph = discover(graph, None, noted)
    machine = machine_from(
        asked.hardware,
        levels=asked.cluster,
        software=asked.software or reading.stack,
        devices=description.devices,
    )
    return Subject(
        model=model_reference(graph, name=model, sequence_length=built.sequence_length, batch=built.batch),
        graph=graph,
        batch=built.batch,
        cluster=of_one_kind(machine, "import"),
    )
