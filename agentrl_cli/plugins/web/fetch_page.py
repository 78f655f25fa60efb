"""`fetch_page`: a web page as text, from allowed hosts only. Off until a list of hosts is configured.

    - {name: fetch_page, config: {allow: ["docs.python.org", "*.wikipedia.org", "https://example.org/help/"]}}

Only http and https on their default ports, GET, no cookies, no credentials. Every URL, each redirect's too, is checked
against the list; its host is resolved here, and the connection goes to exactly the checked IP address. Private,
loopback and link-local addresses are refused. Size, redirects and time are bounded.
"""

from __future__ import annotations

import fnmatch
import http.client
import ipaddress
import re
import socket
import ssl
import time
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from agentrl_cli.errors import ConfigError
from agentrl_cli.hooks.threads import in_thread
from agentrl_cli.tools.base import Tool
from agentrl_cli.tools.schema import tool_schema
from agentrl_cli.types import ToolResult

REDIRECTS = 5
AGENT = "agentrl (+https://pypi.org/project/agentrl-cli)"
TYPES = ("text/", "application/json", "application/xhtml+xml", "application/xml")
PORTS = {"http": 80, "https": 443}
WRITTEN = "!#$%&'()*+,/:;=?@[]"
"""Characters beside letters and digits that an address keeps; others (中, a space) are percent-encoded."""


_CHARSET = re.compile(rb"<meta[^>]+charset\s*=\s*[\"']?([\w-]+)", re.IGNORECASE)


class Refused(Exception):
    """A URL or a response that is refused; the model reads the message."""


def fetch_page(url: str) -> ToolResult:
    """Fetch a web page and return its text.

    Args:
        url: The address, beginning with https://.
    """
    raise NotImplementedError("FetchTool.execute fetches.")


