"""Addresses of tasks, `host:port`, and errors that say what is wrong with an address."""

import ipaddress
import re
from typing import NamedTuple

from distributary.cluster_resolver._checks import number_in
from distributary.errors import InvalidValueError, check_type

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
