"""What runs without a GPU runs where there is no fcntl, and by Windows' rules for paths and files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import pytest
from checkpoints import environment

from normswap import native
from normswap.checkpoint import files

UNIX_ONLY = ("fcntl", "grp", "pwd", "resource", "termios")

WITHOUT = f"""
import sys
import threading  # what the standard library has already taken stays out of the way

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {UNIX_ONLY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

for name in {UNIX_ONLY!r}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Blocked())
"""

WHOLE_WAY = """
import torch
from pathlib import Path
from torch import nn
import normswap
from normswap import cli, native
from normswap.checkpoint import convert, load_model

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU())

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(4, 8)
    fast = normswap.optimize(model, x)
    torch.testing.assert_close(fast(x), model(x))
    assert len(normswap.report(fast).swapped) == 2 and not native.status().available
    torch.save(model.state_dict(), "net.pt")
    Path("shards").mkdir()
    torch.save(model.state_dict(), "shards/pytorch_model.bin")
    for source, out in (("net.pt", "out.safetensors"), ("shards", "out")):
        convert(source, out, factory="whole:Net", validate="off", device="cpu")
        again = load_model(out, trust_factory=True)
        torch.testing.assert_close(again.eval()(x), model(x))
    print("fcntl" in sys.modules, "ran")
"""


@pytest.mark.parametrize("blocked", [False, True])
def test_everything_on_a_cpu_without_fcntl(tmp_path: Path, blocked: bool) -> None:
    (tmp_path / "whole.py").write_text((WITHOUT if blocked else "import sys\n") + WHOLE_WAY)
    env = {**environment(), "XDG_CACHE_HOME": str(tmp_path / "cache"), "NORMSWAP_BUILD": "never"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "whole.py"], cwd=tmp_path, env=env, text=True, capture_output=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "ran" and (done.stdout.split()[-2] == "False" or not blocked)


@pytest.mark.parametrize(
    ("name", "posix", "windows"),
    [
        ("net.safetensors", True, True),
        ("a b-c.d", True, True),
        ("c:net", True, False),  # the file net of wherever drive c is
        ("..", False, False),
        ("a/b", False, False),
        ("a\\b", False, False),
        (".hidden", False, False),
    ],
)
def test_plain_names(monkeypatch: pytest.MonkeyPatch, name: str, posix: bool, windows: bool) -> None:
    assert files.is_plain(name) is posix
    monkeypatch.setattr(files, "PurePath", PureWindowsPath)
    assert files.is_plain(name) is windows


@pytest.mark.parametrize(
    ("name", "posix", "windows"),
    [
        ("deep/net.pt", True, True),
        ("deep\\net.pt", True, True),
        ("deep\\..\\..\\net.pt", True, False),
        ("c:net.pt", True, False),
        ("c:/net.pt", True, False),
        ("\\\\host\\share\\net.pt", True, False),
        ("\\net.pt", True, False),
        ("/net.pt", False, False),
        ("a/../b", False, False),
        ("", False, False),
    ],
)
def test_what_a_journal_may_name(monkeypatch: pytest.MonkeyPatch, name: str, posix: bool, windows: bool) -> None:
    assert files.is_inside(name) is posix
    monkeypatch.setattr(files, "PurePath", PureWindowsPath)
    assert files.is_inside(name) is windows


def test_files_are_replaced_where_folders_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: a folder has no descriptor, and only who may write a file can flush it."""
    real_open, real_sync = os.open, os.fsync
    writable: set[int] = set()

    def opened(path: str | Path, flags: int, *arguments: object) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        descriptor = real_open(path, flags, *arguments)  # type: ignore[arg-type]
        (writable.add if flags & (os.O_RDWR | os.O_WRONLY) else writable.discard)(descriptor)
        return descriptor

    def flushed(descriptor: int) -> None:
        if descriptor not in writable:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real_sync(descriptor)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(files, "_WINDOWS", True)
    (tmp_path / "one").write_text("old")
    with files.replacing(force=True) as replacement:
        for name in ("one", "two", "deep/three"):
            replacement.write(tmp_path / name, lambda path: path.write_text("new"))
    found = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == dict.fromkeys(("one", "two", "deep/three"), "new")


def test_targets_on_two_drives_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another_drive(path: Path, start: Path) -> str:
        if "elsewhere" in str(path):
            raise ValueError("path is on mount 'D:', start on mount 'C:'")
        return str(Path(path).relative_to(start))

    monkeypatch.setattr(os.path, "relpath", another_drive)
    for name in ("elsewhere", "here"):
        (tmp_path / name).mkdir()
    with files.replacing(force=True) as replacement:
        for name in ("elsewhere/one", "here/two"):
            replacement.write(tmp_path / name, lambda path: path.write_text("new"))
    assert [(tmp_path / name).read_text() for name in ("elsewhere/one", "here/two")] == ["new", "new"]


def test_a_cache_that_cannot_be_written_stops_no_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with files.replacing(force=True) as replacement:
        for name in ("one", "two"):
            replacement.write(tmp_path / name, lambda path: path.write_text("new"))
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text() == "new"


@pytest.mark.parametrize("system", ["Windows", "Darwin"])
def test_elsewhere_than_on_linux_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: str
) -> None:
    monkeypatch.setattr(native, "LINUX", False)
    monkeypatch.setattr(native.platform, "system", lambda: system)
    monkeypatch.setattr(native, "_cuda_available", lambda: True)
    monkeypatch.setattr(native, "PACKAGE", tmp_path)
    monkeypatch.setattr(native, "build", lambda: pytest.fail("compiled"))
    for name, value in {"_status": None, "_available": False, "_compiled_in_vain": False, "_warned": False}.items():
        monkeypatch.setattr(native, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match=f"PyTorch's own ops serve: the kernels are compiled on Linux only.*{system}"):
        assert not native.load(build=True).available
