"""A process that returns what it gets: writes its address, ends with its input."""

import sys
import threading

from distributary.servers._grpc import GrpcServer
from distributary.servers._messages import Limits


class Echo:
    """Replies with the request, or never."""

    def handle(self, message, peer):
        if message.kind == "wait":
            threading.Event().wait()
        return message


server = GrpcServer(
    Echo(), sys.argv[1], limits=Limits(max_message_bytes=1 << 24), max_links=4, insecure=True
)
print(server.address, flush=True)
sys.stdin.read()  # it ends without `close`
