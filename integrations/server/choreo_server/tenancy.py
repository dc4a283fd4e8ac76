"""Who calls: a key is a tenant's, and tenants find nothing of each other."""

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
"""The tenant whose keys are shown what all tenants do."""
_PORTS = {"http": 80, "https": 443}
"""Where none is told."""
KEYS = "CHOREO_KEYS"
"""Keys of a server where no file is named: `key tenant`, a line each, or with commas between."""
API_KEY = "CHOREO_API_KEY"
"""The one key of a server without tenants."""


class Keys:
    """Of a server's tenants. They are compared in constant time, and kept as digests only.

    Args:
        lines: `key tenant`; a tenant may have several keys. Empty lines, and those that start with `#`, say nothing.

    Raises:
        InvalidRequestError: A line is none, or a key is two tenants'.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._tenants: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                raise InvalidRequestError(
                    f"line {number} of the keys must be a key and its tenant, with a space between"
                )
            key, tenant = words
            if self._tenants.setdefault(_digest(key), tenant) != tenant:
                raise InvalidRequestError(f"line {number} of the keys gives {tenant!r} a key of another tenant")

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Those of a file. Raises `OSError` if it cannot be read, and what `Keys` raises, also if it has none."""
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
        """Whose key a header has; None: nobody's."""
        scheme, _, key = (authorization or "").partition(" ")
        return self._whose(_digest(key.strip()) if scheme.lower() == "bearer" else b"")

    def viewer(self, authorization: str | None) -> str | None:
        """The same of a browser's header, too: the key is the password that it has asked for, whatever the name."""
        scheme, _, told = (authorization or "").partition(" ")
        if scheme.lower() != "basic":
            return self.tenant(authorization)
        try:
            _, _, key = base64.b64decode(told, validate=True).decode().partition(":")
        except ValueError:
            return None
        return self._whose(_digest(key))

    def _whose(self, given: bytes) -> str | None:
        found = None
        for digest, tenant in self._tenants.items():  # all of them, whichever it is
            found = tenant if hmac.compare_digest(digest, given) else found
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def read_keys(path: Path | None, only: str | None = None) -> Keys:
    """Read keys from a file; where none is named, from the environment.

    Args:
        path: Of the file.
        only: The one key that there is, the operator's; None: the environment may have it.
    """
    only = os.environ.get(API_KEY) if only is None else only
    if only is not None:
        if path is not None or KEYS in os.environ:
            raise InvalidRequestError(
                f"--api-key or {API_KEY} is the only key, --keys or {KEYS} are several: leave one of them out"
            )
        if len(only.split()) != 1:
            raise InvalidRequestError(
                f"--api-key, or {API_KEY}, must be one word: write a key, or leave it out to let everybody in"
            )
        return Keys([f"{only.strip()} {OPERATOR}"])
    if path is not None:
        return Keys.read(path)
    if (told := os.environ.get(KEYS)) is None:
        return Keys()
    if not (keys := Keys(told.replace(",", "\n").splitlines())):
        raise InvalidRequestError(f"{KEYS} has no keys: write KEY TENANT into it, or unset it to let everybody in")
    return keys


class Tenancy:
    """The engine, as whoever calls has it.

    Args:
        engine: The server's.
        keys: Without any, all calls are those of whoever has loaded the engine.
        calls_per_second: Of the engine, that a tenant with a key may start; None: as many as come.
        called: Names by which programs call the server, if there are no keys.
        adapters: Folders, by the names that all tenants call them.

    Raises:
        AdapterError: One is another model's, or its files are damaged.
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
        # Handles of a server end with its engine: so may the salts that they are sealed under.
        self._secret = secrets.token_bytes(32)
        self._engines: dict[str, Engine] = {}
        for name, folder in (adapters or {}).items():
            for each in map(self._of, keys.tenants) if keys else (engine,):
                each.load_adapter(folder, name)

    def engine(self, request: Request) -> Engine:
        """The tenant's who calls.

        Raises:
            RefusedError: Nobody is known to call, or a web page does.
        """
        name = self.name(request)
        return self._engine if name is None else self._of(name)

    def _of(self, name: str) -> Engine:
        if name not in self._engines:
            salt = hmac.digest(self._secret, name.encode(), "sha256").hex()
            self._engines[name] = self._engine.tenant(salt, calls_per_second=self._calls_per_second)
        return self._engines[name]

    def sees_all(self, request: Request) -> bool:
        """Whether who calls may know what all tenants do. Raises what `engine` raises."""
        return self.name(request) in (OPERATOR, None)

    def viewer(self, request: Request) -> str | None:
        """The tenant who looks at pages, in a browser, say; None: there are no keys. Raises what `engine` raises."""
        if not self._keys:
            return self.name(request)
        name = self._keys.viewer(request.headers.get("authorization"))
        if name is None:
            raise RefusedError(401, "no such key: it is the password here", "invalid_api_key", asks="Basic")
        return name

    def name(self, request: Request) -> str | None:
        """The tenant who calls; None: there are no keys. Raises what `engine` raises."""
        if not self._keys:
            require_no_other_site(request.headers, self._called)
            return None
        name = self._keys.tenant(request.headers.get("authorization"))
        if name is None:
            raise RefusedError(
                401, "no such key: send one of this server's as Authorization: Bearer KEY", "invalid_api_key"
            )
        return name


def require_no_other_site(headers: Mapping[str, str], known: Collection[str]) -> None:
    """Where there are no keys, a web page that somebody has opened must not call in their place.

    A browser says which site asks: another than the one that is asked may not. A site's own name may have been made to
    lead here: so a server is called by its address, by a name that leads to this machine alone, or by one it was told.

    Args:
        headers: Of a request, by their names in small letters.
        known: Names that the server may be called by.

    Raises:
        RefusedError: One does.
    """
    host, origin = headers.get("host"), headers.get("origin")
    if host is not None and not _is_ours(_site("http", host)[0], known):
        raise RefusedError(
            403, "this server is not called by that name: give it --keys, or the name as --called", "unknown_host"
        )
    if origin is not None and (host is None or not _same_site(origin, host)):
        raise RefusedError(403, "a page of another site may not call a server without keys: give it --keys", "site")


def _same_site(origin: str, host: str) -> bool:
    scheme, _, rest = origin.partition("://")
    return scheme in _PORTS and _site(scheme, rest) == _site(scheme, host)


def _site(scheme: str, told: str) -> tuple[str, int | None]:
    """Name and port of a host as it is told; no name if that is nothing."""
    try:
        parts = urlsplit(f"//{told}")
        return (parts.hostname or "").rstrip("."), parts.port or _PORTS[scheme]
    except ValueError:
        return "", None


def _is_ours(name: str, known: Collection[str]) -> bool:
    if name in known or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return name == gethostname().lower()
    return True
