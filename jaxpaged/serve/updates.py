"""New weights from clients: from a directory under a root, or as bytes of safetensors; all or none."""

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from jaxpaged.api.async_llm import AsyncLLM
from jaxpaged.checks import InputError, check, shown
from jaxpaged.models.files.safetensors_files import INDEX, SINGLE, Tensors
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.replies import ApiError

FLOAT32_BYTES = 4
MOST_HEADER_BYTES = 16 * 2**20  # of a body: JSON that is parsed
LENGTH_BYTES = 8  # at a body's beginning: the length of its header
WRITTEN_TOGETHER = 2**20  # bytes of a body that are written to disk at a time
BODY = "the body"
CLOSE = {"connection": "close"}  # behind a body that was not read to its end


@dataclasses.dataclass(frozen=True)
class Part:
    """Part of an update: tensors by name, and the folder that is deleted after it; None for a client's."""

    tensors: Tensors
    path: Path
    said: str  # the client's word for it
    folder: tempfile.TemporaryDirectory[str] | None = None
    num_bytes: int = 0  # of the body


class Updates:
    """The door of new weights, for one event loop: one client at a time comes through, others get 409.

    Between `begin` and `finish` parts are collected, and nothing changes; without `begin` each is an update.
    """

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self._llm, self._options = llm, options
        root = options.weights_root
        self._root = None if root is None else Path(root).resolve()
        max_weight_bytes = options.max_weight_bytes
        self.max_bytes = (
            FLOAT32_BYTES * llm.engine.num_weights + MOST_HEADER_BYTES
            if max_weight_bytes is None
            else max_weight_bytes
        )
        self._parts: list[Part] | None = None  # of an update that has begun
        self._is_busy = False

    def begin(self) -> None:
        """Begin an update of several parts. What came of one before is dropped. Raises `ApiError`."""
        with self._alone():
            self.drop()
            self._parts = []

    async def add_folder(self, said: str, version: int | None) -> int | None:
        """Take the weights of a directory under the root, as a part or as an update.

        Returns the new version of the weights, None for a part. Raises `InputError`, `ApiError`.
        """
        with self._alone():
            return await self._take(await asyncio.to_thread(self._opened, said), version)

    async def add_body(self, chunks: AsyncIterator[bytes], length: int | None, version: int | None) -> Any:
        """Take the weights of a body, a safetensors file, as `add_folder` does those of a directory.

        chunks: the body. It is written to a file as it comes.
        length: the bytes that it is said to have, if so.
        """
        with self._alone():
            held = sum(part.num_bytes for part in self._parts or ())
            folder = tempfile.TemporaryDirectory(prefix="jaxpaged-weights-")
            try:
                num_bytes = await self._received(chunks, length, Path(folder.name) / SINGLE, held)
                part = await asyncio.to_thread(_read, Path(folder.name), BODY)
                part = dataclasses.replace(part, folder=folder, num_bytes=num_bytes)
                return await self._take(part, version)
            finally:
                if folder not in [part.folder for part in self._parts or ()]:
                    folder.cleanup()

    async def finish(self, version: int | None) -> int:
        """Update the weights by all parts since `begin`, and return the new version.

        The parts are dropped, whatever comes of it. Raises `InputError`, `ApiError`.
        """
        with self._alone():
            if self._parts is None:
                raise ApiError(400, "no update has begun: post to /start_weight_update before")
            try:
                check("parts", len(self._parts), "at least one: post to /update_weights", bool(self._parts))
                return await self._llm.update_weights(self._pairs(self._parts), version=version)
            finally:
                self.drop()

    def drop(self) -> None:
        """Forget the parts of an update that has begun, and delete their files."""
        parts, self._parts = self._parts, None
        for part in parts or ():
            if part.folder is not None:
                part.folder.cleanup()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._is_busy:
            raise ApiError(409, "another client's update is under way", headers=CLOSE)
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    async def _take(self, part: Part, version: int | None) -> int | None:
        if self._parts is None:
            return await self._llm.update_weights(self._pairs([part]), version=version)
        rule = "left out before /finish_weight_update"
        check("weight_version", version, rule, version is None)
        # What is wrong is told now, not at the end of all.
        await asyncio.to_thread(self._llm.engine.check_weights, self._pairs([part]))
        self._parts.append(part)
        return None

    def _pairs(self, parts: list[Part]) -> Iterator[tuple[str, Any]]:
        for part in parts:
            for name in part.tensors:
                with _said(part.path, part.said):
                    tensor = part.tensors[name]
                yield name, tensor

    def _opened(self, said: str) -> Part:
        """Open a directory's weights, if all of them lie under the root. Raises `InputError`."""
        check("path", said, "left out without --weights-root", self._root is not None)
        assert self._root is not None
        folder = self._under_root(said, said)
        check("path", said, "a directory under --weights-root", folder.is_dir())
        index = folder / INDEX
        has_index = index.is_symlink() or index.exists()
        for file in [*folder.glob("*.safetensors"), *([index] if has_index else [])]:
            resolved = self._under_root(said, file)
            if not resolved.is_file():
                raise InputError(f"path={shown(said)}: {file.name} must be a file")
        return _read(folder, f"path={shown(said)}")

    def _under_root(self, said: str, path: str | Path) -> Path:
        """Return where a path leads to, by links too. Raises `InputError` for a place outside of the root.

        It tells nothing of what is there.
        """
        assert self._root is not None
        try:
            resolved = (self._root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            resolved = None
        if resolved is None or not resolved.is_relative_to(self._root):
            rule = "a directory under --weights-root, with all its files"
            raise InputError(f"path={shown(said)} must be {rule}")
        return resolved

    async def _received(self, chunks: AsyncIterator[bytes], length: int | None, file: Path, held: int) -> int:
        """Write a body to a file, and return how many bytes it has. Raises `ApiError`."""
        max_bytes = self.max_bytes - held
        if length is not None and length > max_bytes:
            raise self._too_large()
        num_bytes, waiting, is_begun = 0, bytearray(), False
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                with file.open("wb") as target:
                    async for chunk in _timely(chunks, self._options.body_timeout_s):
                        num_bytes += len(chunk)
                        if num_bytes > max_bytes:
                            raise self._too_large()
                        waiting += chunk
                        if not is_begun and len(waiting) >= LENGTH_BYTES:
                            is_begun = True
                            _check_header(waiting)
                        if len(waiting) >= WRITTEN_TOGETHER:
                            await asyncio.to_thread(target.write, bytes(waiting))
                            waiting.clear()
                    await asyncio.to_thread(target.write, bytes(waiting))
        except TimeoutError:
            raise ApiError(408, "the body did not come in time", headers=CLOSE) from None
        return num_bytes

    def _too_large(self) -> ApiError:
        message = f"the weights must have at most {self.max_bytes} bytes: see --max-weight-bytes"
        return ApiError(413, message, headers=CLOSE)


def _read(folder: Path, said: str) -> Part:
    with _said(folder, said):
        return Part(Tensors(folder), folder, said)


@contextlib.contextmanager
def _said(folder: Path, said: str) -> Iterator[None]:
    """Let an `InputError` name a client's word for a folder, in the place of the folder."""
    try:
        yield
    except InputError as error:
        message = str(error).replace(f"model={str(folder)!r}", said)
        raise InputError(message.replace(f"{BODY}: {SINGLE}", BODY)) from None


def _check_header(begin: bytearray) -> None:
    num_bytes = int.from_bytes(begin[:LENGTH_BYTES], "little")
    if not 2 <= num_bytes <= MOST_HEADER_BYTES:
        message = f"the body must be a safetensors file with a header of at most {MOST_HEADER_BYTES} bytes"
        raise ApiError(400, message, headers=CLOSE)


async def _timely(chunks: AsyncIterator[bytes], limit_s: float) -> AsyncIterator[bytes]:
    """Yield chunks. Raises `TimeoutError` where one does not come within the limit."""
    while True:
        async with asyncio.timeout(limit_s):
            chunk = await anext(chunks, None)
        if chunk is None:
            return
        yield chunk
