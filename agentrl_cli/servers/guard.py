"""What every server here looks at before it answers: who is asked, from which page, with which token.

A page of any site can send requests to this machine, and one that renames itself to its address (DNS rebinding) can
read the answers. Neither can choose the Host and Origin that a browser sends.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """True for localhost and addresses that never leave this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_served(netloc: str, names: Collection[str]) -> bool:
    """Whether a Host header names this server: by one of its names, on any port, or by an address, as no page can."""
    try:
        host = urlsplit(f"//{netloc}").hostname or ""
        if host.casefold() in names:
            return True
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_foreign(origin: str | None, hosts: Collection[str]) -> bool:
    """Whether a request comes from a page that is not from one of these hosts (with their ports)."""
    try:
        return origin is not None and urlsplit(origin).netloc not in hosts
    except ValueError:
        return True


def sent_unasked(content_type: str) -> bool:
    """Whether a browser lets any page send a body of this type, or of none, without asking the server first."""
    kind = content_type.partition(";")[0].strip().casefold()
    return kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")


def allowed(token: str, given: str) -> bool:
    """Whether a token is the right one, compared in constant time."""
    return hmac.compare_digest(token.encode("utf-8", "surrogateescape"), given.encode("utf-8", "surrogateescape"))


def bearer(header: str) -> str:
    """The token in an Authorization header; empty if it holds none."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.casefold() == "bearer" else ""
