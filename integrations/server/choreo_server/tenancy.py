"""Authentication: API keys of tenants, each of which has an isolated view of the engine."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from collections.abc import Collection, Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path
from socket import gethostname
from urllib.parse import urlsplit

from starlette.requests import Request

from choreo_agents import Engine
from choreo_agents.errors import InvalidRequestError
from choreo_server.errors import RefusedError

OPERATOR = "operator"
"""Tenant whose keys may see the metrics of all tenants."""
_PORTS = {"http": 80, "https": 443}
"""Default ports."""
KEYS = "CHOREO_KEYS"
"""Environment variable with keys, if no file is given: `key tenant` pairs, separated by newlines or commas."""
API_KEY = "CHOREO_API_KEY"
"""Environment variable with the only key of a server without tenants."""


class Keys:
    """API keys of a server's tenants, compared in constant time and kept only as digests.

    Args:
        lines: `key tenant` pairs; a tenant may have several keys. Empty lines and `#` comments are skipped.

    Raises:
        InvalidRequestError: A line is no pair, or two tenants have the same key.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._tenants: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                raise InvalidRequestError(
                    f"line {number} of the keys must be a key and its tenant, separated by a space"
                )
            key, tenant = words
            if self._tenants.setdefault(_digest(key), tenant) != tenant:
                raise InvalidRequestError(f"line {number} of the keys assigns a key of another tenant to {tenant!r}")

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read keys from a file; raises `OSError`, or `InvalidRequestError` as `Keys` does and if there are none."""
        keys = cls(path.read_text().splitlines())
        if not keys:
            raise InvalidRequestError(f"{path} has no keys: write a key and its tenant on each line")
        return keys

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def tenants(self) -> frozenset[str]:
        return frozenset(self._tenants.values())

    def tenant(self, authorization: str | None) -> str | None:
        """Return the tenant of a bearer token; None if the key is unknown."""
        scheme, _, key = (authorization or "").partition(" ")
        return self._tenant_of(_digest(key.strip()) if scheme.lower() == "bearer" else b"")

    def viewer(self, authorization: str | None) -> str | None:
        """Return the tenant of a bearer token or of HTTP Basic credentials, whose password is the key."""
        scheme, _, credentials = (authorization or "").partition(" ")
        if scheme.lower() != "basic":
            return self.tenant(authorization)
        try:
            _, _, key = base64.b64decode(credentials, validate=True).decode().partition(":")
        except ValueError:
            return None
        return self._tenant_of(_digest(key))

    def _tenant_of(self, key_digest: bytes) -> str | None:
        owner = None
        for digest, tenant in self._tenants.items():  # all of them, so that the time tells nothing
            owner = tenant if hmac.compare_digest(digest, key_digest) else owner
        return owner


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def read_keys(path: Path | None, only: str | None = None) -> Keys:
    """Read keys from a file, or without one from the environment.

    Args:
        path: The file.
        only: The only key, which is the operator's; None: the one in `CHOREO_API_KEY`, if that is set.

    Raises:
        InvalidRequestError: Keys are invalid, or given in two ways.
    """
    only = os.environ.get(API_KEY) if only is None else only
    if only is not None:
        if path is not None or KEYS in os.environ:
            raise InvalidRequestError(
                f"--api-key or {API_KEY} sets the only key, --keys or {KEYS} several: leave one of them out"
            )
        if len(only.split()) != 1:
            raise InvalidRequestError(
                f"--api-key, or {API_KEY}, must be one word: set a key, or leave it out to allow everybody"
            )
        return Keys([f"{only.strip()} {OPERATOR}"])
    if path is not None:
        return Keys.read(path)
    if (text := os.environ.get(KEYS)) is None:
        return Keys()
    if not (keys := Keys(text.replace(",", "\n").splitlines())):
        raise InvalidRequestError(f"{KEYS} has no keys: set it to KEY TENANT, or unset it to allow everybody")
    return keys


class Tenancy:
    """Maps callers to tenants and tenants to their engines.

    Args:
        engine: The server's engine.
        keys: API keys; without any, all calls use the server's engine directly.
        calls_per_second: Engine calls that each tenant may start per second; None: no limit.
        called: Host names by which the server may be called without keys.
        adapters: Directories of adapters by name, for all tenants.

    Raises:
        AdapterError: An adapter is another model's, or its files are damaged.
    """

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        calls_per_second: float | None,
        called: Iterable[str] = (),
        adapters: Mapping[str, Path] | None = None,
    ) -> None:
        self._engine, self._keys, self._called = engine, keys, frozenset(name.lower() for name in called)
        self._calls_per_second = calls_per_second
        # Handles end with the engine, so the salts that seal them need not survive it either.
        self._secret = secrets.token_bytes(32)
        self._engines: dict[str, Engine] = {}
        for name, folder in (adapters or {}).items():
            for tenant_engine in map(self._tenant_engine, keys.tenants) if keys else (engine,):
                tenant_engine.load_adapter(folder, name)

    def engine(self, request: Request) -> Engine:
        """Return the engine of the caller's tenant.

        Raises:
            RefusedError: The key is unknown, or without keys the caller is another site's web page.
        """
        name = self.name(request)
        return self._engine if name is None else self._tenant_engine(name)

    def _tenant_engine(self, name: str) -> Engine:
        if name not in self._engines:
            salt = hmac.digest(self._secret, name.encode(), "sha256").hex()
            self._engines[name] = self._engine.tenant(salt, calls_per_second=self._calls_per_second)
        return self._engines[name]

    def sees_all(self, request: Request) -> bool:
        """Return whether the caller may see the metrics of all tenants; raises as `engine` does."""
        return self.name(request) in (OPERATOR, None)

    def viewer(self, request: Request) -> str | None:
        """Return the tenant of a browser that views pages; None if there are no keys. Raises as `engine` does."""
        if not self._keys:
            return self.name(request)
        name = self._keys.viewer(request.headers.get("authorization"))
        if name is None:
            raise RefusedError(401, "invalid key: pass it as the password", "invalid_api_key", asks="Basic")
        return name

    def name(self, request: Request) -> str | None:
        """Return the caller's tenant; None if there are no keys. Raises as `engine` does."""
        if not self._keys:
            require_no_other_site(request.headers, self._called)
            return None
        name = self._keys.tenant(request.headers.get("authorization"))
        if name is None:
            raise RefusedError(
                401, "invalid key: send a key of this server as Authorization: Bearer KEY", "invalid_api_key"
            )
        return name


