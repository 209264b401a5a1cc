// The kernels that work on row after row, and those for rows that no blocks hold.
#pragma once

#include "launch.h"
#include "row_apply.cuh"

namespace normswap {
namespace {

// --- team --------------------------------------------------------------------------------------------------------
// A team of args.blocks_a_row blocks does one row after the other. A warp has the same chunk of each, so that its
// weights stay in registers. A block holds its slices of args.slots rows: while one is normalised the statistics of the
// next are on their way and those after it are being loaded.

// Waits until at most the `newest` last batches have not arrived.
__device__ inline void wait_for_batches_before(int newest) {
  static_assert(kMaxSlots == 6);
  switch (newest) {
    case 5: wait_for_all_but<5>(); break;
    case 4: wait_for_all_but<4>(); break;
    case 3: wait_for_all_but<3>(); break;
    case 2: wait_for_all_but<2>(); break;
    case 1: wait_for_all_but<1>(); break;
    default: wait_for_all_but<0>();
  }
  __syncwarp();
}

// The statistics of a row of which every block holds a slice, which is a group, through memory (tell, hear).
template <class Policy, class T>
struct TeamExchange {
  using Stat = typename Policy::Stat;
  struct Shared {
    Stat parts[kGroup], groups[kMaxGroups];
    RowValues before;
  };
  const RowArgs& args;
  Shared& shared;
  int team, rank;

  __device__ TeamExchange(const RowArgs& a, Shared& s, int of_team, int of_rank)
      : args(a), shared(s), team(of_team), rank(of_rank) {}
  // Hands on the statistic of this warp's chunk of this turn's row, if there is one; returns the values of the row before.
  __device__ RowValues step(int turn, bool more, const Stat& mine, int64_t row_before) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) shared.parts[warp] = mine;
    __syncthreads();
    if (warp == 0 && more) {
      const Stat group = unite_one<1, kGroup>(lane < kGroup ? shared.parts[lane] : Stat{});
      if (lane == 0) tell(told_of(turn) + rank, told(group), turn + 1);
    }
    // By one warp and as late as can be: polling for what is not yet there slows all of the memory.
    if (warp == 1 && turn > 0) {
      hear_groups(told_of(turn - 1), turn);
      const Stat stat = unite_groups(shared.groups, args.blocks_a_row);
      if (lane == 0) {
        shared.before = Policy::template finish<T>(stat, args);
        if (rank == 0) save_values<Policy>(args, row_before, stat, shared.before);
      }
    }
    __syncthreads();
    return shared.before;
  }

 private:
  // Who tells of turn k + 3 has heard all of turn k + 1, whose tellers had heard of turn k - 1: four sets in turn.
  __device__ Told* told_of(int turn) const {
    return static_cast<Told*>(args.n.workspace) + (team * kToldSets + turn % kToldSets) * args.blocks_a_row;
  }
  __device__ void hear_groups(const Told* from, unsigned round) const {
    constexpr int each = 4;  // loads under way at once
    const int64_t group_len = static_cast<int64_t>(kGroup) * args.chunk_len;
    const int count = args.blocks_a_row;
    for (int first = threadIdx.x % 32; first < count; first += each * 32) {
      float2 what[each];
      hear(what, from + first, 32, (count - first + 31) / 32, round);
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int g = first + i * 32;
        const int64_t len = max(int64_t{0}, min(group_len, args.n.cols - g * group_len));
        if (g < count) understand(what[i], static_cast<float>(len), shared.groups[g]);
      }
    }
    __syncwarp();
  }
};

template <class Policy, bool Ragged>
constexpr bool kLean = kWeights<Policy> == 0 && !Ragged;

// A block has as many warps as its slices have chunks.
template <class Policy, class T, class W, bool Ragged>
__global__ void __launch_bounds__(kWarpsTeam * 32, kTeamBlocks<kLean<Policy, Ragged>, sizeof(T)>)
    row_team(const RowArgs args) {
  using Chunk = ChunkTile<T, Ragged>;
  constexpr bool keeps = Policy::affine == Affine::by_element;  // the warp's weights, in registers
  extern __shared__ __align__(16) char shared[];
  __shared__ typename TeamExchange<Policy, T>::Shared exchanged;
  const int warp = threadIdx.x / 32, blocks = args.blocks_a_row;
  const int teams = gridDim.x / blocks, team = blockIdx.x / blocks, rank = blockIdx.x % blocks;
  const TeamExchange<Policy, T> exchange(args, exchanged, team, rank);
  const auto row_of = [&](int turn) { return team + static_cast<int64_t>(turn) * teams; };
  const auto slice_of = [&](int turn) {
    return Slice<Policy, T, W, Ragged>(args, shared + turn % args.slots * args.block_chunks * args.chunk_bytes, rank);
  };
  for (int turn = 0; turn < args.slots; ++turn) {
    if (row_of(turn) < args.n.rows) slice_of(turn).stage(warp, row_of(turn), warp);
    end_batch();
  }
  AffineAhead<Policy, W, Chunk, Chunk::Slots> weights(args);
  if constexpr (keeps) {
    Chunk chunk;
    chunk.len = slice_of(0).len(warp);
    weights.load_ahead(args, slice_of(0).begin(warp), chunk);
  }
  for (int turn = 0;; ++turn) {  // statistics of this turn's row, the rest of what is to be done with the one before
    const int64_t before = row_of(turn - 1), later = row_of(turn - 1 + args.slots);
    const bool more = row_of(turn) < args.n.rows;
    wait_for_batches_before(turn == 0 ? args.slots - 1 : args.slots - 2);
    const auto mine = more ? slice_of(turn).statistic(warp, row_of(turn), warp) : typename Policy::Stat{};
    const RowValues values = exchange.step(turn, more, mine, before);
    if (turn == 0) continue;
    weights.forget();
    slice_of(turn - 1).apply(warp, before, warp, values, weights, keeps);
    __syncwarp();
    if (later < args.n.rows) slice_of(turn - 1 + args.slots).stage(warp, later, warp);
    end_batch();
    if (!more) return;
  }
}

template <class Policy, class T, class W, bool Ragged>
cudaError_t launch_team(const RowArgs& args, const RowPlan& plan, const LaunchShape& shape, cudaStream_t stream) {
  const int64_t bytes = row_workspace_bytes(plan, args.n.rows);
  return launch_at_once<row_team<Policy, T, W, Ragged>>(args, shape, args.n.workspace, bytes, stream);
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

// Starts loading elements [begin, begin + length) of a row, as far as they are there.
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
  tile[0].settle();
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
  const int64_t first = static_cast<int64_t>(blockIdx.x) * args.blocks_a_row;
  const Stat* parts = static_cast<const Stat*>(args.n.workspace) + first;
  const Stat stat = args.blocks_a_row <= kMaxGroups
                        ? unite_groups(parts, args.blocks_a_row)
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
#pragma unroll
  for (Piece& piece : pieces) piece.settle();
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
