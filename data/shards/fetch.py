"""From what a recipe names (folder, glob, braces, URL, pipe) to shards, and from a shard to a plain local
tar.

Local uncompressed tar files are read where they lie. Everything else (.gz, .zst, URLs, pipes) is streamed
once into the cache ($EF_CACHE/shards, or the option cache_dir) and read from there; a pipe's cache is named
by its command, so delete it to run the command again.

URLs are read by fsspec, but http by the standard library, which needs no further package and takes no more
bytes than were asked for, whatever a server sends.
"""

from __future__ import annotations

import fcntl
import glob
import gzip
import io
import json
import logging
import math
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any
from urllib.parse import unquote, urlsplit

from braceexpand import braceexpand
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.shards.index import Count
from earlyfusion.kernels.files import replacing

TAR_ENDS = (".tar", ".tar.gz", ".tgz", ".tar.zst")
MANIFEST = "index.json"
UNPACKED_RATIO, UNPACKED_FREE = 100, 256 << 20
"""Unpacked bytes for each packed one that are believed, once there are more than UNPACKED_FREE."""
LOG = logging.getLogger("earlyfusion.data")
_MOST_SHARDS = 1_000_000
_SMALL = 32 << 20
"""Most bytes of an index.json, that of 40,000 shards: a JSON of lists takes 25 times as much memory when it
is parsed."""


def cache_root() -> Path:
    """Where derived files live: $EF_CACHE, else ~/.cache/earlyfusion."""
    return Path(os.environ.get("EF_CACHE") or Path.home() / ".cache" / "earlyfusion")


# ---- names


def is_url(path: str) -> bool:
    """Whether `path` is a URL and not a local path (file:// counts as a URL)."""
    return "://" in path


def is_folder(path: str) -> bool:
    """Whether `path` is a folder of shards: a local one, or a URL that names neither one shard nor a
    pattern."""
    if path.startswith("pipe:") or any(c in path for c in "*{["):
        return False
    local = as_local(path)
    return local.is_dir() if local is not None else not path.split("?")[0].endswith(TAR_ENDS)


def as_local(url: str) -> Path | None:
    """The local path of a plain path or file:// URL; None for everything else."""
    if url.startswith("pipe:"):
        return None
    if url.startswith("file://"):
        return Path(unquote(urlsplit(url).path))
    return None if is_url(url) else Path(url).expanduser()


def short_names(urls: Sequence[str]) -> list[str]:
    """File names, with as much of the folders as keeps them apart. A pipe is named by its whole command."""
    plain = [url if url.startswith("pipe:") else url.rstrip("/").rpartition("/")[2] for url in urls]
    if len(set(plain)) == len(plain):
        return plain
    parts = [url.split("/") for url in urls]
    shared = next((i for i, column in enumerate(zip(*parts)) if len(set(column)) > 1), 0)
    return ["/".join(part[shared:]) for part in parts]


def expand(path: str) -> list[str]:
    """Every shard that `path` names, in order.

    A folder (its index.json, else every tar in it), a glob, braces (a-{000..012}.tar), a URL of any of these,
    or `pipe:command` (braces too). Raises DataError when nothing is found.
    """
    shards: list[str] = []
    for pattern in braces(path):
        local = as_local(pattern)
        if pattern.startswith("pipe:"):
            found = [pattern]
        elif local is None:
            found = _expand_url(pattern)
        else:
            found = _expand_local(local)
        if not found:
            raise DataError(
                f"no shard at {pattern}: expected a folder with {', '.join(TAR_ENDS)} files or {MANIFEST}, a"
                " glob, braces or a URL"
            )
        shards += found
    return shards


def braces(path: str) -> list[str]:
    """The patterns that the braces of a path stand for. Raises DataError for unbalanced ones and for over a
    million."""
    if "{" not in path:
        return [path]

    # Counted before any is made: ranges, letters and lists inside one another multiply.
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)", path)
    sizes = [abs(int(b) - int(a)) + 1 if len(a) + len(b) < 30 else _MOST_SHARDS + 1 for a, b in ranges]
    sizes += [52] * len(re.findall(r"\{[A-Za-z]\.\.[A-Za-z]", path))
    sizes += [part.count(",") + 1 for part in re.findall(r"\{[^{}]*\}", path)]
    if math.prod(sizes) > _MOST_SHARDS or path.count("{") > 64:
        raise DataError(f"{path!r:.200}: its braces stand for more than {_MOST_SHARDS:,} files; name fewer")

    try:
        return list(braceexpand(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path!r:.200}: {error}; write braces as a-{{000..012}}.tar") from None


def _expand_local(path: Path) -> list[str]:
    if path.is_file():
        return [str(path)]
    if not path.is_dir():
        return sorted(name for name in glob.glob(str(path), recursive=True) if name.endswith(TAR_ENDS))

    tars = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(TAR_ENDS))
    tars = [name for name in tars if not name.startswith(".")]
    below = [tar.relative_to(path).as_posix() for tar in path.rglob("*") if tar.name.endswith(TAR_ENDS)]
    present = tars or sorted(below)
    manifest = read_manifest(str(path))
    if manifest is None:
        return [str(path / name) for name in present]

    listed = [entry["name"] for entry in manifest["shards"]]
    if more := set(present) - set(listed):
        LOG.warning("%s: not in its %s and left out: %s", path, MANIFEST, ", ".join(sorted(more)[:5]))
    return [str(path / name) for name in listed]


