"""From what a recipe names (folder, glob, braces, URL, pipe) to shards, and from a shard to a plain local
tar.

Local uncompressed tar files are read where they lie. Everything else (.gz, .zst, URLs, pipes) is streamed
once into the cache ($EF_CACHE/shards, or the option cache_dir) and read from there; a pipe's cache is named
by its command, so delete it to run the command again.

URLs are read by fsspec, but http by the standard library, which needs no further package and takes no more
bytes than were asked for, whatever a server sends.
"""

import fcntl
import glob
import gzip
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any
from urllib.parse import unquote, urlsplit

from braceexpand import braceexpand
from pydantic import BaseModel, ConfigDict, Field

from earlyfusion.data.errors import DataError
from earlyfusion.data.loading.order import digest64
from earlyfusion.data.shards.remote import LOG, file_system, patiently
from earlyfusion.kernels.files import Record, replacing

TAR_ENDS = (".tar", ".tar.gz", ".tgz", ".tar.zst")
MANIFEST = "index.json"
HTTP = ("http://", "https://")
_BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Answers of a server that may be other ones a moment later."""
UNPACKED_RATIO, UNPACKED_FREE = 100, 256 << 20
"""Unpacked bytes for each packed one that are believed, once there are more than UNPACKED_FREE."""
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 48)]
"""A number of bytes or samples; no file has more, so that a number beyond is damage."""
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
    # A command may hold anything, also what looks like a path.
    if path.startswith("pipe:") or any(c in path for c in "*{["):
        return False
    local = as_local(path)
    return local.is_dir() if local is not None else not path.split("?")[0].endswith(TAR_ENDS)


def as_local(url: str) -> Path | None:
    """The local path of a plain path or file:// URL; None for everything else."""
    if url.startswith("pipe:"):
        return None
    # Percent signs are part of a URL and not of a path.
    if url.startswith("file://"):
        return Path(unquote(urlsplit(url).path))
    return None if is_url(url) else Path(url).expanduser()


def short_names(urls: Sequence[str]) -> list[str]:
    """File names, with as much of the folders as keeps them apart. A pipe is named by its whole command."""
    # Names decide what is held out, so they must not change with the place of the folder.
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
        # Every pattern must name something: a typing error in one is not hidden by the others.
        found = _found(pattern)
        if not found:
            raise DataError(
                f"no shard at {pattern}: expected a folder with {', '.join(TAR_ENDS)} files or {MANIFEST}, a"
                " glob, braces or a URL"
            )
        shards += found
    return shards


def _found(pattern: str) -> list[str]:
    """The shards of one pattern without braces."""
    local = as_local(pattern)
    if pattern.startswith("pipe:"):
        return [pattern]
    if not is_folder(pattern):
        if local is None:
            return _remote(pattern) if "*" in pattern else [pattern]
        return [str(local)] if local.is_file() else sorted(glob.glob(str(local), recursive=True))

    # What a preparation wrote says which files belong to it, without listing a remote folder.
    base = str(local or pattern).rstrip("/")
    manifest = read_manifest(base)
    if manifest is not None:
        return [f"{base}/{entry['name']}" for entry in manifest["shards"]]
    if local is None:
        return _remote(f"{base}/*")
    paths = [path for path in local.rglob("*") if path.name.endswith(TAR_ENDS)]
    # A preparation under way has temporary files with a dot; folders count where there is no shard here.
    tops = [path for path in paths if path.parent == local and not path.name.startswith(".")]
    return sorted(str(path) for path in tops or paths)


def _remote(pattern: str) -> list[str]:
    fs, inside = file_system(pattern)
    return [
        fs.unstrip_protocol(name)
        for name in sorted(patiently(pattern, partial(fs.glob, inside)))
        if name.endswith(TAR_ENDS)
    ]


