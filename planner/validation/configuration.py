"""A row as a request to the planner: a model, a machine, and a configuration with every decision fixed.

An empty cell means unknown. Then the usual default of frameworks is taken and noted: no recomputation, no ZeRO without
a distributed optimizer, no sequence parallelism, micro-batches of one sample. Nothing is assumed about the model and
the number of devices, except what a note says.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import RequestError
from planner.models.deepseek_models import DEEPSEEK_MODELS
from planner.models.dimensions import Dimensions, ExpertDimensions, Family
from planner.plan.layout.kept import Kept
from planner.plan.schedule_checks import PASSES
from planner.strategy_search.job import PRECISION
from planner.strategy_search.request.space import ContextBy, Pattern, Pinned
from planner.validation.contradictions import refuse_contradictions
from planner.validation.experts import CAPACITY
from planner.validation.losses import gathers_logits
from planner.validation.nanotron import is_nanotron, nanotron_vocabulary
from planner.validation.otherwise import refuse_otherwise
from planner.validation.recipes import virtual_stages_by_recipe
from planner.validation.recomputation import repeated, running, spared_of
from planner.validation.replicas import hybrid_stage, replicas_of
from planner.validation.row_adapters import adapters_of_row
from planner.validation.rows import Row, readings_of, unread_of
from planner.validation.spared import NOTHING_SPARED, Spared
from planner.validation.stack_names import pads_vocabulary
from planner.validation.stage_layers import stage_layers
from planner.validation.states import USUAL, States, states_of
from planner.validation.unsupported import UnsupportedError
from planner.validation.words import mentions, says

VOCABULARY_MULTIPLE = 128
"""Megatron pads vocabularies to a multiple of this, so that they can be sharded."""

_ALIGNED = 8
"""16-bit elements whose rows tensor cores read at their full rate."""

USUAL_VOCABULARY = 32000
"""Llama 2's vocabulary, if a row does not state one."""

AGREEING = 0.07
"""Largest relative difference between the parameters of the dimensions and the published ones."""

LARGEST: Mapping[str, int] = {
    "n_layers": 1024, "hidden": 2**20, "ffn_hidden": 2**22, "n_heads": 2**16, "n_kv_heads": 2**16, "head_dim": 2**16,
    "vocab": 2**26, "seq_len": 2**26, "n_devices": 2**20, "n_experts": 2**14, "topk": 2**14, "moe_ffn_hidden": 2**22,
    "tp": 2**20, "cp": 2**20, "ep": 2**20, "pp": 2**12, "vpp": 2**10, "dp": 2**20, "micro_batch": 2**20,
    "global_batch": 2**26,
}  # fmt: skip
"""Limits beyond every published run. A row with more is not evaluated, because that might never end."""

