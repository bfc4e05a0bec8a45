"""A process that returns what it gets: writes its address, ends with its input."""

import sys
import threading

from distributary.servers import _grpc, _messages


class Echo:
    """Replies with the request, or never."""

    def handle(self, message, peer):
        if message.kind == "wait":
            threading.Event().wait()
        return message


_messages.MAX_MESSAGE_BYTES = 1 << 24
server = _grpc.GrpcServer(Echo(), sys.argv[1], max_links=4, insecure=True)
print(server.address, flush=True)
sys.stdin.read()  # it ends without `close`
