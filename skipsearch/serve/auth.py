"""Authentication by API keys from the environment."""

from __future__ import annotations

import hashlib
import hmac
import os

from skipsearch.errors import SkipSearchError
from skipsearch.serve.api_errors import APIError

KEY_VARIABLE = "SKIPSEARCH_API_KEY"
NO_KEY = "no key"  # the owner of all prefixes if the server has no keys


class APIKeys:
    """The accepted API keys.

    keys: a request needs one of them; empty: no authentication.
    """

    def __init__(self, keys: list[str]):
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def from_environment(cls) -> APIKeys:
        """Read one key, or several separated by commas, from SKIPSEARCH_API_KEY.

        Raises: SkipSearchError if the variable is set but holds no key.
        """
        text = os.environ.get(KEY_VARIABLE)
        keys = [key.strip() for key in (text or "").split(",") if key.strip()]
        if text is not None and not keys:
            raise SkipSearchError(
                f"{KEY_VARIABLE} is set and holds no key: put one there, or unset it to let "
                "everybody ask"
            )
        return cls(keys)

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._digests)

    def authenticate(self, header: str | None) -> str:
        """Return a name for the owner of the key: its hash, which does not reveal the key.

        header: the `Authorization` header. Every key is compared in constant time, so the response
            time does not reveal one either.

        Raises: APIError 401 for a missing or wrong key.
        """
        if not self._digests:
            return NO_KEY
        scheme, _, key = (header or "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            way_out = "send it as `Authorization: Bearer KEY`"
            message = (
                f"this server asks for an API key: {way_out}"
                if not key
                else f"that API key is not one of this server's: {way_out}"
            )
            raise APIError(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        return given.hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
