"""Addresses as people and processes write them."""

from __future__ import annotations


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of "host:port" or "[v6]:port". Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