MEASURED: Mapping[str, tuple[float, float]] = {
    "iter_time_s": (1e-4, 1e5), "tokens_per_s_per_device": (1e-2, 1e8), "peak_mem_GB": (1e-3, 1e4),
}  # fmt: skip
"""Limits of measured values. Anything beyond is a wrong unit, and its error would dominate that of all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, and on what; runs of one job differ only in their configuration."""

    model: Dimensions
    profile: str
    devices: int
    global_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job, its configuration, and the assumptions about it.

    Attributes:
        job: the model, machine and batch.
        pinned: the fixed decisions. If `stages` is given, it has one stage on a rank, and the resulting plan is cut
            anew.
        notes: what was assumed.
        recomputed_in_backward: see `Software.recomputed_in_backward`.
        stages: layers of every stage, virtual ones too, in the order of the model; None if all have the same number.
        spared: what some of its blocks do to save memory.
        states: what its optimizer keeps.
        untold: neither the row nor a recipe says anything about recomputation.
    """

    job: Job
    pinned: Pinned
    notes: tuple[str, ...]
    recomputed_in_backward: tuple[str, ...] = ()  # see above
    stages: tuple[int, ...] | None = None
    spared: Spared = NOTHING_SPARED
    states: States = USUAL
    untold: bool = False


def padded_vocabulary(size: int) -> int:
    """The next multiple of `VOCABULARY_MULTIPLE`."""
    return -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def run_of(row: Row) -> Run:
    """A row as a request. Raises UnsupportedError with the reason if that is impossible."""
    notes: list[str] = []
    _check_sizes(row)
    if not row.text("profile"):
        raise UnsupportedError("no hardware profile is given")
    model = replace(model_of(row, notes), adapters=adapters_of_row(row, notes))
    _check_training(row, notes)
    devices, global_batch = _needed(row, "n_devices"), _needed(row, "global_batch")
    notes += (*readings_of(row), *unread_of(row))
    states = states_of(row, notes)
    spared = spared_of(row, _layers_of_stage(row, model), notes)
    pinned = _pinned(row, devices, model, spared, notes)
    stages = stage_layers(row, model, pinned.virtual_stages or 1, notes)
    if stages is not None:
        pinned = replace(pinned, virtual_stages=1, schedule="1f1b", even=False)
    job = Job(model=model, profile=row.text("profile"), devices=devices, global_batch=global_batch)
    recomputed_in_backward: tuple[str, ...] = ()
    if pinned.never_kept == ("attention",):  # Megatron checkpoints only attention: the block runs without recomputation
        recomputed_in_backward = pinned.never_kept
        pinned = replace(pinned, recompute="none", never_kept=())
    if spared is not None and row.text("recompute") and spared.recomputed >= _longest(model, pinned, stages):
        pinned, spared = replace(pinned, recompute="full"), NOTHING_SPARED
    return Run(
        job=job,
        pinned=pinned,
        notes=tuple(notes),
        recomputed_in_backward=recomputed_in_backward,
        stages=stages,
        spared=spared or NOTHING_SPARED,
        states=states,
        untold=spared is None and row.recomputation() is None,
    )


def _layers_of_stage(row: Row, model: Dimensions) -> int:
    """Layers of a stage, rounded up."""
    pipeline = row.integer("pp") or 1
    return math.ceil(model.layers / (pipeline * ((row.integer("vpp") or 1) if pipeline > 1 else 1)))


def _longest(model: Dimensions, pinned: Pinned, stages: tuple[int, ...] | None) -> int:
    """Blocks of the longest stage."""
    return max(stages) if stages else math.ceil(model.layers / ((pinned.pipeline or 1) * (pinned.virtual_stages or 1)))


def _check_sizes(row: Row) -> None:
    """Raise UnsupportedError for numbers beyond `LARGEST`, `MEASURED` or the most passes of a pipeline."""
    for column, largest in LARGEST.items():
        if (row.integer(column, least=0) or 0) > largest:
            raise UnsupportedError(f"{column} is {row.text(column):.40}; runs with {largest} at most are evaluated")
    measured = {column: (row.quantity(column), row.text(column)) for column in MEASURED}
    if measured["iter_time_s"][0] is None and (rated := row.seconds_by_rate) is not None:
        measured["iter_time_s"] = rated, f"{rated:.4g} by tokens_per_s_per_device"
    for column, (least, most) in MEASURED.items():
        value, text = measured[column]
        if value is not None and not least <= value <= most:
            raise UnsupportedError(f"{column} is {text:.40}; runs with {least:g} to {most:g} are evaluated")
    stages = (row.integer("pp") or 1) * (row.integer("vpp") or 1)
    passes = (
        stages * (row.integer("global_batch") or 1) // ((row.integer("micro_batch") or 1) * (row.integer("dp") or 1))
    )
    if passes > PASSES:
        raise UnsupportedError(f"{passes} passes of micro-batches through stages; at most {PASSES} are evaluated")


def model_of(row: Row, notes: list[str]) -> Dimensions:
    """The decoder with the row's dimensions whose number of parameters is closest to the published one.

    Raises UnsupportedError for other architectures, missing dimensions, or parameters that do not agree.
    """
    if row.text("arch").lower() not in ("", "dense", "gqa", "moe"):
        raise UnsupportedError(
            f"the architecture is {row.text('arch')}; dense decoders and mixtures of experts are built from dimensions"
        )
    candidates = _candidates(row, _precision(row, notes), notes)
    published = row.parameters or _parameters_of_its_kind(candidates[0])
    if published is None:
        if candidates[0].ffn == 4 * candidates[0].hidden:  # gpt and llama models both have this width
            notes.append(f"n_params_B unknown: taken for a {candidates[0].family}")
        return candidates[0]
    best = min(candidates, key=lambda model: abs(model.parameters - published))
    if abs(best.parameters / published - 1) > AGREEING:
        raise UnsupportedError(
            f"the dimensions make {best.parameters / 1e9:.3g} billion parameters ({best.family}), published are"
            f" {published / 1e9:.3g}: another architecture, or reduced layers"
        )
    return best


def _candidates(row: Row, precision: str, notes: list[str]) -> list[Dimensions]:
    """Decoders with these dimensions, the most usual one first."""
    hidden, heads, head = _needed(row, "hidden"), _needed(row, "n_heads"), row.integer("head_dim")
    experts = _experts(row, notes)
    like = _latent_like(row, notes) if row.latent else ""
    if like:
        assert experts is not None, row  # `like` was found by their number
        experts, head = _with_unsaid(experts, row, like), None
    ffn, kv_heads = row.integer("ffn_hidden"), row.integer("n_kv_heads")
    if kv_heads is None:
        if row.text("arch").lower() == "gqa":
            raise UnsupportedError("n_kv_heads is empty")
        kv_heads = heads
        notes.append("n_kv_heads unknown: as many as heads")
    if ffn is None and experts is not None and not experts.dense_layers:
        ffn = experts.width
    if ffn is None:
        ffn = 4 * hidden
        notes.append("ffn_hidden unknown: 4 x hidden")
    vocabulary = row.integer("vocab")
    if vocabulary is None:
        vocabulary = USUAL_VOCABULARY
        notes.append(f"vocab unknown: {USUAL_VOCABULARY}, as Llama's")
    padded = padded_vocabulary(vocabulary)
    if vocabulary % _ALIGNED and not pads_vocabulary(row):
        padded = vocabulary
        notes.append(
            f"a vocabulary of {vocabulary} that nothing pads: rows of its products are no multiples of 16 bytes"
        )
    if is_nanotron(row):
        padded = nanotron_vocabulary(vocabulary, row.integer("tp") or 1)
        notes.append(f"vocabulary of {padded}, as nanotron pads it")
    if hidden % heads and head is None and not like:
        raise UnsupportedError(f"head_dim is empty, and {heads} heads do not divide hidden={hidden}")
    tensor = row.integer("tp") or 1
    if kv_heads < tensor <= heads and tensor % kv_heads == heads % tensor == 0:
        kv_heads = tensor
        notes.append(f"keys and values once for each of {tensor} tensor parallel devices, as there are fewer of them")
    if heads % kv_heads:
        raise UnsupportedError(f"n_kv_heads={kv_heads} does not divide n_heads={heads}")
    kinds: list[tuple[Family, bool]] = [("llama", False), ("llama", True)]
    if ffn == 4 * hidden and kv_heads == heads and experts is None and head in (None, hidden // heads):
        kinds.insert(0, ("gpt", True))
    if experts is None:
        kinds += [("nemotron", False), ("nemotron", True)]
    if like:
        kinds = [("deepseek", False)]
    return [
        Dimensions(
            family=family,
            layers=_needed(row, "n_layers"),
            hidden=hidden,
            ffn=ffn,
            heads=heads,
            kv_heads=kv_heads,
            vocabulary=padded,
            tied=tied,
            sequence=_needed(row, "seq_len"),
            precision=precision,
            head_size=None if head is None or head * heads == hidden else head,
            experts=experts,
            like=like,
            qk_norm=family in ("llama", "nemotron") and normalises_heads(row),
        )
        for family, tied in kinds
    ]


_BY_HEADS = r"ulysses|\bcp[-_ ]comm[-_ ]type\s*[=: ]\s*\W?a2a(?!\+)"
"""Words for Ulysses context parallelism: DeepSpeed's name of it, and Megatron's --cp-comm-type a2a."""

_NORMED_HEADS = (
    r"(?<![a-z])qwen[-_ ]?3(?![\d.b]|[-_ ]next)|(?<![a-z])olmo[-_ ]?(?:[23]|1124)(?![\d.b])"
    r"|(?<![a-z])qk[-_ ]?(?:(?:layer|rms|l2)?[-_ ]?norm|ln(?![a-z]))"
)
"""Models with normalised queries and keys (Qwen3: arXiv 2505.09388; OLMo 2 and 3, which normalise all heads together
and move as much: arXiv 2501.00656, `olmo3_7B` of OLMo-core), and words for it."""


def normalises_heads(row: Row) -> bool:
    """Whether a row says, by its model's name or by flags, that queries and keys are normalised."""
    return mentions(row.words("model", "other_flags"), _NORMED_HEADS)


