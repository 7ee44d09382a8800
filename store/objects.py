"""Objects of any fsspec file system except the local disk, with retries.

obstore is an optional client for some of them: `Store("obstore::s3://bucket/run")`.

URLs of the Hugging Face Hub are `hf://datasets/user/repo/run` and `hf://buckets/user/bucket/run`. Each change of a
repository is a commit. A commit that names its parent is refused if another came first, so files are created once.
Buckets have none.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import posixpath
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

from ..codec.extras import install
from ..codec.format.fields import Bytes
from .files import Files

T = TypeVar("T")
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that a retry does not change."""
_MISTAKES = (TypeError, ValueError, AttributeError, NotImplementedError, ImportError, MemoryError, RecursionError)
_ATTEMPTS, _FIRST = 6, 0.1
"""Requests at most, and seconds before the second one, doubled each time: 3.1 s in all."""
_REFUSED = 412
"""Status of a commit whose parent is not the last commit any more."""
_PATIENCE = 64
"""Commits of others, one after the other, before a file that is created."""


class ObjectFiles(Files):
    """The files below a prefix of an fsspec file system.

    Writing an object is atomic. `create` is a conditional put (If-None-Match) where the file system has one (`mode=
    "create"`, as s3fs does); elsewhere two writers that commit the same step at the same moment are not distinguished.
    """

    local = False

    def __init__(self, fs: Any, root: str) -> None:
        self.fs, self.root = fs, root
        self._sleep: Callable[[float], None] = time.sleep
        put = getattr(fs, "_pipe_file", None) if getattr(fs, "async_impl", False) else fs.pipe_file
        # These take the mode and ignore it: obstore's file system for fsspec, which `obstore::` URLs do not use, and
        # that of the Hugging Face Hub, which uploads over an existing file.
        ignored = type(fs).__module__.startswith(("obstore.", "huggingface_hub."))
        self._conditional = put is not None and "mode" in inspect.signature(put).parameters and not ignored

    def _retry(self, request: Callable[[], T]) -> T:
        """Return the answer to a request that may be repeated."""
        for attempt in range(_ATTEMPTS - 1):
            try:
                return request()
            except (*_FINAL, *_MISTAKES):
                raise
            # Network libraries have errors of their own that are not an OSError.
            except Exception:
                self._sleep(_FIRST * 2**attempt)
        return request()

    def read(self, name: str) -> bytes:
        """Return all bytes of an object; FileNotFoundError if it does not exist."""
        return bytes(self._retry(lambda: self.fs.cat_file(self.path(name))))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes start..stop of an object; fewer if it ends before."""
        return bytes(self._retry(lambda: self.fs.cat_file(self.path(name), start=start, end=stop)))

    def size(self, name: str) -> int:
        """Return the size of an object in bytes; FileNotFoundError if it does not exist."""
        self.fs.invalidate_cache()
        return int(self._retry(lambda: self.fs.info(self.path(name)))["size"])

    def modified(self, name: str) -> float:
        """Return when an object was written, in seconds by the clock of the storage."""
        self.fs.invalidate_cache()
        return float(self._retry(lambda: self.fs.modified(self.path(name))).timestamp())

    def stamp(self, name: str) -> object:
        """Return None: a request takes as long as reading the object."""
        return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Return name -> size in bytes of the objects in a folder; empty if it does not exist."""
        self.fs.invalidate_cache()
        try:
            objects = self._retry(lambda: self.fs.ls(self.path(folder), detail=True))
        except FileNotFoundError:
            return {}
        return {posixpath.basename(o["name"].rstrip("/")): int(o["size"] or 0) for o in objects}

    def write(self, name: str, data: bytes | Iterable[Bytes]) -> None:
        """Write or replace an object; its bytes are joined in memory."""
        whole = data if isinstance(data, bytes) else b"".join(data)
        self._retry(lambda: self.fs.pipe_file(self.path(name), whole))

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that must not exist; False if it does, with other bytes.

        An answer may be lost after the object was written; the retry then finds the same bytes.
        """

        def put() -> bool:
            try:
                self.fs.pipe_file(self.path(name), data, mode="create")
            except OSError as e:
                # s3fs reports a failed precondition as EINVAL if the server does not name it.
                if isinstance(e, FileExistsError) or (e.errno == errno.EINVAL and self._exists(name)):
                    return False
                raise
            return True

        if self._conditional:
            placed = self._retry(put)
        elif placed := not self.exists(name):
            self.write(name, data)
        try:
            # Retried separately: the attempts are per request.
            return placed or self.read(name) == data
        except FileNotFoundError:  # it was removed meanwhile
            return False

    def exists(self, name: str) -> bool:
        """Return whether an object exists."""
        return self._retry(lambda: self._exists(name))

    def _exists(self, name: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self.path(name)))

    def sync(self, names: Sequence[str]) -> None:
        """Do nothing: an object that exists is durable."""

    def below(self, folder: str) -> ObjectFiles:
        """Return the objects below a longer prefix."""
        return type(self)(self.fs, self.path(folder))

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; missing ones are skipped."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._retry(functools.partial(self.fs.rm_file, self.path(name)))


class HubFiles(ObjectFiles):
    """The files below a path of a bucket of the Hub."""

    def read(self, name: str) -> bytes:
        """Return all bytes of a file; FileNotFoundError if it does not exist."""
        self.fs.invalidate_cache()  # it may be newer than a listing
        return super().read(name)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return name -> size of the files in a folder.

        Raises:
            FileNotFoundError: the bucket or repository does not exist.
        """
        found = super().sizes(folder)
        if not found:
            self.fs.resolve_path(self.root)
        return found


