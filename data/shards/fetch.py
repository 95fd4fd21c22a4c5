"""From what a recipe names (folder, glob, braces, URL, pipe) to shards, and from a shard to a plain local
tar.

Local uncompressed tar files are read where they lie. Everything else (.gz, .zst, URLs, pipes) is streamed
once into the cache ($EF_CACHE/shards, or the option cache_dir) and read from there; a pipe's cache is named
by its command, so delete it to run the command again.
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
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import digest64

TAR_ENDS = (".tar", ".tar.gz", ".tgz", ".tar.zst")
MANIFEST = "index.json"
_MOST_SHARDS = 1_000_000
_SMALL = 32 << 20
"""Most bytes of an index.json, that of 40,000 shards: a JSON of lists takes 25 times as much memory when it
is parsed."""
_RATIO, _FREE = 100, 256 << 20
"""Unpacked bytes for each packed one that are believed, once there are more than _FREE."""
LOG = logging.getLogger("earlyfusion.data")


def cache_root() -> Path:
    """Where derived files live: $EF_CACHE, else ~/.cache/earlyfusion."""
    return Path(os.environ.get("EF_CACHE") or Path.home() / ".cache" / "earlyfusion")


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


def file_system(url: str) -> tuple[Any, str]:
    """(fsspec file system, path in it); raises DataError when fsspec or the protocol's package is missing."""
    try:
        import fsspec
    except ImportError:
        raise DataError(f"{url}: reading URLs needs fsspec; pip install 'earlyfusion[shards]'") from None
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DataError(f"{url}: {error}") from None
    except ValueError as error:
        raise DataError(
            f"{url}: {error}; write it as protocol://path with a protocol that fsspec knows"
        ) from None


def expand(path: str) -> list[str]:
    """Every shard that `path` names, in order.

    A folder (its index.json, else every tar in it), a glob, braces (a-{000..012}.tar), a URL of any of these,
    or `pipe:command` (braces too). Raises DataError when nothing is found.
    """
    return [shard for pattern in braces(path) for shard in _expand_one(pattern)]


def braces(path: str) -> list[str]:
    """The patterns that the braces of a path stand for. Raises DataError for unbalanced ones and for over a
    million."""
    from braceexpand import braceexpand

    if "{" not in path:
        return [path]
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)", path)
    sizes = [abs(int(b) - int(a)) + 1 if len(a) + len(b) < 30 else _MOST_SHARDS + 1 for a, b in ranges]
    sizes += [52] * len(re.findall(r"\{[A-Za-z]\.\.[A-Za-z]", path))
    alternatives = [part.count(",") + 1 for part in re.findall(r"\{[^{}]*\}", path)]
    if math.prod(sizes) * math.prod(alternatives) > _MOST_SHARDS or path.count("{") > 64:
        raise DataError(f"{path!r:.200}: its braces stand for more than {_MOST_SHARDS:,} files; name fewer")
    try:
        return list(braceexpand(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path!r:.200}: {error}; write braces as a-{{000..012}}.tar") from None


def _expand_one(path: str) -> list[str]:
    if path.startswith("pipe:"):
        return [path]
    local = as_local(path)
    if local is None:
        return _expand_url(path)
    if local.is_dir():
        manifest = read_manifest(str(local))
        names = [entry["name"] for entry in manifest["shards"]] if manifest else _tars_below(local)
        if manifest and (more := set(_tars_below(local)) - set(names)):
            LOG.warning("%s: not in its %s and left out: %s", local, MANIFEST, ", ".join(sorted(more)[:5]))
        found = [str(local / name) for name in names]
    elif any(c in str(local) for c in "*?["):
        found = sorted(name for name in glob.glob(str(local), recursive=True) if name.endswith(TAR_ENDS))
    else:
        found = [str(local)] if local.is_file() else []
    if not found:
        raise DataError(
            f"no shard at {path}: expected a folder with {', '.join(TAR_ENDS)} files, a glob, braces or a URL"
        )
    return found


def _tars_below(folder: Path) -> list[str]:
    here = sorted(
        entry.name for entry in folder.iterdir() if entry.name.endswith(TAR_ENDS) and entry.name[0] != "."
    )
    return here or sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.name.endswith(TAR_ENDS)
    )