def _latent_like(row: Row, notes: list[str]) -> str:
    """The DeepSeek model of the zoo with the row's layers; no row states the sizes of latent vectors."""
    columns = {"hidden": "hidden_size", "n_heads": "num_heads", "n_experts": "num_experts", "topk": "experts_per_token"}
    said = {column: _needed(row, column) for column in columns}
    for name, entry in DEEPSEEK_MODELS.items():
        sizes = dict(entry.dimensions)
        if all(sizes[columns[column]] == value for column, value in said.items()):
            notes.append(f"latent attention and routers as those of {name}, without what predicts further tokens")
            return name
    words = ", ".join(f"{column}={value}" for column, value in said.items())
    raise UnsupportedError(
        f"attention is multi-head latent attention, of a size that is not known: {words} is none of"
        f" {', '.join(DEEPSEEK_MODELS)}"
    )


def _with_unsaid(experts: ExpertDimensions, row: Row, like: str) -> ExpertDimensions:
    """Experts with the shared experts and the dense layers of a model of the zoo, if the flags name none."""
    sizes: dict[str, Any] = dict(DEEPSEEK_MODELS[like].dimensions)
    if not re.search(_LAYERS_OF_EXPERTS, _words(row)):
        experts = replace(experts, dense_layers=min(sizes["dense_layers"], _needed(row, "n_layers")))
    return experts if experts.shared_width else replace(experts, shared_width=sizes["shared_size"])