class RepositoryFiles(HubFiles):
    """The files below a path of a repository of the Hub."""

    _staged: Mapping[str, bytes] = {}

    @contextlib.contextmanager
    def staged(self, name: str, data: Iterable[Bytes]) -> Iterator[None]:
        """Within this, let `create` write this file too, in the same commit."""
        self._staged = {name: b"".join(data)}
        try:
            yield
        finally:
            self._staged = {}

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not exist; False if it does, with other bytes."""
        for _ in range(_PATIENCE):
            created = self._retry(lambda: self._create(name, data))
            if created is not None:
                return created
        raise TimeoutError(f"{self.path(name)}: others commit to this repository all the time")

    def _create(self, name: str, data: bytes) -> bool | None:
        """Return the result of `create`; None if another commit came first."""
        from huggingface_hub import CommitOperationAdd

        head = self.fs._api.repo_info(**self._repository()).sha
        if self._present([name], revision=head):
            return self.read(name) == data
        added = [CommitOperationAdd(self._in_repo(n), d) for n, d in {**self._staged, name: data}.items()]
        try:
            self._commit(added, f"Add {name}", parent_commit=head)
        except OSError as e:
            if getattr(getattr(e, "response", None), "status_code", None) == _REFUSED:
                return None
            raise
        return True

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, in one commit; missing ones are skipped."""
        from huggingface_hub import CommitOperationDelete

        def attempt() -> None:
            if present := self._present(names):
                self._commit([CommitOperationDelete(path) for path in present], f"Remove {len(present)} files")

        if names:
            self._retry(attempt)

    def _commit(self, operations: Sequence[Any], message: str, **options: Any) -> None:
        self.fs._api.create_commit(operations=operations, commit_message=message, **self._repository(), **options)
        self.fs.invalidate_cache()

    def _present(self, names: Sequence[str], **revision: str) -> list[str]:
        """Return the paths of those files that exist."""
        where: Any = {**self._repository(), **revision}
        return [found.path for found in self.fs._api.get_paths_info(paths=[*map(self._in_repo, names)], **where)]

    def _repository(self) -> dict[str, Any]:
        place = self.fs.resolve_path(self.root)
        return {"repo_id": place.repo_id, "repo_type": place.repo_type, "revision": place.revision}

    def _in_repo(self, name: str) -> str:
        return str(self.fs.resolve_path(self.path(name)).path_in_repo)


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
        # Requests are repeated by `ObjectFiles`; only short faults of the network here.
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

    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
        """Return names and sizes of the objects in a folder."""
        objects = self._call(self._api.list_with_delimiter, self._name(path))["objects"]
        return [{"name": posixpath.join(self._bucket, o["path"]), "size": o["size"]} for o in objects]

    def du(self, path: str) -> int:
        """Return the bytes of all objects below a folder."""
        pages = self._call(self._api.list, prefix=self._name(path))
        return sum(int(o["size"]) for page in pages for o in page)

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        self._call(self._api.delete, self._name(path))


_client = functools.lru_cache(maxsize=64)(Obstore)
"""Returns the client of a bucket, whose connections all stores of this process share."""


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
