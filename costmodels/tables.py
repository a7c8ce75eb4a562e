"""Rows of a table of embeddings that is not on the device: getting them, and giving back their gradients.

    host       the tables are shared out over the ranks of a stage, in the memory of their hosts
               rows to the owner's buffer, exchange among the p ranks, over the link to the device
    servers    processes beyond the network: over it, and over the link

    get        2 n w / M  +  exchange(n (w + i))     +  n w / L          host
                             a + n (w + i) / N       +  n w / L          servers
    give       n w / L  +  exchange(n (w + i))  +  u n w / M             host
               n w / L  +  a + n (w + i) / N                             servers

n rows of w bytes, named by i = 8 bytes each; M bytes/s of host memory, L of the link, a + x / N the time of a message
over the network. An update moves u = 8 rows a row: the gradient, and weight and two moments, read and written, and one
more to sum. What servers do themselves is taken as hidden behind the network: there are as many as it needs. Every row
that is looked up is taken as another one, as nobody knows which ids come: repetitions make it faster.
"""

from costmodels.collectives import collective_time
from costmodels.units import Array
from hardware_profiles import Bytes, Cluster, Group, Host

ID_BYTES = 8.0
"""Of the number of a row."""

_MOVED_BY_UPDATE = 8.0


def host_rows_time(rows: Array, row_bytes: Bytes, host: Host, group: Group | None) -> tuple[Array, Array]:
    """Seconds to get so many rows (K,) from the hosts of a group of ranks, and to give back their gradients and update
    them; None for one rank alone."""
    moved, memory = rows * row_bytes, host.memory_rate
    exchanged = 0.0 * rows if group is None else collective_time("all_to_all", rows * (row_bytes + ID_BYTES), group)
    link = moved / host.link + exchanged
    return 2 * moved / memory + link, link + _MOVED_BY_UPDATE * moved / memory


def server_rows_time(rows: Array, row_bytes: Bytes, cluster: Cluster) -> tuple[Array, Array]:
    """The same from servers, which are as far from a device as the farthest other one is."""
    whole = cluster if cluster.devices > 1 else cluster.with_devices(2)
    network = collective_time("send_recv", rows * (row_bytes + ID_BYTES), whole.group(2, whole.devices // 2))
    link = 0.0 if cluster.host is None else rows * row_bytes / cluster.host.link
    return network + link, network + link
