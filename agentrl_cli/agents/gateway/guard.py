"""Checks that every server here makes before it answers: host, origin and token.

Any web page can send requests to this machine, and one that maps its own name to this address (DNS rebinding) can
read the answers. Neither can choose the Host and Origin headers that a browser sends.
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
    """Whether a Host header names this server, by one of its names (any port) or by an IP address."""
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
    """Whether browsers let any page send a body of this type, or without a type, without a CORS preflight."""
    kind = content_type.partition(";")[0].strip().casefold()
    return kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")


def allowed(token: str, given: str) -> bool:
    """Whether a token is valid, compared in constant time."""
    return hmac.compare_digest(
        token.encode("utf-8", "surrogateescape"), given.encode("utf-8", "surrogateescape")
    )


def bearer(header: str) -> str:
    """Return the token in an Authorization header; empty if absent."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.casefold() == "bearer" else ""
