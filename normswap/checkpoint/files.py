"""Files replaced all together or not at all, also when the process is killed half-way.

What is written lies under hidden names until it is complete and on the disk. One rename then shows it; where several
are needed, a journal in the folder says so first, and whoever reads or writes there next goes by the journal.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from filelock import FileLock
from platformdirs import user_cache_path

JOURNAL = ".normswap-journal.json"

_CHUNK = 1 << 20
_PLAIN = re.compile(r"[^/\\\0.][^/\\\0]*")
_LONGEST = 200  # bytes; file systems take 255, of which a hidden name needs some
_WINDOWS = os.name == "nt"


@contextmanager
def replacing() -> Iterator[Replacement]:
    """A ``with`` block whose files appear at its end: complete, or none of them.

    Each file is written under a hidden name and flushed to the disk; leaving the block renames them in the order of
    ``write``. When a write, a rename or the block itself raises, the targets and their folders are as they were. A
    folder that was not there appears by one rename, with all that is in it. A kill between several renames leaves a
    journal: ``present`` then shows every file of the block as new, and ``settle`` finishes the renames.
    """
    files = Replacement()
    try:
        yield files
        files.rename()
    except BaseException:
        files.restore()
        raise
    files.sync_folders()


class Replacement:
    """What ``replacing`` yields: files written under hidden names, to be renamed together."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(6)
        self._moves: list[tuple[Path, Path]] = []
        self._moved: list[tuple[Path, Path, Path | None]] = []
        self._folders: dict[Path, Path] = {}
        self._given: dict[Path, Path] = {}
        self._staged: dict[Path, Path] = {}
        self._backups: list[Path] = []
        self._journal: Path | None = None

    def write(self, path: Path, writer: Callable[[Path], object]) -> Path:
        """Let ``writer`` fill a new file that shall replace ``path``; returns where it lies until then.

        Symlinks are followed: the file they name is replaced. Missing folders are made. The mode is the umask's.
        Raises OSError, and whatever ``writer`` raises.
        """
        target = Path(os.path.realpath(path))
        self._given[target] = path
        temporary = self._staged[target] = self._place(target)
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = stat.S_IMODE(temporary.stat().st_mode)
        writer(temporary)
        temporary.chmod(mode)  # safetensors puts a file of its own, mode 0600, in the place of ours
        _sync(temporary)
        return temporary

    def staged(self, path: Path) -> Path:
        """Where ``path`` lies until the block ends: its hidden name if it is written in it, else its own."""
        return self._staged.get(Path(os.path.realpath(path)), path)

    def rename(self) -> None:
        """Put every file in its target's place. Raises OSError; ``restore`` then undoes what was done."""
        for folder in {place.parent for place, _ in self._moves} | set(_below(self._folders.values())):
            _sync(folder)
        if len(self._moves) == 1:  # one rename is atomic: there is no half to go back from
            os.replace(*self._moves[0])
            return
        if self._moves:
            settle(self._home())
            with _alone():
                self._write_journal()
                for temporary, target in self._moves:
                    backup = self._backup(target)
                    os.replace(temporary, target)
                    self._moved.append((temporary, target, backup))
                self._end_journal()
        self._remove_backups()

    def restore(self) -> None:
        """Put the targets and folders back as they were before the block."""
        for temporary, target, backup in reversed(self._moved):
            os.replace(target, temporary)  # as long as the journal is there, this counts as the new file
            if backup is not None:
                os.replace(backup, target)
        self._moved.clear()
        if self._journal is not None:
            self._journal.unlink(missing_ok=True)
        for temporary, _ in self._moves:
            if temporary in self._folders.values():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                _discard(temporary)
        self._remove_backups()

    def sync_folders(self) -> None:
        """Flush the renames themselves to the disk. They have happened: a disk that refuses is no reason to fail."""
        for folder in {target.parent for _, target in self._moves}:
            with contextlib.suppress(OSError):
                _sync(folder)

    def _place(self, target: Path) -> Path:
        """Where ``target`` is written: beside it, or in the hidden folder that shall become its missing one."""
        missing = [folder for folder in target.parents if not folder.exists()]
        if not missing:
            self._moves.append((_hidden(target, self._token), target))
            return self._moves[-1][0]
        top = missing[-1]
        if top not in self._folders:
            self._folders[top] = _hidden(top, self._token)
            self._moves.append((self._folders[top], top))
            self._folders[top].mkdir()
        place = self._folders[top] / target.relative_to(top)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _home(self) -> Path:
        """The folder of the file written last: the one that vouches for the others."""
        target = self._moves[-1][1]
        return Path(os.path.realpath(self._given.get(target, target).parent))

    def _name(self, target: Path, home: Path) -> str:
        """What ``target`` is called from ``home``, before symlinks are followed, with slashes; "" on another drive."""
        given = self._given.get(target, target)
        try:
            return Path(os.path.relpath(Path(os.path.realpath(given.parent)) / given.name, home)).as_posix()
        except ValueError:
            return ""

    def _write_journal(self) -> None:
        """From the rename in here on, the block counts as done."""
        home = self._home()
        names = [name for _, target in self._moves if _is_inside(name := self._name(target, home))]
        journal = home / JOURNAL
        temporary = _hidden(journal, self._token)
        self._backups.append(temporary)
        temporary.write_text(json.dumps({"token": self._token, "names": names}), encoding="utf-8")
        _sync(temporary)
        self._journal = journal
        os.replace(temporary, journal)
        _sync(home)

    def _end_journal(self) -> None:
        self.sync_folders()
        if self._journal is not None:
            self._journal.unlink()
        self._journal = None
        self._moved.clear()

    def _backup(self, target: Path) -> Path | None:
        if not target.exists():
            return None
        backup = target.with_name(f".{target.name}.{self._token}.old.tmp")
        self._backups.append(backup)
        try:
            os.link(target, backup)
        except OSError:  # a file system without hard links
            shutil.copyfile(target, backup)
        return backup

    def _remove_backups(self) -> None:
        for backup in self._backups:
            _discard(backup)


