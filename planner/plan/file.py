"""Plan files: JSON that diffs well, reads back exactly, and can be edited by hand.

A strategy is one word per mesh axis, the name of a factor or `-`: "b,o" splits factor b over the first axis and o over
the second. A layout is one of R, P, S0, S1, ... per axis. Keys are exact; whatever cannot be read is refused with the
place and the reason, and nothing in a file is ever executed.
"""

import errno
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from costmodels import SCHEDULES
from hardware_profiles import Home
from hardware_profiles.foreign import ForeignTextError, form_fault, parse_json, read_text
from planner.errors import LayoutError, ModelError, PlanFileError
from planner.graph.expert_load import EVEN, imbalance_fault
from planner.graph.operator_graph import WrittenRule
from planner.models.overrides import canonical_reference
from planner.nearest import divisors, nearest_words
from planner.old_words import rename_keys
from planner.plan.binding.machine import groups_of_ranks
from planner.plan.carried import LONGEST
from planner.plan.plan import (
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTATION,
    SCHEMA_VERSION,
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
)
from planner.sharding.discover.content import RuleContent, rule_content
from planner.sharding.layout import Layout, format_layout, parse_layout
from planner.sharding.mesh import ORDERS, Mesh, MeshAxis
from planner.sharding.stored import StoredParameter
from planner.sharding.update import AUTO_BUCKETS, AUTO_GATHERS, GATHERS, Buckets, Update, update_fault, update_words

_LOG = logging.getLogger(__name__)
LARGEST = 2**31  # of any count in a plan
_A_PLAN = "give a plan file, as plan --model ... -o FILE writes"
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Index = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


_Form = TypeVar("_Form", bound=_Strict)


class _Outline(_Strict):
    inputs: dict[str, str]
    parameters: dict[str, str]
    operators: str


class _Model(_Strict):
    reference: Annotated[str, Field(max_length=4096)]
    sequence_length: Count | None
    parameters: Annotated[int, Field(ge=0)]
    fingerprint: str
    batch: Count | None = None
    outline: _Outline | None = None
    graph: Annotated[str, Field(max_length=LONGEST)] | None = None


class _Training(_Strict):
    global_batch: Count
    micro_batches: Count
    precision: str
    optimizer: str
    interleave: Count = 1
    gradients: str = "mean"
    gradient_dtype: str = "mixed"
    master_weights: bool = True
    clip_norm: float | None = None
    broadcast: bool = False
    buckets: str | Count | list[Count] | dict[str, Index] = "none"
    gathers: str = "each"
    local_parameters: list[str] = []
    placed: dict[str, str] = {}
    imbalance: float = EVEN


class _Cluster(_Strict):
    profile: str
    digest: str
    devices: Count
    composition: str = ""
    software: str = "pytorch"


class _Axis(_Strict):
    name: str
    size: Count
    stride: Count
    bandwidth: Positive
    order: str = "contiguous"


class _Stage(_Strict):
    first_block: Index
    blocks: Index
    group: str = ""


class _Stored(_Strict):
    weight: str
    gradient: str
    state: str
    state_home: str = "device"
    weight_home: str = "device"


class _Group(_Strict):
    name: str
    first_block: Index
    blocks: Index
    recomputation: str
    kept: list[str]
    activations_home: str = "device"
    operators: dict[str, str]
    parameters: dict[str, _Stored]


class _StagePrediction(_Strict):
    micro_batch_seconds: float
    once_seconds: float
    peak_bytes: float


class _Prediction(_Strict):
    step_seconds: Positive
    objective_seconds: Positive | None = None
    low_seconds: Positive | None = None
    high_seconds: Positive | None = None
    peak_bytes: Positive
    capacity_bytes: Positive
    model_flops: float
    model_flops_utilisation: float
    samples_per_second: float
    time: dict[str, float]
    memory: dict[str, float]
    stages: list[_StagePrediction]
    offloaded: dict[str, float] = {}


class _Provenance(_Strict):
    planner: str
    search: str
    status: str
    gap: float


