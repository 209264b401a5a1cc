"""Files replaced all together or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK = 1 << 20


@contextmanager
def replacing() -> Iterator[Replacement]:
    """A ``with`` block whose files appear at its end: complete, or none of them.

    Each file is written beside its target under a hidden name and flushed to the disk; leaving the block
    renames them in the order of ``write``. When a write, a rename or the block itself raises, the targets
    and their folders are as they were. A kill between two renames leaves the earlier files new and the later ones
    old, so write the file that vouches for the others last.
    """
    files = Replacement()
    try:
        yield files
        files.rename()
    except BaseException:
        files.restore()
        raise
    finally:
        files.remove_temporaries()
    files.sync_folders()


class Replacement:
    """What ``replacing`` yields: files written under hidden names, to be renamed together."""

    def __init__(self) -> None:
        self._staged: list[tuple[Path, Path]] = []
        self._replaced: list[tuple[Path, Path | None]] = []
        self._made: list[Path] = []
        self._temporary: list[Path] = []

    def write(self, path: Path, writer: Callable[[Path], object]) -> Path:
        """Let ``writer`` fill a new file that shall replace ``path``; returns where it lies until then.

        Symlinks are followed: the file they name is replaced. Missing folders are made. The mode is the umask's.
        Raises OSError, and whatever ``writer`` raises.
        """
        target = Path(os.path.realpath(path))
        self._make_folder(target.parent)
        temporary = self._temporary_name(target)
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = stat.S_IMODE(temporary.stat().st_mode)
        writer(temporary)
        temporary.chmod(mode)  # safetensors puts a file of its own, mode 0600, in the place of ours
        _sync(temporary)
        self._staged.append((temporary, target))
        return temporary

    def rename(self) -> None:
        """Put every file in its target's place. Raises OSError; ``restore`` then undoes what was done."""
        if len(self._staged) == 1:  # one rename is atomic: there is no half to go back from
            os.replace(*self._staged[0])
            return
        for temporary, target in self._staged:
            backup = self._backup(target)
            os.replace(temporary, target)
            self._replaced.append((target, backup))

    def restore(self) -> None:
        """Put the targets and folders back as they were before the block."""
        for target, backup in reversed(self._replaced):
            if backup is None:
                target.unlink()
            else:
                os.replace(backup, target)
        self.remove_temporaries()
        for folder in reversed(self._made):
            folder.rmdir()

    def remove_temporaries(self) -> None:
        """Remove every hidden file that is left."""
        for temporary in self._temporary:
            temporary.unlink(missing_ok=True)

    def sync_folders(self) -> None:
        """Flush the renames themselves to the disk."""
        for folder in {target.parent for _, target in self._staged} | {folder.parent for folder in self._made}:
            _sync(folder)

    def _backup(self, target: Path) -> Path | None:
        if not target.exists():
            return None
        backup = self._temporary_name(target)
        try:
            os.link(target, backup)
        except OSError:  # a file system without hard links
            shutil.copyfile(target, backup)
        return backup

    def _temporary_name(self, target: Path) -> Path:
        name = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
        self._temporary.append(name)
        return name

    def _make_folder(self, folder: Path) -> None:
        missing = [p for p in (folder, *folder.parents) if not p.exists()]
        for path in reversed(missing):
            path.mkdir()
            self._made.append(path)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
