"""Measured training runs from a CSV file: one row for each, an empty cell where something is unknown.

    id         what it is called     source, profile, device, rank_group, tier, flag     where it is from, how good
    the model  arch, n_layers, hidden, ffn_hidden, n_heads, n_kv_heads, head_dim, vocab, seq_len, n_params_B,
               n_experts, topk, moe_ffn_hidden
    the run    n_devices, precision, tp, sp, cp, ep, pp, vpp, dp, layers_per_stage, zero_stage, micro_batch,
               global_batch, recompute, stack, ...
    measured   iter_time_s or tokens_per_s_per_device, peak_mem_GB with peak_mem_kind

A missing column is the same as an empty one, unless it is required. Other columns are ignored.
`cells` beside this file lists what cells may say, `row_files` reads a file of rows.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hardware_profiles import software_names
from planner.errors import RequestError, unknown_name
from planner.validation.reading import cells
from planner.validation.reading.cells import PEAK_KINDS, PeakKind
from planner.validation.reading.words import mentions, says
from planner.validation.unsupported import UnsupportedError

_Value = TypeVar("_Value")
_GIGABYTE = 1e9  # bytes of a column named _GB
_BILLION = 1e9  # parameters of a column named _B

_FRAMEWORKS = {
    "megatron-lm": "megatron", "megatron-core": "megatron", "megatron core": "megatron", "llmfoundry": "llm-foundry",
    "megatron-deepspeed": "deepspeed", "pytorch fsdp": "fsdp", "fsdp2": "fsdp", "mindspeed-llm": "mindspeed",
    "megatron bridge": "nemo", "megatron-bridge": "nemo", "paddlenlp": "paddle", "paddlepaddle": "paddle",
    "nanotron": "megatron", "transformer engine": "megatron", "transformerengine": "megatron",
    "pytorch ddp": "fsdp", "ddp": "fsdp", "distributeddataparallel": "fsdp",
    "jax": "fsdp-compiled", "maxtext": "fsdp-compiled", "pax": "fsdp-compiled", "paxml": "fsdp-compiled",
    "levanter": "fsdp-compiled", "axlearn": "fsdp-compiled",
    "hugging face transformers": "fsdp", "hugging face": "fsdp", "huggingface": "fsdp", "transformers": "fsdp",
}  # fmt: skip
"""Frameworks of any version, and the stack of each; torchtitan is `fsdp` or `fsdp-compiled`."""

_TRACED, _WHOLLY = r"aot_fx_trace", r"inductor_compilation\W{1,3}full"
"""Words for a step that torchtitan's graph trainer traces, and whose operators run one by one but for FlexAttention
(experiments/graph_trainer/passes.py at 51238014b: `inductor_compilation` is "regional"); and for one that compiles."""

_LATENT = r"(?:multi[-_ ]?(?:head[-_ ])?)?latent[-_ ]attention|(?<![a-z])mla(?![a-z_])"
_WITH_LATENT = (
    r"deepseek[-_ ]?(?:coder[-_ ]?v2|r1(?![-_ ]?(?:zero[-_ ])?distill)|v[2-9]|[2-9](?:\.\d)?(?![\d.]|b(?![a-z0-9])))"
    r"|moonlight|kimi[-_ ]?(?:k[2-9]|vl)|glm[-_ ]?5|minicpm[-_ ]?3"
)
"""Words for multi-head latent attention (first), and models that have it: DeepSeek since V2 (DeepSeek-AI 2024) except
the models that R1 was distilled into, Moonlight, Kimi K2 and its relatives (Moonshot AI 2025), GLM-5 and MiniCPM3, by
their released config files."""

_DATE = r"20[0-9]{2}(?:-(?:0[1-9]|1[0-2])(?:-(?:0[1-9]|[12][0-9]|3[01]))?)?"

RECOMPUTATIONS = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run; None and empty texts mean unknown.

    `line` is its line in the file, `values` all cells of the row as they were read. `fault` says why the row is
    refused, with line and column.
    """

    line: int
    values: Mapping[str, str]
    fault: str = ""

    def text(self, column: str) -> str:
        """The text of a cell."""
        return self.values.get(column, "").strip()

    def words(self, *columns: str) -> str:
        """The texts of several columns in small letters, separated so that no denial reaches the next column."""
        return "; ".join(map(self.text, columns)).lower()

    def model_and_flags(self) -> str:
        """The words of the model and of all flags, in small letters."""
        return self.words("model", "other_flags", "flag")

    def integer(self, column: str, least: int = 1) -> int | None:
        """A whole number of at least `least`. Raises RequestError for anything else."""
        wanted = f"a whole number of {least} or more"
        number = self._read(column, cells.whole, wanted)
        if number is not None and number < least:
            raise self._malformed(column, wanted)
        return number

    def needed(self, column: str) -> int:
        """A whole number above 0. Raises UnsupportedError for an unknown one, RequestError for anything else."""
        value = self.integer(column)
        if value is None:
            raise UnsupportedError(f"{column} is empty")
        return value

    def quantity(self, column: str) -> float | None:
        """A number above 0, in the unit of the column's name. Raises RequestError for anything else."""
        wanted = f"a number above 0 ({cells.UNIT_WORDS[column]})"
        number = self._read(column, lambda text: cells.quantity(text, column), wanted)
        if number is not None and number <= 0:
            raise self._malformed(column, wanted)
        return number

    def date(self) -> str:
        """When it ran or was published, as 2024-06-30 or a prefix of that; empty if unknown.

        Raises RequestError for anything else, because another form would compare as older or newer than it is.
        """
        text = self.text("date")
        if cells.unknown(text):
            return ""
        if not re.fullmatch(rf"{_DATE}(?:\.\.{_DATE})?", text):
            raise self._malformed("date", "a date as in 2024, 2024-06 or 2024-06-30")
        return text

    def truth(self, column: str) -> bool | None:
        """True or False. Raises RequestError for anything else."""
        return self._read(column, cells.truth, "True or False")

    def recomputation(self) -> str | None:
        """One of `RECOMPUTATIONS`. Raises RequestError for anything else."""
        return self._one_of("recompute", RECOMPUTATIONS)

    def zero_stage(self) -> int | None:
        """0 to 3; None if nothing is stated, and for DeepSpeed without a stage. Raises RequestError."""
        return self._read(
            "zero_stage", cells.zero_stage, "0 to 3, ZeRO-3, fsdp2 (3), FULL_SHARD, SHARD_GRAD_OP or HYBRID_SHARD"
        )

    def attention(self) -> cells.Attention | None:
        """The attention kernels. Raises RequestError for other words."""
        wanted = "True, False, FA1 to FA4, SDPA, cuDNN, TE, FlexAttention or unfused"
        return self._read("flash_attention", cells.attention, wanted)

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention: as flags say, else by the model."""
        model = self.text("model").lower()
        named = says(self.model_and_flags(), _LATENT)
        return mentions(model, _WITH_LATENT) if named is None else named

    def shares_optimizer(self) -> bool | None:
        """Whether data-parallel devices shard the optimizer states.

        Accepts True, "DeepSpeed ZeRO-1" or "implied by --overlap-param-gather". Raises RequestError for anything else.
        """
        word = self.text("distributed_optimizer").lower()
        if word == "none":
            return False
        if word.startswith("implied") or "zero-1" in word:
            return True
        return self._read("distributed_optimizer", cells.truth, "True, False, or ZeRO-1 by name")

    def layers_per_stage(self) -> tuple[int, ...] | None:
        """Layers of each pipeline stage. Raises RequestError for anything else."""
        return self._read("layers_per_stage", cells.layer_counts, "layers of each stage, as in 15 16 16 14")

    def peak_kind(self) -> PeakKind | None:
        """What the measured peak counts. Raises RequestError for anything else."""
        return self._read("peak_mem_kind", cells.peak_kind, f"one of {', '.join(PEAK_KINDS)}")

    def precision(self) -> str | None:
        """The dtype of computation: bf16, fp16, fp32 or fp8. Raises RequestError for anything else."""
        return self._read("precision", cells.precision, "bf16, fp16, fp32 or fp8")

    def compiled(self) -> bool:
        """Whether a compiler fuses operators. Raises RequestError for another word than a truth."""
        flags = self.text("other_flags").lower()
        return bool(self.truth("compile")) and not (re.search(_TRACED, flags) and not re.search(_WHOLLY, flags))

    def stack(self) -> str | None:
        """The training stack, by its name or by that of the framework. Raises RequestError for an unknown one."""
        name = re.sub(r"[ v]+\d[\d.]*\w*$", "", self.text("stack").lower())
        if cells.unknown(name):
            return None
        if name == "torchtitan":
            return "fsdp-compiled" if self.compiled() else "fsdp"
        if name in _FRAMEWORKS:
            return _FRAMEWORKS[name]
        if name not in software_names():
            raise RequestError(
                f"line {self.line}, column stack: {unknown_name('training stack', name, software_names())}"
            )
        return name

    @property
    def id(self) -> str:
        """The name of the run."""
        return self.text("id")

    @property
    def measured_seconds(self) -> float | None:
        """Seconds of a step, as given or from tokens per second and device; None for a refused row."""
        if self.fault:
            return None
        return self.quantity("iter_time_s") or self.seconds_by_rate

    @property
    def seconds_by_rate(self) -> float | None:
        """Seconds of a step from tokens per second and device."""
        rate, batch = self.quantity("tokens_per_s_per_device"), self.integer("global_batch")
        length, devices = self.integer("seq_len"), self.integer("n_devices")
        if rate is None or batch is None or length is None or devices is None:
            return None
        return batch * length / (rate * devices)

    @property
    def measured_peak_bytes(self) -> float | None:
        """Bytes on the fullest device, as published; None for a refused row."""
        if self.fault:
            return None
        size = self.quantity("peak_mem_GB")
        return None if size is None else size * _GIGABYTE

    @property
    def out_of_memory(self) -> bool:
        """Whether the run did not fit."""
        return self.text("tier").upper() == "OOM"

    @property
    def parameters(self) -> float | None:
        """Parameters of the model, as published."""
        count = self.quantity("n_params_B")
        return None if count is None else count * _BILLION

    def _read(self, column: str, read: Callable[[str], _Value], wanted: str) -> _Value | None:
        text = self.text(column)
        if cells.unknown(text):
            return None
        try:
            return read(text)
        except ValueError as error:
            raise self._malformed(column, wanted, str(error) if type(error) is cells.UnclearError else "") from error

    def _one_of(self, column: str, words: Sequence[str]) -> str | None:
        word = self.text(column).lower()
        if not cells.unknown(word) and word not in words:
            raise self._malformed(column, f"one of {', '.join(words)}")
        return word if word in words else None

    def _malformed(self, column: str, wanted: str, reason: str = "") -> RequestError:
        why = f": {reason}" if reason else ""
        return RequestError(f"line {self.line}, column {column}: '{self.text(column):.40}' is not {wanted}{why}")