class _PlanFile(_Strict):
    schema_version: int
    model: _Model
    training: _Training
    cluster: _Cluster
    mesh: list[_Axis]
    stages: Annotated[list[_Stage], Field(min_length=1)]
    virtual_stages: Count
    slices: Count = 1
    schedule: str
    inputs: dict[str, str]
    groups: list[_Group]
    rules: dict[str, RuleContent] = {}
    prediction: _Prediction
    provenance: _Provenance


def dump_plan(plan: Plan) -> str:
    """The text of a plan file. The same plan gives the same bytes."""
    content = {
        "schema_version": plan.schema_version,
        "model": _model_content(plan.model),
        "training": training_content(plan.training),
        "cluster": _cluster_content(plan.cluster),
        "mesh": [_axis_content(axis) for axis in plan.mesh.axes],
        "stages": [_stage_content(stage) for stage in plan.stages],
        "virtual_stages": plan.virtual_stages,
        **({"slices": plan.slices} if plan.slices > 1 else {}),
        "schedule": plan.schedule,
        "inputs": {name: format_layout(layout) for name, layout in plan.inputs},
        "groups": [_group_content(group) for group in plan.groups],
        **({"rules": {call: _rule_content(rule) for call, rule in plan.rules}} if plan.rules else {}),
        "prediction": _prediction_content(plan.prediction),
        "provenance": _fields(plan.provenance),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


def _model_content(model: ModelReference) -> dict[str, Any]:
    """Nothing is said of what files older than that have not."""
    content = {name: value for name, value in _fields(model).items() if value is not None or name == "sequence_length"}
    if model.outline is not None:
        outline = model.outline
        content["outline"] = {
            "inputs": dict(outline.inputs), "parameters": dict(outline.parameters), "operators": outline.operators
        }  # fmt: skip
    return content


def _axis_content(axis: MeshAxis) -> dict[str, Any]:
    """Nothing is said of the order of an axis that cuts everything into contiguous pieces, as in older files."""
    return {name: value for name, value in _fields(axis).items() if (name, value) != ("order", "contiguous")}


def _stage_content(stage: Stage) -> dict[str, Any]:
    """Nothing is said of the devices where all are alike."""
    return {name: value for name, value in _fields(stage).items() if value or name != "group"}


def training_content(training: Training) -> dict[str, Any]:
    """The section `training` of a plan file. Nothing is said of gradients that are treated as in older files."""
    own = {name: value for name, value in _fields(training).items() if name != "update"}
    if training.imbalance == EVEN:
        del own["imbalance"]
    if training.interleave == 1:
        del own["interleave"]
    return {**own, **update_words(training.update)}


def _prediction_content(prediction: Prediction) -> dict[str, Any]:
    """Nothing is said of what is offloaded where that is nothing, as in files older than that."""
    found = {
        **_fields(prediction),
        "time": dict(prediction.time),
        "memory": dict(prediction.memory),
        "stages": [_fields(stage) for stage in prediction.stages],
        "offloaded": dict(prediction.offloaded),
    }
    return found if prediction.offloaded else {name: value for name, value in found.items() if name != "offloaded"}


def _cluster_content(cluster: ClusterReference) -> dict[str, Any]:
    """Nothing is said of what is as the profile and the runtime have it, as in files older than that."""
    plain = {"composition": "", "software": "pytorch"}
    return {name: value for name, value in _fields(cluster).items() if plain.get(name) != value}


def _rule_content(rule: WrittenRule) -> dict[str, Any]:
    """What is empty is left out."""
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
    """Write a plan file. It is whole or not there: the text goes to a temporary file that then takes the name."""
    write_atomically(Path(path), dump_plan(plan))


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file so that it is either whole or as it was; with `private` for its owner alone, whatever the umask is.
    Raises PlanFileError where it cannot be written."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
        ) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if private:
            os.chmod(temporary, 0o600)
        else:
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
        temporary = None
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    finally:
        if temporary is not None:
            os.unlink(temporary)


def check_place(path: Path) -> None:
    """Raise PlanFileError where a file cannot be written, before anybody has waited for what is to be in it."""
    try:
        number = errno.EISDIR if path.is_dir() else _folder_fault(path)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    if number:
        raise _unwritable(path, OSError(number, os.strerror(number)))


