"""Files replaced all together or not at all, also when the process is killed half-way.

What is written lies under hidden names until it is complete and on the disk. The rename of the last file, the manifest,
makes it count: it says under which token the others lie, and whoever reads or writes there next finishes their renames.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

CHUNK = 8 << 20

_PLAIN = re.compile(r"[^/\\\0.][^/\\\0]*|\.metadata")
_LONGEST = 200  # bytes; file systems take 255, of which a hidden name needs some
_WINDOWS = os.name == "nt"
_FICLONE = 0x40049409  # linux/fs.h: the copy shares its blocks until one of the two is written


@contextmanager
def replacing() -> Iterator[Replacement]:
    """A ``with`` block whose files appear at its end: complete, or none of them.

    Each is written under a hidden name and flushed to the disk. The file written last is renamed first; from then on
    the block counts as done. When something before that raises, the targets and their folders are as they were. A
    folder that was not there appears by one rename, with all that is in it.
    """
    files = Replacement()
    try:
        yield files
        files.commit()
    except BaseException:
        files.discard()
        raise
    files.finish()


class Replacement:
    """What ``replacing`` yields. ``token`` is the part of the hidden names that ``settle`` must be told of."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(6)
        self._moves: dict[Path, Path] = {}  # hidden: target
        self._staged: dict[Path, Path] = {}
        self._last: Path | None = None
        self._tops: dict[Path, Path] = {}

    def write(self, path: Path, writer: Callable[[Path], object]) -> Path:
        """Let ``writer`` fill a new file that shall replace ``path``; returns where it lies until then.

        Symlinks are followed: the file they name is replaced. Missing folders are made. The mode is the umask's.
        Raises OSError, and whatever ``writer`` raises.
        """
        target = Path(os.path.realpath(path))
        temporary = self._staged[target] = self._place(target)
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = stat.S_IMODE(temporary.stat().st_mode)
        writer(temporary)
        temporary.chmod(mode)  # safetensors puts a file of its own, mode 0600, in the place of ours
        sync(temporary)
        return temporary

    def staged(self, path: Path) -> Path:
        """Where ``path`` lies until the block ends: its hidden name if it is written in it, else its own."""
        return self._staged.get(Path(os.path.realpath(path)), path)

    def commit(self) -> None:
        """Rename what holds the file written last. Raises OSError."""
        inside = {place for top in self._tops.values() for place in (top, *top.rglob("*")) if place.is_dir()}
        for folder in {place.parent for place in self._moves} | inside:
            sync(folder)
        if self._last is not None:
            target = self._moves[self._last]
            with _locked(target.parent) as folder:
                settle(target)
                os.replace(self._last, target)
                del self._moves[self._last]
                sync_folder(folder)
                self._rename()

    def discard(self) -> None:
        """Remove what was written."""
        for temporary in self._moves:
            shutil.rmtree(temporary, ignore_errors=True) if temporary in self._tops.values() else _unlink(temporary)

    def finish(self) -> None:
        """Flush the renames themselves to the disk. They have happened: a disk that refuses is no reason to fail."""
        for folder in {target.parent for target in self._staged}:
            sync_folder(folder)

    def _rename(self) -> None:
        """What is renamed here counts as done already."""
        for temporary, target in self._moves.items():
            try:
                os.replace(temporary, target)
            except OSError as error:
                warnings.warn(f"{target}: still lies in {temporary.name} ({error}); it is found there", stacklevel=6)
        self._moves.clear()

    def _place(self, target: Path) -> Path:
        """Where ``target`` is written: beside it, or in the hidden folder that shall become its missing one."""
        missing = [folder for folder in target.parents if not folder.exists()]
        if not missing:
            self._last = hidden(target, self.token)
            self._moves[self._last] = target
            return self._last
        top = missing[-1]
        if top not in self._tops:
            self._tops[top] = hidden(top, self.token)
            self._moves[self._tops[top]] = top
            self._tops[top].mkdir()
        self._last = self._tops[top]
        place = self._last / target.relative_to(top)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place


def settle(manifest: Path) -> None:
    """Finish the renames of the block that wrote ``manifest``, were it killed before its end. Raises OSError."""
    for temporary, target in _left(manifest):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.replace(temporary, target)
            sync_folder(target.parent)


def _left(manifest: Path) -> Iterator[tuple[Path, Path]]:
    """What a manifest says was written with it and still has its hidden name."""
    try:
        data = json.loads(manifest.read_bytes())
        token, names = data["token"], data["written"]
        if not re.fullmatch("[0-9a-f]{12}", token) or not all(map(is_inside, names)):
            return
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    for name in names:
        target = Path(os.path.realpath(manifest.parent / name))
        if hidden(target, token).is_file():
            yield hidden(target, token), target


def copy_file(source: Path, target: Path, progress: Callable[[int], object] | None = None) -> None:
    """Copy the bytes of ``source`` into ``target``, sharing them where the file system can; ``progress`` is told of the
    bytes of each piece. Raises OSError."""
    with open(source, "rb") as file, open(target, "wb") as into:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system that cannot, or two of them
                fcntl.ioctl(into.fileno(), _FICLONE, file.fileno())
                return
        while piece := file.read(CHUNK):
            into.write(piece)
            if progress is not None:
                progress(len(piece))


def sha256(path: Path, progress: Callable[[int], object] | None = None) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal. Raises OSError."""
    digest, buffer = hashlib.sha256(), bytearray(CHUNK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            if progress is not None:
                progress(count)
    return digest.hexdigest()


def is_plain(name: object) -> bool:
    """Whether ``name`` is the name of a file: no path, not hidden, not too long, and no file of another drive's."""
    return (
        isinstance(name, str)
        and _PLAIN.fullmatch(name) is not None
        and not PurePath(name).anchor
        and not PurePath(name).drive
        and len(name.encode(errors="replace")) <= _LONGEST
    )


def is_inside(name: object) -> bool:
    """Whether ``name`` is a relative path that leads nowhere outside its folder, by this system's rules."""
    if not isinstance(name, str) or "\0" in name:
        return False
    path = PurePath(name)
    return bool(path.parts) and ".." not in path.parts and not path.anchor and not path.drive


def hidden(target: Path, token: str) -> Path:
    """The name under which ``target`` is written."""
    return target.with_name(f".{target.name}.{token}.tmp")


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """One process at a time renames in ``folder``; where folders have no locks, one process of this user at all."""
    if fcntl is None or _WINDOWS:
        lock = FileLock(user_cache_path("normswap") / "replacing.lock")
        with contextlib.suppress(OSError):  # a cache that cannot be written
            Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        try:
            yield folder
        finally:
            lock.release()
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # it means nothing any more
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Flush a folder's names, where the disk lets one."""
    with contextlib.suppress(OSError):
        sync(folder)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk. Windows flushes names by itself, and a file only for who may
    write it. Raises OSError."""
    if _WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if _WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
