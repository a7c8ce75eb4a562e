"""Tables in which kernels and collectives count with shares, and launches of the host for the rest (`launches` finds
the shares)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.pricing import OperatorPrices
from planner.strategy_search.request.template import Template
from planner.strategy_search.tables.cost_table import EdgeTable, OperatorTable, ParameterTable
from planner.strategy_search.tables.launches import Shares

Array = NDArray[np.float64]


def launched_ahead(
    template: Template, operators: Sequence[OperatorTable], edges: Sequence[EdgeTable], shares: Shares
) -> tuple[tuple[OperatorTable, ...], tuple[EdgeTable, ...]]:
    """Operators and edges whose kernels and collectives count with shares; launches count for the rest."""
    kinds = [template.kind_of(at) for at in range(len(operators))]
    counted = tuple(_counted(table, shares[kind]) for kind, table in zip(kinds, operators, strict=True))
    return counted, tuple(_scaled(table, shares[kinds[table.edge.consumer]]) for table in edges)


def added_up(
    template: Template, parameters: Sequence[ParameterTable], shares: Shares | None
) -> tuple[ParameterTable, ...]:
    """Parameters with the price of gradient accumulation: its kernels count with the share of the backward pass of
    their readers, its launches for the rest. Without shares, kernels wait for their launches. A parameter that several
    kinds of blocks share may be accumulated in any of them, so the least price counts."""

    def seconds(table: ParameterTable) -> Array:
        prices = table.prices
        if shares is None:
            return prices.accumulation + prices.late
        backs = sorted({shares[template.kind_of(use.consumer)][1] for use in table.uses})
        ways = [share * prices.accumulation + (1 - share) * prices.launches for share in backs]
        return np.minimum.reduce(ways) if ways else prices.accumulation

    return tuple(
        replace(table, prices=replace(table.prices, accumulation=seconds(table)))
        if table.prices.launches.any()
        else table
        for table in parameters
    )


def _counted(table: OperatorTable, shares: tuple[float, float]) -> OperatorTable:
    """An operator whose kernels count with a share in each pass; its launches count for the rest."""
    prices = table.prices
    (late, back), (first, second) = prices.late, prices.host
    second = second if prices.backward.any() else np.zeros_like(second)

    def forward(share: float) -> OperatorPrices:
        seconds = share * (prices.forward - late) + (1 - share) * first
        return replace(prices, forward=seconds, inner_forward=share * prices.inner_forward)

    there, again = shares
    counted = replace(
        forward(there),
        backward=again * (prices.backward - back) + (1 - again) * second,
        inner_backward=again * prices.inner_backward,
    )
    return replace(table, prices=counted, again=None if there == again else forward(again))


def _scaled(table: EdgeTable, shares: tuple[float, float]) -> EdgeTable:
    """An edge whose collectives count with a share in each pass."""
    there, back = shares
    if there == back == 1:
        return table
    beneath = None if table.beneath is None else np.minimum(there * table.beneath, back * table.beneath)
    under = None if table.under is None else (min(shares) * table.under[0], back * table.under[1])
    later = None if table.later is None else replace(table.later, seconds=back * table.later.seconds)
    return replace(
        table,
        forward=there * table.forward,
        backward=back * table.backward,
        under=under,
        beneath=beneath,
        later=later,
        share_again=back / there,
        confined=None if table.confined is None else there * table.confined,
    )
