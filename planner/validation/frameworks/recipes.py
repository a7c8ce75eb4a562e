"""Decisions of NVIDIA's recipes that no row states: how rows of tokens reach their experts, what of a block is in CUDA
graphs, what saves memory, and the number of virtual stages.

    NeMo, and Megatron Bridge 25.09      DeepEP on H100 from 25.07 on, else one row for each expert of a token
    Megatron Bridge 25.11 to 26.04       DeepEP or HybridEP (`moe_flex_dispatcher_backend`), or one row for each expert
                                         where the recipe names neither; parts of a block in CUDA graphs
                                         (`cuda_graph_scope`) where `cuda_graph_impl` is "transformer_engine"

Sources: NVIDIA-NeMo/Megatron-Bridge, tags v0.1.0rc4 (run_script.py) and v0.2.0 to v0.4.0, scripts/performance/configs,
`*workload_base_configs.py`; NVIDIA/NeMo, tags v2.3.0 and v2.4.0, scripts/performance/llm and model_configs_*.csv. A
model without a recipe there is assumed to have no graphs, and the exchange that most recipes of its time have.

    memory      Megatron Bridge, the same files: recompute_modules, recompute_num_layers, cpu_offloading_num_layers
    virtual     NVIDIA/dgxc-benchmarking, tag v25.04, nemotron/launch.sh: VP=12 for 340b, of which the table of the
    stages      same release says "NA"; NVIDIA/NeMo-Framework-Launcher, tags 24.03 to 24.07: conf/training/llama/
                llama2_13b.yaml and examples/peft/llama/h100/13b_1node.sh have 10 on 4 pipeline ranks
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hardware_profiles import Dispatcher, Graphs
from planner.validation.reading.rows import Row
from planner.validation.spared import Spared

BRIDGE = r"megatron[-_ ]bridge"
"""Words for Megatron Bridge."""

_DEEP_EP, _HYBRID_EP, _ON_B300 = "25.07", "25.11", "26.02"
"""Containers from which recipes send rows of tokens once: on H100; on NVL72; and, for some models, on other devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How rows reach their experts, and what is in CUDA graphs."""

    dispatcher: Dispatcher
    graphs: Graphs = "none"


def of_bridge(row: Row) -> bool:
    """Whether a row is from Megatron Bridge, by its source or its stack."""
    return bool(re.search(BRIDGE, f"{row.text('source')} {row.text('stack')}".lower()))


def recipe_of(row: Row, release: str) -> Recipe:
    """The recipe of a row with experts, by its container (`release`, as "25.11"), its model and its device."""
    profile = row.text("profile")
    racks = profile.startswith(("gb", "vr"))
    if release < _HYBRID_EP:
        once = release >= _DEEP_EP and profile.startswith("h")
        return Recipe(dispatcher="once" if once else "alltoall", graphs=_before_bridge(row, release, profile))
    model = row.text("model").lower()
    for words, found in _FAMILIES:
        if re.search(words, model):
            return found(profile, release, racks)
    return Recipe(dispatcher="once" if racks else "alltoall")


def _before_bridge(row: Row, release: str, profile: str) -> Graphs:
    """NeMo 25.04 and later had whole layers in graphs on Blackwell, except for DeepSeek (model_configs_gb200.csv)."""
    blackwell = profile.startswith(("b2", "b3", "gb"))
    latent = re.search(r"deepseek", row.text("model").lower())
    return "step" if blackwell and not latent and "25.04" <= release < _DEEP_EP else "none"


def _deepseek(profile: str, release: str, racks: bool) -> Recipe:
    once = racks or profile.startswith("h") or release >= _ON_B300
    graphs: Graphs = "none" if not racks else "router" if release < _ON_B300 else "attention"
    return Recipe(dispatcher="once" if once else "alltoall", graphs=graphs)


def _qwen_large(profile: str, release: str, racks: bool) -> Recipe:
    return Recipe(dispatcher="once" if racks else "alltoall", graphs="router" if racks else "none")


def _qwen_small(profile: str, release: str, racks: bool) -> Recipe:
    once = racks or (release >= _ON_B300 and profile.startswith(("b3", "h")))
    return Recipe(dispatcher="once" if once else "alltoall", graphs="router")


def _gpt_oss(profile: str, release: str, racks: bool) -> Recipe:
    graphs: Graphs = "attention" if profile.startswith(("gb3", "b3")) else "none"
    return Recipe(dispatcher="alltoall", graphs=graphs)


_FAMILIES: tuple[tuple[str, Callable[[str, str, bool], Recipe]], ...] = (
    (r"deepseek|kimi", _deepseek),
    (r"qwen3[-_ ]?235b", _qwen_large),
    (r"qwen3[-_ ]?30b", _qwen_small),
    (r"gpt[-_ ]?oss", _gpt_oss),
)


def release_of(row: Row) -> str:
    """The NeMo container that a row names, as "26.06.01"; else the month of its date, as "26.08"; else empty."""
    named = re.search(r"\b(2\d\.(?:0[1-9]|1[0-2])(?:\.\d{2})?)\s+nemo container", row.text("source").lower())
    if named:
        return named[1]
    month = re.fullmatch(r"20(2\d)-(0[1-9]|1[0-2])(?:-\d\d)?", row.date())
    return f"{month[1]}.{month[2]}" if month else ""


_PARTIAL_GRAPHS, _WHOLE_GRAPHS = "26.04", "26.06"
"""Containers in which the modules that DeepSeek-V3 recomputes changed on GB200, and on GB300."""

_AWAY: Mapping[tuple[str, str, bool], int] = {
    ("llama3_70b", "gb300", True): 30,
    ("llama3_70b", "gb300", False): 20,
    ("llama3_70b", "gb200", True): 20,
    ("llama3_70b", "gb200", False): 40,
    ("llama3_70b", "b200", False): 5,
    ("llama3.1_405b", "gb300", True): 40,
    ("llama3.1_405b", "gb300", False): 10,
    ("llama3.1_405b", "gb200", False): 92,
    ("llama3.1_405b", "b300", True): 40,
}
"""Blocks that offload activations under FSDP (cpu_offloading_num_layers), by model, device, and whether in bf16."""


def spared_by_recipe(row: Row) -> Spared | None:
    """What saves memory in the recipe of a Megatron Bridge row that does not state it; None if no recipe is known."""
    if not of_bridge(row):
        return None
    model, device, release = row.text("model").lower(), row.text("profile").partition("-")[0], release_of(row)
    if re.search(r"lora|sft|finetun", model):
        return None
    if re.search(r"deepseek[-_ ]?v3", model):
        activations = device == "gb300" and row.precision() == "bf16" and release >= _HYBRID_EP
        return Spared(but=_of_deepseek(row, device, release), remade=("experts",) if activations else ())
    if re.search(r"gpt[-_ ]?oss[-_ ]?120b", model):
        whole = device == "gb200" and row.precision() == "fp8" and release >= _WHOLE_GRAPHS
        return Spared(remade=() if whole or device not in ("gb200", "b200", "h100") else ("normalisation", "experts"))
    if re.search(r"qwen3[-_ ]?(30b|235b)", model):
        return Spared()
    wide = row.precision() == "bf16"
    if row.zero_stage() == 3:
        blocks = _AWAY.get((model.partition(" ")[0], device, wide), 0)
        early = device == "b200" and release < _HYBRID_EP  # recompute_num_layers before there was offloading
        return Spared(recomputed=blocks) if early else Spared(offloaded=blocks)
    if model.startswith("llama3_8b") and device == "h100" and not wide:
        return Spared(recomputed=5)
    return Spared() if model.startswith(("llama3_", "llama3.1_")) else None


def _of_deepseek(row: Row, device: str, release: str) -> tuple[str, ...]:
    """Modules that DeepSeek-V3 recomputes, activations of experts excluded."""
    up, mlp = ("mla_up_proj",), ("mlp",)
    if device == "h100":
        return up + mlp
    if device == "gb300":
        return up if _ON_B300 <= release < _WHOLE_GRAPHS and row.precision() != "bf16" else ()
    if device == "gb200" and release < _HYBRID_EP:
        return up if "tokendrop" in row.text("model").lower() else up + mlp
    if device == "gb200" and _PARTIAL_GRAPHS <= release < _WHOLE_GRAPHS and row.precision() != "bf16":
        return mlp
    return up


def virtual_stages_by_recipe(row: Row) -> int | None:
    """Virtual stages of a rank, if a table of NVIDIA omits them and the script of its release has them; else None."""
    source, model, pipeline = row.text("source").lower(), row.text("model").lower(), row.integer("pp")
    if row.integer("vpp") not in (None, 1):
        return None
    if "dgxc" in source and "v25.04" in source and re.search(r"nemotron4?[-_ ]340b", model) and pipeline == 8:
        return 12
    launched = "nemo" in source and row.date().startswith("2024")
    if launched and row.integer("vpp") is None and re.match(r"llama-?2-13b", model) and pipeline == 4:
        return 10
    return None
