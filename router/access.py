"""Who may call: API keys for clients, and the operators' part for this machine or the cluster."""

from __future__ import annotations

import hmac
import ipaddress

from pdserve_wire.auth import is_token
from router.intake import NotAuthorized


class ApiKeys:
    """The keys that clients may use; with none, everybody may call."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def check(self, authorization: str) -> None:
        """Raise `NotAuthorized` unless an `Authorization` header names a key. Takes the same time for all."""
        if not self._keys:
            return
        scheme, _, given = authorization.partition(" ")
        given_bytes = given.strip().encode("utf-8", "surrogateescape")
        matches = [hmac.compare_digest(given_bytes, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise NotAuthorized("the API key is missing or wrong; send 'Authorization: Bearer KEY'")


def is_operator(peer: str | None, is_forwarded: bool, given_token: str | None, cluster_token: str | None) -> bool:
    """Whether a caller may see the router's inside: it is on this machine, or has the cluster token.

    A request that a proxy forwarded is not from this machine, whatever its peer.
    """
    if cluster_token is not None and given_token is not None:
        return is_token(given_token.encode("utf-8", "surrogateescape"), cluster_token)
    return not is_forwarded and _is_loopback(peer)


def _is_loopback(peer: str | None) -> bool:
    try:
        address = ipaddress.ip_address(peer or "")
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