def _expand_url(url: str) -> list[str]:
    if url.split("?")[0].endswith(TAR_ENDS) and "*" not in url:
        return [url]
    manifest = None if "*" in url else read_manifest(url)
    if manifest:
        return [f"{url.rstrip('/')}/{entry['name']}" for entry in manifest["shards"]]
    fs, inside = file_system(url)
    found = fs.glob(inside if "*" in inside else f"{inside.rstrip('/')}/*")
    return [fs.unstrip_protocol(name) for name in sorted(found) if name.endswith(TAR_ENDS)]


# ---- index.json of a folder


TOTALS = ("samples", "items", "bytes", "tokens", "patches", "media")
"""Sums in an index.json; the tables beside them count by name."""
TABLES = ("formats", "skipped", "token_histogram", "patch_histogram")


class _Listed(BaseModel):
    """One shard in an index.json."""

    model_config = ConfigDict(extra="allow")

    name: str
    samples: Annotated[Count, Field(lt=1 << 40)]
    bytes: Count


class _Manifest(BaseModel):
    """An index.json, as far as anything in it is read later."""

    model_config = ConfigDict(extra="allow")

    shards: list[_Listed]
    samples: StrictInt = 0
    items: StrictInt = 0
    bytes: StrictInt = 0
    tokens: StrictInt = 0
    patches: StrictInt = 0
    media: StrictInt = 0
    formats: dict[str, Count] = {}
    skipped: dict[str, Count] = {}
    token_histogram: dict[str, Count] = {}
    patch_histogram: dict[str, Count] = {}


