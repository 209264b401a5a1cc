"""A kill at any moment and a disk that refuses leave the old checkpoint or the new one, never half of one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import REPOSITORY, SITES, ZOO, environment, forget_zoo, randomized, snapshot, write_shards
from disk_faults import CONVERSIONS, Fault, disk_full
from disk_faults import run as run_conversion

from normswap.checkpoint import CheckpointError, build_model, convert, load_model, same_tensors
from normswap.modules import site_match

OPENED = {
    **{"new file": "out.safetensors", "new folder": "deep/out"},
    **{"file replaced": "old/net.safetensors", "source kept": "old/net.pt"},
}
"""What load_model is to open after a conversion, where it is not the folder "old"."""

NEW = ("new file", "new folder")
"""The conversions before which there was nothing to open."""

OLDER = {"factory": "zoo:net", "device": "cpu", "validate": "off", "exclude": "norm"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for each conversion, with a new checkpoint and the conversion of an older one, or of the same, that
    leaves out a site."""
    base = tmp_path_factory.mktemp("base")
    (base / "zoo.py").write_text(ZOO)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(base))
        forget_zoo()
        new, old = (randomized(build_model("zoo:net"), seed).state_dict() for seed in (1, 2))
        for name in CONVERSIONS:
            (base / name).mkdir()
            patch.chdir(base / name)
            torch.save(new, "new.pt")
            write_shards(Path("shards"), new, ".safetensors", 3)
        torch.save(old, base / "old.pt")
        write_shards(base / "older", old, ".safetensors", 3)
        convert(base / "old.pt", base / "file replaced/old/net.safetensors", **OLDER)
        convert(base / "older", base / "folder replaced/old", **OLDER)
        (base / "source kept/old").mkdir()
        shutil.copy("new.pt", base / "source kept/old/net.pt")
        convert(base / "source kept/old/net.pt", None, **OLDER)
        shutil.copytree("shards", base / "in place/old")
        convert(base / "in place/old", None, **OLDER)
        yield base
        forget_zoo()


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What tests/disk_faults.py leaves behind."""
    runs = tmp_path_factory.mktemp("runs")
    command = [sys.executable, str(REPOSITORY / "tests" / "disk_faults.py"), str(base), str(runs)]
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    return runs


def opened(folder: Path, name: str, base: Path) -> str:
    """Which conversion is there: "none", "old" or "new", checked to be whole."""
    try:
        model = load_model(folder / OPENED.get(name, "old"), trust_factory=True)
    except CheckpointError as error:
        assert name in NEW and "no such file" in str(error)
        return "none"
    swapped = {name for name, module in model.named_modules() if site_match(module) is not None}
    assert swapped in (SITES, SITES - {"norm"})
    found = "new" if swapped == SITES else "old"
    expected = base / ("old.pt" if found == "old" and name.endswith("replaced") else f"{name}/new.pt")
    assert same_tensors(model.state_dict(), torch.load(expected))
    return found


def check_files(folder: Path, *wholes: Path) -> None:
    """Every file in sight is, whole, as it is in one of the folders ``wholes``."""
    found, *allowed = (in_sight(place) for place in (folder, *wholes))
    for name, content in found.items():
        assert content in [place[name] for place in allowed if name in place], name


def in_sight(folder: Path) -> dict[str, Any]:
    """The files under ``folder`` that are not hidden, manifests without their time and token."""
    found = {name: content for name, content in snapshot(folder).items() if "/." not in f"/{name}"}
    for name in [name for name in found if name.endswith("normswap.json")]:
        found[name] = {**json.loads(found[name]), "proof": None, "token": None}
    return found


def check_repeated(folder: Path, name: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was killed can be done again, with nothing in the way."""
    monkeypatch.chdir(folder)
    convert(**{**CONVERSIONS[name], "force": True}, factory="zoo:net", device="cpu", validate="off")
    assert opened(folder, name, base) == "new"


