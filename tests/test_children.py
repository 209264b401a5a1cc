"""What scripts/gpu_check starts ends with it, with all that it started itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import children
import pytest

SCRIPTS = Path(children.__file__).parent
# Starts a process that would live on, says which, and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(float(sys.argv[2]))
"""
RUNS = """
import concurrent.futures, sys, children
children.end_with_this_process()
command = [sys.executable, "-c", sys.argv[1], sys.argv[2], "600"]
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    found = [pool.submit(children.run, command) for _ in range(2)]
    [one.result() for one in found]
"""

# Waits for a lock of C's that it has itself, which no signal interrupts.
STUCK = """
import ctypes, children
children.GRACE_S = 0.5
children.end_with_this_process()
lock, of_c = ctypes.create_string_buffer(128), ctypes.CDLL(None)
print("there", flush=True)
for _ in range(2):
    of_c.pthread_mutex_lock(lock)
"""


def pid_in(file: Path) -> int:
    for _ in range(600):
        if file.is_file() and file.read_text():
            return int(file.read_text())
        time.sleep(0.05)
    raise AssertionError("it was not started")


def assert_ends(pid: int) -> None:
    for _ in range(200):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("it lives on")


@pytest.mark.parametrize("seconds", (0.0, 600.0), ids=("by itself", "at the limit"))
def test_what_a_child_started_ends_when_it_ends(tmp_path: Path, seconds: float) -> None:
    file = tmp_path / "pid"
    done = children.run([sys.executable, "-c", PARENT, str(file), str(seconds)], limit_s=5.0 if seconds else None)
    assert (done.returncode == 0) == (seconds == 0.0)
    assert_ends(pid_in(file))


def test_what_it_writes_comes_back() -> None:
    done = children.run([sys.executable, "-c", "import sys; print(1); print(2, file=sys.stderr); sys.exit(3)"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "1\n", "2\n")


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_ends_children_and_starts_no_more(tmp_path: Path, number: int) -> None:
    file, env = tmp_path / "pid", {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    with subprocess.Popen(
        [sys.executable, "-c", RUNS, PARENT, str(file)], env=env, stderr=subprocess.DEVNULL
    ) as process:
        pid = pid_in(file)
        file.unlink()
        process.send_signal(number)
        assert process.wait(30) not in (0, None)
    assert_ends(pid)
    assert not file.exists()


def test_a_process_that_waits_in_c_is_ended_and_says_where(tmp_path: Path) -> None:
    env, stuck = {**os.environ, "PYTHONPATH": str(SCRIPTS)}, tmp_path / "stuck.py"
    stuck.write_text(STUCK)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, stuck], env=env, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "there\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            process.kill()
        assert f'"{stuck}", line 8 in <module>' in process.stderr.read()
