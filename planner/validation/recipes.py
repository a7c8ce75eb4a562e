"""What NVIDIA's recipes of models with experts decide and no row says: how rows of tokens get to their experts, and
what of a block is in CUDA graphs.

    NeMo, and Megatron Bridge 25.09      DeepEP on H100 from 25.07 on, else one row for each expert of a token
    Megatron Bridge 25.11 to 26.04       DeepEP or HybridEP (`moe_flex_dispatcher_backend`), or one row for each expert
                                         where the recipe names neither; parts of a block in CUDA graphs
                                         (`cuda_graph_scope`) where `cuda_graph_impl` is "transformer_engine"

Sources: NVIDIA-NeMo/Megatron-Bridge, tags v0.1.0rc4 (run_script.py) and v0.2.0 to v0.4.0, scripts/performance/configs,
`*workload_base_configs.py`; NVIDIA/NeMo, tags v2.3.0 and v2.4.0, scripts/performance/llm and model_configs_*.csv. A
model that they do not have is taken for one whose recipe names no graphs, and is sent as most of its time are.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from hardware_profiles import Dispatcher, Graphs
from planner.validation.rows import Row

_DEEP_EP, _HYBRID_EP, _ON_B300 = "25.07", "25.11", "26.02"
"""Containers from which on recipes send rows of tokens once: on H100, on NVL72, and of some models on other devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How rows get to their experts, and what is in CUDA graphs."""

    dispatcher: Dispatcher
    graphs: Graphs = "none"


def recipe_of(row: Row, release: str) -> Recipe:
    """The recipe of a row with experts, by the container that it ran in ("25.11"), its model and its device."""
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
    """NeMo 25.04 and later had whole layers in graphs on Blackwell, but for DeepSeek (model_configs_gb200.csv)."""
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