def _folder_fault(path: Path) -> int:
    """Why nothing can be put into the folder of a path, or into the first above it that is there; 0 where it can."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        return errno.ENOTDIR
    return 0 if os.access(folder, os.W_OK | os.X_OK) else errno.EACCES


def _unwritable(path: Path, error: OSError | ValueError) -> PlanFileError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return PlanFileError(f"{path}: cannot be written: {reason}; name another place")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file. Raises PlanFileError, naming the place, where it is not one that this version can read."""
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
        raise PlanFileError(
            f"{error}: the file is truncated or was edited wrongly; undo the edit or plan again"
        ) from error
    _check_printable(content)
    if not isinstance(content, dict) or "schema_version" not in content:
        raise PlanFileError("not a plan file: it has no schema_version; make one with plan --model ... -o FILE")
    if content["schema_version"] not in (1, SCHEMA_VERSION) or content["schema_version"] is True:
        raise PlanFileError(
            f"schema_version is {content['schema_version']!r}, this planner reads the versions 1 and "
            f"{SCHEMA_VERSION}; plan again with this version"
        )
    if old := content["schema_version"] == 1:
        content = _from_version_1(content)
    for line in rename_keys(content):
        _LOG.warning("plan file: %s; plans are written with the new word", line)
        old = True
    if old:
        text = json.dumps(content)
    return _plan_of(_validated(_PlanFile, text))


def parse_training(content: object) -> Training:
    """The training that the section of that name says; the inverse of `training_content`."""
    return _training(_validated(_Training, json.dumps(content)))


def _validated(kind: type[_Form], text: str) -> _Form:
    """Raises PlanFileError with the first place that does not have the form."""
    try:
        return kind.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise PlanFileError(f"{form_fault(error)}; undo the edit or plan again") from error


def _from_version_1(content: dict[str, Any]) -> dict[str, Any]:
    """A file of version 1 as one of this version: one word said how all blocks are recomputed, and nothing was said of
    virtual stages or of single stages. What does not have the form of a plan is left for the check of the form."""
    word = content.pop("recomputation", None)
    if word not in ("none", "full"):
        raise PlanFileError(f"recomputation: {word!r} is not one of none, full; undo the edit or plan again")
    content["schema_version"] = SCHEMA_VERSION
    _add(content, "the file", virtual_stages=1, rules={})
    if isinstance(content.get("cluster"), dict):
        _add(content["cluster"], "cluster", composition="", software="pytorch")
    groups = content.get("groups")
    for index, group in enumerate(groups if isinstance(groups, list) else ()):
        if isinstance(group, dict):
            _add(group, f"groups.{index}", recomputation=word if group.get("blocks") else "none", kept=[])
    if isinstance(content.get("prediction"), dict):
        _add(
            content["prediction"], "prediction", stages=[], objective_seconds=None, low_seconds=None, high_seconds=None
        )
    return content


def _add(content: dict[str, Any], place: str, **new: Any) -> None:
    for key, value in new.items():
        if key in content:
            raise PlanFileError(f"{place}: version 1 has no key '{key}'; say schema_version {SCHEMA_VERSION}")
        content[key] = value


def _check_printable(content: Any) -> None:
    """Texts of a plan are printed: none has a control character."""
    waiting = [("the file", content)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(name, text) for pair in value.items() for name, text in ((pair[0], pair[0]), pair)]
        elif isinstance(value, list):
            waiting += [(place, one) for one in value]
        elif isinstance(value, str) and not value.isprintable():
            raise PlanFileError(f"{place!a}: the text {value!a} has a control character; remove it")


def _plan_of(file: _PlanFile) -> Plan:
    _check_words(file)
    prediction = file.prediction.model_dump()
    return Plan(
        schema_version=file.schema_version,
        model=_model_of(file.model),
        training=_training(file.training),
        cluster=ClusterReference(**file.cluster.model_dump()),
        mesh=Mesh(axes=tuple(_mesh_axis(axis) for axis in file.mesh)),
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
    )


