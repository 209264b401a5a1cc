// The kernels for rows that no cluster holds. What they share with the others (Slice, apply_tiles) is in row_norm.cuh,
// which includes this file.
#pragma once

#include "launch.h"
#include "row_policy.cuh"

namespace normswap {
namespace {

// The copies a warp starts are counted in batches, which land in the order in which they were started.
__device__ inline void end_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `newest` last batches have not landed.
__device__ inline void wait_for_batches_before(int newest) {
  static_assert(kMaxSlots == 3);
  if (newest >= 2) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else if (newest == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
  __syncwarp();
}

// What was told of a row's groups; a warp calls.
template <class Stat>
__device__ inline void hear_statistics(Stat* groups, const RowArgs& args, const Told* from, int count, unsigned round) {
  constexpr int each = 4;  // loads under way at once
  const int64_t group_len = static_cast<int64_t>(kGroup) * args.chunk_len;
  for (int first = threadIdx.x % 32; first < count; first += each * 32) {
    float2 what[each];
    hear(what, from + first, 32, (count - first + 31) / 32, round);
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int g = first + i * 32;
      const int64_t len = max(int64_t{0}, min(group_len, args.n.cols - g * group_len));
      if (g < count) understand(what[i], static_cast<float>(len), groups[g]);
    }
  }
  __syncwarp();
}

// A team of args.blocks_a_row blocks, one a multiprocessor, row after row. Each holds its slices of args.slots rows:
// while one is normalised the statistics of the next are on their way and those after it are being loaded.
template <class Policy, class T, class W, bool Ragged>
__global__ void __launch_bounds__(kWarpsTeam * 32, 1) row_team(const RowArgs args) {
  using Stat = typename Policy::Stat;
  constexpr int chunks = kSliceBytes / (kChunk * sizeof(T)), groups = chunks / kGroup;
  extern __shared__ __align__(16) char shared[];
  __shared__ Stat parts[chunks];
  __shared__ Stat all[kMaxGroups];
  __shared__ RowValues values;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = static_cast<int>(args.blocks_a_row);
  const int teams = gridDim.x / blocks, team = blockIdx.x / blocks, rank = blockIdx.x % blocks, count = blocks * groups;
  const auto row_of = [&](int turn) { return team + static_cast<int64_t>(turn) * teams; };
  const auto slice_of = [&](int turn) {
    return Slice<Policy, T, W, Ragged>(args, shared + turn % args.slots * chunks * args.chunk_bytes, rank);
  };
  // Who tells of turn k + 3 has heard of all of turn k + 1, whose tellers had heard of turn k - 1: four sets in turn.
  const auto told_of = [&](int turn) {
    return static_cast<Told*>(args.n.workspace) + (team * kToldSets + turn % kToldSets) * count;
  };
  for (int turn = 0; turn < args.slots; ++turn) {
    for (int c = warp; row_of(turn) < args.n.rows && c < chunks; c += kWarpsTeam) slice_of(turn).stage(row_of(turn), c);
    end_batch();
  }
  for (int turn = 0;; ++turn) {  // statistics of this turn's row, the rest of what is to be done with the one before
    const int64_t row = row_of(turn), before = row_of(turn - 1), later = row_of(turn - 1 + args.slots);
    wait_for_batches_before(turn == 0 ? args.slots - 1 : args.slots - 2);
    for (int c = warp; row < args.n.rows && c < chunks; c += kWarpsTeam) {
      const Stat stat = slice_of(turn).statistic(row, c);
      if (lane == 0) parts[c] = stat;
    }
    __syncthreads();
    if (warp == 0 && row < args.n.rows) {
      const Stat group = unite_one<1, kGroup>(lane < chunks ? parts[lane] : Stat{});
      if (lane % kGroup == 0 && lane < chunks) {
        tell(told_of(turn) + rank * groups + lane / kGroup, told(group), turn + 1);
      }
    }
    // By one warp and as late as can be: polling for what is not yet there slows all of the memory.
    if (warp == 1 && turn > 0) {
      hear_statistics(all, args, told_of(turn - 1), count, turn);
      const Stat stat = unite_groups(all, count);
      if (lane == 0) {
        values = Policy::template finish<T>(stat, args);
        if (rank == 0) save_values<Policy>(args, before, stat, values);
      }
    }
    __syncthreads();
    if (turn == 0) continue;
    const auto slice = slice_of(turn - 1);
    for (int c = warp; c < chunks; c += kWarpsTeam) {
      slice.apply(before, c, values);
      __syncwarp();
      if (later < args.n.rows) slice.stage(later, c);
    }
    end_batch();
    if (row >= args.n.rows) return;
  }
}

// --- split -------------------------------------------------------------------------------------------------------
// Statistics: a block is a group of chunks, a warp a chunk. The workspace holds a statistic and a float a group, then
// the values of the rows. row_merge and row_apply start while the kernel before them ends. row_partial does not, so that
// row_apply may load x without waiting.

template <class Stat>
__device__ inline float* split_room(const RowArgs& args) {
  return reinterpret_cast<float*>(static_cast<Stat*>(args.n.workspace) + args.n.rows * args.blocks_a_row);
}

template <class Stat>
__device__ inline RowValues* split_values(const RowArgs& args) {
  return reinterpret_cast<RowValues*>(split_room<Stat>(args) + args.n.rows * args.blocks_a_row);
}

// Elements [begin, begin + length) of a row, as far as they are there.
template <class T, class Tile>
__device__ inline void load_piece(Tile& tile, const RowArgs& args, int64_t row, int64_t begin, int64_t length) {
  const int64_t len = row < args.n.rows ? max(int64_t{0}, min(args.n.cols - begin, length)) : 0;
  const T* x = static_cast<const T*>(args.n.x);
  tile.load(x + row * args.n.cols + begin, static_cast<int>(len), x + args.n.rows * args.n.cols);
}

template <class Policy, class T, bool Ragged>
__global__ void __launch_bounds__(kWarpsSplit * 32, 2) row_partial(const RowArgs args) {
  using Stat = typename Policy::Stat;
  __shared__ Stat parts[kGroup];
  let_successor_start();
  // The same group of all rows comes first: row_apply does them in the opposite order.
  const int64_t group = divided(blockIdx.x, args.n.rows), row = blockIdx.x - group * args.n.rows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  ChunkTile<T, Ragged> tile[1];
  load_piece<T>(tile[0], args, row, (group * kGroup + warp) * args.chunk_len, args.chunk_len);
  Stat mine[1];
  Policy::statistics(tile, tile[0].len == args.chunk_len ? args.chunk : args.last_chunk, mine);
  if (lane == 0) parts[warp] = mine[0];
  __syncthreads();
  if (warp == 0) {
    const Stat united = unite_one<1, kGroup>(lane < kGroup ? parts[lane] : Stat{});
    if (lane == 0) static_cast<Stat*>(args.n.workspace)[row * args.blocks_a_row + group] = united;
  }
}

template <class Policy, class T>
__global__ void __launch_bounds__(256) row_merge(const RowArgs args) {
  using Stat = typename Policy::Stat;
  let_successor_start();
  follow_predecessor();
  const int64_t first = blockIdx.x * args.blocks_a_row;
  const Stat* parts = static_cast<const Stat*>(args.n.workspace) + first;
  const Stat stat = args.blocks_a_row <= kMaxGroups
                        ? unite_groups(parts, static_cast<int>(args.blocks_a_row))
                        : unite_in_memory(parts, split_room<Stat>(args) + first, args.blocks_a_row);
  if (threadIdx.x == 0) {
    const RowValues values = Policy::template finish<T>(stat, args);
    split_values<Stat>(args)[blockIdx.x] = values;
    save_values<Policy>(args, blockIdx.x, stat, values);
  }
}

// A warp takes a piece of several rows, so that its weights are loaded once. Backwards: what row_partial read last is
// still in the L2.
template <class Policy, class T, class W, bool Ragged>
__global__ void __launch_bounds__(kWarpsApply * 32, 2) row_apply(const RowArgs args) {
  using Piece = Tile<T, 32, kPiece / 32 / (16 / static_cast<int>(sizeof(T))), Ragged>;
  const int64_t at = static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x;
  const int64_t sets = (args.n.rows + kRowsSplit - 1) / kRowsSplit, place = divided(at, sets);
  const int64_t begin = (place * kWarpsApply + threadIdx.x / 32) * kPiece;
  Piece pieces[kRowsSplit];
  int64_t rows[kRowsSplit];
  RowValues values[kRowsSplit];
#pragma unroll
  for (int r = 0; r < kRowsSplit; ++r) {
    rows[r] = (at - place * sets) * kRowsSplit + r;
    load_piece<T>(pieces[r], args, rows[r], begin, kPiece);
  }
  AffineAhead<Policy, W, Piece> affine(args);
  affine.load_ahead(args, begin, pieces[0]);
  follow_predecessor();
  let_successor_start();
#pragma unroll
  for (int r = 0; r < kRowsSplit; ++r) {
    values[r] = split_values<typename Policy::Stat>(args)[min(rows[r], args.n.rows - 1)];
  }
  apply_tiles<Policy, T, W>(pieces, args, rows, begin, values, affine);
}

template <class Policy, class T, class W, bool Ragged>
cudaError_t launch_split(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  const int64_t blocks = ceil_div(args.n.cols, kPiece * kWarpsApply) * ceil_div(args.n.rows, kRowsSplit);
  const LaunchShape partial{grid_of(plan.grid), plan.warps * 32, 0, 1, false};
  const LaunchShape merge{grid_of(args.n.rows), 256, 0, 1, plan.overlap};
  const LaunchShape apply{grid_of(blocks), kWarpsApply * 32, 0, 1, plan.overlap};
  cudaError_t error = launch_block<row_partial<Policy, T, Ragged>>(args, partial, stream);
  if (error == cudaSuccess) error = launch_block<row_merge<Policy, T>>(args, merge, stream);
  return error == cudaSuccess ? launch_block<row_apply<Policy, T, W, Ragged>>(args, apply, stream) : error;
}

}  // namespace
}  // namespace normswap
