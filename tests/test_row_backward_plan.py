"""How the backward of the row norms is cut and who works on it, asked of the compiled library without a GPU."""

from __future__ import annotations

from typing import Any

import launch_plans
import pytest

from normswap import native

GPUS: tuple[dict[str, Any], ...] = (
    {"clusters": True, "shared": 232_448},  # H100
    {"clusters": False, "shared": 166_912},  # A100
    {"clusters": False, "shared": 101_376},  # RTX 4090
)
ITEMSIZES = ((4, 4), (2, 2), (2, 4), (4, 2))
"""Of x and dy: float32, 16 bits, and autocast."""
COLUMNS = (*range(1, 40), *(2**k + d for k in range(6, 20) for d in (-1, 0, 1)), 769, 12_288, 65_535, 98_305, 4_194_304)


@pytest.fixture
def library() -> None:
    if not native.status().available:
        pytest.skip(f"the compiled library is not here: {native.status().reason}")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("itemsizes", ITEMSIZES)
def test_plans_cover_rows_and_columns_and_fit_the_gpu(gpu: dict[str, Any], itemsizes: tuple[int, int]) -> None:
    passes = set()
    for cols in COLUMNS:
        for rows in (1, 7, 133, 1576, 100_003):
            lean = bool(cols % 3)
            p = launch_plans.row_backward_plan(rows, cols, *itemsizes, lean=lean, **gpu)
            assert p is not None
            passes.add(p["one_pass"])
            assert (p["pieces"] - 1) * p["rows_a_piece"] < rows <= p["pieces"] * p["rows_a_piece"]
            assert p["chunks"] == -(-cols // 1024) and p["chunk_len"] == min(cols, 1024)
            assert p["lanes"] == (8 if cols <= 256 else 32)
            assert (p["blocks_a_row"] - 1) * p["block_chunks"] < p["chunks"] <= p["blocks_a_row"] * p["block_chunks"]
            assert p["warps"] == p["teams"] * p["block_chunks"] <= (16 if lean and itemsizes[0] == 2 else 12)
            assert p["rows_a_piece"] % (p["teams"] * (32 // p["lanes"])) == 0  # no warp's rows are of two pieces
            assert p["grid"] == p["pieces"] * p["blocks_a_row"] < 2**31
            assert not p["one_pass"] or p["blocks_a_row"] <= (8 if gpu["clusters"] else 1)
            elements = p["chunk_len"] * 32 // p["lanes"]
            assert p["slot_bytes"] >= elements * sum(itemsizes) + 64 + 64 and p["slot_bytes"] % 16 == 0
            assert 1 <= p["slots"] <= 4 and p["lag"] <= max(0, p["slots"] - 2)
            assert p["shared"] >= p["slots"] * p["warps"] * p["slot_bytes"]
            assert p["shared"] >= 4 * p["warps"] * elements  # the sums of columns, at the end
            alone = p["one_pass"] or p["slots"] == 1  # on a multiprocessor
            assert p["shared"] + 4096 <= gpu["shared"] // (1 if alone else 3)
    assert passes == {0, 1}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("itemsizes", ITEMSIZES)
def test_the_order_of_sums_follows_from_rows_and_columns_alone(itemsizes: tuple[int, int]) -> None:
    """Which rows make a piece, which warps take them in turn, and how a row is cut; not whether it is read twice."""
    for cols in COLUMNS:
        for rows in (1, 133, 100_003):
            plans = [launch_plans.row_backward_plan(rows, cols, *itemsizes, **gpu) for gpu in GPUS]
            plans.append(
                launch_plans.row_backward_plan(rows, cols, *itemsizes, passes=2, **GPUS[0]) if cols > 1024 else plans[0]
            )
            keys = ("lanes", "chunk_len", "chunks", "rows_a_piece", "pieces")
            assert len({tuple(p[key] for key in keys) for p in plans if p is not None}) == 1, (rows, cols)
            assert len({p["teams"] for p in plans if p is not None and p["one_pass"]}) <= 1


@pytest.mark.usefixtures("library")
def test_sums_of_a_gradient_of_16_bits_are_in_the_order_of_float32_s() -> None:
    keys = ("lanes", "chunk_len", "chunks", "block_chunks", "teams", "rows_a_piece", "pieces", "one_pass")
    for cols in (c for c in COLUMNS if c % 8 == 0):
        for rows in (1, 133, 100_003):
            plans = [launch_plans.row_backward_plan(rows, cols, 4, of_grad, **GPUS[0]) for of_grad in (2, 4)]
            of_16, of_32 = ([p[key] for key in keys] for p in plans if p is not None)
            assert of_16 == of_32, (rows, cols)
            assert plans[0]["slot_bytes"] < plans[1]["slot_bytes"]  # type: ignore[index]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("itemsizes", ITEMSIZES)
def test_a_gradient_of_the_sum_has_room_and_changes_no_order(itemsizes: tuple[int, int]) -> None:
    keys = ("lanes", "chunk_len", "chunks", "rows_a_piece", "pieces", "one_pass", "teams", "warps")
    for cols in COLUMNS:
        for gpu in GPUS:
            plans = [
                launch_plans.row_backward_plan(1576, cols, *itemsizes, options=True, sums=sums, **gpu)
                for sums in (False, True)
            ]
            without, p = plans
            assert without is not None and p is not None
            assert [p[key] for key in keys] == [without[key] for key in keys]
            copied = p["slot_bytes"] >= without["slot_bytes"] + p["chunk_len"] * itemsizes[0]
            assert p["slots"] > 1 if copied else p == without  # else it is read where it is added
            if gpu is GPUS[0] and p["one_pass"]:
                assert copied
            assert p["shared"] >= p["slots"] * p["warps"] * p["slot_bytes"] and p["shared"] + 4096 <= gpu["shared"]


@pytest.mark.usefixtures("library")
def test_a_row_that_a_cluster_holds_is_read_once() -> None:
    for cols, itemsizes in ((98_304, (2, 2)), (98_304, (4, 4)), (98_304, (2, 4)), (65_535, (4, 4))):
        p = launch_plans.row_backward_plan(64, cols, *itemsizes, **GPUS[0])
        assert p is not None and p["one_pass"] and p["blocks_a_row"] == 8 and p["slots"] >= 2
    assert launch_plans.row_backward_plan(64, 98_305, 4, 4, passes=1, **GPUS[0]) is None
    assert launch_plans.row_backward_plan(64, 1024, 4, 4, passes=2, **GPUS[0]) is None


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("itemsizes", [(4, 4), (2, 2), (2, 4)])
@pytest.mark.parametrize("slopes", [False, True])
def test_what_an_activation_makes_of_dy_is_kept_where_its_dtype_or_a_vector_holds_it(
    itemsizes: tuple[int, int], slopes: bool
) -> None:
    """In dy's place: of its dtype where the derivative is 0 or 1 or dy float32, in float32 where rows begin at
    vectors and no fewer are on their way at once. How the sums are added does not depend on it."""
    cut = (
        *("lanes", "chunk_len", "chunks", "rows_a_piece", "pieces"),
        *("one_pass", "blocks_a_row", "teams", "slots", "lag"),
    )
    seen = set()
    for cols in COLUMNS:
        for gpu, passes in (*((gpu, 0) for gpu in GPUS), (GPUS[0], 2)):
            plans = [
                launch_plans.row_backward_plan(1576, cols, *itemsizes, options=True, slopes=s, passes=passes, **gpu)
                for s in (slopes, False)
            ]
            if plans[0] is None:
                assert plans[1] is None and passes == 2 and cols <= 1024
                continue
            p, other = plans[0], plans[1]
            assert other is not None and all(p[key] == other[key] for key in cut)
            in_dtype = not slopes or itemsizes[1] == 4
            assert p["wide"] <= p["keeps"] <= p["one_pass"] and p["keeps"] >= (p["one_pass"] and in_dtype)
            assert not p["wide"] or (not in_dtype and cols % 8 == 0)
            assert p["keeps"] == p["wide"] or in_dtype
            if gpu is GPUS[0] and passes == 0 and p["one_pass"]:
                assert p["keeps"] == (in_dtype or cols % 8 == 0)
            of_dy = 4 if p["wide"] else itemsizes[1]
            assert p["slot_bytes"] >= p["chunk_len"] * (itemsizes[0] + of_dy) + 64 + 64
            assert p["shared"] >= p["slots"] * p["warps"] * p["slot_bytes"] and p["shared"] + 4096 <= gpu["shared"]
            seen.add((p["keeps"], p["wide"]))
    assert seen == ({(0, 0), (1, 1)} if slopes and itemsizes[1] == 2 else {(0, 0), (1, 0)})
