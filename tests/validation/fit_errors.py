"""Records how far the packaged profiles are off the tables that they are fitted to, hardware_profiles/fit_errors.csv:

    python -m tests.validation.fit_errors

Takes a second. Products and attentions of less than 5 µs are left out: their time is that of a launch.
"""

import datetime
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import hardware_profiles
from costmodels import Array, attention_preparation, attention_time, matmul_time
from costmodels.fit_collectives import relative_errors
from hardware_profiles import FitError, dump_records, load_profile, profile_names, with_records
from planner.plan.writing import write_atomically
from tests.validation.test_collectives import in_a_node
from tests.validation.test_collectives import rows as collectives
from tests.validation.test_kernel_tables import SMALL, attention_of, cold, rows, tables


def fit_errors(date: str) -> Iterator[FitError]:
    """Of every profile that has tables of its own, as it is packaged now."""
    for profile, dtype in tables("gemm"):
        columns, device = rows("gemm", profile, dtype), load_profile(profile).device
        m, n, k, measured = (columns[name] for name in ("m", "n", "k", "time_s"))
        predicted = np.asarray(matmul_time(m, n, k, 1.0, dtype, cold(device, dtype)))
        yield _error(profile, f"matmul {dtype}", predicted / measured - 1, measured, date, "kernels_gemm.csv")
    for kind in ("attention", "attention_whole"):
        for profile, dtype in tables(kind):
            columns, device = rows(kind, profile, dtype), load_profile(profile).device
            measured = columns["time_s"]
            shape = attention_of(columns, np.arange(len(measured)), causal=kind == "attention")
            predicted = np.asarray(attention_time(shape, dtype, device) + attention_preparation(shape, dtype, device))
            yield _error(profile, f"attention {dtype}", predicted / measured - 1, measured, date, f"kernels_{kind}.csv")
    for profile in sorted(set(collectives("collectives_in_a_node.csv", "profile")) & set(profile_names())):
        cluster, some = load_profile(profile), in_a_node(profile)
        inside = [row for row in some if row.devices <= (cluster.devices_per_node or row.devices)]
        part = f"collectives in a {cluster.levels[0].name}"
        errors = relative_errors(cluster, inside)
        yield _error(profile, part, errors, np.full(len(errors), np.inf), date, "collectives_in_a_node.csv")


def _error(profile: str, part: str, errors: Array, measured: Array, date: str, table: str) -> FitError:
    kept = errors[measured >= SMALL]
    return FitError(
        profile=profile,
        part=part,
        rows=len(kept),
        mean_absolute=float(np.abs(kept).mean()),
        bias=float(kept.mean()),
        date=date,
        source=f"tests/validation/data/{table}",
    )


def main() -> None:
    """Write the table."""
    path = Path(hardware_profiles.__file__).parent / "fit_errors.csv"
    found = fit_errors(datetime.datetime.now(datetime.UTC).date().isoformat())
    write_atomically(path, dump_records(FitError, with_records((), found)))


if __name__ == "__main__":
    main()
