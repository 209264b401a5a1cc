"""Arrays of numpy beside the tensors of a checkpoint: what comes back, and what a pickle that lies may not do."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from normswap.checkpoint import CheckpointError, open_checkpoint
from normswap.checkpoint.tensors import load_file


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def objects(*shape: int) -> Any:
    found = np.empty(shape, object)
    for number, place in enumerate(np.ndindex(shape)):
        found[place] = [number, np.arange(number), np.array(2.5)]
    return found


VALUES = {
    **{
        kind: np.arange(6, dtype=kind).reshape(2, 3) for kind in ("i1", "u2", "i8", "f2", "f8", "c8", ">i4", ">f8", "g")
    },
    **{"bool": np.array([True, False]), "str": np.array(["ab", "c"]), "bytes": np.array([b"a\0b", b""])},
    **{"big str": np.array(["ab"], ">U2"), "by columns": np.asfortranarray(np.arange(6.0).reshape(2, 3))},
    **{"objects": objects(2, 3), "objects by columns": objects(2, 3).T, "no objects": objects(0, 2)},
    **{"times": np.array(["2020-01-01T00:00:00.1"], "M8[ms]"), "big times": np.array(["2020"], ">M8[D]")},
    **{"spans": np.array([1, 2], "m8[25s]"), "times of no unit": np.array(["NaT"], "M8"), "span": np.timedelta64(3)},
    **{"0-d": np.array(3.5), "empty": np.zeros((0, 3)), "empty by columns": np.zeros((3, 0), order="F")},
    **{f"scalar {kind}": np.dtype(kind).type(1) for kind in ("i1", "u8", "f2", "f4", "g", "c16", "?", "U", "S")},
    **{"time": np.datetime64("2020-01-01"), "text": np.str_("é"), "no text": np.str_(""), "no bytes": np.bytes_(b"")},
    **{f"dtype {kind}": np.dtype(kind) for kind in ("f4", ">i2", "O", "M8[us]", "m8", "U3")},
    "nested": {"a": [np.ones(2), (np.int32(1), {np.float64(2.0): None})], "n": Namespace(x=np.ones(1), y={np.int8(3)})},
    "random": np.random.RandomState(0).get_state(),
    "size": torch.Size([2, 3]),
}


def check_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.strides) == (other.dtype, other.shape, other.strides)
        assert other.flags.writeable and other.flags.owndata
        one, other = one.tolist(), other.tolist()
    if isinstance(one, list | tuple):
        for values in zip(one, other, strict=True):
            check_equal(*values)
    elif isinstance(one, dict | Namespace):
        one, other = (list((value if isinstance(value, dict) else vars(value)).items()) for value in (one, other))
        check_equal(one, other)
    else:
        assert repr(one) == repr(other)


@pytest.mark.parametrize("name", VALUES)
def test_what_numpy_wrote_beside_the_weights_is_read_as_it_was(name: str) -> None:
    torch.save({"w": torch.ones(1), "v": VALUES[name]}, "values.pt")
    check_equal(VALUES[name], load_file(Path("values.pt"))[0]["v"])


def test_an_array_in_several_places_is_one() -> None:
    shared, inner = np.arange(3), [np.ones(1)]
    torch.save([shared, (shared,), {"a": shared}, inner, Namespace(b=inner), objects(1)], "values.pt")
    one, (two,), three, four, five, _ = load_file(Path("values.pt"))[0]
    assert one is two is three["a"] and four is five.b
    one += 1
    assert two.tolist() == [1, 2, 3]


def test_numbers_of_numpy_wherever_something_holds_them() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.scale, weight.seen = np.float32(0.5), np.arange(3)  # type: ignore[attr-defined]
    state = OrderedDict(w=weight, counts=Counter(a=np.int64(3)))
    state._metadata = OrderedDict({"": {"version": np.int64(2)}})  # type: ignore[attr-defined]
    torch.save(state, "values.pt")
    found = load_file(Path("values.pt"))[0]
    check_equal(vars(found["w"]), vars(weight))
    check_equal(found._metadata, state._metadata)
    check_equal(found["counts"], state["counts"])


def test_what_is_shared_is_read_once() -> None:
    nested: Any = (1,)
    for _ in range(60):
        nested = (nested, nested)
    torch.save({"w": torch.ones(1), "nested": nested}, "values.pt")
    found = load_file(Path("values.pt"))[0]["nested"]
    assert found[0] is found[1]


class Pair(NamedTuple):
    one: Any
    two: Any


@pytest.mark.parametrize(
    "more", ([], [np.dtype, np.ndarray, type(np.dtype("f4")), np.arange(1).__reduce__()[0], Namespace])
)
def test_what_a_person_allows_stays_allowed(more: list[Any]) -> None:
    torch.save({"w": torch.ones(1), "pair": Pair(np.float32(1), 2)}, "values.pt")
    with torch.serialization.safe_globals([Pair, *more]):
        before = torch.serialization.get_safe_globals()
        check_equal(load_file(Path("values.pt"))[0]["pair"], Pair(np.float32(1), 2))
        assert {*map(id, torch.serialization.get_safe_globals())} == {*map(id, before)}


class Reduced:
    """Pickled as a call and the state of what it returns."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


