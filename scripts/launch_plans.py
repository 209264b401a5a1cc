"""How the kernels cut their work, asked of the library without a GPU: what tests hold the plans of csrc to."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from normswap import native
from normswap.builder import BuildError


def row_plan(
    rows: int,
    cols: int,
    itemsize: int,
    *,
    clusters: bool,
    weights: int = 0,
    ragged: bool = False,
    options: bool = False,
    adds: bool = False,
    shared: int = 101376,
    multiprocessors: int = 0,
    regime: int = 0,
) -> dict[str, int] | None:
    """How the kernels cut rows of ``cols`` elements of ``itemsize`` bytes, and who works on them.

    On a GPU with ``clusters`` of eight blocks, ``shared`` bytes of shared memory for a block and so many
    ``multiprocessors`` (0: it has no cooperative launches). ``weights`` is how many an element may have of its own
    (layer_norm 2, rms_norm 1), ``ragged`` whether rows begin or end elsewhere than at multiples of 16 bytes,
    ``options`` whether the norm has any, or is l2_norm, and ``adds`` whether a residual is the only one.
    ``regime`` 0 chooses; 1 subwarp, 2 warp, 3 block, 4 cluster, 5 split, 6 team, 7 both (team and split) force one, and
    None is returned where such rows cannot be done in it. ``held`` of the result says who has the row in registers: 0
    nobody, 1 a block alone on a multiprocessor, 2 a block, 3 a cluster, 4 a cluster of large blocks, which takes row
    after row if ``shared`` is not 0. Needs the library, but no GPU. Raises BuildError without the library.
    """
    names = (
        *("regime", "vec", "lanes", "chunk_len", "chunks", "warps"),
        *("held", "block_chunks", "blocks_a_row", "slots", "grid", "shared"),
    )
    gpu = (clusters, shared, multiprocessors)
    return _plan("row_plan", (rows, cols), (itemsize, weights, ragged, options, adds, *gpu, regime), names)


def row_backward_plan(
    rows: int,
    cols: int,
    itemsize: int,
    grad_itemsize: int,
    *,
    lean: bool = False,
    options: bool = False,
    slopes: bool = False,
    sums: bool = False,
    clusters: bool,
    shared: int = 101376,
    passes: int = 0,
) -> dict[str, int] | None:
    """How the backward of the row norms cuts rows of ``cols`` elements of ``itemsize`` bytes, and who works on them.

    ``grad_itemsize`` is that of dy's elements; ``lean``: of a norm without a bias; ``options``: with an activation, a
    gradient of the sum or one of the residual apart, ``slopes``: with an activation whose derivative is not 0 or 1
    everywhere, ``sums``: with a gradient of the sum; ``clusters`` and ``shared`` are as in ``row_plan``. ``passes`` 0
    chooses; 1 and 2 force one pass over x and dy, or two, and None is returned where such rows cannot be done so. Needs
    the library, but no GPU. Raises BuildError without the library.
    """
    names = (
        *("lanes", "chunk_len", "chunks", "blocks_a_row", "block_chunks", "teams", "warps", "rows_a_piece"),
        *("pieces", "one_pass", "slots", "lag", "keeps", "wide", "slot_bytes", "shared", "grid"),
    )
    numbers = (itemsize, grad_itemsize, lean, options, slopes, sums, clusters, shared, passes)
    return _plan("row_backward_plan", (rows, cols), numbers, names)


def column_plan(
    batch: int,
    rows: int,
    channels: int,
    num_groups: int,
    itemsize: int,
    *,
    clusters: bool,
    shared: int = 101376,
    multiprocessors: int = 128,
    regime: int = 0,
) -> dict[str, int] | None:
    """How the kernels of column statistics (channels_last group_norm; scale_batch_norm, where ``num_groups`` is
    ``channels``) cut ``batch`` entries of ``rows`` rows of ``channels`` channels, and who works on them.

    On a GPU of so many ``multiprocessors`` with ``shared`` bytes of shared memory for a block. ``regime`` 0 chooses; 3
    block, 4 cluster, 5 split force one, and None is returned where such columns cannot be done in it. Needs the
    library, but no GPU. Raises BuildError without the library.
    """
    names = (
        *("regime", "vec", "width", "groups", "lanes", "parts", "slots", "strips", "piece_rows"),
        *("pieces", "items", "grid", "shared", "workspace"),
    )
    gpu = (clusters, shared, multiprocessors)
    return _plan("column_plan", (batch, rows, channels, num_groups), (itemsize, *gpu, regime), names)


def group_backward_plan(
    batch: int,
    channels: int,
    spatial: int,
    num_groups: int,
    itemsize: int,
    grad_itemsize: int,
    *,
    clusters: bool,
    channels_last: bool = False,
    kept_itemsize: int = 0,
    shared: int = 101376,
    multiprocessors: int = 128,
    regime: int = 0,
) -> dict[str, int] | None:
    """How the backward of a group norm cuts its groups, or its strips of whole groups in ``channels_last``, and who
    works on them; ``itemsize`` and ``grad_itemsize`` are the bytes of an element of the input and of the gradient,
    ``kept_itemsize`` those that blocks keep of it behind an activation (in ``channels_last``; 0: as many).

    ``held`` of the result, or ``held_bytes`` of both of a block's piece in ``channels_last``: blocks, or clusters of
    them, keep both on chip; 0: they read them twice. ``regime`` 0 chooses; 3 block, 4 cluster (neither in
    ``channels_last``), 5 split (twice) force one, and None is returned where it cannot be done so. Needs the library,
    but no GPU. Raises BuildError without the library.
    """
    contiguous = (
        *("held", "vec", "lanes", "each", "units", "piece_lines", "piece_units", "line_pieces", "group_pieces"),
        *("groups", "block_pieces", "cluster", "block_lines", "block_elements", "threads", "shared", "lag", "grid"),
        "workspace",
    )
    columns = (
        *("vec", "width", "lanes", "side", "half_rows", "sum_rows", "thread_rows", "piece_rows"),
        *("strips", "slabs", "pieces", "bunches", "held_bytes", "lag", "shared", "blocks", "workspace", "threads"),
    )
    name, names = ("group_columns_plan", columns) if channels_last else ("group_backward_plan", contiguous)
    sizes, gpu = (batch, channels, spatial, num_groups), (clusters, shared, multiprocessors)
    return _plan(name, sizes, (itemsize, grad_itemsize, kept_itemsize or grad_itemsize, *gpu, regime), names)


def batch_norm_plan(
    samples: int,
    channels: int,
    inner: int,
    itemsize: int,
    *,
    tensors: int = 0,
    clusters: bool = True,
    shared: int = 232448,
) -> dict[str, int] | None:
    """How the kernels of BatchNorm in training cut ``samples`` rows of ``channels`` times ``inner`` columns (1 in
    channels_last memory) of elements of ``itemsize`` bytes; None where they cannot.

    ``tensors`` are read twice: 1 in the forward, 2 in the backward, 0 by frozen statistics. If blocks, or clusters of
    them, keep strips of these on chip, ``held`` of the result are the bytes of a block's piece, else 0. Needs the
    library, but no GPU. Raises BuildError without the library.
    """
    names = (
        *("vec", "lanes", "side", "threads", "values", "width", "last_width", "group", "last_group", "across"),
        *("log_run", "line", "strips", "rows", "piece_rows", "pieces", "items", "held", "workspace"),
    )
    return _plan("batch_norm_plan", (samples, channels, inner), (itemsize, tensors, clusters, shared), names)


def _plan(name: str, sizes: Sequence[int], numbers: Sequence[int], names: Sequence[str]) -> dict[str, int] | None:
    """What the library's function normswap_``name`` makes of int64 sizes and ints, or None if it says no."""
    found = native.load()
    if not found.available:
        raise BuildError(f"{name}: the library is not loaded: {found.reason}")
    function = ctypes.CDLL(str(found.path))[f"normswap_{name}"]
    function.argtypes = [*[ctypes.c_int64] * len(sizes), *[ctypes.c_int] * len(numbers), ctypes.c_void_p]
    values = (ctypes.c_int64 * len(names))()
    if not function(*sizes, *map(int, numbers), values):
        return None
    return dict(zip(names, values, strict=True))
