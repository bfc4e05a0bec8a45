"""The roles that may send each kind of message. A message that is not in the table is refused."""

from collections.abc import Mapping
from typing import Final

from distributary.servers._links import Peer
from distributary.servers._messages import Message

# A message to any task -> name of the task, its number of devices, versions
IDENTIFY: Final = "identify"

_LOCAL: Final = "local"  # a role that may send everything
_CHIEF: Final = frozenset({"chief", _LOCAL})
_WORKER: Final = frozenset({"worker", _LOCAL})
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


def check_sender(task: str, message: Message, peer: Peer) -> None:
    """Checks that a task gets only messages that their senders may send.

    Args:
        task: Name of the task: `"worker 1"`, `"ps 0"`.
        message: The message.
        peer: Its sender. The role `"local"` belongs to the job and may send everything.

    Raises:
        PermissionError: if the role of the sender does not allow the message.
    """
    task_type = task.partition(" ")[0]
    roles = SENDERS[task_type].get(message.kind)
    rule, part = "", ""
    if roles is None:
        rule = f"which nobody may send to a {task_type}"
    elif peer.role not in roles:
        rule = f"which only the {' and the '.join(sorted(roles - {_LOCAL}))} may send"
    elif _ONCE in message.fields and peer.role not in _CHIEF:
        rule, part = "which only the chief may send", f" with the field {_ONCE!r}"
    if rule:
        kind = message.kind[:_MAX_CHARACTERS]
        raise PermissionError(f"{task} got {kind!r}{part} from {peer.identity}, {rule}.")
