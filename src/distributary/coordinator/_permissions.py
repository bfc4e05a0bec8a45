"""The roles that may send each kind of message. A message that is not in the table is refused."""

from collections.abc import Mapping
from typing import Final

from distributary.coordinator._links import Peer
from distributary.coordinator._messages import Message

__all__ = ["SENDERS", "check_sender"]

_CHIEF: Final = frozenset({"chief"})
_WORKER: Final = frozenset({"worker"})
_CHIEF_AND_WORKER: Final = _CHIEF | _WORKER
_LOCAL: Final = frozenset({"local"})

_OF_TASKS: Final = {"identify": _CHIEF, "hello": _CHIEF, "alive": _CHIEF}
#: For each type of receiving task and each kind of message, the roles that may send it.
SENDERS: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    "chief": {},  # the chief serves nobody
    "worker": {
        **_OF_TASKS,
        "forget": _CHIEF,
        "function": _CHIEF,
        "peek": _CHIEF,
        "plan": _CHIEF,
        "run": _CHIEF,
        "source": _CHIEF,
    },
    "ps": {
        **_OF_TASKS,
        "adopt": _CHIEF,
        "assign": _CHIEF,
        "copy": _CHIEF,
        "create": _CHIEF,
        "drop": _CHIEF,
        "finish": _CHIEF,
        "load": _CHIEF,
        "push": _WORKER,
        "read": _CHIEF_AND_WORKER,
        "save": _CHIEF,
        "statistics": _CHIEF,
        "update": _CHIEF,
    },
}
# A message with this field is handled once. A task keeps one last number, that of the chief.
_ONCE: Final = "request"
_MAX_CHARACTERS = 40


def check_sender(task_type: str, name: str, message: Message, peer: Peer) -> None:
    """Checks that the sender of a message may send it.

    Args:
        task_type: Type of the receiving task, `"worker"` or `"ps"`.
        name: Name of the receiving task, such as `"ps 0"`.
        message: The message.
        peer: The sender. The role `"local"` belongs to the job and may send everything.

    Raises:
        PermissionError: if the sender may not send it.
    """
    roles = SENDERS[task_type].get(message.kind)
    if roles is None:
        raise PermissionError(
            f"{name} got {message.kind[:_MAX_CHARACTERS]!r} from {peer.identity}, which nobody may"
            f" send to a {task_type}."
        )
    if peer.role not in roles | _LOCAL:
        raise PermissionError(
            f"{name} got {message.kind!r} from {peer.identity}, which only the"
            f" {' and the '.join(sorted(roles))} may send."
        )
    if _ONCE in message.fields and peer.role not in _CHIEF | _LOCAL:
        raise PermissionError(
            f"{name} got {message.kind!r} with the field {_ONCE!r} from {peer.identity}, which only"
            " the chief may send."
        )