def _parameters_of_its_kind(model: Dimensions) -> float | None:
    """Parameters of a whole model of the zoo; None for a run of fewer layers, which have no published number."""
    if not model.like:
        return None
    whole: dict[str, Any] = dict(DEEPSEEK_MODELS[model.like].dimensions)
    if model.layers != whole["num_layers"]:
        return None
    experts = ExpertDimensions(
        count=whole["num_experts"],
        chosen=whole["experts_per_token"],
        width=whole["expert_size"],
        shared_width=whole["shared_size"],
        dense_layers=whole["dense_layers"],
    )
    return float(replace(model, ffn=whole["ffn_size"], vocabulary=whole["vocab_size"], experts=experts).parameters)


def _experts(row: Row, notes: list[str]) -> ExpertDimensions | None:
    """The experts of a row; None if it is dense. Flags are those of Megatron."""
    if row.text("arch").lower() != "moe" and (row.integer("n_experts", least=0) or 0) <= 1:
        return None
    words = _words(row)
    width = row.integer("moe_ffn_hidden")
    if width is None:
        width = _needed(row, "ffn_hidden")
        notes.append("moe_ffn_hidden unknown: ffn_hidden")
    shared = re.search(r"moe[-_]shared[-_]expert[-_]intermediate[-_]size\s*[=: ]\s*(\d{1,9})", words)
    if shared is None and mentions(words, r"shared[-_ ]expert") and not row.latent:
        notes.append("an MLP for all tokens of unknown width: left out")
    dense = _first_dense(words, _needed(row, "n_layers"))
    if mentions(words, CAPACITY):
        notes.append("rows over the capacity of an expert are dropped: priced as if none were")
    count, chosen = _needed(row, "n_experts"), _needed(row, "topk")
    if chosen > count:
        raise UnsupportedError(f"topk={chosen}: a token cannot take more than the n_experts={count}")
    return ExpertDimensions(
        count=count,
        chosen=chosen,
        width=width,
        shared_width=int(shared[1]) if shared else 0,
        dense_layers=dense,
    )


_LAYERS = r"\[[\d\s,]*\](?:\s*\*\s*\d+)?"
_LAYERS_OF_EXPERTS = (
    rf"moe[-_]layer[-_]freq\s*[=: ]\s*(?:[\"']?(\(?\s*{_LAYERS}(?:\s*\+\s*{_LAYERS})*\s*\)?)|([^\s;,]+))"
    r"|first[-_]k[-_]dense[-_]replace\s*[=: ]\s*([^\s;,]+)"
)
"""Which layers have experts, in the words of Megatron-LM and of Hugging Face configurations."""


def _first_dense(words: str, layers: int) -> int:
    """Number of first layers without experts. Raises UnsupportedError if other layers have none."""
    found = re.search(_LAYERS_OF_EXPERTS, words)
    if found is None:
        return 0
    if found[3]:
        if not re.fullmatch(r"\d{1,9}", found[3]):
            raise UnsupportedError(f"the first layers without experts are {found[3]}, which is no number of layers")
        return min(int(found[3]), layers)
    pattern = re.sub(r"\s", "", found[1] or found[2])
    first = re.fullmatch(r"\(?\[0\]\*(\d{1,9})\+\[1\]\*(\d{1,9})\)?", pattern)
    if pattern == "1":
        return 0
    if first is None or int(first[1]) + int(first[2]) != layers:
        raise UnsupportedError(f"layers with experts are {pattern}; only the first layers can be dense")
    return int(first[1])


