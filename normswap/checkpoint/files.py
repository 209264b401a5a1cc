"""Files replaced all together or not at all, also when the process is killed half-way.

What is written lies under hidden names until it is complete and on the disk. The rename of the last file, the manifest,
makes it count: it says under which token the others lie, and whoever reads or writes there next finishes their renames.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path, PurePath
from typing import Any

from blake3 import blake3

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

CHUNK = 1 << 20  # what is read at once: more takes new memory for every piece, which costs more than reading it

_WINDOWS = os.name == "nt"
_FICLONE = 0x40049409  # linux/fs.h: the copy shares its blocks until one of the two is written


class replacing:
    """A ``with`` block whose files appear at its end: complete, or none of them.

    Each is written under a hidden name, of which ``token`` is a part, and flushed to the disk. The file written last is
    renamed first and counts; when something before that raises, the targets and their folders are as they were. Where
    one of the targets is there by then and not ``force``, FileExistsError is raised."""

    def __init__(self, force: bool) -> None:
        self.force = force
        self.token = secrets.token_hex(6)
        self._hidden: dict[Path, Path] = {}  # by target
        self._made, self._synced = list[Path](), list[Future[None]]()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> replacing:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._pool.shutdown()
            if kind is None:
                self._commit()
        finally:
            for temporary in self._hidden.values():  # what is hidden means nothing, where the disk refuses this too
                with suppress(OSError):
                    temporary.unlink()
            for folder in reversed(self._made):
                with suppress(OSError):
                    folder.rmdir()

    def write(self, path: Path, writer: Callable[[Path], object]) -> Path:
        """Let ``writer`` fill a new file, of the umask's mode, that shall replace ``path``, or what a link there names.
        Missing folders are made. Returns where it lies until then. Raises OSError, and what ``writer`` raises."""
        target = Path(os.path.realpath(path))
        for folder in reversed([folder for folder in target.parents if not folder.exists()]):
            folder.mkdir()
            self._made.append(folder)
        temporary = self._hidden[target] = target.with_name(f".{target.name}.{self.token}.tmp")
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = stat.S_IMODE(temporary.stat().st_mode)
        writer(temporary)
        temporary.chmod(mode)  # safetensors puts a file of its own, mode 0600, in the place of ours
        self._synced.append(self._pool.submit(sync, temporary))  # while it is read back
        return temporary

    def _commit(self) -> None:
        for synced in self._synced:
            synced.result()
        *others, last = self._hidden
        folders = {target.parent for target in self._hidden}
        for folder in folders | {made.parent for made in self._made}:
            sync(folder)
        with ExitStack() as stack:
            if fcntl is not None and not _WINDOWS:  # one process at a time renames there
                lock = os.open(last.parent, os.O_RDONLY)
                stack.callback(os.close, lock)
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
            settle(last)
            if not self.force and (there := [target for target in self._hidden if os.path.lexists(target)]):
                raise FileExistsError(f"{there[0]} is there by now; pass force (--force) to replace it")
            os.replace(self._hidden[last], last)
            moves, self._hidden, self._made = self._hidden, {}, []  # from here on nothing is taken back
            with suppress(OSError):  # it has happened: a disk that refuses is no reason to fail
                sync(last.parent)
            for target in others:
                try:
                    os.replace(moves[target], target)
                except OSError as error:
                    left = f"{target}: still lies in {moves[target].name} ({error}); it is found there"
                    warnings.warn(left, stacklevel=4)
        for folder in folders:
            with suppress(OSError):
                sync(folder)


def settle(manifest: Path) -> None:
    """Finish the renames of the block that wrote ``manifest``, were it killed before its end. Raises OSError."""
    try:
        data = json.loads(manifest.read_bytes())
        token, names = data["token"], data["written"]
        sound = re.fullmatch("[0-9a-f]{12}", token) and all(map(is_inside, names))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    for name in names if sound else ():
        target = Path(os.path.realpath(manifest.parent / name))
        hidden = target.with_name(f".{target.name}.{token}.tmp")
        if os.path.lexists(hidden):  # else it has its name; a read-only file system refuses to be asked
            with suppress(FileNotFoundError, NotADirectoryError):  # another process was quicker
                os.replace(hidden, target)


def copy_file(source: Path, target: Path, progress: Callable[[int], object]) -> None:
    """Copy ``source`` into the empty file ``target``, sharing bytes where that can be; ``progress`` is told of each
    piece. It is not opened to be truncated: ext4 would write such a file to the disk when it is closed."""
    with open(source, "rb") as file, open(target, "r+b") as into:
        if fcntl is not None:
            with suppress(OSError):  # a file system that cannot, or two of them
                fcntl.ioctl(into.fileno(), _FICLONE, file.fileno())
                return
        while piece := file.read(CHUNK):
            into.write(piece)
            progress(len(piece))


def digest(path: Path, progress: Callable[[int], object] = lambda size: None) -> str:
    """The BLAKE3 of a file, as b3sum prints it; ``progress`` is told of its size when it is done. Raises OSError."""
    made = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    progress(path.stat().st_size)
    return made


def is_inside(name: object) -> bool:
    """Whether ``name`` is a relative path that leads nowhere outside its folder, by this system's rules."""
    if not isinstance(name, str) or "\0" in name:
        return False
    path = PurePath(name)
    return bool(path.parts) and ".." not in path.parts and not path.anchor and not path.drive


def is_plain(name: object) -> bool:
    """Whether ``name`` is the name of a file: no path, not hidden (but for .metadata), UTF-8, and not too long."""
    plain = is_inside(name) and re.fullmatch(r"(?!\.)[^/\\\ud800-\udfff]+|\.metadata", str(name))
    return bool(plain) and len(str(name).encode()) <= 200  # of 255, a hidden name is longer


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk; Windows does names by itself. Raises OSError."""
    if not (_WINDOWS and path.is_dir()):
        descriptor = os.open(path, os.O_RDWR if _WINDOWS else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
