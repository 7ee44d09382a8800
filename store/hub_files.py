"""Files on the Hugging Face Hub, in repositories and in buckets.

URLs are `hf://datasets/user/repo/run` and `hf://buckets/user/bucket/run`. Each change of a repository is a commit. A
commit that names its parent is refused if another came first, so files are created once. Buckets have none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..codec.format.fields import Bytes
from .objects import ObjectFiles

_REFUSED = 412
"""Status of a commit whose parent is not the last commit any more."""
_PATIENCE = 64
"""Commits of others, one after the other, before a file that is created."""


class HubFiles(ObjectFiles):
    """The files below a path of a bucket."""

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
    """The files below a path of a repository."""

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
