"""The roles that may send each kind of message. A message that is not in the table is refused."""

from collections.abc import Mapping
from typing import Final, final

from distributary.devices import backends_started, local_devices_of, requested_cpu_devices
from distributary.job import package_versions
from distributary.servers._links import Peer, Service
from distributary.servers._messages import Message

# A message to any task -> name of the task, its number of devices, versions
IDENTIFY: Final = "identify"

_CHIEF: Final = frozenset({"chief"})
_WORKER: Final = frozenset({"worker"})
_LOCAL: Final = frozenset({"local"})
_OF_SESSIONS: Final = (IDENTIFY, "hello", "alive")
_OF_WORKERS: Final = ("forget", "peek", "plan", "run", "source")
_OF_SERVERS: Final = ("adopt", "assign", "copy", "create", "drop", "finish", "load", "save")
#: For each type of receiving task and each kind of message, the roles that may send it. The chief
#: receives none.
SENDERS: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    "worker": dict.fromkeys((*_OF_SESSIONS, *_OF_WORKERS), _CHIEF),
    "ps": {
        **dict.fromkeys((*_OF_SESSIONS, *_OF_SERVERS, "statistics", "update"), _CHIEF),
        "push": _WORKER,
        "read": _CHIEF | _WORKER,
    },
}
# A message with this field is handled once. A task keeps one last number, that of the chief.
_ONCE: Final = "request"
_MAX_CHARACTERS = 40


@final
class RoleCheck:
    """A filter that passes to a service only messages that their senders may send.

    It also answers the message that asks which task this is.

    Args:
        task_type: Type of the task, `"worker"` or `"ps"`.
        task_id: Number of the task.
        service: The service.
    """

    def __init__(self, task_type: str, task_id: int, service: Service) -> None:
        self._task_type = task_type
        self._name = f"{task_type} {task_id}"
        self._service = service

    def handle(self, message: Message, peer: Peer) -> Message:
        """Handles a message, and returns the reply.

        Raises:
            PermissionError: if the role of the sender does not allow the message. The role
                `"local"` belongs to the job and may send everything.
            Exception: any error that the service raises.
        """
        roles = SENDERS[self._task_type].get(message.kind)
        rule, part = "", ""
        if roles is None:
            rule = f"which nobody may send to a {self._task_type}"
        elif peer.role not in roles | _LOCAL:
            rule = f"which only the {' and the '.join(sorted(roles))} may send"
        elif _ONCE in message.fields and peer.role not in _CHIEF | _LOCAL:
            rule, part = "which only the chief may send", f" with the field {_ONCE!r}"
        if rule:
            kind = message.kind[:_MAX_CHARACTERS]
            raise PermissionError(f"{self._name} got {kind!r}{part} from {peer.identity}, {rule}.")
        if message.kind == IDENTIFY:
            started = backends_started()
            num = len(local_devices_of("CPU")) if started else requested_cpu_devices()
            fields = {"task": self._name, "versions": package_versions(), "devices": num}
            return Message("ok", fields)
        return self._service.handle(message, peer)