@pytest.mark.case("killed")
@pytest.mark.parametrize("name", CONVERSIONS)
def test_killed_at_every_step(base: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    *killed, done = sorted(path for path in (runs / "steps" / name).iterdir() if path.is_dir())
    steps = json.loads((done.parent / "steps.json").read_text())
    assert done.name == "done 0" and len(killed) == len(steps) and {"write", "fsync", "replace"} <= set(steps)
    outcomes = []
    for folder in killed:
        outcomes.append(opened(folder, name, base))
        check_files(folder, base / name, done)
    assert opened(done, name, base) == "new" and outcomes[0] == ("none" if name in NEW else "old")
    assert outcomes == sorted(outcomes, key=["none", "old", "new"].index)
    for folder in killed[::5]:
        check_repeated(folder, name, base, monkeypatch)


@pytest.mark.case("killed")
@pytest.mark.parametrize("name", CONVERSIONS)
def test_killed_at_random_moments(base: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    *killed, done = sorted((runs / "random" / name).iterdir())
    assert done.name == "done 0" and opened(done, name, base) == "new" and len(killed) == 10
    for folder in killed:
        assert opened(folder, name, base) in ("none", "old", "new")
        check_files(folder, base / name, done)
        check_repeated(folder, name, base, monkeypatch)


@pytest.mark.case("full-disk")
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_disk_that_is_full_at_every_step(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for at in range(1, 1000):
        folder = shutil.copytree(base / name, tmp_path / f"{at}")
        before = snapshot(folder)
        fault = Fault(at, disk_full)
        told = ""
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            fault.install(patch.setattr)
            try:
                run_conversion(name, folder)
            except CheckpointError as error:
                told = str(error)
        if told:
            assert "No space left on device" in told and "\n" not in told
            assert snapshot(folder) == before, (at, fault.steps)
        else:
            assert opened(folder, name, base) == "new"
        if len(fault.steps) < at:
            break
    assert at > 5


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from normswap.cli import main
sys.argv = ["normswap", *sys.argv[2:]]
main()
"""


@pytest.mark.case("full-disk")
@pytest.mark.parametrize(
    ("name", "source", "out", "limit"),
    [("folder replaced", "shards", "old", 0), ("file replaced", "new.pt", "old/net.safetensors", 3000)],
)
def test_a_file_size_limit(base: Path, tmp_path: Path, name: str, source: str, out: str, limit: int) -> None:
    folder = shutil.copytree(base / name, tmp_path / "run")
    shutil.copy(base / "zoo.py", folder)
    before = snapshot(folder)
    options = ["--model", "zoo:net", "--device", "cpu", "--validate", "off", "--force", "-q"]
    command = [sys.executable, "-c", LIMITED, str(limit), "convert", source, out, *options]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == "", done
    assert done.stderr.startswith(f"normswap: {out}") and "cannot be written" in done.stderr
    assert done.stderr.count("\n") == 1
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        {"token": "../../../x"},
        {"token": "0" * 12, "written": ["../../outside"]},
        {"token": "0" * 12, "written": ["/etc/hostname", 3]},
        {"token": 3, "written": 4},
    ],
)
def test_a_manifest_of_somebody_else(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """It names what shall be renamed: nothing outside the folder, and nothing under a token that is not one."""
    folder = shutil.copytree(base / "in place", tmp_path / "run")
    (tmp_path / ".outside.000000000000.tmp").write_text("outside")
    manifest = json.loads((folder / "old/normswap.json").read_text())
    (folder / "old/normswap.json").write_text(json.dumps({**manifest, **change}))
    if "written" in change:
        with pytest.raises(CheckpointError, match="has no (token|written), or not one of its kind"):
            load_model(folder / "old", trust_factory=True)
    else:
        assert opened(folder, "in place", base) == "old"
    check_repeated(folder, "in place", base, monkeypatch)
    assert (tmp_path / ".outside.000000000000.tmp").read_text() == "outside"