def require_no_other_site(headers: Mapping[str, str], names: Collection[str]) -> None:
    """Reject calls from other sites' web pages, which could reach a server without keys through a user's browser.

    A browser sends the page's origin, which must be the server's. Against DNS rebinding, the host must be an address,
    `localhost`, this machine's name, or one of `names`.

    Args:
        headers: Headers of a request, with lower-case names.
        names: Host names that the server may be called by.

    Raises:
        RefusedError: The host or the origin is not allowed.
    """
    host, origin = headers.get("host"), headers.get("origin")
    if host is not None and not _is_own_host(_parse_authority("http", host)[0], names):
        raise RefusedError(
            403, "unknown host name: start the server with --keys, or pass the name as --called", "unknown_host"
        )
    if origin is not None and (host is None or not _same_site(origin, host)):
        raise RefusedError(403, "pages of other sites may not call a server without keys: start it with --keys", "site")


def _same_site(origin: str, host: str) -> bool:
    scheme, _, authority = origin.partition("://")
    return scheme in _PORTS and _parse_authority(scheme, authority) == _parse_authority(scheme, host)


def _parse_authority(scheme: str, authority: str) -> tuple[str, int | None]:
    """Parse an authority into host and port; the host is empty if that fails."""
    try:
        parts = urlsplit(f"//{authority}")
        return (parts.hostname or "").rstrip("."), parts.port or _PORTS[scheme]
    except ValueError:
        return "", None


def _is_own_host(name: str, names: Collection[str]) -> bool:
    if name in names or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return name == gethostname().lower()
    return True
