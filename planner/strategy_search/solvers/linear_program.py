"""A small linear program and its dual values, by GLOP of OR-Tools.

    minimise  c x     with  lower <= A x <= upper,  x >= 0

The dual value of a row is the increase of the minimum if its binding side increases by one. A program of a few rows and
up to a hundred columns takes a millisecond; the same program gives the same answer. Not good for: large sparse
programs, since the matrix is dense.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


_AS_FOUND = "change_status_to_imprecise: false"
"""Without this, GLOP calls a program abnormal and returns no solution if the solution is off by about the
tolerances."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearSolution:
    """The least value, the values of all columns, and the dual values of all rows."""

    value: float
    columns: Array
    duals: Array


def minimized(costs: Array, rows: Array, lower: Array, upper: Array) -> LinearSolution | None:
    """The minimum of a linear program: costs (columns), rows (rows, columns), lower and upper (rows). None if no x
    satisfies it.

    Raises ArithmeticError if the solver ends without an answer.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    solver.SetSolverSpecificParametersAsString(_AS_FOUND)
    objective, variables = solver.Objective(), [solver.NumVar(0.0, solver.infinity(), "") for _ in costs]
    for variable, cost in zip(variables, costs.tolist(), strict=True):
        objective.SetCoefficient(variable, cost)
    constraints = [solver.Constraint(*ends) for ends in zip(lower.tolist(), upper.tolist(), strict=True)]
    for constraint, row in zip(constraints, rows.tolist(), strict=True):
        for variable, value in zip(variables, row, strict=True):
            if value:
                constraint.SetCoefficient(variable, value)
    objective.SetMinimization()
    status = solver.Solve()
    if status == pywraplp.Solver.INFEASIBLE:
        return None
    if status != pywraplp.Solver.OPTIMAL:
        raise ArithmeticError(f"GLOP ended with status {status} for {len(rows)} rows and {len(costs)} columns")
    return LinearSolution(
        value=objective.Value(),
        columns=np.array([variable.solution_value() for variable in variables]),
        duals=np.array([constraint.dual_value() for constraint in constraints]),
    )
