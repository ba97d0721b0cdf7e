"""Who may ask: API keys from the environment."""

from __future__ import annotations

import hashlib
import hmac
import os

from skipsearch.errors import SkipSearchError
from skipsearch.serve.api_errors import APIError

KEY_VARIABLE = "SKIPSEARCH_API_KEY"
NO_KEY = "no key"  # whose prefixes requests use where no key is asked for


class APIKeys:
    """keys: any of them opens; none: everybody may ask."""

    def __init__(self, keys: list[str]):
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def from_environment(cls) -> APIKeys:
        """One key, or several with commas between them. Raises: SkipSearchError for a variable that
        is set to nothing.
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
        return bool(self._digests)

    def authenticate(self, header: str | None) -> str:
        """Who asks, as a name that tells nothing of the key. header: `Authorization`. Raises: Fault
        401.

        Every key is compared in full, so that the time it takes tells nothing either.
        """
        if not self._digests:
            return NO_KEY
        scheme, _, key = (header or "").partition(" ")
        given = _digest(key.strip())
        found = [hmac.compare_digest(given, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(found):
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
