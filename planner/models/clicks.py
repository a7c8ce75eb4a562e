"""Models that predict clicks, by name: Wide & Deep and DLRM.

Widths are those of Cheng et al. 2016 (figure 4 and section 4.2) and of the benchmark scripts that Naumov et al. 2019
released; rows of the tables are those that the scripts find in the data of Criteo. Cheng et al. do not say how many
values their features have: those rows are assumed. Rows are used as given, so pad them yourself where that pays.
"""

from collections.abc import Callable, Mapping
from typing import Any

from planner.models.entry import TRACE_BATCH, Dimension, Example, ZooEntry

_PER_DEVICE = 2048
"""Default samples of a step on each device: the batch of the script for Criteo Terabyte that Naumov et al. 2019
released, on one device."""


def _wide_deep(
    source: str, tables: tuple[int, ...], width: int, dense: int, hidden: tuple[int, ...], crossed: tuple[int, int]
) -> ZooEntry:
    """`crossed`: how many crossed features a sample has, and how many there are."""
    count, rows = crossed
    dimensions: dict[str, Dimension] = {
        "table_rows": tables, "table_width": width, "dense_features": dense, "hidden_sizes": hidden,
        "crossed_features": count, "crossed_rows": rows,
    }  # fmt: skip
    return ZooEntry(
        family="wide-deep", dimensions=tuple(dimensions.items()), source=source, samples_per_device=_PER_DEVICE
    )


def _dlrm(
    source: str, tables: tuple[int, ...], width: int, bottom: tuple[int, ...], top: tuple[int, ...], dense: int = 13
) -> ZooEntry:
    dimensions: dict[str, Dimension] = {
        "table_rows": tables, "table_width": width, "dense_features": dense, "bottom_sizes": bottom, "top_sizes": top,
    }  # fmt: skip
    return ZooEntry(family="dlrm", dimensions=tuple(dimensions.items()), source=source, samples_per_device=_PER_DEVICE)


_WIDE_DEEP = "Cheng et al. 2016 (arXiv 1606.07792), figure 4 and section 4.2; numbers of fields and rows assumed"
_KAGGLE = "Naumov et al. 2019 (arXiv 1906.00091) and the released script for Criteo Kaggle"
_TERABYTE = "Naumov et al. 2019 (arXiv 1906.00091) and MLPerf's configuration for Criteo Terabyte, 40 million rows"
_TINY = "made for tests and demonstrations"

_KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
_TERABYTE_ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976, 14,
    39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip

CLICK_MODELS: Mapping[str, ZooEntry] = {
    "wide-deep-tiny": _wide_deep(_TINY, (64, 32, 16), 8, 4, (32, 16), (2, 64)),
    "wide-deep": _wide_deep(_WIDE_DEEP, (100_000,) * 36, 32, 48, (1024, 512, 256), (8, 1_000_000)),
    "dlrm-tiny": _dlrm(_TINY, (64, 32, 16), 8, (16, 8), (16, 8), 4),
    "dlrm-kaggle": _dlrm(_KAGGLE, _KAGGLE_ROWS, 16, (512, 256, 64, 16), (512, 256)),
    "dlrm-terabyte": _dlrm(_TERABYTE, _TERABYTE_ROWS, 128, (512, 256, 128), (1024, 1024, 512, 256)),
}


def _build_wide_deep(dimensions: dict[str, Any]) -> Example:
    import torch

    from planner.models.wide_deep import WideDeep, WideDeepConfig

    count, rows = dimensions["crossed_features"], dimensions["crossed_rows"]
    crossed = torch.zeros(TRACE_BATCH, count, dtype=torch.int64)
    dense, fields, labels = _features(dimensions)
    return Example(
        module=WideDeep(WideDeepConfig(**dimensions)),
        args=(dense, fields, crossed, labels),
        bounds=(None, *dimensions["table_rows"], rows, 2),
    )


def _build_dlrm(dimensions: dict[str, Any]) -> Example:
    from planner.models.dlrm import DLRM, DLRMConfig

    return Example(
        module=DLRM(DLRMConfig(**dimensions)),
        args=_features(dimensions),
        bounds=(None, *dimensions["table_rows"], 2),
    )


def _features(dimensions: dict[str, Any]) -> tuple[Any, ...]:
    """Dense features, B D, the value of each field, B, and whether there was a click, B."""
    import torch

    dense = torch.zeros(TRACE_BATCH, dimensions["dense_features"])
    fields = [torch.zeros(TRACE_BATCH, dtype=torch.int64) for _ in dimensions["table_rows"]]
    return dense, fields, torch.zeros(TRACE_BATCH, dtype=torch.int64)


CLICK_FAMILIES: Mapping[str, Callable[[dict[str, Any]], Example]] = {
    "dlrm": _build_dlrm,
    "wide-deep": _build_wide_deep,
}
