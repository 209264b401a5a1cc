"""Conversions that are killed, or whose disk refuses, at a chosen step. Run as a script it kills many, each in a
process forked from one that has PyTorch loaded, and leaves what each left behind in a folder of its own."""

from __future__ import annotations

import builtins
import errno
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from normswap.checkpoint import convert, tensors, writing

CONVERSIONS: dict[str, dict[str, Any]] = {
    "new file": {"source": "new.pt", "out": "out.safetensors"},
    "file replaced": {"source": "new.pt", "out": "old/net.safetensors", "force": True},
    "new folder": {"source": "shards", "out": "deep/out"},
    "folder replaced": {"source": "shards", "out": "old", "force": True},
    "source kept": {"source": "old/net.pt", "out": "old/net.pt", "force": True},
    "in place": {"source": "old", "out": None, "force": True},
}
"""Arguments of convert, each over files that tests/test_disk_faults.py puts into a folder of that name."""


def run(name: str, folder: Path) -> None:
    """One of CONVERSIONS, in ``folder``."""
    os.chdir(folder)
    convert(**CONVERSIONS[name], factory="zoo:net", device="cpu", validate="off")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Fault:
    """Counts the calls by which a conversion changes the disk, and at number ``at`` (from 1) does ``act`` instead. A
    write is then half done: the first half of what it writes is in the file."""

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self.at, self.act = at, act
        self.steps: list[str] = []
        self._lock = threading.Lock()  # files are flushed by a thread

    def install(self, setattr: Callable[..., object] = setattr) -> None:
        for name in ("open", "fsync", "replace", "link", "unlink", "mkdir", "chmod"):
            setattr(os, name, self._before(name, getattr(os, name)))
        setattr(writing, "copy_file", self._half("write", writing.copy_file, 1))
        setattr(tensors, "save_file", self._half("write", tensors.save_file, 1))
        setattr(Path, "write_text", self._half("write", Path.write_text, 0))
        vars(tensors)["open"] = builtins.open
        setattr(tensors, "open", self._opener)

    def reached(self, name: str) -> bool:
        """Whether this step, which is counted, is the one."""
        with self._lock:
            self.steps.append(name)
            return len(self.steps) == self.at

    def _step(self, name: str) -> None:
        if self.reached(name):
            self.act()

    def _before(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._step(name)
            return real(*arguments, **options)

        return call

    def _half(self, name: str, real: Callable[..., Any], position: int) -> Callable[..., Any]:
        """``real``, which fills the file named by its argument at ``position``."""

        def call(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            if self.reached(name):
                os.truncate(arguments[position], os.path.getsize(arguments[position]) // 2)
                self.act()
            return result

        return call

    def _opener(self, path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = builtins.open(path, mode, *arguments, **options)  # noqa: SIM115 (the caller's with closes it)
        return _Writer(file, self) if "w" in mode else file


class _Writer:
    """A file whose every write is a step."""

    def __init__(self, file: Any, fault: Fault) -> None:
        self._file, self._fault = file, fault

    def write(self, content: Any) -> int:
        if self._fault.reached("write"):
            self._file.write(bytes(content)[: len(bytes(content)) // 2])
            self._file.flush()
            self._fault.act()
        return self._file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def forked(work: Callable[[], object]) -> int:
    """The id of a process that does ``work`` and ends with 0."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def ended(child: int) -> int:
    """How a process ended: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at_every_step(name: str, base: Path, into: Path) -> None:
    """A conversion killed at its first step, another at its second, and so on to one that is done."""
    for at in range(1, 1000):
        folder = shutil.copytree(base, into / f"{at:03}")

        def work(at: int = at, folder: Path = folder) -> None:
            fault = Fault(at, die)
            fault.install()
            run(name, folder)
            with builtins.open(into / "steps.json", "w") as file:
                json.dump(fault.steps, file)

        code = ended(forked(work))
        if code != -signal.SIGKILL:
            folder.rename(into / f"done {code}")
            return


def killed_at_random(name: str, base: Path, into: Path) -> None:
    """Ten conversions, each killed at a random moment of the time that one takes."""
    folder = shutil.copytree(base, into / "whole")
    started = time.perf_counter()
    code = ended(forked(lambda: run(name, folder)))
    taken = time.perf_counter() - started
    folder.rename(into / f"done {code}")
    moments = random.Random(7)
    for number in range(10):
        folder = shutil.copytree(base, into / f"{number:03}")
        child = forked(lambda folder=folder: run(name, folder))  # type: ignore[misc]
        time.sleep(moments.uniform(0, taken))
        os.kill(child, signal.SIGKILL)
        ended(child)


def main(base: Path, into: Path) -> None:
    """Every conversion killed at every step, in into/steps/NAME, and at random moments, in into/random/NAME."""
    torch.set_num_threads(1)  # threads do not survive a fork
    sys.path.insert(0, str(base))
    for name in CONVERSIONS:
        warm = shutil.copytree(base / name, into / "warm")
        run(name, warm)  # imports the model and traces it, once for all that are forked
        shutil.rmtree(warm)
        for kind, kill in (("steps", killed_at_every_step), ("random", killed_at_random)):
            (into / kind / name).mkdir(parents=True)
            kill(name, base / name, into / kind / name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
