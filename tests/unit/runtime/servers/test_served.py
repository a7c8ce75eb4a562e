"""Embeddings of torch models on servers: they compute what they computed, and train as sparse ones do."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import RequestError
from runtime.servers.addresses import Addresses
from runtime.servers.served import ParameterServerEmbedding, attach
from runtime.servers.sparse_optimizers import SparseOptimizer
from tests.refusals import refused
from tests.unit.runtime.servers.served_here import serving

SGD = SparseOptimizer(name="sgd", learning_rate=0.5)


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[Addresses]:
    with serving(tmp_path, count=2) as found:
        yield found


class Tables(nn.Module):
    def __init__(self, **bag: object) -> None:
        super().__init__()
        self.users = nn.Embedding(30, 4, padding_idx=0)
        self.items = nn.EmbeddingBag(20, 4, **bag)

    def forward(self, users: torch.Tensor, items: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        return F.softplus(self.users(users).sum(dim=1) * self.items(items, offsets)).sum()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 30, (6, 3), generator=generator), torch.randint(0, 20, (6, 5), generator=generator)


def flat(seed: int) -> tuple[torch.Tensor, ...]:
    users, items = batch(seed)
    return users, items.flatten(), torch.tensor([0, 2, 3, 11, 20, 25])


@pytest.mark.parametrize(
    ("bag", "data"),
    [
        ({"mode": "sum"}, batch),
        ({"mode": "mean", "padding_idx": 3}, batch),
        ({"mode": "max"}, batch),
        ({"mode": "mean"}, flat),
    ],
)
def test_losses_and_tables_are_those_of_the_plain_model(
    addresses: Addresses, bag: dict[str, object], data: Callable[[int], tuple[torch.Tensor, ...]]
) -> None:
    torch.manual_seed(0)
    plain, served = Tables(**bag), Tables(**bag)
    served.load_state_dict(plain.state_dict())
    tables = attach(served, addresses, optimizer=SGD)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(4):
        losses = [model(*data(step)) for model in (plain, served)]
        torch.autograd.backward(losses)
        optimizer.step()
        optimizer.zero_grad()
        tables.step()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for name in ("users", "items"):
        assert torch.allclose(tables.whole(name), plain.get_parameter(f"{name}.weight"), atol=1e-6)
    tables.close()


def test_nothing_of_the_table_stays_in_the_module(addresses: Addresses) -> None:
    model = Tables()
    tables = attach(model, addresses, tables=["users"])
    assert isinstance(model.users, ParameterServerEmbedding)
    assert [name for name, _ in model.named_parameters()] == ["items.weight"]
    assert repr(model.users) == "ParameterServerEmbedding(users: 30, 4, on servers)"
    tables.close()


def test_a_row_is_pulled_once_a_step_however_often_it_is_looked_up(addresses: Addresses) -> None:
    model = Tables()
    tables = attach(model, addresses, optimizer=SGD)
    users, items = batch(0)
    touched = users.unique().numel() + items.unique().numel()
    tables.prefetch({"users": users, "items": items})
    assert tables.client.traffic.pulled_rows == touched
    for _ in range(3):  # micro-batches
        model(users, items).backward()
    tables.step()
    assert tables.client.traffic.pulled_rows == tables.client.traffic.pushed_rows == touched
    assert tables.client.traffic.pulled_bytes == tables.client.traffic.pushed_bytes == touched * 4 * 4
    tables.close()


def test_gradients_of_micro_batches_are_summed(addresses: Addresses) -> None:
    torch.manual_seed(1)
    plain, served = Tables(), Tables()
    served.load_state_dict(plain.state_dict())
    tables = attach(served, addresses, optimizer=SGD)
    for model in (plain, served):
        for part in range(3):
            (model(*batch(part)) / 3).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    tables.step()
    assert torch.allclose(tables.whole("items"), plain.items.weight, atol=1e-6)
    tables.close()


def test_without_gradients_nothing_is_pushed(addresses: Addresses) -> None:
    model = Tables()
    tables = attach(model, addresses)
    with torch.no_grad():
        model(*batch(0))
    tables.step()
    assert tables.client.traffic.pushed_rows == 0
    tables.close()


def test_a_frozen_table_keeps_its_rows(addresses: Addresses) -> None:
    model = Tables()
    model.users.weight.requires_grad_(False)
    before = model.users.weight.clone()
    tables = attach(model, addresses, optimizer=SGD)
    model(*batch(0)).backward()
    tables.step()
    assert torch.equal(tables.whole("users"), before)
    assert tables.client.traffic.pushed_rows == len(batch(0)[1].unique())
    tables.close()


class Shared(nn.Module):
    """Two modules with one weight."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.one = nn.Embedding(4, 2)
        self.other = other
        self.other.weight = self.one.weight


class Again(nn.Module):
    """One embedding under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = nn.Embedding(4, 2)


@pytest.mark.parametrize(
    ("model", "tables", "facts"),
    [
        (Tables(), ["user"], ("user", "users")),
        (nn.Linear(2, 2), ["*"], ("*", "none")),
        (Shared(nn.Embedding(4, 2)), ["*"], ("one.weight", "other.weight")),
        (Shared(nn.Linear(2, 4)), ["*"], ("one.weight", "other.weight")),
        (Again(), ["one"], ("one.weight", "other.weight")),
        (nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), ["*"], ("0", "max_norm", "scale_grad_by_freq")),
    ],
)
def test_what_cannot_be_served_is_refused(
    addresses: Addresses, model: nn.Module, tables: list[str], facts: tuple[object, ...]
) -> None:
    with refused(RequestError, *facts):
        attach(model, addresses, tables=tables)