def _words(row: Row) -> str:
    return row.words("model", "other_flags", "flag")


def _needed(row: Row, column: str) -> int:
    value = row.integer(column)
    if value is None:
        raise UnsupportedError(f"{column} is empty")
    return value


def _precision(row: Row, notes: list[str]) -> str:
    try:
        precision = row.precision()
    except RequestError as error:
        raise UnsupportedError(str(error)) from error
    if precision is None:
        notes.append(f"precision unknown: {PRECISION}")
        return PRECISION
    if precision == "fp8":
        notes.append("fp8: products in fp8, all else in bf16")
        return "bf16"
    return precision


def _check_training(row: Row, notes: list[str]) -> None:
    words = _words(row)
    refuse_otherwise(row)
    refuse_contradictions(row)
    if mentions(words, r"offload"):
        notes.append("what offloading moves takes no time here")


def _pinned(row: Row, devices: int, model: Dimensions, spared: Spared | None, notes: list[str]) -> Pinned:
    tensor, pipeline = (_degree(row, name, notes) for name in ("tp", "pp"))
    context = row.integer("cp") or 1
    virtual = _virtual_stages(row, model.layers // pipeline, notes) if pipeline > 1 else 1
    if pipeline == 1 and (row.integer("vpp") or 1) > 1:
        notes.append(f"vpp is {row.integer('vpp')}, and there is no pipeline: 1")
    rest = tensor * pipeline * context
    data = row.integer("dp")
    if data is None:
        if devices % rest:
            raise UnsupportedError(
                f"tp {tensor} x pp {pipeline} x cp {context} = {rest} does not divide {devices} devices"
            )
        data = max(1, devices // rest)
        notes.append(f"dp unknown: {data}, from the devices")
    if data * rest != devices:
        raise UnsupportedError(
            f"tp {tensor} x pp {pipeline} x cp {context} x dp {data} = {data * rest} are not the {devices} devices"
        )
    around: ContextBy = "heads" if mentions(row.text("other_flags").lower(), _BY_HEADS) else "ring"
    if context > 1:
        notes.append(f"context parallelism by {around}")
    sequence = row.truth("sp")
    if sequence is None and tensor > 1:
        notes.append("sequence parallelism unknown: off")
    micro_batch = row.integer("micro_batch")
    if micro_batch is None:
        notes.append("micro_batch unknown: 1")
    expert, whole = _expert_degrees(row, model, tensor, data * context, notes)
    recompute = running(row, spared, notes)
    parts = Kept(but=spared.but) if spared is not None and spared.but else None
    zero, replicas = _shared_out(row, data, rest, context, notes)
    return Pinned(
        pipeline=pipeline,
        virtual_stages=virtual,
        schedule="1f1b" if virtual == 1 else None,
        data=data,
        context=context,
        context_by=around,
        tensor=tensor,
        expert=expert,
        whole_experts=whole,
        sequence_parallel=bool(sequence),
        zero=zero,
        replicas=replicas,
        micro_batch=micro_batch or 1,
        recompute=recompute,
        never_kept=() if parts else repeated(row, recompute, notes),
        even=True,
        pattern=Pattern(selective=recompute == "selective", kept=parts, whole_logits=gathers_logits(row)),
    )


_FOLDED = "2025"
"""Date from which Megatron-LM shards experts over tensor-parallel devices too (expert_tensor_parallel_size,
Megatron-Core 0.10). Published recipes for experts that are no wider than the model ask for it: Megatron Bridge,
Megatron-MoE-ModelZoo (model_configs/benchmarking at e865051), Pai-Megatron-Patch (examples/qwen3 at a098ca5)."""


def _expert_degrees(
    row: Row, model: Dimensions, tensor: int, shards: int, notes: list[str]
) -> tuple[int | None, bool | None]:
    """The expert-parallel degree, and whether experts are whole on each tensor-parallel device (None: does not apply).

    `shards` devices split tokens, those of tensor parallelism excluded.
    """
    expert = row.integer("ep")
    if model.experts is None:
        if (expert or 1) > 1:
            raise UnsupportedError(f"ep is {expert}, and the model has no experts")
        return None, None
    expert = _degree(row, "ep", notes)
    if tensor == 1:
        return expert, None
    given = re.search(r"(?:\betp|expert[-_]tensor[-_]parallel[-_](?:size|degree))\s*[=: ]\s*(\d{1,9})", _words(row))
    if given:
        within = int(given[1])
    elif shards % expert or (_folds(row) and model.experts.width <= model.hidden):
        within = 1
        notes.append("tensor parallelism of experts unknown: none, each is whole on a device")
    else:
        within = tensor
        notes.append("tensor parallelism of experts unknown: that of all else")
    if within not in (1, tensor):
        raise UnsupportedError(f"experts are split by {within} of {tensor} tensor parallel devices, not by all or none")
    return expert, within == 1


def _folds(row: Row) -> bool:
    return row.date() >= _FOLDED and not row.text("profile").startswith("ascend")


_INTERLEAVED = (
    r"\binterleav(?:ed|ing)[\s_-]+(?:1f1b|vpp|virtual|pipeline|stages?|schedul)"
    r"|\b(?:1f1b|pipeline|stages|schedule)[\s_-]+interleav(?:ed|ing)\b"
    r"|(?:^|(?<=[;,(])|(?<=[;,(] ))interleav(?:ed|ing)(?=\s*(?:[;,.)=:]|$))"
)
"""Words for a rank with several stages (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). RoPE positions and
layers with a window are called interleaved, too."""


def _virtual_stages(row: Row, layers: int, notes: list[str]) -> int:
    """Virtual stages of a pipeline rank that has `layers` layers."""
    known = virtual_stages_by_recipe(row)
    if known is not None:
        notes.append(f"{known} virtual stages, by the script of the release")
        return known
    if row.integer("vpp") is None and mentions(row.text("other_flags").lower(), _INTERLEAVED):
        fewest = next((count for count in range(2, layers + 1) if layers % count == 0), 1)
        notes.append(f"vpp unknown, and stages are interleaved: {fewest}, the fewest that divide the layers of a rank")
        return fewest
    return _degree(row, "vpp", notes)


def _degree(row: Row, column: str, notes: list[str]) -> int:
    value = row.integer(column)
    if value is None:
        notes.append(f"{column} unknown: 1")
    return value or 1


def _shared_out(row: Row, data: int, others: int, context: int, notes: list[str]) -> tuple[int, int | None]:
    """The ZeRO stage, and the number of replicas of the groups that shard states; None for a single group."""
    copies = replicas_of(row, data, others, notes)
    if copies is None:
        return _zero(row, data * context, notes), None
    said = row.zero_stage()
    if copies == data and data > 1:  # every group is one device: plain DistributedDataParallel
        return 0, None
    if copies > 1 and said == 0:
        raise UnsupportedError(f"zero_stage is 0, and {data // copies} devices share states out (HSDP)")
    stage = _zero(row, data * context, notes) if said is not None or row.shares_optimizer() else hybrid_stage(row)
    return stage, copies if copies > 1 else None


_RESHARDS = r"reshard[-_ ]after[-_ ]forward"
"""FSDP2 gathers weights twice a step, or once if this is false or "never" (torchtitan)."""


def _zero(row: Row, shards: int, notes: list[str]) -> int:
    """The ZeRO stage; if none is stated, 1 with a distributed optimizer, else 0 (3 for DeepSpeed)."""
    stage = row.zero_stage()
    if stage == 1 and "mindformers" in row.text("source").lower() and _one_micro_batch(row, shards):
        notes.append("parallel optimizer of MindSpore: gradients are shared out as they come, no micro-batches add up")
        return 2
    if stage == 3 and says(row.text("other_flags").lower(), _RESHARDS) is False:
        notes.append("weights stay gathered after the forward pass: ZeRO 2")
        return 2
    if (
        stage == 3
        and (row.integer("pp") or 1) > 1
        and mentions(f"{row.words('source', 'stack')}; {_words(row)}", "torchtitan")
    ):
        notes.append(
            "weights stay gathered, and gradients are reduced once, as torchtitan does with a pipeline: ZeRO 1"
        )
        return 1
    if stage is not None:
        return stage
    shared = row.shares_optimizer()
    if shared is None and row.text("zero_stage").lower().startswith("deepspeed"):
        notes.append("ZeRO stage of DeepSpeed unknown: 3")
        return 3
    stage = int(shared or False)
    if shards > 1:
        notes.append(f"ZeRO stage unknown: {stage}")
    return stage


def _one_micro_batch(row: Row, shards: int) -> bool:
    """Whether a step has a single micro-batch, so that no gradients are accumulated."""
    return (row.integer("micro_batch") or 1) * shards >= (row.integer("global_batch") or 1)
