"""Limits of what a row may say: numbers beyond them are of no run, or in a wrong unit."""

from collections.abc import Mapping

from planner.plan.schedule_checks import PASSES
from planner.validation.reading.rows import Row
from planner.validation.unsupported import UnsupportedError

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


def check_sizes(row: Row) -> None:
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