def _expand_url(url: str) -> list[str]:
    if url.split("?")[0].endswith(TAR_ENDS) and "*" not in url:
        return [url]
    manifest = None if "*" in url else read_manifest(url)
    if manifest:
        return [f"{url.rstrip('/')}/{entry['name']}" for entry in manifest["shards"]]
    fs, inside = file_system(url)
    pattern = inside if "*" in inside else f"{inside.rstrip('/')}/*"
    found = sorted(name for name in fs.glob(pattern) if name.endswith(TAR_ENDS))
    if not found:
        raise DataError(f"no shard at {url}: expected {', '.join(TAR_ENDS)} files or an {MANIFEST}")
    return [fs.unstrip_protocol(name) for name in found]


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
    if not _whole_manifest(manifest):
        raise DataError(f"{folder}/{MANIFEST}: damaged; prepare the folder again, or delete this file")
    names = [entry["name"] for entry in manifest["shards"]]
    if any("/" in name or "\\" in name or name.startswith(".") for name in names):
        raise DataError(f"{folder}/{MANIFEST}: shard names must be plain file names, got {names[:3]}")
    return manifest


TOTALS = ("samples", "items", "bytes", "tokens", "patches", "media")
"""Sums in an index.json; the tables beside them count by name."""
TABLES = ("formats", "skipped", "token_histogram", "patch_histogram")


def _whole_manifest(manifest: dict[str, Any]) -> bool:
    """Whether everything in an index.json that is read later is of its kind."""

    def count(value: object) -> bool:
        return type(value) is int and 0 <= value < 1 << 40

    shards = manifest.get("shards")
    entries = isinstance(shards, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and count(entry.get("samples"))
        and type(entry.get("bytes")) is int
        and 0 <= entry["bytes"] < 1 << 48
        for entry in shards
    )
    tables = [manifest[name] for name in TABLES if name in manifest]
    sums = all(type(manifest[name]) is int for name in TOTALS if name in manifest)
    return entries and sums and all(isinstance(t, dict) and all(map(count, t.values())) for t in tables)


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
    """A readable byte stream of a path, a URL (http by the standard library, others by fsspec) or a pipe.

    Raises FileNotFoundError when there is nothing there, DataError for other failures to open.
    """
    local = as_local(url)
    if local is not None:
        with local.open("rb") as file:
            yield file
    elif url.startswith("pipe:"):
        from webdataset.gopen import gopen

        try:
            with gopen(url) as stream:
                yield stream
        except OSError as error:
            raise DataError(f"{url}: the command failed ({error}); run it by hand") from None
    elif url.startswith(("http://", "https://")):
        with _open_http(url) as stream:
            yield stream
    else:
        fs, inside = file_system(url)
        with fs.open(inside, "rb") as stream:
            yield stream


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
    if url.startswith(("http://", "https://")):

        def over_http(offset: int, size: int) -> bytes:
            if not size:
                return b""
            with _open_http(url, {"Range": f"bytes={offset}-{offset + size - 1}"}) as answer:
                if answer.status != 206:
                    raise DataError(f"{url}: the server gives no byte ranges; use remote = 'cache'")
                return answer.read(size)  # no more than was asked for, whatever is sent

        return over_http
    fs, inside = file_system(url)
    return lambda offset, size: fs.cat_file(inside, start=offset, end=offset + size) if size else b""


def stamp(url: str) -> list[object]:
    """What changes when the file behind `url` does: size and time, or what the remote side tells of it."""
    local = as_local(url)
    if local is not None:
        status = local.stat()
        return [status.st_size, status.st_mtime_ns]
    if url.startswith(("pipe:", "http://", "https://")):
        return []
    fs, inside = file_system(url)
    info = fs.info(inside)
    return [info.get("size"), str(info.get("ETag") or info.get("mtime") or info.get("LastModified") or "")]


