"""Ed25519 signatures of versions, by the package `cryptography` (the extra `sign`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...codec.errors import BadArgumentError
from ...codec.extras import install

LENGTH = 32
"""Bytes of a key."""


class Keys(NamedTuple):
    """Functions that sign and check signatures; without a key everything is accepted.

    Args:
        sign: data -> signature.
        accepts: (signature, data) -> whether it is the key's.
    """

    sign: Callable[[bytes], bytes] | None = None
    accepts: Callable[[bytes, bytes], bool] | None = None


def private(key: Any) -> Keys:
    """Return the functions of a private key (32 bytes, `Ed25519PrivateKey`, or None).

    Raises:
        BadArgumentError: not such a key, or `cryptography` is not installed.
    """
    if key is None:
        return Keys()
    own = _loaded(key, "Ed25519PrivateKey", "from_private_bytes", "sign")
    return Keys(own.sign, public(own.public_key()).accepts)


def public(key: Any) -> Keys:
    """Return the functions of a public key (32 bytes, `Ed25519PublicKey`, or None).

    Raises:
        BadArgumentError: not such a key, or `cryptography` is not installed.
    """
    if key is None:
        return Keys()
    own = _loaded(key, "Ed25519PublicKey", "from_public_bytes", "verify")

    def accepts(signature: bytes, data: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            own.verify(signature, data)
        except InvalidSignature:
            return False
        return True

    return Keys(None, accepts)


def _loaded(key: Any, kind: str, read: str, does: str) -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise BadArgumentError(f"key: signatures need cryptography: {install('sign')}") from None
    if isinstance(key, bytes) and len(key) == LENGTH:
        return getattr(getattr(ed25519, kind), read)(key)
    if not isinstance(key, getattr(ed25519, kind)):
        raise BadArgumentError(
            f"key must be {LENGTH} bytes or an {kind}, which can {does}; not {type(key).__qualname__}"
        )
    return key
