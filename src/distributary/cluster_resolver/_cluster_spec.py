"""The tasks of a job, and their addresses."""

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, final

from distributary.errors import InvalidTypeError, InvalidValueError, check_type, checked_int, shown

# Checks of what the user wrote, with errors that say where it is.


def checked_counts(counts: Mapping[str, int], field: str, expected: str) -> dict[str, int]:
    """Returns a dict from names to numbers, after checking it.

    Raises:
        InvalidTypeError: if it is not a dict to ints.
        InvalidValueError: if a number is negative.
    """
    check_type(field, counts, Mapping, f"a dict {expected}")
    return {
        name: checked_int(f'{field}["{name}"]', count, minimum=0) for name, count in counts.items()
    }


def checked_strs(value: Sequence[str], field: str, expected: str) -> list[str]:
    """Returns a list of strings, after checking it.

    Raises:
        InvalidTypeError: if it is not a list or tuple of strings, or is empty.
    """
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    if not is_list or not all(isinstance(item, str) for item in value):
        raise InvalidTypeError(f"{field} is {shown(value)}, expected {expected}.")
    return list(value)


def checked_task_id(task_id: object, field: str) -> int:
    """Returns the number of a task from an int, or from a string of digits as in TensorFlow.

    Raises:
        InvalidTypeError: if it is neither.
        InvalidValueError: if it is negative.
    """
    number = number_in(task_id)
    if number is not None:
        return number
    return checked_int(field, task_id, "the number of a task; they count from 0", minimum=0)


def number_in(text: object) -> int | None:
    """Returns the number that a string of ASCII digits stands for; None for anything else."""
    return int(text) if isinstance(text, str) and text.isascii() and text.isdecimal() else None


# Addresses of tasks, `host:port`, and errors that say what is wrong with an address.

_MAX_PORT = 65535
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^\]]*:[^\]]*)\]|(?P<host>[^:]*))(?::(?P<port>[^:]*))?")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


class Address(NamedTuple):
    """The host and port on which a task listens.

    Args:
        host: Name or IP address. An IPv6 address has no brackets, as sockets expect it.
        port: A number from 1 to 65535.
    """

    host: str
    port: int


def parse_address(text: str, field: str) -> Address:
    """Returns the host and the port of `"host:port"` or `"[ipv6]:port"`.

    Args:
        text: The address as the user wrote it.
        field: Where the user wrote it, for messages: `'TF_CONFIG["cluster"]["worker"][1]'`.

    Raises:
        InvalidTypeError: if `text` is not a string.
        InvalidValueError: if it is not an address, or its port is missing or out of range.
    """
    check_type(field, text, str, 'the address of a task as a string, such as "10.0.0.1:2222"')
    host, port = split_port(text)
    number = number_in(port)
    if not host:
        reason = "expected a host and one colon; an IPv6 address must be in brackets"
    elif not (is_ip(host) if ":" in host else _HOST.fullmatch(host)):
        reason = f"{host!r} is neither a host name nor an IP address"
    elif not port:
        reason = "the port is missing"
    elif not number or number > _MAX_PORT:
        reason = f"{port!r} is not a port from 1 to {_MAX_PORT}"
    else:
        return Address(host, number)
    raise InvalidValueError(
        f"{field} is {text!r}: {reason}. Write host:port, the address at which the other tasks"
        ' reach this one, such as "10.0.0.1:2222" or "[fd00::1]:2222".'
    )


def split_port(text: str) -> tuple[str, str | None]:
    """Splits `"host:port"` or `"[ipv6]:port"`; None stands for a missing port.

    An IPv6 address without brackets has no port. The host is `""` if it is missing or malformed.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return text if is_ip(text) else "", None
    return match["ipv6"] or match["host"], match["port"]


def join_address(host: str, port: int) -> str:
    """Returns `"host:port"`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether a host is this machine for all processes, without asking a name server."""
    return ipaddress.ip_address(host).is_loopback if is_ip(host) else host == "localhost"


def is_ip(text: str) -> bool:
    """Returns whether a text is an IP address, without brackets."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# The cluster

TOKEN_VARIABLE: Final = "DISTRIBUTARY_TOKEN"  # holds the secret that the tasks of a job share


