"""Host names that a server answers to.

This stops DNS rebinding, by which a web page reaches a server that listens on its reader's own machine.
"""

import ipaddress
import re

from jaxpaged.serve.options import ServerOptions

EVERY = "*"
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^][:/@?#\s]+))(?::[0-9]*)?")


class Hosts:
    """The values of the header Host that are served.

    On loopback these are addresses, localhost and its subdomains, and `allowed_hosts`. A strange page's own
    name, made to stand for this machine's address, is none of them. On other addresses the names by which
    others know this machine are not known: all are served, unless there are `allowed_hosts`.
    """

    def __init__(self, options: ServerOptions) -> None:
        allowed = {name.lower().rstrip(".") for name in options.allowed_hosts}
        self._takes_all = EVERY in allowed or not (allowed or options.is_on_loopback)
        self._allowed = allowed | {options.host.lower()}

    def serve(self, header: str) -> bool:
        """Return whether a header's value, with or without a port, is a name of this server."""
        if self._takes_all:
            return True
        name = host_of(header)
        return name is not None and (
            name in self._allowed or name == "localhost" or name.endswith(".localhost") or _is_address(name)
        )


def host_of(header: str) -> str | None:
    """Return the name or address without its port and brackets; None for what is no host."""
    match = HOST.fullmatch(header)
    return None if match is None else (match[1] or match[2]).lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
