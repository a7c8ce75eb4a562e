"""Rows of an embedding table that is not on the device: fetching them, and returning their gradients.

    host       the tables are sharded over the ranks of a stage, in the memory of their hosts
               rows to the owner's buffer, exchange among the p ranks, over the link to the device
    servers    processes across the network: over the network, and over the link

    get        2 n w / M  +  exchange(n (w + i))     +  n w / L          host
                             a + n (w + i) / N       +  n w / L          servers
    give       n w / L  +  exchange(n (w + i))  +  u n w / M             host
               n w / L  +  a + n (w + i) / N                             servers

n rows of w bytes, each with an id of i = 8 bytes; M bytes/s of host memory, L of the link, a + x / N the time of a
message over the network. An update moves u = 8 rows for each row: the gradient; the weight and two moments, read and
written; and one more for the sum. The servers' own work is taken to overlap the network: there are as many servers as
it needs. Every row of a lookup is taken to be different, because the ids are not known; repeated rows are faster.
"""

from costmodels.collectives import collective_time
from costmodels.units import Array
from hardware_profiles import Bytes, Cluster, Group, Host

ID_BYTES = 8.0
"""Bytes of the id of a row."""

_MOVED_BY_UPDATE = 8.0


def host_rows_time(rows: Array, row_bytes: Bytes, host: Host, group: Group | None) -> tuple[Array, Array]:
    """Seconds to fetch `rows` rows, (K,), from the hosts of a group of ranks, and to return and apply their gradients.

    `row_bytes` are the bytes of one row; `group` is None for a single rank. Returns two arrays, (K,).
    """
    moved, memory = rows * row_bytes, host.memory_rate
    exchanged = 0.0 * rows if group is None else collective_time("all_to_all", rows * (row_bytes + ID_BYTES), group)
    link = moved / host.link + exchanged
    return 2 * moved / memory + link, link + _MOVED_BY_UPDATE * moved / memory


def server_rows_time(rows: Array, row_bytes: Bytes, cluster: Cluster) -> tuple[Array, Array]:
    """As `host_rows_time`, but from servers, which are as far from a device as its farthest peer.

    Without `Cluster.host`, the link to the device takes no time.
    """
    whole = cluster if cluster.devices > 1 else cluster.with_devices(2)
    network = collective_time("send_recv", rows * (row_bytes + ID_BYTES), whole.group(2, whole.devices // 2))
    link = 0.0 if cluster.host is None else rows * row_bytes / cluster.host.link
    return network + link, network + link
