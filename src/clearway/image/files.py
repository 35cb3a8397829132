"""Where pictures go: names, folders, and writing that neither overwrites nor leaves anything half-written."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clearway.errors import ClearwayError, RequestError, UnavailableError, one_line
from clearway.image.encode import FORMATS, DoesNotFit, encode

if TYPE_CHECKING:
    from clearway.result import Result

_NUMBERED = re.compile(r"(\d{5,7})-")  # eight digits are dates
_LONGEST_NAME_BYTES = 255
_PROBE_BYTES = 65536
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LINKS = (
    errno.EPERM,
    errno.EACCES,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
    errno.EXDEV,
)


@dataclass(frozen=True, slots=True)
class _Target:
    """`stem` None: numbered names in `folder`."""

    folder: Path
    stem: str | None
    suffix: str

    def names(self, numbers: Iterator[int], seed: int, suffix: str) -> Iterator[str]:
        for number in numbers:
            if self.stem is None:
                yield f"{number:05d}-{seed}{suffix}"
            else:
                yield f"{self.stem}{suffix}" if number == 1 else f"{self.stem}-{number}{suffix}"


def check_target(target: str | Path, count: int = 1, *, format: str = "png") -> None:
    """Raises now what `save` would raise later, so that no picture is drawn in vain. Makes no folder.

    RequestError where FILE (or NAME-2 … NAME-count beside it) exists, the path cannot be, or may not be
    written; UnavailableError where the disk is full (64 KiB are written and removed).
    """
    place = _resolve(target, format)
    try:
        if place.stem is not None:
            for name in itertools.islice(place.names(itertools.count(1), 0, place.suffix), count):
                if os.path.lexists(place.folder / name):
                    raise RequestError(
                        f"{place.folder / name} exists already and is never overwritten; "
                        "another name would work, or a folder, which numbers its pictures"
                    )
        folder = _nearest_folder(place.folder)
        temporary = _temporary(folder)
        try:
            _write(temporary, bytes(_PROBE_BYTES))
        finally:
            _remove(temporary)
    except OSError as error:
        raise _sentence(error, place, []) from error


def save(
    result: Result, target: str | Path, *, format: str = "png", evidence: str | None = None
) -> list[Path]:
    """Writes the pictures of `result` with their metadata; gives the paths, in order.

    `target` is a FILE (its suffix says the format: png, jpg, jpeg, webp) or a folder (an existing one, a name
    without suffix or one that ends in "/"), where `format` holds. Into a folder go 00001-SEED.png and so on,
    after the highest number there; into FILE go name.png, name-2.png, …. A name that is taken is passed
    over, also where another process takes it at this moment. Missing folders are made, "~" is the home
    folder. Each picture appears under its name when it is whole. One that JPEG or WebP cannot hold (sides
    over 65535 or 16383 pixels, JPEG metadata over 64 KiB) is written as PNG under the same stem: nothing is
    lost. `evidence` (JSON text) goes where the WebUI does not look: a text chunk "clearway" or EXIF
    MakerNote. Raises RequestError or UnavailableError; pictures written before stay, and are named.
    """
    if not hasattr(result, "infotexts"):
        raise RequestError(
            f"a Result was to be saved and {type(result).__name__} was given; "
            "clearway.generate gives one, and PIL.Image.fromarray saves arrays"
        )
    place = _resolve(target, format)
    saved: list[Path] = []
    try:
        _nearest_folder(place.folder)  # says what is in the way better than mkdir
        place.folder.mkdir(parents=True, exist_ok=True)
        numbers = itertools.count(1 if place.stem is not None else _next_number(place.folder))
        for image, seed, infotext in zip(result.images, result.seeds, result.infotexts, strict=True):
            suffix = place.suffix
            try:
                data = encode(image, FORMATS[suffix.lower()], infotext, evidence)
            except DoesNotFit:
                suffix = ".png"
                data = encode(image, "PNG", infotext, evidence)
            saved.append(_place(data, place.folder, place.names(numbers, seed, suffix)))
    except OSError as error:
        raise _sentence(error, place, saved) from error
    return saved


def _resolve(target: str | Path, format: str) -> _Target:
    if not isinstance(target, str | os.PathLike):
        raise RequestError(f"output {target!r} is no path; it would be a folder or a file such as apple.png")
    text = os.fspath(target)
    default = "." + format.lower().lstrip(".")
    if default not in FORMATS:
        raise RequestError(f"picture format {format!r} is not known; it is one of png, jpg, jpeg, webp")
    if not text or "\0" in text:
        raise RequestError(f"output {text!r} is no path; it would be a folder or a file such as apple.png")
    try:
        path = Path(text).expanduser()
        for part in path.parts:
            if len(os.fsencode(part)) > _LONGEST_NAME_BYTES:
                raise RequestError(
                    f"output name {part[:40]}… has {len(os.fsencode(part))} bytes; "
                    f"{_LONGEST_NAME_BYTES} are possible"
                )
        is_folder = text.endswith(("/", os.sep)) or not path.suffix or path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        shown = text if len(text) <= 100 else f"{text[:100]}…"
        reason = getattr(error, "strerror", None) or one_line(error)
        raise RequestError(
            f"output {shown!r} is no usable path ({reason}); another one would work"
        ) from error
    if is_folder:
        return _Target(path, None, default)
    if path.suffix.lower() not in FORMATS:
        raise RequestError(
            f"output {text!r}: file type {path.suffix!r} is not known; it is one of {', '.join(FORMATS)} "
            "(a new folder's name ends in '/')"
        )
    return _Target(path.parent, path.stem, path.suffix)


def _nearest_folder(folder: Path) -> Path:
    """The deepest existing folder on the way to `folder`; OSError where the way is blocked."""
    for path in (folder, *folder.parents):
        try:
            mode = os.stat(path).st_mode
        except NotADirectoryError:  # a parent is a file, and comes next
            continue
        except FileNotFoundError:
            if path.is_symlink():
                raise FileExistsError(errno.EEXIST, "broken link", str(path)) from None
            continue
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return path
    return Path()


def _next_number(folder: Path) -> int:
    with os.scandir(folder) as entries:
        found = (_NUMBERED.match(entry.name) for entry in entries)
        return max((int(match[1]) for match in found if match), default=0) + 1


def _temporary(folder: Path) -> Path:
    return folder / f".clearway-{os.getpid()}-{secrets.token_hex(8)}.tmp"


def _place(data: bytes, folder: Path, names: Iterable[str]) -> Path:
    """Writes `data` under the first of `names` that is free."""
    temporary = _temporary(folder)
    try:
        _write(temporary, data)
        for name in names:
            if _claim(temporary, folder / name):
                return folder / name
    finally:
        _remove(temporary)
    raise AssertionError("the names have an end")


def _write(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(
        os.open(path, flags, 0o666), "wb"
    ) as file:  # mkstemp's 0600 would hide shared folders' files
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _claim(temporary: Path, final: Path) -> bool:
    """Gives the written file the name `final`; False where that is taken. `temporary` may remain.

    A hard link cannot replace anything. Where the file system has none (FAT, some network folders), an empty
    file reserves the name and is replaced in one move.
    """
    try:
        os.link(temporary, final)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:
        os.close(os.open(final, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    try:
        os.replace(temporary, final)
    except BaseException:
        with contextlib.suppress(OSError):
            if final.stat().st_size == 0:  # not where the interrupt came after the move
                final.unlink()
        raise
    return True


def _sentence(error: OSError, place: _Target, saved: list[Path]) -> ClearwayError:
    where = place.folder if place.stem is None else place.folder / f"{place.stem}{place.suffix}"
    kept = f"; saved before: {', '.join(map(str, saved))}" if saved else ""
    if error.errno in _FULL:
        return UnavailableError(
            f"no space is left on the disk for {where}; another output or freeing some would work{kept}"
        )
    if error.errno in _DENIED:
        return RequestError(f"{where} may not be written here; an output in your own folder would work{kept}")
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        blocked = error.filename or place.folder
        return RequestError(
            f"{where} cannot be made: {blocked} is not a folder; another output would work{kept}"
        )
    if error.errno == errno.ENAMETOOLONG:
        return RequestError(
            f"output name {where.name[:40]}… is too long for the disk; a shorter one would work{kept}"
        )
    reason = error.strerror or str(error) or type(error).__name__
    kind = RequestError if error.errno in (errno.EINVAL, errno.EILSEQ, errno.ELOOP) else UnavailableError
    return kind(f"{where} could not be written: {reason}; another output would work{kept}")
