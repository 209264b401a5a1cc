"""How BatchNorm in training is cut, without a GPU: every element belongs to one thread, every channel to one sum."""

from __future__ import annotations

import launch_plans
import pytest
import torch

THREADS, PIECES = 256, 396
CLUSTER, CHANNELS, HELD, BESIDE, ROWS, AT_ONCE = 8, 16, 101 * 1024, 12 * 1024, 4096, 264
SMALL = (
    *(
        (1, 4, 1),
        (7, 3, 1),
        (300, 24, 1),
        (33, 130, 1),
        (5, 1000, 1),
        (9, 2056, 1),
        (4, 33, 9),
        (3, 16, 49),
        (2, 24, 30),
    ),
    *((2, 3, 3249), (2, 2, 4097), (1, 3, 10000), (2, 5, 784), (3, 8, 12), (2, 2, 2048), (3, 2, 2056), (1, 7, 255)),
)
LARGE = (
    *((64 * size * size, c, 1) for c, size in ((64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7))),
    *((64, c, size * size) for c, size in ((64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7), (64, 512))),
    *((2**25, 64, 1), (65536, 7, 3249), (1, 1, 2**30)),
)


@pytest.mark.parametrize("tensors", (0, 1, 2))
@pytest.mark.parametrize("itemsize", (2, 4))
@pytest.mark.parametrize("sizes", SMALL, ids=str)
def test_every_element_is_some_threads_and_every_channel_is_united(
    sizes: tuple[int, int, int], itemsize: int, tensors: int
) -> None:
    samples, channels, inner = sizes
    p = launch_plans.batch_norm_plan(*sizes, itemsize, tensors=tensors)
    assert p is not None
    vec, lanes, line = p["vec"], p["lanes"], p["line"]
    columns = channels * inner
    seen = torch.zeros(samples * columns, dtype=torch.int32)
    for item in range(p["items"]):
        piece, strip = divmod(item, p["strips"])
        begin = piece * p["piece_rows"]
        end = min(begin + p["piece_rows"], p["rows"])
        assert begin < end
        last_strip = strip == p["strips"] - 1
        many = p["last_group"] if last_strip else p["group"]
        assert strip * p["group"] + many <= channels
        values = {}  # of the channel that a value handed on is taken for, by (row, index)
        for channel in range(many):
            for row in range(p["side"]):
                for i in range(p["across"]):
                    values[row, channel * p["across"] + i] = strip * p["group"] + channel
        for row in range(p["side"]):
            for lane in range(lanes):
                if lane * vec >= (p["last_width"] if last_strip else p["width"]):
                    continue
                for r in range(begin + row, end, p["side"]):
                    sample, place = divmod(r, line)
                    start = strip * (inner if line > 1 else p["width"]) + lane * vec
                    first = start + sample * columns + place * vec
                    assert first % vec == 0 and first + vec <= samples * columns
                    seen[first : first + vec] += 1
                    of = [(first + j) % columns // inner for j in range(vec)]
                    handed = range(lane * vec, (lane + 1) * vec) if p["values"] > 1 else [lane] * vec
                    assert [values[row, index] for index in handed] == of
    assert bool((seen == 1).all())


@pytest.mark.parametrize("itemsize", (2, 4))
@pytest.mark.parametrize("sizes", (*SMALL, *LARGE), ids=str)
def test_blocks_are_of_a_size_and_number_that_can_be_launched(sizes: tuple[int, int, int], itemsize: int) -> None:
    samples, channels, inner = sizes
    p = launch_plans.batch_norm_plan(*sizes, itemsize)
    assert p is not None
    assert p["lanes"] * p["side"] <= p["threads"] <= THREADS and p["threads"] % 32 == 0
    assert p["line"] == 1 or (p["lanes"], p["side"], p["strips"]) == (1, THREADS, channels)
    assert p["piece_rows"] % p["side"] == 0 and p["piece_rows"] >= 8 * p["side"]
    assert p["held"] == 0
    assert p["group"] << p["log_run"] <= p["threads"] or p["log_run"] == 0
    assert p["values"] in (1, p["vec"]) and (p["values"] > 1 or inner % p["vec"] == 0 or p["vec"] == 1)
    assert p["width"] == p["lanes"] * p["vec"] and 0 < p["last_width"] <= p["width"]
    assert p["workspace"] == channels * (3 * p["pieces"] + 2)
    assert p["workspace"] * 4 < 64e6 and p["items"] <= max(PIECES, p["strips"])  # all at once on an H100
    if samples * channels * inner > 2**24:
        assert p["items"] > PIECES / 2


@pytest.mark.parametrize("shared", (49152, 101376, 166912, 232448))
@pytest.mark.parametrize("clusters", (False, True))
@pytest.mark.parametrize("tensors", (1, 2))
@pytest.mark.parametrize("itemsize", (2, 4))
@pytest.mark.parametrize("sizes", (*SMALL, *LARGE), ids=str)
def test_a_block_holds_its_piece(
    sizes: tuple[int, int, int], itemsize: int, tensors: int, clusters: bool, shared: int
) -> None:
    p = launch_plans.batch_norm_plan(*sizes, itemsize, tensors=tensors, clusters=clusters, shared=shared)
    assert p is not None
    if p["held"] == 0:  # nothing of it is otherwise than where nothing may be held
        assert p == launch_plans.batch_norm_plan(*sizes, itemsize)
        return
    of_thread = p["piece_rows"] // p["side"]
    assert p["held"] == of_thread * p["threads"] * p["vec"] * itemsize * tensors <= min(HELD, shared - BESIDE)
    wide = p["line"] > 1 or p["width"] * itemsize >= 128
    assert wide or (p["rows"] <= ROWS and p["items"] <= AT_ONCE)
    assert p["vec"] == 4 and p["group"] <= CHANNELS and p["workspace"] == 0
    assert p["pieces"] <= (CLUSTER if clusters else 1) and p["threads"] >= CHANNELS * CLUSTER
    assert p["items"] == p["strips"] * p["pieces"] and (p["pieces"] - 1) * p["piece_rows"] < p["rows"]


HELD_BY = {  # (samples, channels, inner), itemsize, tensors: columns of a strip, its pieces; None: read twice
    ((64 * 49, 2048, 1), 2, 1): (16, 2),
    ((64 * 49, 2048, 1), 2, 2): None,
    ((64 * 49, 512, 1), 2, 2): (16, 7),
    ((64 * 196, 256, 1), 2, 1): None,
    ((64, 64, 112 * 112), 4, 1): None,
    ((64, 256, 56 * 56), 4, 1): (4, 8),
    ((64, 256, 56 * 56), 4, 2): None,
    ((64, 512, 28 * 28), 4, 2): (4, 5),
    ((64, 1024, 14 * 14), 4, 1): (4, 1),
    ((64, 2048, 7 * 7), 4, 2): (196, 2),
    ((64, 2048, 7 * 7), 2, 2): (196, 1),
    ((16384, 1024, 2), 4, 1): None,
    ((1000, 64, 4), 4, 1): (16, 4),
}


@pytest.mark.parametrize(("case", "expected"), HELD_BY.items(), ids=str)
def test_clusters_hold_what_they_can(
    case: tuple[tuple[int, int, int], int, int], expected: tuple[int, int] | None
) -> None:
    sizes, itemsize, tensors = case
    p = launch_plans.batch_norm_plan(*sizes, itemsize, tensors=tensors)
    assert p is not None
    assert ((p["width"], p["pieces"]) if p["held"] else None) == expected


def test_what_is_too_large_is_not_cut() -> None:
    assert launch_plans.batch_norm_plan(2**31, 4, 1, 2) is None
    assert launch_plans.batch_norm_plan(2**29, 4, 1, 2) is not None
