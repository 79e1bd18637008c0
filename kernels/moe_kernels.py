STREAM_ROWS = 64


def num_slots(T, E, top_k):
    return E if T > STREAM_ROWS else min(E, T * top_k)


def launch_route(*a):
    raise NotImplementedError


launch_gate_up = launch_down = launch_route