@final
class ClusterSpec:
    """The tasks of a job by type and number, with the address of each. Immutable.

    Args:
        cluster: A dict from the type of a task, such as `"worker"`, to the addresses `"host:port"`
            of its tasks. Give them as a list, or as a dict from their numbers if you do not know
            all of them. An empty dict stands for a job of this process alone. You can also pass
            another `ClusterSpec`.

    Raises:
        InvalidTypeError: if `cluster`, the tasks of a type, a number or an address has the wrong
            type.
        InvalidValueError: if an address is malformed, two tasks share one, a number is negative,
            or a type has no tasks.

    Source: `tf.train.ClusterSpec`. TensorFlow does not check the addresses, and two of its specs
    are never equal.
    """

    def __init__(
        self, cluster: "Mapping[str, Sequence[str] | Mapping[int, str]] | ClusterSpec"
    ) -> None:
        self._jobs: dict[str, dict[int, str]] = (
            cluster._jobs if isinstance(cluster, ClusterSpec) else checked_jobs(cluster, "cluster")
        )

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns the addresses by type of task: a list, or a dict if some number is missing."""
        return {
            job: list(tasks.values()) if max(tasks) + 1 == len(tasks) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    @property
    def jobs(self) -> list[str]:
        """The types of tasks, in the order in which you gave them."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks of a type.

        Raises:
            InvalidValueError: if there is no such type.
        """
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the numbers of the tasks of a type, in ascending order.

        Raises:
            InvalidValueError: if there is no such type.
        """
        return list(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of one task.

        Raises:
            InvalidValueError: if there is no such type or no such task.
        """
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            raise InvalidValueError(
                f"There is no task {task_index!r} of type {job_name!r} in the cluster; the numbers"
                f" are {', '.join(map(str, tasks))}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a type in the order of their numbers, None for missing numbers.

        Raises:
            InvalidValueError: if there is no such type.
        """
        tasks = self._tasks(job_name)
        return [tasks.get(number) for number in range(max(tasks) + 1)]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Mapping):
            try:
                other = ClusterSpec(other)
            except (InvalidTypeError, InvalidValueError):
                return False
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, tuple(tasks.items())) for job, tasks in self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))})"

    def _tasks(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise InvalidValueError(
                f"There are no tasks of type {job_name!r} in the cluster, which has"
                f" {', '.join(map(repr, self._jobs)) or 'no tasks at all'}."
            )
        return self._jobs[job_name]


def checked_jobs(cluster: Any, field: str) -> dict[str, dict[int, str]]:
    """Returns the addresses of a cluster by type and number, with numbers in ascending order.

    Args:
        cluster: Like the argument of `ClusterSpec`, but not a `ClusterSpec`.
        field: Where the user wrote it, for messages.

    Raises:
        InvalidTypeError, InvalidValueError: see `ClusterSpec`.
    """
    expected = 'a dict from task types to addresses, such as {"worker": ["10.0.0.1:2222"]}'
    check_type(field, cluster, Mapping, expected)
    jobs: dict[str, dict[int, str]] = {}
    field_of: dict[str, str] = {}
    for job, tasks in cluster.items():
        check_type(f"{field} has a key that", job, str, 'a task type, such as "worker"')
        expected = "a list of addresses, or a dict from task numbers to addresses"
        check_type(f'{field}["{job}"]', tasks, list | tuple | Mapping, expected)
        if not tasks:
            raise InvalidValueError(
                f'{field}["{job}"] is empty, expected the address of at least one task. Leave the'
                " type out if the job has no such tasks."
            )
        addresses: dict[int, str] = {}
        for key, address in tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks):
            number = checked_task_id(key, f'{field}["{job}"] has a key that')
            task_field = f'{field}["{job}"][{json.dumps(key)}]'
            parse_address(address, task_field)
            earlier = field_of.setdefault(address, task_field)
            if earlier != task_field:
                raise InvalidValueError(
                    f"{earlier} and {task_field} are both {address!r}: two tasks cannot listen at"
                    " the same address. Give each task its own host or port."
                )
            addresses[number] = address
        jobs[job] = dict(sorted(addresses.items()))
    return jobs
