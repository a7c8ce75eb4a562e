"""Plan files: JSON that diffs well, reads back exactly, and can be edited by hand.

A strategy is one word per mesh axis, the name of a factor or `-`: "b,o" splits factor b over the first axis and o over
the second. A layout is one of R, P, S0, S1, ... per axis. Keys are exact; whatever cannot be read is refused with the
place and the reason, and nothing in a file is ever executed.
"""

import json
import os
from pathlib import Path
from typing import Any, cast, get_args

from hardware_profiles import Home
from hardware_profiles.foreign import ForeignTextError, parse_json, read_text
from planner.errors import LayoutError, ModelError, PlanFileError
from planner.graph.expert_load import EVEN, imbalance_fault
from planner.graph.fp8 import Fp8, fp8_fault
from planner.graph.operator_graph import WrittenRule
from planner.models.overrides import canonical_reference
from planner.plan.migration import migrated
from planner.plan.plan import (
    Candidate,
    ClusterReference,
    Group,
    ModelReference,
    Outline,
    Plan,
    Prediction,
    Provenance,
    Stage,
    StagePrediction,
    Training,
    products_in,
)
from planner.plan.refusing import refuse_plan
from planner.plan.schema import (
    AxisSection,
    GroupSection,
    ModelSection,
    PlanFile,
    TrainingSection,
    check_words,
    validated,
)
from planner.plan.writing import write_atomically
from planner.sharding.discover.content import rule_content
from planner.sharding.layout import Layout, format_layout, parse_layout
from planner.sharding.mesh import ORDERS, Mesh, MeshAxis
from planner.sharding.stored import StoredParameter
from planner.sharding.update import (
    AUTO_BUCKETS,
    AUTO_GATHERS,
    AUTO_ZERO_BY,
    GATHERS,
    ZERO_BY,
    Buckets,
    Update,
    update_fault,
    update_words,
)

_A_PLAN = "give a plan file, as plan --model ... -o FILE writes"


def dump_plan(plan: Plan) -> str:
    """The text of a plan file. The same plan gives the same bytes."""
    return json.dumps(plan_content(plan), indent=1, allow_nan=False) + "\n"


def plan_content(plan: Plan) -> dict[str, Any]:
    """What a plan file has, as plain values."""
    return {
        "schema_version": plan.schema_version,
        "model": _model_content(plan.model),
        "training": training_content(plan.training),
        "cluster": _cluster_content(plan.cluster),
        "mesh": [_axis_content(axis) for axis in plan.mesh.axes],
        **({} if plan.alltoall is None else {"alltoall": plan.alltoall or "none"}),
        "stages": [_stage_content(stage) for stage in plan.stages],
        "virtual_stages": plan.virtual_stages,
        **({"slices": plan.slices} if plan.slices > 1 else {}),
        "schedule": plan.schedule,
        "inputs": {name: format_layout(layout) for name, layout in plan.inputs},
        "groups": [_group_content(group) for group in plan.groups],
        **({"rules": {call: _rule_content(rule) for call, rule in plan.rules}} if plan.rules else {}),
        "prediction": _prediction_content(plan.prediction),
        "provenance": _fields(plan.provenance),
        **_candidates_content(plan),
    }


def _candidates_content(plan: Plan) -> dict[str, Any]:
    """The candidates; no key where there are none, as in older files."""
    found = [{**_fields(one), "words": dict(one.words)} for one in plan.candidates]
    return {"candidates": found} if found else {}


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


def _model_content(model: ModelReference) -> dict[str, Any]:
    """The model; no keys for what older files do not have."""
    content = {name: value for name, value in _fields(model).items() if value is not None or name == "sequence_length"}
    if model.outline is not None:
        outline = model.outline
        content["outline"] = {
            "inputs": dict(outline.inputs), "parameters": dict(outline.parameters), "operators": outline.operators
        }  # fmt: skip
    return content


