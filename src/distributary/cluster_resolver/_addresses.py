"""Addresses of tasks, `host:port`, and errors that say what is wrong with an address."""

import ipaddress
import re
from typing import NamedTuple

from distributary.errors import InvalidTypeError, InvalidValueError

__all__ = ["MAX_PORT", "Address", "checked_port", "join", "parse_address"]

MAX_PORT = 65535

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_LOOKS_LIKE_IPV4 = re.compile(r"\d+(\.\d+){3}")


class Address(NamedTuple):
    """The host and port on which a task listens.

    Args:
        host: Name or IP address. An IPv6 address has no brackets, as sockets expect it.
        port: A number from 1 to 65535.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return join(self.host, self.port)


def parse_address(text: object, field: str) -> Address:
    """Returns the host and the port of `"host:port"` or `"[ipv6]:port"`.

    Args:
        text: The address as the user wrote it.
        field: Where the user wrote it, for messages: `'TF_CONFIG["cluster"]["worker"][1]'`.

    Raises:
        InvalidTypeError: if `text` is not a string.
        InvalidValueError: if it is not an address, or its port is missing or out of range.
    """
    if not isinstance(text, str):
        raise InvalidTypeError(
            f"{field} is {text!r} ({type(text).__name__}), expected the address of a task as a"
            ' string, such as "10.0.0.1:2222".'
        )
    if "://" in text:
        raise InvalidValueError(
            f"{field} is {text!r}, expected host:port without a protocol: write"
            f" {text.partition('://')[2]!r}."
        )
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not _is_ip(host, version=6):
            raise _no_address(text, field, "the brackets do not enclose an IPv6 address")
        # Spelled in one way, so that equal addresses compare equal.
        return Address(str(ipaddress.ip_address(host)), _port(rest, text, field))
    if text.count(":") > 1:
        raise _no_address(
            text, field, "it has several colons; an IPv6 address must be in brackets, [::1]:2222"
        )
    host, colon, port = text.partition(":")
    if not host:
        raise _no_address(text, field, "the host is missing")
    if not _HOST.fullmatch(host):
        raise _no_address(text, field, f"{host!r} is neither a host name nor an IP address")
    if _LOOKS_LIKE_IPV4.fullmatch(host) and not _is_ip(host, version=4):
        raise _no_address(text, field, f"{host} is not an IPv4 address")
    return Address(host, _port(colon + port, text, field))


def join(host: str, port: int) -> str:
    """Returns `"host:port"`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def checked_port(port: object, field: str) -> int:
    """Returns a port that is given as a number, after checking it.

    Raises:
        InvalidTypeError: if it is not an int.
        InvalidValueError: if it is not from 1 to 65535.
    """
    if isinstance(port, bool) or not isinstance(port, int):
        raise InvalidTypeError(
            f"{field} is {port!r} ({type(port).__name__}), expected a port number, such as 2222."
        )
    if not 1 <= port <= MAX_PORT:
        raise InvalidValueError(f"{field} is {port}, expected a port from 1 to {MAX_PORT}.")
    return port


def _port(text_with_colon: str, address: str, field: str) -> int:
    port = text_with_colon.removeprefix(":")
    if not port:
        raise _no_address(address, field, "the port is missing")
    is_number = port.isascii() and port.isdecimal() and text_with_colon.startswith(":")
    if not is_number or not 1 <= int(port) <= MAX_PORT:
        raise _no_address(address, field, f"{port!r} is not a port from 1 to {MAX_PORT}")
    return int(port)


def _is_ip(text: str, *, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def _no_address(text: str, field: str, reason: str) -> InvalidValueError:
    return InvalidValueError(
        f"{field} is {text!r}: {reason}. Write host:port, the address at which the other tasks"
        ' reach this one, such as "10.0.0.1:2222" or "[fd00::1]:2222".'
    )