def present(path: Path) -> Path:
    """Where the file ``path`` lies now: under its own name, or, after a kill, still under its hidden one."""
    token, names = _journal(path.parent)
    hidden = _hidden(Path(os.path.realpath(path)), token) if path.name in names else path
    return hidden if hidden.exists() else path


def settle(folder: Path) -> None:
    """Finish the renames that a killed process left behind in ``folder``. Raises OSError."""
    if not (folder / JOURNAL).is_file():
        return
    with _alone():
        token, names = _journal(folder)
        for name in names:
            target = Path(os.path.realpath(folder / name))
            if _hidden(target, token).exists():
                os.replace(_hidden(target, token), target)
            target.with_name(f".{target.name}.{token}.old.tmp").unlink(missing_ok=True)
        _sync(folder)
        (folder / JOURNAL).unlink(missing_ok=True)


def is_plain(name: object) -> bool:
    """Whether ``name`` is the name of a file: no path, on no drive, not hidden, not too long."""
    return (
        isinstance(name, str)
        and _PLAIN.fullmatch(name) is not None
        and not PurePath(name).drive
        and len(name.encode(errors="replace")) <= _LONGEST
    )


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _journal(folder: Path) -> tuple[str, list[str]]:
    """The token and names of a folder's journal; nothing where there is none, or none of ours."""
    try:
        data = json.loads((folder / JOURNAL).read_bytes())
        token, names = data["token"], data["names"]
        if re.fullmatch("[0-9a-f]{12}", token) and all(_is_inside(name) for name in names):
            return token, names
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return "", []


def _is_inside(name: str) -> bool:
    path = PurePath(name)
    return bool(path.parts) and ".." not in path.parts and not path.anchor and "\0" not in name


def _hidden(target: Path, token: str) -> Path:
    return target.with_name(f".{target.name}.{token}.tmp")


def _discard(path: Path) -> None:
    """Remove a hidden file that means nothing any more; one that cannot be removed is no reason to fail."""
    with contextlib.suppress(OSError):
        path.unlink()


def _below(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        yield folder
        yield from (path for path in folder.rglob("*") if path.is_dir())


@contextmanager
def _alone() -> Iterator[None]:
    """One process of this user at a time is in such a block; where the cache cannot be written, nobody waits."""
    lock = FileLock(user_cache_path("normswap") / "replacing.lock")
    with contextlib.suppress(OSError):
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.release()


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk. Windows flushes names by itself, and a file only for who may
    write it."""
    if _WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if _WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