def _axis_content(axis: MeshAxis) -> dict[str, Any]:
    """An axis. Usual settings get no key, as in older files: an axis that cuts everything into contiguous pieces, and
    has the all-to-all."""
    usual = {"order": "contiguous", "alltoall": True}
    return {name: value for name, value in _fields(axis).items() if name not in usual or value != usual[name]}


def _stage_content(stage: Stage) -> dict[str, Any]:
    """A stage; no key for its devices where all are alike."""
    return {name: value for name, value in _fields(stage).items() if value or name != "group"}


def training_content(training: Training) -> dict[str, Any]:
    """The section `training` of a plan file. Settings of gradients that are as in older files get no key."""
    own = {name: value for name, value in _fields(training).items() if name not in ("update", "fp8")}
    if training.imbalance == EVEN:
        del own["imbalance"]
    if not training.tokens_once:
        del own["tokens_once"]
    if training.interleave == 1:
        del own["interleave"]
    del own["tensor_overlap"]
    if training.tensor_overlap:
        own["tensor_overlap"] = {
            name: [there, back, first] if first else [there, back]
            for name, there, back, first in sorted(training.tensor_overlap)
        }
    del own["expert_overlap"]
    if training.expert_overlap:
        own["expert_overlap"] = dict(sorted(training.expert_overlap))
    if training.fp8:
        own["fp8"] = training.fp8.recipe
    if training.fp8.left_out:
        own["fp8_left_out"] = list(training.fp8.left_out)
    for word in ("gathered", "experts", "dispatch"):
        if getattr(training.fp8, word):
            own[f"fp8_{word}"] = True
    if training.fp8.delayed:
        own |= {"fp8_history": training.fp8.history, "fp8_margin": training.fp8.margin}
    return {**own, **update_words(training.update)}


def _prediction_content(prediction: Prediction) -> dict[str, Any]:
    """The prediction; no key for what is offloaded where nothing is, as in older files."""
    found = {
        **_fields(prediction),
        "time": dict(prediction.time),
        "memory": dict(prediction.memory),
        "stages": [_fields(stage) for stage in prediction.stages],
        "offloaded": dict(prediction.offloaded),
    }
    return found if prediction.offloaded else {name: value for name, value in found.items() if name != "offloaded"}


def _cluster_content(cluster: ClusterReference) -> dict[str, Any]:
    """The machine; no keys for what is as the profile and the runtime have it, as in older files."""
    plain = {"composition": "", "software": "pytorch"}
    said = {name: value for name, value in _fields(cluster).items() if name != "products"}
    return {name: value for name, value in said.items() if plain.get(name) != value}


def _rule_content(rule: WrittenRule) -> dict[str, Any]:
    """A rule; empty fields are left out."""
    return {name: value for name, value in rule_content(rule).model_dump().items() if value}


def _group_content(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "first_block": group.first_block,
        "blocks": group.blocks,
        "recomputation": group.recomputation,
        "kept": list(group.kept),
        **({} if group.activations_home == "device" else {"activations_home": group.activations_home}),
        "operators": {name: format_strategy(strategy) for name, strategy in group.operators},
        "parameters": {
            name: {
                **{kind: format_layout(getattr(stored, kind)) for kind in ("weight", "gradient", "state")},
                **({"state_home": stored.state_home} if stored.offloaded else {}),
                **({"weight_home": stored.weight_home} if stored.weight_offloaded else {}),
            }
            for name, stored in group.parameters
        },
    }


def format_strategy(strategy: tuple[str | None, ...]) -> str:
    """`b,-` for factor b on the first axis and nothing on the second."""
    return ",".join(name or "-" for name in strategy)


def parse_strategy(text: str) -> tuple[str | None, ...]:
    """The inverse of `format_strategy`."""
    return tuple(None if word.strip() == "-" else word.strip() for word in text.split(",")) if text else ()


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan file, whole or not at all: the text goes to a temporary file that is then renamed."""
    write_atomically(Path(path), dump_plan(plan))


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file. Raises PlanFileError, naming the place, for a file that this version cannot read."""
    try:
        text = read_text(path)
    except ForeignTextError as error:
        raise PlanFileError(f"{path}: {error}; {_A_PLAN}") from error
    try:
        return parse_plan(text)
    except PlanFileError as error:
        raise PlanFileError(f"{path}: {error}") from error


