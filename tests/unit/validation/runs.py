"""Rows of a small file of measured runs."""

import os
import signal
import time
from pathlib import Path

from hardware_profiles import Cluster

GPT = {
    "id": "gpt",
    "source": "paper",
    "profile": "a100-80gb",
    "device": "A100",
    "arch": "dense",
    "n_layers": "4",
    "hidden": "1024",
    "ffn_hidden": "4096",
    "n_heads": "16",
    "n_kv_heads": "16",
    "head_dim": "64",
    "vocab": "50257",
    "seq_len": "512",
    "n_devices": "8",
    "precision": "bf16",
    "tp": "2",
    "sp": "False",
    "cp": "1",
    "ep": "1",
    "pp": "2",
    "vpp": "1",
    "dp": "2",
    "zero_stage": "1",
    "micro_batch": "2",
    "global_batch": "16",
    "n_params_B": "0.1024",
    "recompute": "full",
    "iter_time_s": "0.1",
    "peak_mem_GB": "4",
    "rank_group": "one",
    "tier": "A",
}


EMPTY = (
    "model",
    "n_experts",
    "topk",
    "moe_ffn_hidden",
    "distributed_optimizer",
    "recompute_detail",
    "precision_detail",
    "flash_attention",
    "flag",
    "other_flags",
    "stack",
    "layers_per_stage",
    "peak_mem_kind",
    "notes",
    "date",
)
COLUMNS = (*GPT, *EMPTY, "tokens_per_s_per_device")


def row(**changes: str) -> dict[str, str]:
    """The usual row with other cells."""
    return {**dict.fromkeys(COLUMNS, ""), **GPT, **changes}


def write(path: Path, *rows: dict[str, str]) -> Path:
    """A file of rows."""
    lines = [",".join(COLUMNS), *(",".join(one[name] for name in COLUMNS) for one in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def endless(cluster: Cluster) -> Cluster:
    """A change of a machine that takes longer than any test."""
    time.sleep(600)
    return cluster


def killed(cluster: Cluster) -> Cluster:
    """One for which the process is killed, as by a machine that runs out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    return cluster
