// The row engine's kernels of rows that a warp, or a part of one, has in registers:
//   row_small    subwarp, warp: a row is one chunk; several rows a block
//   row_pair     warp: a row is a chunk and a part of one
#pragma once

#include "device/launch.h"
#include "row/row_apply.cuh"

namespace normswap {
namespace {

// row_small: warps on a multiprocessor, so that a lane has 80 registers, or 96; of short rows, 48.
template <class Tile>
constexpr int kWarpsWanted = Tile::Slots == 2 && Tile::Lanes == 8 ? 40 : Tile::V == 8 || Tile::Slots * Tile::V <= 24 ? 24 : 20;
// With options a lane has 128.
template <class Policy, class Tile>
constexpr int kSmallBlocks = (kOptions<Policy> ? 16 : kWarpsWanted<Tile>) / kWarpsSmall<Tile::Lanes>;

// Rows a lane works on at once in row_small: what is the same for all is then done once.
template <class Tile>
constexpr int kRowsAtOnce = Tile::Slots > 1                   ? 1
                            : Tile::Ragged && Tile::Lanes > 8 ? kRowsSubwarp / 2
                                                              : kRowsSubwarp;

// Vectors of a lane whose affine parameters it loads at once in row_small: those of 16-bit rows of more than three come from the
// L1, once the statistics are known, since more warps are worth more than parameters ahead.
template <class Policy, class Tile>
constexpr int kAffineSmall = Tile::V < 8       ? kAffineAtOnce<Policy, Tile>
                             : Tile::Ragged    ? 1
                             : Tile::Slots > 3 ? 2
                                               : Tile::Slots;

// --- kernels -----------------------------------------------------------------------------------------------------

template <class Policy, class T, class RowTile>
__global__ void __launch_bounds__(kWarpsSmall<RowTile::Lanes> * 32, kSmallBlocks<Policy, RowTile>)
    row_small(const RowArgs args) {
  follow_predecessor();
  let_successor_start();
  constexpr int Rows = kRowsAtOnce<RowTile>, Lanes = RowTile::Lanes, groups = kWarpsSmall<Lanes> * 32 / Lanes;
  const T* x = static_cast<const T*>(args.n.x);
  const T* end = x + args.n.rows * args.n.cols;
  using Row = std::conditional_t<Lanes == 32, unsigned, int64_t>;  // of 256 bytes or more: fewer than 2^32
  const Row first = static_cast<Row>(blockIdx.x) * (Rows * groups) + threadIdx.x / Lanes;
  const Row last = static_cast<Row>(args.n.rows - 1);
  if (Lanes == 32 && first > last) return;
  Row rows[Rows];
  RowTile tiles[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const Row row = first + r * groups;
    rows[r] = Lanes == 32 && r == 0 || row < last ? row : last;  // behind the last one that again, to the same bits
    tiles[r].load(x + rows[r] * args.n.cols, static_cast<int>(args.n.cols), end);
  }
  constexpr bool adds = kAddsResidual<Policy, RowTile>;
  if constexpr (adds) add_residual<T, true>(tiles, args, rows, 0);
  constexpr bool in_table = Policy::affine == Affine::by_channel && Lanes == 32 && Rows == 1;
  __shared__ AffineTables<Policy, in_table ? kWarpsSmall<Lanes> : 1> tables;
  using Affine = AffineAhead<Policy, T, RowTile, kAffineSmall<Policy, RowTile>>;
  std::conditional_t<in_table, AffineOfRow<Policy, T, RowTile>, Affine> affine;
  if constexpr (in_table) {
    affine.load_row(args, rows[0], 0u, tiles[0], tables.of_warp[threadIdx.x / 32]);
  } else {
    affine.load_ahead(args, 0u, tiles[0]);
  }
  if constexpr (!adds) {
#pragma unroll
    for (RowTile& tile : tiles) tile.settle();
  }
  typename Policy::Stat stats[Rows];
  Policy::statistics(tiles, args.sizes.row, args, stats);
  RowValues values[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    values[r] = Policy::template finish<T>(stats[r], args);
    if (args.saves && RowTile::lane() == 0) save_values<Policy>(args, rows[r], stats[r], values[r]);
  }
  apply_tiles<Policy, T>(tiles, args, rows, 0, values, affine);
}

// A row of two chunks whose statistics a lane holds: what unite_group makes of them.
template <class Stat>
__device__ inline Stat unite_two(const Stat& first, const Stat& second, const RowSizes& sizes) {
  const Stat s[4] = {first, second, Stat{}, Stat{}};
  return with_nothing(unite<1, 1>(s, sizes.row.value));
}

// Rest: a tile for what is left of the row behind the first chunk. A row's bits are those that two warps of row_held give it.
template <class Policy, class T, class Rest>
__global__ void __launch_bounds__(kWarpsSmall<32> * 32, (sizeof(T) == 2 ? 24 : 16) / kWarpsSmall<32>)
    row_pair(const RowArgs args) {
  follow_predecessor();
  let_successor_start();
  using First = Tile<T, 32, kChunkSlots<T>, false, kChunkSlots<T>>;
  const unsigned rows[1] = {blockIdx.x * kWarpsSmall<32> + threadIdx.x / 32};
  if (rows[0] >= args.n.rows) return;
  const T* x = static_cast<const T*>(args.n.x) + static_cast<int64_t>(rows[0]) * args.n.cols;
  const T* end = static_cast<const T*>(args.n.x) + args.n.rows * args.n.cols;
  First first[1];
  Rest rest[1];
  first[0].load(x, kChunk, end);
  rest[0].load(x + kChunk, static_cast<int>(args.n.cols) - kChunk, end);
  if constexpr (kAddsResidual<Policy, Rest>) {
    add_residual<T, true>(first, args, rows, 0);
    add_residual<T, true>(rest, args, rows, kChunk);
  }
  typename Policy::Stat of_first[1], of_rest[1];
  Policy::statistics(first, args.sizes.chunk, args, of_first);
  Policy::statistics(rest, args.sizes.last_chunk, args, of_rest);
  const auto stat = unite_two(of_first[0], of_rest[0], args.sizes);
  const RowValues values[1] = {Policy::template finish<T>(stat, args)};
  if (args.saves && threadIdx.x % 32 == 0) save_values<Policy>(args, rows[0], stat, values[0]);
  AffineAhead<Policy, T, First, kAffineSmall<Policy, First>> of_elements;
  apply_tiles<Policy, T>(first, args, rows, 0, values, of_elements);
  AffineAhead<Policy, T, Rest, kAffineSmall<Policy, Rest>> of_others;
  of_others.load_ahead(args, kChunk, rest[0]);
  apply_tiles<Policy, T>(rest, args, rows, kChunk, values, of_others);
}

// --- launch ------------------------------------------------------------------------------------------------------

template <class Policy, class T, class RowTile>
cudaError_t launch_small(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  const LaunchShape shape{grid_of(ceil_div(plan.grid, kRowsAtOnce<RowTile>)), plan.warps * 32, plan.shared, 1, plan.overlap};
  return launch_block<row_small<Policy, T, RowTile>>(args, shape, stream);
}

// A row of few vectors wants a kernel of few registers: the smallest of the numbers of slots built that holds it. More
// than Before are needed.
template <class Policy, class T, bool Ragged, int Lanes, int Before, int Slots, int... More>
cudaError_t launch_slots(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  if constexpr (sizeof...(More) > 0) {
    if (plan.chunk_len > Slots * Lanes * plan.vec) {
      return launch_slots<Policy, T, Ragged, Lanes, Slots, More...>(args, plan, stream);
    }
  }
  return launch_small<Policy, T, Tile<T, Lanes, Slots, Ragged, Before>>(args, plan, stream);
}

// Whether a lane of eight may have several vectors, and no sixteen lanes share a row of whole vectors: see chunk_lanes.
template <class Policy>
constexpr bool kSeveral = Policy::affine == Affine::by_element || kOptions<Policy>;

template <class Policy, class T, bool Ragged>
cudaError_t launch_rows_of_one_chunk(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  constexpr bool several = kSeveral<Policy>;
  constexpr int all = kChunkSlots<T>;
  if constexpr (several && !Ragged && kOptions<Policy>) {
    if (plan.lanes == 8) return launch_slots<Policy, T, Ragged, 8, 0, 1, kVectorsShort>(args, plan, stream);
    return launch_slots<Policy, T, Ragged, 32, 1, all / 2, all>(args, plan, stream);
  } else if constexpr (several && !Ragged) {
    if (plan.lanes == 8) return launch_slots<Policy, T, Ragged, 8, 0, 1, 2, 3, kVectorsShort>(args, plan, stream);
    if constexpr (sizeof(T) == 2) {
      return launch_slots<Policy, T, Ragged, 32, 1, 2, 3, 4>(args, plan, stream);
    } else {
      return launch_slots<Policy, T, Ragged, 32, 1, 2, 4, 6, 8>(args, plan, stream);
    }
  } else {
    if constexpr (several) {
      if (plan.lanes == 8) return launch_slots<Policy, T, Ragged, 8, 0, 1, kVectorsShort>(args, plan, stream);
    } else {
      if (plan.lanes == 8) return launch_slots<Policy, T, Ragged, 8, 0, 1>(args, plan, stream);
    }
    if (plan.lanes == 16) return launch_slots<Policy, T, Ragged, 16, 0, 1>(args, plan, stream);
    if constexpr (Ragged && (kOptions<Policy> || kBehind<Policy>)) {
      return launch_slots<Policy, T, Ragged, 32, 0, all>(args, plan, stream);
    } else if constexpr (Ragged && sizeof(T) == 4) {
      return launch_slots<Policy, T, Ragged, 32, 0, all / 2, all>(args, plan, stream);
    } else if constexpr (Ragged) {
      return launch_slots<Policy, T, Ragged, 32, 0, 1, 2, 4>(args, plan, stream);
    } else {  // few rows are so short
      return launch_slots<Policy, T, Ragged, 32, 0, 1, all / 2, all>(args, plan, stream);
    }
  }
}

}  // namespace
}  // namespace normswap
