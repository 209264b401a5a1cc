"""Child processes that do not outlive what started them: each has a process group of its own, which is ended whole."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

GRACE_S = 5.0
"""For what a process does when it is told to end."""
_groups: set[int] = set()
_ending = threading.Event()
_alone = threading.Lock()


def run(command: Sequence[str], limit_s: float | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """``command``, with what it writes. When it ends, or after ``limit_s``, whatever it started ends with it; the
    ``returncode`` is then that of a killed process. Raises SystemExit once ``end_all`` was called."""
    with tempfile.TemporaryFile("w+") as written, tempfile.TemporaryFile("w+") as errors:
        with _alone:
            if _ending.is_set():
                raise SystemExit("ended by a signal")
            process = subprocess.Popen(command, stdout=written, stderr=errors, start_new_session=True, **options)
            _groups.add(process.pid)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        finally:
            _end(process.pid)
            process.wait()
            _groups.discard(process.pid)
        texts = [file.seek(0) or file.read() for file in (written, errors)]
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended by itself
        os.killpg(group, signal.SIGKILL)


def end_all() -> None:
    """Kill every group that runs; no more are started."""
    with _alone:
        _ending.set()
        for group in [*_groups]:
            _end(group)


def end_with_this_process() -> None:
    """From now on SIGTERM and SIGINT, such as ``timeout`` sends, end this process and with it its children. Where it
    waits in C, as for a GPU, no code of its own would run: after GRACE_S it is said where, and ended."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def handle(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    def watch() -> None:
        number = os.read(reader, 1)[0]  # C writes it there, whatever Python does
        end_all()
        time.sleep(GRACE_S)
        faulthandler.dump_traceback()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=watch, daemon=True).start()