def _mesh_axis(axis: _Axis) -> MeshAxis:
    order = next(order for order in ORDERS if order == axis.order)
    return MeshAxis(**{**axis.model_dump(), "order": order})


def _reference(text: str) -> str:
    """The name of a model as we write it. Raises PlanFileError for one that says something twice, or is no name."""
    try:
        return canonical_reference(text)
    except ModelError as error:
        raise PlanFileError(f"model.reference: {error}") from error


def _model_of(file: _Model) -> ModelReference:
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


def _training(training: _Training) -> Training:
    content = training.model_dump()
    own = {
        name: content.pop(name)
        for name in ("global_batch", "micro_batches", "precision", "optimizer", "interleave", "imbalance")
    }
    uneven = imbalance_fault(training.imbalance)
    if uneven is not None:
        raise PlanFileError(f"training.imbalance: {uneven}")
    buckets, local = content.pop("buckets"), tuple(content.pop("local_parameters"))
    placed = tuple(content.pop("placed").items())
    update = Update(**content, buckets=_buckets(buckets), local_parameters=local, placed=placed)
    fault = update_fault(update)
    if fault is not None:
        raise PlanFileError(f"training.{fault[0]}: {fault[1]}")
    if update.gathers == AUTO_GATHERS:
        raise PlanFileError(f"training.gathers: 'auto' is a word for the search; write one of {', '.join(GATHERS)}")
    return Training(**own, update=update)


def _buckets(content: Any) -> Buckets:
    """A word, a size, positions or numbers, as a plan has them."""
    if content == AUTO_BUCKETS:
        raise PlanFileError("training.buckets: 'auto' is a word for the search, which writes the size; write one")
    if isinstance(content, dict):
        return tuple(content.items())
    return tuple(content) if isinstance(content, list) else content


def _check_words(file: _PlanFile) -> None:
    for place, word, known in (
        ("training.precision", file.training.precision, tuple(PRECISIONS)),
        ("training.optimizer", file.training.optimizer, OPTIMIZERS),
        ("schedule", file.schedule, SCHEDULES),
        *((f"mesh.{at}.order", axis.order, ORDERS) for at, axis in enumerate(file.mesh)),
        *((f"groups.{at}.recomputation", group.recomputation, RECOMPUTATION) for at, group in enumerate(file.groups)),
    ):
        if word not in known:
            raise PlanFileError(f"{place}: '{word}' is not one of {', '.join(known)}")
    if file.training.global_batch % file.training.micro_batches:
        raise PlanFileError(
            f"training.micro_batches: {file.training.micro_batches} does not divide global_batch"
            f" {file.training.global_batch};"
            f" {nearest_words(file.training.micro_batches, divisors(file.training.global_batch))}"
        )
    if len({axis.name for axis in file.mesh}) != len(file.mesh):
        raise PlanFileError(f"mesh: the axes need different names, not {', '.join(axis.name for axis in file.mesh)}")
    size = 1
    for axis in reversed(file.mesh):
        if axis.stride != size:
            raise PlanFileError(f"mesh: axis '{axis.name}' has stride {axis.stride}; the axes after it make it {size}")
        size *= axis.size
    pipeline, rest = divmod(len(file.stages), file.virtual_stages)
    if rest:
        raise PlanFileError(
            f"virtual_stages: {file.virtual_stages} on each pipeline rank do not divide {len(file.stages)} stages;"
            f" {nearest_words(file.virtual_stages, divisors(len(file.stages)))}"
        )
    if size * pipeline != file.cluster.devices:
        raise PlanFileError(
            f"mesh: {size} devices in each of {pipeline} stages make {size * pipeline}, "
            f"cluster.devices is {file.cluster.devices}"
        )
    groups = groups_of_ranks(ClusterReference(**file.cluster.model_dump()), pipeline)
    for number, stage in enumerate(file.stages):
        if stage.group != groups[number % pipeline]:
            found = f"'{stage.group}'" if stage.group else "not said"
            raise PlanFileError(
                f"stages.{number}.group is {found}; by cluster.profile, {file.cluster.profile}, it is"
                f" '{groups[number % pipeline]}'"
            )


def _group(group: _Group, place: str) -> Group:
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