def read_manifest(folder: str) -> dict[str, Any] | None:
    """The index.json of a folder of shards written by `earlyfusion prepare`; None when there is none, or
    another's.

    Raises DataError for a damaged one, and for shard names that leave the folder.
    """
    try:
        raw = read_whole(f"{folder.rstrip('/')}/{MANIFEST}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or "earlyfusion_shards" not in manifest:
        LOG.warning("%s/%s is not of earlyfusion prepare; not used", folder, MANIFEST)
        return None

    try:
        _Manifest.model_validate(manifest)
    except ValidationError:
        raise DataError(
            f"{folder}/{MANIFEST}: damaged; prepare the folder again, or delete this file"
        ) from None
    names = [entry["name"] for entry in manifest["shards"]]
    if any("/" in name or "\\" in name or name.startswith(".") for name in names):
        raise DataError(f"{folder}/{MANIFEST}: shard names must be plain file names, got {names[:3]}")
    return manifest


# ---- bytes


def file_system(url: str) -> tuple[Any, str]:
    """(fsspec file system, path in it); raises DataError when fsspec or the protocol's package is missing."""
    try:
        import fsspec
    except ImportError:
        raise DataError(f"{url}: reading URLs needs fsspec; pip install 'earlyfusion[shards]'") from None
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(f"{url}: {error}; write it as protocol://path, of a protocol fsspec knows") from None


def read_whole(url: str) -> bytes:
    """All bytes of a small file; raises FileNotFoundError when there is none, DataError when it is not
    small."""
    with open_stream(url) as stream:
        data = stream.read(_SMALL + 1)
    if len(data) > _SMALL:
        raise DataError(f"{url}: more than {_SMALL >> 20} MiB; not read")
    return data


@contextmanager
def open_stream(url: str) -> Iterator[IO[bytes]]:
    """A readable byte stream of a path, a URL or a pipe.

    Raises FileNotFoundError when there is nothing there, DataError for other failures to open.
    """
    local = as_local(url)
    if url.startswith("pipe:"):
        from webdataset.gopen import gopen

        try:
            with gopen(url) as stream:
                yield stream
        except OSError as error:
            raise DataError(f"{url}: the command failed ({error}); run it by hand") from None
        return
    if local is not None:
        opened: Any = local.open("rb")
    elif _is_http(url):
        opened = _open_http(url)
    else:
        fs, inside = file_system(url)
        opened = fs.open(inside, "rb")
    with opened as stream:
        yield stream


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _open_http(url: str, headers: dict[str, str] | None = None) -> Any:
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise FileNotFoundError(url) from None
        raise DataError(f"{url}: the server answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise DataError(f"{url}: cannot be reached ({error.reason})") from None


def ranged_reader(url: str) -> Callable[[int, int], bytes]:
    """pread(offset, size) on a remote file, one request each."""
    fs, inside = (None, "") if _is_http(url) else file_system(url)

    def read(offset: int, size: int) -> bytes:
        if not size:
            return b""
        if fs is not None:
            part: bytes = fs.cat_file(inside, start=offset, end=offset + size)
            return part
        with _open_http(url, {"Range": f"bytes={offset}-{offset + size - 1}"}) as answer:
            if answer.status != 206:
                raise DataError(f"{url}: the server gives no byte ranges; use remote = 'cache'")
            part = answer.read(size)
            return part

    return read


def stamp(url: str) -> list[object]:
    """What changes when the file behind `url` does: size and time, or what the remote side tells of it."""
    local = as_local(url)
    if local is not None:
        status = local.stat()
        return [status.st_size, status.st_mtime_ns]
    if url.startswith("pipe:") or _is_http(url):
        return []
    fs, inside = file_system(url)
    info = fs.info(inside)
    return [info.get("size"), str(info.get("ETag") or info.get("mtime") or info.get("LastModified") or "")]


# ---- copies in the cache


_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def plain_copy(url: str, cache: Path) -> Path:
    """A local uncompressed file with the content of `url`: itself when it is one, else its copy in `cache`.

    A stream that is compressed and torn gives what could be read of it. Raises DataError when nothing can be
    opened.
    """
    local = as_local(url)
    try:
        if local is not None:
            with local.open("rb") as file:
                if not file.read(4).startswith((_GZIP, _ZSTD)):
                    return local
        name = "pipe" if url.startswith("pipe:") else urlsplit(url).path.rpartition("/")[2]
        name = name.removesuffix(".gz").removesuffix(".zst").replace(".tgz", ".tar")
        target = cache / f"{digest64('copy', url, *stamp(url)):016x}-{name}"
        with locked(target):
            if not target.is_file():
                LOG.warning("streaming %s once into %s", url, target)
                _copy(url, target)
    except (FileNotFoundError, IsADirectoryError):
        raise DataError(f"{url}: no such file") from None
    except OSError as error:
        raise DataError(f"{url}: cannot be read, or copied to {cache} ({error.strerror or error})") from None
    return target


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Only one process at a time makes `target`; the lock ends with the process."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _copy(url: str, target: Path) -> None:
    with replacing(target, sync=False) as temporary, temporary.open("wb") as out, open_stream(url) as packed:
        raw = _Counted(packed)
        stream = io.BufferedReader(raw, 1 << 20)
        unpacked = _unpacked(stream)
        while block := _next_block(unpacked, url, torn_is_end=unpacked is not stream):
            out.write(block)
            if unpacked is not stream and out.tell() > max(UNPACKED_FREE, UNPACKED_RATIO * raw.taken):
                raise DataError(
                    f"{url}: unpacks to more than {UNPACKED_RATIO} times its size ({out.tell() >> 20} MiB so"
                    " far); unpack it by hand if that is meant"
                )


class _Counted(io.RawIOBase):
    """A stream that counts the bytes taken from it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.taken = stream, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self.taken += len(data)
        return len(data)


def _unpacked(stream: Any) -> Any:
    """The stream behind gzip or zstd, told by its first bytes; any other stream as it is."""
    head = stream.peek(4)
    if head.startswith(_GZIP):
        return gzip.GzipFile(fileobj=stream)
    if head.startswith(_ZSTD):
        try:
            import zstandard
        except ImportError:
            raise DataError(".zst files need zstandard; pip install 'earlyfusion[shards]'") from None
        return zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
    return stream


def _next_block(stream: Any, url: str, torn_is_end: bool) -> bytes:
    """The next bytes of a stream; none at its end, or where a compressed one is torn."""
    read = getattr(stream, "read1", stream.read)  # gzip's read() would lose what stands before a tear
    try:
        block: bytes = read(1 << 18)
    except Exception as error:  # zlib.error, EOFError, BadGzipFile, ZstdError, ...
        if not torn_is_end:
            raise
        LOG.warning("%s: the compressed stream is torn (%s); what came before is used", url, error)
        return b""
    return block
