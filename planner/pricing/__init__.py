"""What a choice costs: seconds and bytes of operators, redistributions and stored parameters.

Formulas live in `costmodels`, which knows no operator; what is sharded how lives in `planner.sharding`, which knows no
price. Here they meet, once: the search prices whole tables with these functions, the checker single choices.
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
