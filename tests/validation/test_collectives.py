"""Collectives that others measured: how closely the model fits half of them, and predicts the other half.

`data/collectives_in_a_node.csv` is drawn from AIConfigurator's collected data (NVIDIA, Apache-2.0): all kinds on 2, 4
and 8 devices of one NVLink domain, messages of 512 bytes to 512 MiB. Sums of 8-bit integers are left out, as no
training reduces them (the fitted numbers are 5 to 6 percent off on them). Rows of other sources stand for 256 MiB to
2 GiB only, where the sources agree. They do not on small messages: up to 16 MiB the fitted numbers are 36 to 39 percent
too fast for the nccl-tests and torch sweeps of ml-engineering, and 13 percent for vTrain's. We do not know why; taking
AIConfigurator's is a choice.

The form of the model (which protocols, three for rings and three for peers) was chosen by looking at errors on such
halves, so these tests flatter it a little. The names of the protocols say what they are like; nobody traced which
kernels ran.

`data/collectives_over_nodes.csv` has all-reduces over several nodes. They tell the latency and the bandwidth of the
outer level for each cluster; setups are held at those of the node, because each has groups of one size only. Left out
are those in which switches of the network reduced (`h100-8-nodes-ndr`), and those over many NVLink domains.

Run as a script, this writes `data/fitted_levels.toml`: the numbers of each machine fitted to all of its rows.
"""

import csv
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from costmodels.fit_collectives import Measured, fit_levels, relative_errors
from hardware_profiles import Cluster, Level, Protocol, load_profile

DATA = Path(__file__).parent / "data"
FITTED = DATA / "fitted_levels.toml"
US, GB = 1e-6, 1e9

# Bandwidth per device and direction, and devices, of the NVLink domain or of PCIe (datasheets); whether its switches
# reduce.
DOMAINS = {
    "a100-80gb": (300 * GB, 8, False),
    "h100-80gb": (450 * GB, 8, True),
    "h200-141gb": (450 * GB, 8, True),
    "b200-180gb": (900 * GB, 8, True),
    "b300-288gb": (900 * GB, 8, True),
    "gb200-186gb": (900 * GB, 72, True),
    "gb300-288gb": (900 * GB, 72, True),
    "rtx-pro-6000-96gb": (63 * GB, 8, False),  # PCIe 5.0: two devices on one switch have more of it than four or eight
}
# Machine of a cluster, bandwidth of its port, and how far off the other half may be. The sweep on four B200 nodes has
# 17 rows with two switches of algorithm, which half of them do not show.
CLUSTERS = {
    "a100-2-nodes-efa": ("a100-80gb", 50 / 8 * GB, 0.10),
    "h100-2-nodes-efa": ("h100-80gb", 50 * GB, 0.10),
    "b200-4-nodes-efa": ("b200-180gb", 50 * GB, 0.13),
}
USUAL = (0.07, 0.10, 0.10)
"""How far off fitted numbers may be in the mean: on the rows that they are fitted to, on the other half, on a kind."""
ON_PCIE = {"rtx-pro-6000-96gb": (0.11, 0.15, 0.21)}
"""The same where one level stands for a tree of switches: two devices on one reduce in two thirds of its time."""
SEEDS = range(5)
START = {  # of every fit, for every machine: setup, latency, efficiency, own
    "low_latency": (7, 1, 0.03, 0, "rings"),
    "low_latency_128": (10, 1, 0.4, 0.5, "rings"),
    "simple": (25, 1, 0.75, 0.5, "rings"),
    "peer_low_latency": (7, 0.3, 0.03, 0, "peers"),
    "peer_medium": (14, 0.3, 0.5, 0.3, "peers"),
    "peer_large": (25, 0.5, 0.7, 0.3, "peers"),
}


def protocol(name: str, setup: float, latency: float, efficiency: float, own: float, serves: str = "all") -> Protocol:
    return Protocol(
        name=name,
        setup=setup * US,
        latency=latency * US,
        efficiency=efficiency,
        own=own,
        serves=serves,  # type: ignore[arg-type]
    )


def start(machine: str) -> Cluster:
    bandwidth, devices, reduces = DOMAINS[machine]
    domain = Level(
        name="node",
        fan_out=devices,
        network="switch",
        bandwidth=bandwidth,
        protocols=tuple(protocol(name, *values) for name, values in START.items()),
        in_network=protocol("nvlink_sharp", 20, 7, 0.6, 0) if reduces else None,
    )
    return replace(load_profile("h100-80gb"), name=machine, levels=(domain,), devices=devices)


def over_nodes(cluster: str, machine: Cluster) -> Cluster:
    """The machine with a level around it, where steps take ten microseconds to begin with."""
    domain = machine.levels[0]
    far = tuple(
        replace(
            one,
            latency=one.latency + 10 * US,
            efficiency=start(machine.name).levels[0].protocols[index].efficiency,
            own=0.0,
        )
        for index, one in enumerate(domain.protocols)
    )
    network = Level(name="cluster", fan_out=None, network="switch", bandwidth=CLUSTERS[cluster][1], protocols=far)
    return replace(machine, levels=(domain, network))


@cache
def rows(file: str, column: str) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    with (DATA / file).open() as lines:
        for row in csv.DictReader(lines):
            one = Measured(
                kind=row["kind"],
                devices=int(row["devices"]),
                message=float(row["message_bytes"]),
                seconds=float(row["seconds"]),
            )
            found.setdefault(row[column], []).append(one)
    return found