def plain_copy(url: str, cache: Path) -> Path:
    """A local uncompressed file with the content of `url`: itself when it is one, else its copy in `cache`.

    A stream that is compressed and torn gives what could be read of it. Raises DataError when nothing can be
    opened.
    """
    local = as_local(url)
    if local is not None and not _compressed(local):
        return local
    try:
        name = "pipe" if url.startswith("pipe:") else urlsplit(url).path.rpartition("/")[2]
        name = name.removesuffix(".gz").removesuffix(".zst").replace(".tgz", ".tar")
        target = cache / f"{digest64('copy', url, *stamp(url)):016x}-{name}"
        with locked(target):
            if not target.is_file():
                LOG.warning("streaming %s once into %s", url, target)
                _copy(url, target)
    except (FileNotFoundError, IsADirectoryError):
        raise DataError(f"{url}: no such file") from None
    return target


def _compressed(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return head[:2] == b"\x1f\x8b" or head == b"\x28\xb5\x2f\xfd"


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Only one process at a time makes `target`; the lock ends with the process."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _copy(url: str, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open_stream(url) as packed, temporary.open("wb") as out:
            raw = _Counted(packed)
            for block in _blocks(url, raw):
                out.write(block)
                if raw.packed and out.tell() > max(_FREE, _RATIO * raw.taken):
                    raise DataError(
                        f"{url}: unpacks to more than {_RATIO} times its size ({out.tell() >> 20} MiB so"
                        " far); unpack it by hand if that is meant"
                    )
        temporary.replace(target)
    except OSError as error:
        if isinstance(error, FileNotFoundError | IsADirectoryError):
            raise
        raise DataError(f"{url}: cannot be copied to {target.parent} ({error.strerror or error})") from None
    finally:
        temporary.unlink(missing_ok=True)


class _Counted:
    """A stream that counts the bytes taken from it; `packed` when they are compressed."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.taken, self.packed = stream, 0, False

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.taken += len(data)
        return data


def _blocks(url: str, raw: _Counted) -> Iterator[bytes]:
    """The unpacked stream in blocks, as far as it can be read."""
    stream = decompressed(raw)
    raw.packed = not isinstance(stream, io.BufferedReader)
    read = getattr(stream, "read1", stream.read)  # gzip's read() would lose what stands before a tear
    while True:
        try:
            block = read(1 << 18)
        except Exception as error:  # zlib.error, EOFError, BadGzipFile, ZstdError, ...
            if not raw.packed:
                raise
            LOG.warning("%s: the compressed stream is torn (%s); what came before is used", url, error)
            return
        if not block:
            return
        yield block


class _Rejoined(io.RawIOBase):
    """A stream whose first bytes were read to see what it is."""

    def __init__(self, head: bytes, rest: Any) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head[: len(buffer)] if self._head else self._rest.read(len(buffer))
        self._head = self._head[len(data) :] if self._head else b""
        buffer[: len(data)] = data
        return len(data)


def decompressed(raw: Any) -> Any:
    """The stream behind gzip or zstd, told by its first bytes; any other stream as it is."""
    head = raw.read(4)
    stream = io.BufferedReader(_Rejoined(head, raw), 1 << 20)
    if head[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=stream)
    if head == b"\x28\xb5\x2f\xfd":
        try:
            import zstandard
        except ImportError:
            raise DataError(".zst files need zstandard; pip install 'earlyfusion[shards]'") from None
        return zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
    return stream


def short_names(urls: Sequence[str]) -> list[str]:
    """File names, with as much of the folders as keeps them apart. A pipe is named by its whole command."""
    plain = [url if url.startswith("pipe:") else url.rstrip("/").rpartition("/")[2] for url in urls]
    if len(set(plain)) == len(plain):
        return plain
    parts = [url.split("/") for url in urls]
    shared = next((i for i, column in enumerate(zip(*parts)) if len(set(column)) > 1), 0)
    return ["/".join(part[shared:]) for part in parts]
