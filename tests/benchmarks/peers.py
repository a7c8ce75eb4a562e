"""What the search of others took (data/peers.csv)."""

import csv
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data" / "peers.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One measured search: CPU seconds, None where it did not finish in 15 minutes."""

    planner: str
    algorithm: str
    stack: str
    layers: int
    devices: int
    seconds: float | None


def load_peers() -> tuple[Peer, ...]:
    """All of the file, in its order."""
    with DATA.open(newline="", encoding="utf-8") as file:
        return tuple(
            Peer(
                planner=row["planner"],
                algorithm=row["algorithm"],
                stack=row["stack"],
                layers=int(row["layers"]),
                devices=int(row["devices"]),
                seconds=float(row["seconds"]) if row["seconds"] else None,
            )
            for row in csv.DictReader(file)
        )
