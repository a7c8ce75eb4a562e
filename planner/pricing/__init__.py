"""The price of a choice: seconds and bytes of operators, redistributions and stored parameters.

Formulas are in `costmodels`, which knows no operators; sharding is in `planner.sharding`, which knows no prices. They
are combined here, in one place: the search prices whole tables with these functions, the checker single choices.
"""

from planner.pricing.keeping import Keeping, keeping, keeping_fault
from planner.pricing.operator_price import OperatorPrices, price_operator
from planner.pricing.parameter_price import ParameterPrices, price_parameter
from planner.pricing.redistribution_price import Paths, Pricers, RedistributionPricer

__all__ = [
    "Keeping",
    "OperatorPrices",
    "ParameterPrices",
    "Paths",
    "Pricers",
    "RedistributionPricer",
    "keeping",
    "keeping_fault",
    "price_operator",
    "price_parameter",
]