class FetchTool(Tool):
    """`allow`: hosts, `*.host` patterns, or URL prefixes. `allow_private`: for your own servers."""

    name = "fetch_page"
    external = True
    own_timeout = True
    examples = ({"url": "https://example.org/"},)

    def __init__(
        self,
        allow: list[str] | None = None,
        *,
        seconds: float = 10.0,
        kilobytes: int = 512,
        width: int = 8000,
        allow_private: bool = False,
    ) -> None:
        if seconds <= 0 or kilobytes < 1 or width < 1:
            raise ConfigError(
                "The limits of fetch_page (seconds, kilobytes, width) must be above 0."
            )
        if isinstance(allow, str) or not all(isinstance(item, str) for item in allow or []):
            raise ConfigError("fetch_page's `allow` is a list of hosts.")
        self.allow = [item.casefold() if "//" not in item else item for item in allow or []]
        self.seconds, self.kilobytes, self.width, self.allow_private = (
            seconds,
            kilobytes,
            width,
            allow_private,
        )
        self.schema = tool_schema(fetch_page)

    def own_limits(self) -> dict[str, Any]:
        allow = " ".join(self.allow) or "no host (off)"
        return {
            "allow": allow,
            "seconds": self.seconds,
            "KiB": self.kilobytes,
            "characters": self.width,
        }

    async def execute(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        if not self.allow:
            text = "Error: fetch_page is off: no host is allowed."
            return ToolResult(
                text + " Configure {name: fetch_page, config: {allow: […]}}.", error="refused"
            )
        try:
            text = await in_thread(self.fetch, str(arguments["url"]))
        except Refused as problem:
            return ToolResult(f"Error: {problem}", error="refused")
        except TimeoutError:
            return ToolResult(
                f"Error: the page took longer than {self.seconds:g} s.", error="timeout"
            )
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            return ToolResult(f"Error: {type(error).__name__}: {error}", error="exception")
        return ToolResult(text if len(text) <= self.width else text[: self.width] + "\n[… cut …]")

    def fetch(self, url: str) -> str:
        """Return the text of a page. Raises Refused, TimeoutError, OSError."""
        ends = time.monotonic() + self.seconds
        for _ in range(REDIRECTS + 1):
            status, headers, body = self._get(self.check(url), ends)
            if status not in (301, 302, 303, 307, 308):
                return self._text(url, status, headers, body)
            place = headers.get("location")
            if not place:
                raise Refused(f"{url} redirects nowhere")
            url = urljoin(url, quote(place.encode("latin-1"), safe=WRITTEN))
        raise Refused(f"more than {REDIRECTS} redirects")

    def check(self, url: str) -> SplitResult:
        """Return the parsed URL. Raises Refused if it is not on the list."""
        try:
            parts = urlsplit(url)
            port, host = parts.port, (parts.hostname or "").rstrip(".").casefold()
        except ValueError:
            raise Refused(f"{url!r} is not an address") from None
        if parts.scheme not in PORTS or not host:
            raise Refused(f"{url!r} is not an http or https address")
        if parts.username is not None or parts.password is not None:
            raise Refused("an address with a user name is not fetched")
        if port not in (None, PORTS[parts.scheme]) and not self.allow_private:
            raise Refused(f"port {port} is not allowed")
        if not any(self._fits(pattern, parts, host) for pattern in self.allow):
            raise Refused(f"{host} is not on the list of allowed hosts: {', '.join(self.allow)}")
        return parts

    def _fits(self, pattern: str, parts: SplitResult, host: str) -> bool:
        if "//" not in pattern:
            return fnmatch.fnmatchcase(host, pattern)
        allowed = urlsplit(pattern)
        path = parts.path or "/"
        inside = path.startswith(allowed.path or "/") and ".." not in path.replace(
            "%2e", "."
        ).replace("%2E", ".")
        there = (allowed.scheme, (allowed.hostname or "").casefold())
        same = inside and (parts.scheme, host) == there
        default = PORTS[parts.scheme]
        return same and (parts.port or default) == (allowed.port or default)

    def _get(self, parts: SplitResult, ends: float) -> tuple[int, Any, bytes]:
        """Return (status, headers, body) of one request to the checked address."""
        host = parts.hostname or ""
        port = parts.port or PORTS[parts.scheme]
        address = self._address(host, port)
        connection = _Pinned(host, port, address, parts.scheme == "https", _seconds_left(ends))
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            path = quote(path, safe=WRITTEN, errors="replace")
            connection.request(
                "GET", path, headers={"User-Agent": AGENT, "Accept-Encoding": "identity"}
            )
            answer = connection.getresponse()
            body = b""
            while chunk := self._more(connection, answer, ends):
                body += chunk
                if len(body) > self.kilobytes * 1024:
                    raise Refused(f"the page is larger than {self.kilobytes} KiB")
            if answer.length:  # `read1` ends as at the end of the page
                raise http.client.IncompleteRead(body, answer.length)
            return answer.status, answer.headers, body
        finally:
            connection.close()

    @staticmethod
    def _more(connection: _Pinned, answer: http.client.HTTPResponse, ends: float) -> bytes:
        if connection.sock is not None:
            connection.sock.settimeout(_seconds_left(ends))
        _seconds_left(ends)
        return answer.read1(65536)

    def _address(self, host: str, port: int) -> str:
        """Return an IP address of the host to connect to. Raises Refused if any of its addresses is private."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            raise Refused(f"{host} cannot be resolved: {error}") from None
        addresses = [str(item[4][0]).partition("%")[0] for item in found]
        for address in addresses:
            if not self.allow_private and not _public(address):
                raise Refused(f"{host} has the private address {address}")
        return addresses[0]

    def _text(self, url: str, status: int, headers: Any, body: bytes) -> str:
        kind = headers.get_content_type()
        if status >= 400:
            raise Refused(f"{url} answered {status}")
        if not kind.startswith(TYPES):
            raise Refused(f"{url} is {kind}, not text")
        # a page whose server names no encoding may do so itself
        own = _CHARSET.search(body[:2048]) if "html" in kind else None
        charset = headers.get_content_charset() or (own[1].decode() if own else "utf-8")
        try:
            text = body.decode(charset, "replace")
        except (LookupError, UnicodeError):  # `idna`, for instance, knows no "replace"
            text = body.decode("utf-8", "replace")
        return html_text(text) if "html" in kind else text


def _seconds_left(ends: float) -> float:
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
_CLOSED = tuple(
    ipaddress.ip_network(text)
    for text in (
        "192.0.0.0/24",  # protocol assignments; 192.0.0.192 is a cloud's metadata
        "168.63.129.16/32",  # another cloud's metadata
        "192.88.99.0/24",  # relays to IPv6
        "64:ff9b:1::/48",  # translation to IPv4 inside a network
        "::ffff:0:0:0/96",  # translation to IPv4 (SIIT)
        "3fff::/20",  # documentation
        "5f00::/16",  # segment routing (SRv6)
        "fec0::/10",  # site-local, the former private range of IPv6
        "100::/64",  # discarded
        "2001::/23",  # protocol assignments
    )
)
"""Ranges outside the public internet, or that can embed an address outside it."""


def _public(address: str) -> bool:
    """Whether an address is public; IPv4 addresses embedded in IPv6 are checked themselves."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and not all(map(_public, _inside(ip))):
        return False
    closed = any(ip in network for network in _CLOSED if network.version == ip.version)
    return ip.is_global and not ip.is_multicast and not closed


def _inside(ip: ipaddress.IPv6Address) -> list[str]:
    """Return the IPv4 addresses embedded in an IPv6 address, under every embedding scheme."""
    found = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
    last = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    middle = int(ip) >> 32 & 0xFFFFFFFF
    if (
        int(ip) >> 32 == 0 or ip in _TRANSLATED or middle & ~0x02000000 == 0x5EFE
    ):  # compatible, NAT64, ISATAP
        found.append(last)
    return [str(one) for one in found if one is not None]


class _Pinned(http.client.HTTPConnection):
    """A connection to a fixed IP address, with the host's name for TLS."""

    def __init__(self, host: str, port: int, address: str, secure: bool, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._pin = address
        self._secure = secure

    def connect(self) -> None:
        sock = socket.create_connection((self._pin, self.port), self.timeout)
        try:
            context = ssl.create_default_context() if self._secure else None
            self.sock = context.wrap_socket(sock, server_hostname=self.host) if context else sock
        except OSError:
            sock.close()
            raise


def html_text(html: str) -> str:
    """Return the text of an HTML page, one line a block. Title, scripts, styles and drawings are left out."""
    from html_text import etree_to_text
    from lxml import etree

    # huge_tree: text under more than 256 open tags is kept, too. The size of a page is bounded by `kilobytes`.
    parser = etree.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True
    )
    tree = etree.HTML(html.encode("utf-8", "replace"), parser)
    if tree is None:
        return ""
    etree.strip_elements(
        tree, "head", "noscript", "script", "style", "svg", "template", with_tail=False
    )
    return str(etree_to_text(tree))


TOOL = FetchTool()
