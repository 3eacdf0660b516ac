"""relay.py A B MS: carry ethernet frames between two interfaces, MS milliseconds late.

For kernels without netem. Frames must carry true checksums (no offloading) and fit into one MTU.
"""

from __future__ import annotations

import heapq
import selectors
import socket
import sys
import time

_SOL_PACKET, _IGNORE_OUTGOING = 263, 23
_ALL_PROTOCOLS = 3


def _open(name: str) -> socket.socket:
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    device.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    device.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    device.bind((name, 0))
    device.setblocking(False)
    return device


def main() -> None:
    """Run until killed."""
    first, second = _open(sys.argv[1]), _open(sys.argv[2])
    delay_s, number = float(sys.argv[3]) / 1000, 0
    other = {first: second, second: first}
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    selector = selectors.SelectSelector()  # epoll rounds times up to milliseconds
    for device in other:
        selector.register(device, selectors.EVENT_READ)
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(left_s):
            assert isinstance(key.fileobj, socket.socket)
            device = key.fileobj
            try:
                while True:
                    number += 1
                    heapq.heappush(
                        waiting, (time.monotonic() + delay_s, number, other[device], device.recv(65536))
                    )
            except OSError:  # nothing more for now
                pass
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            try:
                target.send(frame)
            except OSError:  # a full queue drops frames, as cables do
                pass


if __name__ == "__main__":
    main()
