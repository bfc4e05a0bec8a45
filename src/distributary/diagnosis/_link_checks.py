"""Checks of the links between tasks, from the measurements."""

import functools
from collections.abc import Iterator, Sequence

from distributary.cluster_resolver import Peer
from distributary.diagnosis._check import Check
from distributary.diagnosis._links import Link, slow_links

__all__ = ["link_checks"]


def link_checks(
    links: Sequence[Link], peers: Sequence[Peer], wait_seconds: float
) -> Iterator[Check]:
    """Yields what is wrong with the links between tasks, or one check that says that all work.

    Args:
        links: The measurements of all tasks that came.
        peers: The tasks.
        wait_seconds: Seconds for which the first task waited for the others.
    """
    problem = functools.partial(Check, "links", "problem")
    sources = {link.source for link in links}
    for number, peer in enumerate(peers):
        if number in sources:
            continue
        if any(link.error is None for link in links if link.target == number):
            state = "which other tasks reach"
            fix = (
                "Compare the cluster in its TF_CONFIG with the one here, and open"
                f" {peers[0].address} for it in the firewall"
            )
        else:
            state = "which no other task reaches"
            fix = f"Start the doctor on {peer.name} too, and look at what it prints"
        yield problem(
            f"{peer}, {state}, did not connect to {peers[0]} within {wait_seconds:g} s", fix
        )
    broken = [link for link in links if link.error is not None and link.target in sources]
    for number, peer in enumerate(peers):
        to_it = [link for link in broken if link.target == number]
        if len(to_it) == len(sources):
            yield problem(
                f"no task reaches {peer}: {to_it[0].error}",
                f"Give {peer.name} in TF_CONFIG an address at which the other tasks reach its"
                " machine, and open its ports in the firewall",
            )
            continue
        for link in to_it:
            yield problem(
                f"{peers[link.source].name} does not reach {peer}: {link.error}",
                f"Open the ports of {peer.host} for {peers[link.source].host} in the firewalls"
                " between them",
            )
    slow = slow_links(links, peers)
    for link, best in slow:
        detail = f"{_text(link, peers, ' is slow:')}; {_text(best, peers, ' has')}"
        fix = _fix_of_slow(peers[link.source].host, peers[link.target].host)
        yield Check("links", "warning", detail, fix)
    working = [link for link in links if link.error is None and link.source != link.target]
    if working and not broken and not slow and len(sources) == len(peers):
        slowest = min(working, key=lambda link: link.bytes_per_second)
        detail = f"all {len(working)} work; the slowest, {_text(slowest, peers, ', has')}"
        yield Check("links", "ok", detail)


def _fix_of_slow(source: str, target: str) -> str:
    if source == target:
        return f"Look on {source} for other programs with `top`, and for a limit with `tc qdisc`"
    return f"Check cables, switches, drivers and bandwidth limits between {source} and {target}"


def _text(link: Link, peers: Sequence[Peer], verb: str) -> str:
    round_trip, rate = link.round_trip_seconds * 1e6, link.bytes_per_second / 1e6
    return (
        f"{peers[link.source].name} to {peers[link.target].name}{verb} {round_trip:.0f} us round"
        f" trip, {rate:.0f} MB/s"
    )