def in_a_node(machine: str) -> list[Measured]:
    return rows("collectives_in_a_node.csv", "profile")[machine]


def between_nodes(cluster: str) -> list[Measured]:
    return rows("collectives_over_nodes.csv", "cluster")[cluster]


@cache
def fitted(machine: str) -> Cluster:
    """The machine as `fitted_levels.toml` has it."""
    levels = tomllib.loads(FITTED.read_text())[machine]
    base = start(machine)
    one = {
        name: protocol(name, fit["setup_us"], fit["latency_us"], fit["efficiency"], fit["own"])
        for name, fit in levels.items()
    }
    domain = base.levels[0]
    found = tuple(replace(one[item.name], serves=item.serves) for item in domain.protocols)
    return replace(base, levels=(replace(domain, protocols=found, in_network=one.get("nvlink_sharp")),))


def halves(measured: list[Measured], seed: int) -> tuple[list[Measured], list[Measured]]:
    order = np.random.default_rng(seed).permutation(len(measured))
    middle = len(measured) // 2
    return [measured[i] for i in order[:middle]], [measured[i] for i in order[middle:]]


def mean_error(cluster: Cluster, measured: list[Measured]) -> float:
    return float(np.abs(relative_errors(cluster, measured)).mean())


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("machine", DOMAINS)
def test_half_of_the_rows_predict_the_other_half(machine: str) -> None:
    """At most 10 percent off in the mean, for each of five random halves; for each kind, over the five together."""
    _, of_half, of_kind = ON_PCIE.get(machine, USUAL)
    by_kind: dict[str, list[float]] = {}
    for seed in SEEDS:
        known, unknown = halves(in_a_node(machine), seed)
        fit = fit_levels(start(machine), known)
        assert mean_error(fit, unknown) <= of_half
        for kind in sorted({row.kind for row in unknown}):
            by_kind.setdefault(kind, []).append(mean_error(fit, [row for row in unknown if row.kind == kind]))
    assert len(by_kind) == 4
    for kind, errors in by_kind.items():
        assert np.mean(errors) <= of_kind, kind


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_half_of_the_rows_over_nodes_predict_the_other_half(cluster: str) -> None:
    """In the mean over five halves; one half of 17 to 25 rows by itself may be further off."""
    errors = []
    for seed in SEEDS:
        known, unknown = halves(between_nodes(cluster), seed)
        machine = over_nodes(cluster, fitted(CLUSTERS[cluster][0]))
        fit = fit_levels(machine, known, levels=[1], fields=("latency", "efficiency"))
        errors.append(mean_error(fit, unknown))
    assert np.mean(errors) <= CLUSTERS[cluster][2], errors


def test_four_nodes_of_b200_fill_their_ports() -> None:
    """Rings and trees of NCCL send twice the message over four nodes, so the 197 GB/s that they reach need nearly all
    of their ports of 400 Gb/s. An all-reduce between the nodes alone would need 0.76 of them."""
    machine = over_nodes("b200-4-nodes-efa", fitted("b200-180gb"))
    fit = fit_levels(machine, between_nodes("b200-4-nodes-efa"), levels=[1], fields=("latency", "efficiency"))
    assert 0.9 <= fit.levels[1].efficiency < 1


def test_a800_has_the_protocols_of_a100_on_fewer_links() -> None:
    """Nothing of its profile is fitted to these rows."""
    assert mean_error(load_profile("a800-80gb"), in_a_node("a800-80gb")) <= 0.03


@pytest.mark.parametrize(("cluster", "error"), [("gh200-2-nodes-slingshot", 0.03), ("gh200-8-nodes-slingshot", 0.08)])
def test_slingshot_of_alps(cluster: str, error: float) -> None:
    """Nothing of the profile is fitted to what tests of the centre ask for."""
    assert mean_error(load_profile("gh200-96gb"), between_nodes(cluster)) <= error


@pytest.mark.parametrize("machine", DOMAINS)
def test_the_fitted_numbers_are_within_7_percent(machine: str) -> None:
    """Of the rows that they were fitted to: guards the file, and says how much of the data the model can express."""
    assert mean_error(fitted(machine), in_a_node(machine)) <= ON_PCIE.get(machine, USUAL)[0]


@pytest.mark.parametrize("machine", ["a100-80gb", "h100-80gb", "rtx-pro-6000-96gb"])
def test_profiles_have_the_fitted_numbers(machine: str) -> None:
    found, expected = load_profile(machine).levels[0], fitted(machine).levels[0]
    assert replace(found, name="node") == expected


def table(machine: str) -> list[str]:
    domain = fit_levels(start(machine), in_a_node(machine)).levels[0]
    lines = []
    for one in (*domain.protocols, domain.in_network):
        if one is not None:
            values = {"setup_us": one.setup / US, "latency_us": one.latency / US}
            values |= {"efficiency": one.efficiency, "own": one.own}
            text = ", ".join(
                f"{name} = {float(f'{value:.3g}') if value > 1e-3 else 0:g}" for name, value in values.items()
            )
            lines.append(f"{machine}.{one.name} = {{ {text} }}")
    return lines


if __name__ == "__main__":
    head = ["# Fitted to all rows of collectives_in_a_node.csv, by `python -m tests.validation.test_collectives`.", ""]
    FITTED.write_text("\n".join([*head, *(line for machine in DOMAINS for line in [*table(machine), ""])]))