def parse_plan(text: str) -> Plan:
    """The plan written in a text; the inverse of `dump_plan`."""
    try:
        content = parse_json(text)
    except ForeignTextError as error:
        if text.strip() and not text.lstrip().startswith(("{", "[")):  # no damaged plan, but another file
            raise PlanFileError(f"not a plan file: it is not JSON; {_A_PLAN}") from error
        raise PlanFileError(
            f"{error}: the file is truncated or was edited wrongly; undo the edit or plan again"
        ) from error
    _check_printable(content)
    if isinstance(content, dict) and isinstance(kind := content.get("kind"), str):  # as our other files have
        raise PlanFileError(f"not a plan file, but one of the kind '{kind:.40}'; {_A_PLAN}")
    if not isinstance(content, dict) or "schema_version" not in content:
        raise PlanFileError("not a plan file: it has no schema_version; make one with plan --model ... -o FILE")
    content, changed = migrated(content)
    if changed:
        text = json.dumps(content)
    return _plan_of(validated(PlanFile, text))


def parse_training(content: object) -> Training:
    """The training that the section of that name says; the inverse of `training_content`."""
    return _training(validated(TrainingSection, json.dumps(content)))


def _check_printable(content: Any) -> None:
    """Check that no text has a control character, because texts of a plan are printed."""
    waiting = [("the file", content)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(name, text) for pair in value.items() for name, text in ((pair[0], pair[0]), pair)]
        elif isinstance(value, list):
            waiting += [(place, one) for one in value]
        elif isinstance(value, str) and not value.isprintable():
            raise PlanFileError(f"{place!a}: the text {value!a} has a control character; remove it")


def _plan_of(file: PlanFile) -> Plan:
    check_words(file)
    prediction = file.prediction.model_dump()
    return Plan(
        schema_version=file.schema_version,
        model=_model_of(file.model),
        training=_training(file.training),
        cluster=ClusterReference(**file.cluster.model_dump(), products=products_in(file.training.precision)),
        mesh=Mesh(axes=tuple(_mesh_axis(axis) for axis in file.mesh)),
        alltoall=False if file.alltoall == "none" else file.alltoall,
        stages=tuple(Stage(**stage.model_dump()) for stage in file.stages),
        virtual_stages=file.virtual_stages,
        slices=file.slices,
        schedule=file.schedule,
        inputs=tuple((name, _layout(text, f"inputs.{name}")) for name, text in file.inputs.items()),
        groups=tuple(_group(group, f"groups.{index}") for index, group in enumerate(file.groups)),
        rules=tuple((call, rule.rule()) for call, rule in file.rules.items()),
        prediction=Prediction(
            **{
                **prediction,
                "objective_seconds": prediction["objective_seconds"] or prediction["step_seconds"],
                "time": tuple(prediction["time"].items()),
                "memory": tuple(prediction["memory"].items()),
                "offloaded": tuple(prediction["offloaded"].items()),
                "stages": tuple(StagePrediction(**stage.model_dump()) for stage in file.prediction.stages),
            }
        ),
        provenance=Provenance(**file.provenance.model_dump()),
        candidates=tuple(
            Candidate(step_seconds=one.step_seconds, peak_bytes=one.peak_bytes, words=tuple(one.words.items()))
            for one in file.candidates
        ),
    )


def _mesh_axis(axis: AxisSection) -> MeshAxis:
    order = next(order for order in ORDERS if order == axis.order)
    return MeshAxis(**{**axis.model_dump(), "order": order})


def _reference(text: str) -> str:
    """The name of a model as this version writes it. Raises PlanFileError for a name that says something twice, or is
    no name."""
    try:
        return canonical_reference(text)
    except ModelError as error:
        raise PlanFileError(f"model.reference: {error}") from error


