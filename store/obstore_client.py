"""Object storage through obstore, an optional client: `Store("obstore::s3://bucket/run")`."""

from __future__ import annotations

import contextlib
import functools
import posixpath
from datetime import datetime, timedelta
from typing import Any

from ..codec.extras import install

PREFIX = "obstore::"
"""In front of a URL: use obstore for it."""
_SCHEMES = ("s3", "gs", "az", "memory")


class Obstore:
    """The operations of fsspec that `ObjectFiles` calls, by obstore.

    Credentials and endpoint are read from the environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...), as obstore
    does; configuration of fsspec does not apply.

    Args:
        scheme: "s3", "gs", "az" or "memory".
        bucket: its name.

    Raises:
        ImportError: obstore is not installed.
    """

    def __init__(self, scheme: str, bucket: str) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise ImportError(f"a URL that begins with {PREFIX} needs obstore: {install('obstore')}") from None
        self._api, self._bucket = obstore, bucket
        # Requests are repeated by `Retry`; only short faults of the network here.
        retries: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}
        options: Any = {} if scheme == "memory" else {"client_options": {"allow_http": True}, "retry_config": retries}
        self._store = from_url(f"{scheme}://{bucket if scheme != 'memory' else '/'}", **options)

    def _name(self, path: str) -> str:
        return path.removeprefix(f"{self._bucket}/")

    def _call(self, work: Any, *args: Any, **options: Any) -> Any:
        """Call obstore; raise Python's own errors if a retry is pointless."""
        errors = self._api.exceptions
        try:
            return work(self._store, *args, **options)
        except errors.AlreadyExistsError as e:
            raise FileExistsError(str(e)) from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as e:
            raise PermissionError(str(e)) from None

    def invalidate_cache(self) -> None:
        """Do nothing: nothing is cached."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return all bytes of an object, or those from `start` to `end`."""
        if start is None or end is None:
            return bytes(self._call(self._api.get, self._name(path)).bytes().to_bytes())
        if end <= start:
            return b""
        try:
            return bytes(self._call(self._api.get_range, self._name(path), start=start, end=end).to_bytes())
        except self._api.exceptions.GenericError:
            # A range behind the end is an error of its own in each storage.
            if start < self.info(path)["size"]:
                raise
            return b""

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        """Write an object; FileExistsError with the mode "create" if it exists."""
        options = {"mode": mode, "use_multipart": False} if mode == "create" else {}
        self._call(self._api.put, self._name(path), data, **options)

    def info(self, path: str) -> dict[str, Any]:
        """Return the size of an object."""
        return dict(self._call(self._api.head, self._name(path)))

    def modified(self, path: str) -> datetime:
        """Return when an object was written."""
        when: datetime = self.info(path)["last_modified"]
        return when

    def exists(self, path: str) -> bool:
        """Return whether an object exists."""
        with contextlib.suppress(FileNotFoundError):
            return bool(self.info(path))
        return False

    def ls(self, path: str, detail: bool = True) -> list[Any]:
        """Return the objects in a folder: names, or their details."""
        objects = self._call(self._api.list_with_delimiter, self._name(path))["objects"]
        details = [{"name": posixpath.join(self._bucket, o["path"]), "size": o["size"]} for o in objects]
        return details if detail else [o["name"] for o in details]

    def du(self, path: str) -> int:
        """Return the bytes of all objects below a folder."""
        pages = self._call(self._api.list, prefix=self._name(path))
        return sum(int(o["size"]) for page in pages for o in page)

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        self._call(self._api.delete, self._name(path))


@functools.lru_cache(maxsize=64)
def _client(scheme: str, bucket: str) -> Obstore:
    """Return the client of a bucket, whose connections all stores of this process share."""
    return Obstore(scheme, bucket)


def open_client(url: str) -> tuple[Obstore, str]:
    """Return the client for a URL with the prefix, and the path below which its objects are.

    Raises:
        ValueError: another kind of URL.
        ImportError: obstore is not installed.
    """
    scheme, separator, path = url.removeprefix(PREFIX).partition("://")
    bucket = path.strip("/").partition("/")[0]
    if not separator or scheme not in _SCHEMES or not bucket:
        raise ValueError(f"{PREFIX} takes URLs of {', '.join(_SCHEMES[:3])}, as {PREFIX}s3://bucket/run")
    return _client(scheme, bucket), path.strip("/")
