"""Rows of an embedding table that is not on the device: fetching them, and returning their gradients.

    host       the tables are sharded over the ranks of a stage, in the memory of their hosts
               rows to the owner's buffer, exchange among the p ranks, over the link to the device
    servers    processes across the network: over the network, and over the link

    get        2 n w / M  +  exchange(n (w + i))     +  n w / L          host
                             a + n (w + i) / N       +  n w / L          servers
    give       n w / L  +  exchange(n (w + i))  +  u n w / M             host
               n w / L  +  a + n (w + i) / N                             servers

n rows of w bytes, each with an id of i = 8 bytes; M bytes/s of host memory, L of the link, a + x / N the time of a
message over the network. An update moves u = 2 + 2 (1 + m) rows for each row: the gradient, read and summed; the weight
and m moments, read and written. The servers' own work is taken to overlap the network: there are as many servers as it
needs. Every row of a lookup is taken to be different, because the ids are not known; repeated rows are faster.
"""

from costmodels.collectives import collective_time
from costmodels.units import Array
from hardware_profiles import Bytes, Cluster, Group, Host

ID_BYTES = 8.0
"""Bytes of the id of a row."""

ROW_MOMENTS: dict[str, int] = {"adamw": 2, "sgd": 0}
"""Moments of each row that the optimizer of a plan keeps beside tables: Adam under AdamW, and SGD without momentum."""


def host_rows_time(rows: Array, row_bytes: Bytes, host: Host, group: Group | None, moments: int) -> tuple[Array, Array]:
    """Seconds to fetch `rows` rows, (K,), from the hosts of a group of ranks, and to return and apply their gradients.

    `row_bytes` are the bytes of one row; `group` is None for a single rank; `moments` are those of each row
    (`ROW_MOMENTS`). Returns two arrays, (K,).
    """
    moved, memory = rows * row_bytes, host.memory_rate
    exchanged = 0.0 * rows if group is None else collective_time("all_to_all", rows * (row_bytes + ID_BYTES), group)
    link = moved / host.link + exchanged
    return 2 * moved / memory + link, link + (2 + 2 * (1 + moments)) * moved / memory


def server_rows_time(rows: Array, row_bytes: Bytes, host: Host, cluster: Cluster) -> tuple[Array, Array]:
    """As `host_rows_time`, but from servers, which are as far from a device as its farthest peer; `host` is that of the
    device."""
    whole = cluster if cluster.devices > 1 else cluster.with_devices(2)
    network = collective_time("send_recv", rows * (row_bytes + ID_BYTES), whole.group(2, whole.devices // 2))
    link = rows * row_bytes / host.link
    return network + link, network + link
