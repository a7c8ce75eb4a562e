"""Dense parameters on parameter servers: the time between the last gradient and the first new weight.

    push        g n / L      the sum of the gradients, over the link from the device to its host
    update      T n / M      the optimizer, on the host, where the state is
    pull        w n / L      new weights, over the link back

n parameters of a server; g bytes of a summed gradient, w of a weight; T bytes per parameter that the optimizer moves
(`optimizer_traffic`); M bytes/s of host memory, L of the link, one way. Push and pull each add a launch latency. The
three steps follow each other; nothing overlaps. Between devices, gradients are reduced to the device of the server, and
new weights are broadcast from there (`costmodels.collectives`). With a server beside each device and parameters spread
evenly, the ports of a device carry as much as in an all-reduce. Not good for: hosts whose optimizer is limited by their
processors and not by their memory.

Sources: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014; Jiang et al., "A
unified architecture for accelerating distributed DNN training in heterogeneous GPU/CPU clusters" (BytePS), OSDI 2020,
section 4 (servers beside workers); Ren et al., "ZeRO-Offload", USENIX ATC 2021 (the optimizer on the host).
"""

from costmodels.units import Array, Bytes, Seconds
from hardware_profiles import Host


def served_update_time(
    parameters: Array, gradient: Bytes, weight: Bytes, traffic: Bytes, host: Host, latency: Seconds
) -> Array:
    """Seconds of push, update and pull on servers that hold `parameters` parameters each, (K,) -> (K,); 0 for none.

    `gradient`, `weight` and `traffic` are bytes per parameter, `latency` is seconds of each transfer.
    """
    moved = parameters * ((gradient + weight) / host.link + traffic / host.memory_rate)
    return (parameters > 0) * (2 * latency + moved)
