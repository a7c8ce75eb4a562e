"""The slow network of `make bench ONLY=overlap`: what it makes is gone, however it ends."""

import subprocess

import pytest

from tests.benchmarks import namespaces

REASON = namespaces.why_not()
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def existing() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(namespaces.PREFIX)}


def test_ranks_are_held_to_a_bandwidth_and_are_gone_after_an_error() -> None:
    before = existing()
    with pytest.raises(KeyboardInterrupt), namespaces.network(2) as made:  # noqa: PT012
        assert existing() - before == {*made.ranks, made.switch}
        made.limit(1e6)
        shown = made.command(1, ["tc", "qdisc", "show", "dev", namespaces.INTERFACE])
        assert "tbf" in subprocess.run(shown, capture_output=True, text=True, check=True).stdout
        made.limit(None)
        assert "tbf" not in subprocess.run(shown, capture_output=True, text=True, check=True).stdout
        raise KeyboardInterrupt
    assert existing() == before


def test_what_a_killed_benchmark_left_is_removed() -> None:
    orphan = f"{namespaces.PREFIX}999999999-0"
    subprocess.run(["ip", "netns", "add", orphan], check=True)
    namespaces.remove_orphans()
    assert orphan not in existing()
