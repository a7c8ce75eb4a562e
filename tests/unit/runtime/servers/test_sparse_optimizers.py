"""Sparse optimizers against those of torch on the same sparse gradients."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from planner.errors import RequestError
from runtime.servers.sparse_optimizers import SparseOptimizer
from tests.refusals import refused

ROWS, WIDTH, STEPS = 60, 9, 40
TORCH: dict[str, Callable[[torch.Tensor], torch.optim.Optimizer]] = {
    "sgd": lambda weight: torch.optim.SGD([weight], lr=0.1),
    "adagrad": lambda weight: torch.optim.Adagrad([weight], lr=0.1, lr_decay=0.01, initial_accumulator_value=0.3),
    "adam": lambda weight: torch.optim.SparseAdam([weight], lr=0.1, betas=(0.8, 0.99), eps=1e-6),
}
OURS = {
    "sgd": SparseOptimizer(name="sgd", learning_rate=0.1),
    "adagrad": SparseOptimizer(name="adagrad", learning_rate=0.1, decay=0.01, initial_sum=0.3),
    "adam": SparseOptimizer(name="adam", learning_rate=0.1, betas=(0.8, 0.99), epsilon=1e-6),
}
STATES = {"adagrad": {"sum": "sum"}, "adam": {"first": "exp_avg", "second": "exp_avg_sq"}, "sgd": {}}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", sorted(OURS))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_updates_are_those_of_torch(name: str, dtype: str) -> None:
    """Moments and sums bit by bit; weights but for the roundings of fused multiplication and of the square roots of
    MKL, each less than one unit in the last place of what an update moves."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(ROWS, WIDTH, generator=generator, dtype=getattr(torch, dtype))
    theirs = torch.nn.Parameter(start.clone())
    optimizer, ours = TORCH[name](theirs), OURS[name]
    weight, state = start.numpy().copy(), ours.new_state(ROWS, WIDTH, dtype)
    for step in range(1, STEPS + 1):
        rows = torch.randperm(ROWS, generator=generator)[: step % 20].sort().values
        gradient = torch.randn(len(rows), WIDTH, generator=generator, dtype=start.dtype)
        theirs.grad = torch.sparse_coo_tensor(rows[None], gradient, start.shape)
        optimizer.step()
        ours.update(weight, state, rows.numpy(), gradient.numpy(), step, ours.learning_rate)
    for mine, its in STATES[name].items():
        assert np.array_equal(state[mine], optimizer.state[theirs][its].numpy()), mine
    unit = np.finfo(dtype).eps
    difference = np.abs(weight - theirs.detach().numpy())
    assert difference.max() <= STEPS * unit * max(1.0, float(np.abs(weight).max()))
    assert np.abs(weight - start.numpy()).max() > 0.1


def test_rows_that_are_not_touched_stay() -> None:
    ours = OURS["adam"]
    weight, state = np.ones((4, 2), np.float32), ours.new_state(4, 2, "float32")
    ours.update(weight, state, np.array([1, 3]), np.ones((2, 2), np.float32), 1, 0.1)
    assert (weight[[0, 2]] == 1).all()
    assert (weight[[1, 3]] < 1).all()
    assert not state["first"][[0, 2]].any()


def test_the_first_update_of_a_rare_row_is_as_large_with_steps_of_its_own() -> None:
    """Adam's first update is one learning rate long; counted by the table, a row that comes late is held back by
    moments that are taken for old ones."""
    moved = {}
    for row_steps in (True, False):
        ours = SparseOptimizer(name="adam", learning_rate=0.1, row_steps=row_steps)
        weight, state = np.zeros((2, 1), np.float64), ours.new_state(2, 1, "float64")
        for step in range(1, 100):
            ours.update(weight, state, np.array([0]), np.ones((1, 1)), step, 0.1)
        ours.update(weight, state, np.array([1]), np.ones((1, 1)), 100, 0.1)
        moved[row_steps] = float(-weight[1, 0])
    assert moved[True] == pytest.approx(0.1)
    assert moved[False] == pytest.approx(0.1 * (1 - 0.9) / (1 - 0.9**100) * ((1 - 0.999**100) / (1 - 0.999)) ** 0.5)


def test_row_steps_are_those_of_adam() -> None:
    with refused(RequestError, "row_steps", "adam", "sgd"):
        SparseOptimizer(name="sgd", row_steps=True)