def braces(path: str) -> list[str]:
    """The patterns that the braces of a path stand for. Raises DataError for unbalanced ones and for over a
    million."""
    # Counted before any is made, since ranges and lists multiply; what is no number is too many as well.
    count = 1.0
    for a, b in re.findall(r"\{(-?\d+)\.\.(-?\d+)", path):
        count *= abs(float(b) - float(a)) + 1
    for _ in re.findall(r"\{[A-Za-z]\.\.[A-Za-z]", path):
        count *= 52
    for part in re.findall(r"\{[^{}]*\}", path):
        count *= part.count(",") + 1
    if not count <= _MOST_SHARDS or path.count("{") > 64:
        raise DataError(f"{path!r:.200}: its braces stand for more than {_MOST_SHARDS:,} files; name fewer")

    try:
        return list(braceexpand(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path!r:.200}: {error}; write braces as a-{{000..012}}.tar") from None


# ---- index.json of a folder


TOTALS = ("samples", "items", "bytes", "tokens", "patches", "media")
"""Sums in an index.json; the tables beside them count samples by name."""
TABLES = ("formats", "skipped")


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
    samples: Count = 0
    items: Count = 0
    bytes: Count = 0
    tokens: Count = 0
    patches: Count = 0
    media: Count = 0
    formats: dict[str, Count] = {}
    skipped: dict[str, Count] = {}


def read_manifest(folder: str) -> Record | None:
    """The index.json of a folder of shards written by `earlyfusion prepare`; None when there is none, or
    another's.

    Raises DataError for a damaged one, and for shard names that leave the folder.
    """

    def read() -> bytes:
        # One byte more than allowed tells that there is more.
        with open_stream(f"{folder.rstrip('/')}/{MANIFEST}") as stream:
            return stream.read(_SMALL + 1)

    try:
        raw = read() if as_local(folder) is not None else patiently(folder, read)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(raw) > _SMALL:
        raise DataError(f"{folder}/{MANIFEST}: more than {_SMALL >> 20} MiB; not read")
    # Other tools write an index.json, too; theirs is no error.
    if b'"earlyfusion_shards"' not in raw:
        LOG.warning("%s/%s is not of earlyfusion prepare; not used", folder, MANIFEST)
        return None

    try:
        manifest: Record = json.loads(raw)
        _Manifest.model_validate(manifest)
    except (ValueError, RecursionError):
        raise DataError(
            f"{folder}/{MANIFEST}: damaged; prepare the folder again, or delete this file"
        ) from None
    names = [entry["name"] for entry in manifest["shards"]]
    # A name with a path in it could lead to any file of this machine.
    if any("/" in name or "\\" in name or name.startswith(".") for name in names):
        raise DataError(f"{folder}/{MANIFEST}: shard names must be plain file names, got {names[:3]}")
    return manifest


# ---- bytes


@contextmanager
def open_stream(url: str) -> Iterator[IO[bytes]]:
    """A readable byte stream of a path, a URL or a pipe.

    Raises FileNotFoundError when there is nothing there, DataError when a server refuses, and what
    `patiently` tries again.
    """
    local = as_local(url)
    try:
        if local is not None:
            opened: Any = local.open("rb")
        elif url.startswith("pipe:"):
            from webdataset.gopen import gopen  # slow to import, and few need it

            opened = gopen(url)
        elif url.startswith(HTTP):
            opened = urllib.request.urlopen(url, timeout=60)
        else:
            fs, inside = file_system(url)
            opened = fs.open(inside, "rb")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise FileNotFoundError(url) from None
        if error.code in _BUSY:
            raise
        raise DataError(f"{url}: the server answers {error.code} {error.reason}") from None
    with opened as stream:
        yield stream


def stamp(url: str) -> list[object]:
    """What changes when the file behind `url` does: size and time, or what the remote side tells of it."""
    local = as_local(url)
    if local is not None:
        status = local.stat()
        return [status.st_size, status.st_mtime_ns]
    # Nothing cheap can be asked of these: the copy stays until it is deleted.
    if url.startswith(("pipe:", *HTTP)):
        return []
    fs, inside = file_system(url)
    info = patiently(url, partial(fs.info, inside))
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
        # Readable in the cache, for whoever looks for what fills the disk.
        name = "pipe" if url.startswith("pipe:") else urlsplit(url).path.rpartition("/")[2]
        name = name.removesuffix(".gz").removesuffix(".zst").replace(".tgz", ".tar")
        target = cache / f"{digest64('copy', url, *stamp(url)):016x}-{name}"
        with locked(target):
            if not target.is_file():
                LOG.warning("streaming %s once into %s", url, target)
                if local is not None or url.startswith("pipe:"):
                    _copy(url, target)
                else:
                    patiently(url, partial(_copy, url, target))
    except (FileNotFoundError, IsADirectoryError):
        raise DataError(f"{url}: no such file") from None
    except OSError as error:
        why = error.strerror or error
        if url.startswith("pipe:"):
            why = f"the command failed: {why}; run it by hand"
        raise DataError(f"{url}: cannot be read, or copied to {cache} ({why})") from None
    return target


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Only one process at a time makes `target`; the lock ends with the process."""
    # A file of its own for the lock: the target itself is replaced.
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Counted:
    """A stream whose first bytes are known, how many bytes were taken from it, and whether it failed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        # What a server or a file system says of the length, before anything is read.
        self._length = getattr(stream, "length", None) or getattr(stream, "size", None) or 0
        self.head = self._rest = stream.read(4)
        self.taken, self.failed = 0, False

    def read(self, size: int) -> bytes:
        # Whoever unpacks it reads the first bytes again.
        self.failed = True
        data = self._rest[:size] or self._stream.read(size)
        if not data and size and self.taken < self._length:
            raise OSError(f"{self.taken} of {self._length} bytes came")
        self._rest = self._rest[len(data) :]
        self.taken += len(data)
        self.failed = False
        return data


def _copy(url: str, target: Path) -> None:
    with replacing(target, sync=False) as temporary, temporary.open("wb") as out, open_stream(url) as stream:
        packed = _Counted(stream)
        unpacked: Any = packed
        if packed.head.startswith(_GZIP):
            unpacked = gzip.GzipFile(fileobj=packed)  # type: ignore[call-overload]  # asks for read() alone
        elif packed.head.startswith(_ZSTD):
            unpacked = _zstd(packed)

        while block := _next_block(unpacked, url, packed):
            out.write(block)
            # A few bytes may unpack to any number.
            if unpacked is not packed and out.tell() > max(UNPACKED_FREE, UNPACKED_RATIO * packed.taken):
                raise DataError(
                    f"{url}: unpacks to more than {UNPACKED_RATIO} times its size ({out.tell() >> 20} MiB so"
                    " far); unpack it by hand if that is meant"
                )


def _zstd(packed: Any) -> Any:
    try:
        import zstandard
    except ImportError:
        raise DataError(".zst files need zstandard; pip install 'earlyfusion[shards]'") from None
    return zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)


def _next_block(stream: Any, url: str, packed: _Counted) -> bytes:
    """The next bytes of a stream; none at its end, or where a compressed one is torn."""
    read = getattr(stream, "read1", stream.read)  # gzip's read() would lose what stands before a tear
    try:
        block: bytes = read(1 << 18)
    except Exception as error:  # zlib.error, EOFError, BadGzipFile, ZstdError, ...
        # A connection that breaks off is no torn file.
        if stream is packed or packed.failed:
            raise
        LOG.warning("%s: the compressed stream is torn (%s); what came before is used", url, error)
        return b""
    return block