def _model_of(file: ModelSection) -> ModelReference:
    outline = file.outline
    return ModelReference(
        reference=_reference(file.reference),
        sequence_length=file.sequence_length,
        parameters=file.parameters,
        fingerprint=file.fingerprint,
        batch=file.batch,
        outline=None
        if outline is None
        else Outline(
            inputs=tuple(outline.inputs.items()),
            parameters=tuple(outline.parameters.items()),
            operators=outline.operators,
        ),
        graph=file.graph,
    )


def _training(training: TrainingSection) -> Training:
    content = training.model_dump()
    own = {
        name: content.pop(name)
        for name in (
            "global_batch",
            "micro_batches",
            "precision",
            "optimizer",
            "interleave",
            "imbalance",
            "tokens_once",
        )
    }
    overlap = content.pop("tensor_overlap")
    own["tensor_overlap"] = tuple(
        (name, *chunks[:2], *(chunks[2:] or (0,))) for name, chunks in sorted(overlap.items())
    )
    own["expert_overlap"] = tuple(sorted(content.pop("expert_overlap").items()))
    refuse_plan(imbalance_fault(training.imbalance))
    fp8 = Fp8(
        recipe=content.pop("fp8"),
        left_out=tuple(content.pop("fp8_left_out")),
        gathered=content.pop("fp8_gathered"),
        experts=content.pop("fp8_experts"),
        dispatch=content.pop("fp8_dispatch"),
        history=content.pop("fp8_history"),
        margin=content.pop("fp8_margin"),
    )
    refuse_plan(fp8_fault(fp8))
    buckets, local = content.pop("buckets"), tuple(content.pop("local_parameters"))
    placed, padded = (tuple(content.pop(name).items()) for name in ("placed", "padded"))
    content["per_replica"] = tuple(content["per_replica"])
    update = Update(**content, buckets=_buckets(buckets), local_parameters=local, placed=placed, padded=padded)
    refuse_plan(update_fault(update))
    if update.gathers == AUTO_GATHERS:
        raise PlanFileError(f"training.gathers: 'auto' is a word for the search; write one of {', '.join(GATHERS)}")
    if update.zero_by == AUTO_ZERO_BY:
        raise PlanFileError(f"training.zero_by: 'auto' is a word for the search; write one of {', '.join(ZERO_BY)}")
    return Training(**own, update=update, fp8=fp8)


def _buckets(content: Any) -> Buckets:
    """A word, a size, positions or numbers, as a plan has them."""
    if content == AUTO_BUCKETS:
        raise PlanFileError("training.buckets: 'auto' is a word for the search, which writes the size; write one")
    if isinstance(content, dict):
        return tuple(content.items())
    return tuple(content) if isinstance(content, list) else content


def _group(group: GroupSection, place: str) -> Group:
    return Group(
        name=group.name,
        first_block=group.first_block,
        blocks=group.blocks,
        recomputation=group.recomputation,
        kept=tuple(group.kept),
        activations_home=_home(group.activations_home, f"{place}.activations_home"),
        operators=tuple((name, parse_strategy(text)) for name, text in group.operators.items()),
        parameters=tuple(
            (
                name,
                StoredParameter(
                    weight=_layout(stored.weight, f"{place}.parameters.{name}.weight"),
                    gradient=_layout(stored.gradient, f"{place}.parameters.{name}.gradient"),
                    state=_layout(stored.state, f"{place}.parameters.{name}.state"),
                    state_home=_home(stored.state_home, f"{place}.parameters.{name}.state_home"),
                    weight_home=_home(stored.weight_home, f"{place}.parameters.{name}.weight_home"),
                ),
            )
            for name, stored in group.parameters.items()
        ),
    )


def _home(word: str, place: str) -> Home:
    for home in get_args(Home):
        if word == home:
            return cast("Home", home)
    raise PlanFileError(f"{place}: '{word}' is not one of {', '.join(get_args(Home))}")


def _layout(text: str, place: str) -> Layout:
    try:
        return parse_layout(text)
    except (LayoutError, ValueError) as error:
        raise PlanFileError(f"{place}: {error}") from error
