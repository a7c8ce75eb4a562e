"""Rows of a small file of measured runs."""

import csv
import os
import signal
import time
from pathlib import Path

from hardware_profiles import Cluster
from planner.validation import read_rows
from planner.validation.reading.rows import Row
from planner.validation.stack.software import machine_of_run

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

BRIDGE = "Megatron-Bridge perf archive {} NeMo Container"
EXPERTS = {"arch": "moe", "precision": "fp8", "date": "2025-09..2026-07"}


def row(**changes: str) -> dict[str, str]:
    """The usual row with other cells."""
    return {**dict.fromkeys(COLUMNS, ""), **GPT, **changes}


def one(folder: Path, **changes: str) -> Row:
    """The usual row with other cells, as it is read of a file."""
    values = row(**changes)
    path = folder / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(values))
        writer.writeheader()
        writer.writerow(values)
    (found,) = read_rows(path)
    return found


def machine(folder: Path, zero: int = 0, devices: int = 8, **changes: str) -> tuple[Cluster, list[str]]:
    """The cluster of such a row with its software, and the notes on it."""
    notes: list[str] = []
    return machine_of_run(one(folder, **changes), devices, zero, notes), notes


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