def hostile(kind: str, flags: int, fields: bool, size: int) -> Reduced:
    """A dtype whose state says that its bytes are objects."""
    order, names, parts = "|" if kind[0] in "VSO" else "<", ("f",), {"f": (np.dtype("O"), 0)}
    state = (3, order, None, names, parts, size, 1, flags) if fields else (3, order, None, None, None, size, 1, flags)
    return Reduced(np.dtype, (kind, False, True), state)


HOSTILE = [
    *((kind, flags, True, 8) for kind, flags in (("V8", 0), ("V8", 1), ("V8", 4), ("V8", 5), ("V8", 29), ("S8", 1))),
    *((kind, 1, False, 8) for kind in ("S8", "U2", "i8")),
    *((kind, 1, True, 8) for kind in ("U2", "f8")),
    *(
        ("O8", 0, False, -1),
        ("O8", 63, True, 8),
        ("M8", 1, False, -1),
        ("V8", 0, False, 1 << 20),
        ("S8", 0, False, 1 << 20),
    ),
]


@pytest.mark.parametrize("scalar", (False, True))
@pytest.mark.parametrize("given", HOSTILE, ids=str)
def test_a_dtype_that_lies_frees_nothing(given: Any, scalar: bool) -> None:
    multiarray, data = np._core.multiarray, b"AAAAAAAA"
    array = Reduced(multiarray._reconstruct, (np.ndarray, (0,), b"b"), (1, (1,), hostile(*given), False, data))
    made = Reduced(multiarray.scalar, (hostile(*given), data)) if scalar else array
    torch.save({"w": torch.ones(2), "a": made}, "lies.pt")
    try:
        found = open_checkpoint("lies.pt")
    except CheckpointError as error:
        assert "an array beside its tensors cannot be read" in str(error)
    else:
        array = load_file(Path("lies.pt"))[0]["a"]
        assert found.tensors and array.dtype.fields is None and not array.dtype.hasobject and array.tobytes() == data


@pytest.mark.parametrize(
    "state",
    [None, (), (1, (2,)), (1, (2,), None, False, b"a"), (1, (5,), np.dtype("i1"), False, b"ab"), (1, 2, 3, 4, 5)],
)
def test_an_array_of_another_state_is_refused(state: Any) -> None:
    parts = (np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), state)
    torch.save({"w": torch.ones(2), "a": Reduced(*parts[: 2 + (state is not None)])}, "lies.pt")
    with pytest.raises(CheckpointError, match="an array beside its tensors cannot be read"):
        open_checkpoint("lies.pt")
