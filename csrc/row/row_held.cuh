// The row engine's kernels of rows that a block, or a cluster of blocks, has on chip:
//   row_held     block, cluster: a chunk a warp, in registers
//   row_block    the same for longer rows, or where there are no clusters: the chunks of a row lie in shared memory
#pragma once

#include <algorithm>

#include "device/cluster.cuh"
#include "device/launch.h"
#include "row/row_apply.cuh"

namespace normswap {
namespace {

// row_held: registers for affine parameters that are loaded before the statistics are known. in_block they come from the
// L1, which a cluster empties when it waits.
template <class T, Held How>
constexpr int kAheadRegisters = How == Held::alone        ? 64
                                : How == Held::in_cluster ? (sizeof(T) == 2 ? 32 : 16)
                                : How == Held::in_groups  ? (sizeof(T) == 2 ? 24 : 8)
                                                          : 0;

// And so of how many of a lane's vectors.
template <class Policy, class T, class Tile, Held How>
constexpr int kVectorsAhead =
    Policy::affine != Affine::by_element
        ? 0
        : std::min(Tile::Slots, kAheadRegisters<T, How> / (kWeights<Policy> * static_cast<int>(Tile::V * sizeof(T) / 4)));

// The statistic of a row of which every warp of the block, or of the cluster, has the one of a chunk. All threads call.
template <Held How, class Stat, bool InTurns>
struct HeldExchange {
  static constexpr bool grouped = How == Held::in_groups, cluster = How == Held::in_cluster || grouped;
  static constexpr int turns = InTurns ? 2 : 1;
  // By turns: who sends for the turn after the next has had all of the next, and so this block has read its own.
  struct Shared {
    alignas(16) Stat mine[turns][How == Held::in_cluster ? 1 : kGroup];  // of the block's chunks
    Stat parts[turns][grouped ? kMaxCluster : kMaxInCluster];            // of the row's groups or chunks
    Inbox inbox[turns];
  };
  const RowArgs& args;
  Shared& shared;
  unsigned blocks, row, rank;  // row: which cluster of the grid this is

  __device__ HeldExchange(const RowArgs& a, Shared& s) : args(a), shared(s) {
    blocks = cluster ? args.blocks_a_row : 1;
    row = cluster ? args.by_blocks.of(blockIdx.x) : blockIdx.x;
    rank = blockIdx.x - row * blocks;
    if constexpr (cluster) {
      if (threadIdx.x < 32) {
        for (Inbox& inbox : shared.inbox) inbox.open(bytes());
      }
      cluster_arrive_with_inboxes();
    }
  }
  __device__ Stat of_row(const Stat& of_chunk, int turn) const {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, set = turn % turns;
    if constexpr (cluster) {
      if (turn == 0) cluster_wait();  // every block of the cluster runs
    }
    Stat* parts = shared.parts[set];
    if constexpr (How == Held::in_cluster) {
      if (lane < blocks) send_to_block(parts + rank * args.block_chunks + warp, shared.inbox[set], lane, of_chunk);
      wait_for_all(turn);
      return unite_each<kMaxInCluster / 32>(parts, static_cast<int>(args.chunks), args.sizes);
    }
    Stat* mine = shared.mine[set];
    if (lane == 0) mine[warp] = of_chunk;
    __syncthreads();
    if constexpr (!cluster) return unite_group(mine, static_cast<int>(args.chunks), args.sizes);
    const Stat group = unite_one<1, kGroup>(mine[lane % kGroup], args.sizes.of_group(rank));
    if (warp < blocks && lane == 0) send_to_block(parts + rank, shared.inbox[set], warp, group);
    wait_for_all(turn);
    return unite_one<1, 32>(lane < blocks ? parts[lane] : Stat{}, args.sizes.row.value);
  }

 private:
  __device__ unsigned bytes() const {
    return blocks * (grouped ? 1 : args.block_chunks) * static_cast<unsigned>(sizeof(Stat));
  }
  __device__ void wait_for_all(int turn) const {
    Barrier& barrier = shared.inbox[turn % turns].barrier;
    barrier.wait(turn / turns % 2);
    if (InTurns && threadIdx.x == 0) barrier.arrive_expecting(bytes());
  }
};

// Blocks that there are to be registers for; with options a lane of 32-bit elements has 128.
template <class Policy, Held How, int Itemsize>
constexpr int kBlocksHeldOf = kOptions<Policy> && Itemsize == 4 ? 16 / kWarpsHeld<How, Itemsize> : kBlocksHeld<How, Itemsize>;

// Whole: every warp has a chunk, of kChunk elements. InTurns: a cluster takes several rows, one after the other; their weights
// stay in shared memory, and the next row is on its way while the statistics of one are united.
template <class Policy, class T, bool Ragged, Held How, bool Whole, bool InTurns>
__global__ void __launch_bounds__(kWarpsHeld<How, sizeof(T)> * 32, kBlocksHeldOf<Policy, How, sizeof(T)>)
    row_held(const RowArgs args) {
  if constexpr (kClusters || How == Held::in_block || How == Held::alone) {
    using Stat = typename Policy::Stat;
    using HeldTile = ChunkTile<T, Ragged, Whole>;
    using Exchange = HeldExchange<How, Stat, InTurns>;
    constexpr bool all = Whole || (How == Held::alone && !Ragged);  // parameters are in registers at once
    constexpr int AtOnce = all ? HeldTile::Slots : kAffineAtOnce<Policy, HeldTile>;
    constexpr int Ahead = all ? kVectorsAhead<Policy, T, HeldTile, How> : 0;
    constexpr bool by_channel = Policy::affine == Affine::by_channel;
    constexpr bool adds = kAddsResidual<Policy, HeldTile> && How != Held::alone && !InTurns;  // see Rows::options
    extern __shared__ __align__(16) uint4 kept[];
    __shared__ typename Exchange::Shared shared;
    __shared__ AffineTables<Policy, kWarpsHeld<How, sizeof(T)>> tables;
    const Exchange exchange(args, shared);
    follow_predecessor();
    let_successor_start();
    const int chunk = exchange.rank * args.block_chunks + static_cast<int>(threadIdx.x / 32);
    const unsigned begin = chunk * kChunk;
    using Row = std::conditional_t<InTurns, int64_t, unsigned>;  // in turns fewer registers are spilled with 64 bits
    const Row step = InTurns ? gridDim.x / exchange.blocks : 0;
    Row rows[1] = {exchange.row};
    const int len = Whole ? kChunk : max(0, min(static_cast<int>(args.n.cols) - static_cast<int>(begin), kChunk));
    const T* x = static_cast<const T*>(args.n.x);
    std::conditional_t<InTurns, AffineKept<Policy, T, HeldTile>, AffineOfRow<Policy, T, HeldTile, AtOnce>> affine;
    HeldTile tiles[1];
    const auto load_channels = [&] {
      if constexpr (by_channel) affine.load_row(args, rows[0], begin, tiles[0], tables.of_warp[threadIdx.x / 32]);
    };
    const auto load = [&](HeldTile& tile, Row row) {
      tile.load(x + row * args.n.cols + begin, len, x + args.n.rows * args.n.cols);
    };
    load(tiles[0], rows[0]);
    for (int turn = 0;; ++turn) {
      // Before the parameters: there are no registers for both.
      if constexpr (adds) add_residual<T, How == Held::in_block>(tiles, args, rows, begin);
      if constexpr (InTurns) {
        if (turn == 0) affine.keep(args, begin, tiles[0], kept);
      } else if constexpr (Ahead > 0) {
        affine.load(args, begin, tiles[0], 0, 0, Ahead);
      }
      if constexpr (How == Held::alone) load_channels();
      if constexpr (!adds) tiles[0].settle();
      Stat stats[1];
      const bool last = !Whole && chunk + 1 >= args.chunks;  // by its number: ptxas 13.0 mistakes what len says of it
      Policy::statistics(tiles, last ? args.sizes.last_chunk : args.sizes.chunk, args, stats);
      if constexpr (How != Held::alone) load_channels();  // others' warps hide the wait, and registers are few
      [[maybe_unused]] HeldTile next;
      if (const Row after = rows[0] + step; InTurns && after < args.n.rows) load(next, after);
      const Stat stat = exchange.of_row(stats[0], turn);
      const RowValues values[1] = {Policy::template finish<T>(stat, args)};
      if (args.saves && exchange.rank == 0 && threadIdx.x == 0) save_values<Policy>(args, rows[0], stat, values[0]);
      if constexpr (InTurns) {
        if (turn == 0) wait_for_copies();
      } else if constexpr (!by_channel) {
        if constexpr (Ahead > 0) {
          affine.load(args, begin, tiles[0], 0, Ahead, AtOnce);
        } else {
          affine.load_ahead(args, begin, tiles[0]);
        }
      }
      apply_tiles<Policy, T>(tiles, args, rows, begin, values, affine);
      if constexpr (!InTurns) return;
      rows[0] += step;
      if (rows[0] >= args.n.rows) return;
      tiles[0] = next;
    }
  }
}

// A cluster a row, or a block that is alone: one kernel for both.
template <class Policy, class T, bool Ragged>
__global__ void __launch_bounds__(kWarpsBlock * 32, kBlocksAMultiprocessor) row_block(const RowArgs args) {
  follow_predecessor();
  let_successor_start();
  using Stat = typename Policy::Stat;
  extern __shared__ __align__(16) char shared[];
  __shared__ Stat parts[kMaxChunks];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int blocks = args.blocks_a_row, rank = blockIdx.x % blocks;
  const int64_t row = blockIdx.x / blocks;
  cluster_arrive();  // waited for below, once the loads are under way
  const auto chunk = [&](int c) {
    return ChunkInShared<Policy, T, Ragged>{
        args, shared + c * args.chunk_bytes, ChunkPlace::of(args, int64_t{rank} * args.block_chunks + c)};
  };
  for (int c = warp; c < args.block_chunks; c += warps) chunk(c).stage(row);
  wait_for_copies();
  __syncwarp();
  cluster_wait();  // every block of the cluster runs: its shared memory is there
  for (int c = warp; c < args.block_chunks; c += warps) {
    const Stat stat = chunk(c).statistic(row);
    if (lane < blocks) store_in_block(parts + rank * args.block_chunks + c, lane, stat);
  }
  cluster_arrive();
  cluster_wait();
  const Stat stat = unite_chunks(parts, static_cast<int>(args.chunks), args.sizes);
  const RowValues values = Policy::template finish<T>(stat, args);
  if (rank == 0 && threadIdx.x == 0) save_values<Policy>(args, row, stat, values);
  for (int c = warp; c < args.block_chunks; c += warps) {
    AffineAhead<Policy, T, StagedChunk<T, Ragged, false>> affine;
    chunk(c).apply(row, values, affine, false);
  }
}

// --- launch ------------------------------------------------------------------------------------------------------

// Whether rows of whole chunks alone are worth kernels of their own.
template <class Policy, class T, bool Ragged>
constexpr bool kWhole = !Ragged && (Policy::affine == Affine::by_element || (Policy::affine == Affine::by_channel && sizeof(T) == 4));

template <class Policy, class T, bool Ragged, Held How>
cudaError_t launch_held(const RowArgs& args, const LaunchShape& shape, cudaStream_t stream) {
  if constexpr (kWhole<Policy, T, Ragged>) {
    const bool whole = args.n.cols == int64_t{kChunk} * args.block_chunks * args.blocks_a_row;
    if (whole && !has_wide_weights<T>(args) && args.n.out_dtype == args.n.dtype) {
      if constexpr (keeps_weights(How, sizeof(T), kWeights<Policy>)) {
        if (shape.shared > 0) return launch_block<row_held<Policy, T, false, How, true, true>>(args, shape, stream);
      }
      return launch_block<row_held<Policy, T, false, How, true, false>>(args, shape, stream);
    }
  }
  LaunchShape one = shape;  // row a cluster
  one.grid = grid_of(args.n.rows * args.blocks_a_row);
  one.shared = 0;
  return launch_block<row_held<Policy, T, Ragged, How, false, false>>(args, one, stream);
}

template <class Policy, class T, bool Ragged>
cudaError_t launch_blocks(const RowArgs& args, const RowPlan& plan, const LaunchShape& shape, cudaStream_t stream) {
  if (plan.held == Held::in_block) return launch_held<Policy, T, Ragged, Held::in_block>(args, shape, stream);
  if constexpr (!(Ragged && kOptions<Policy>)) {  // see held_by
    if (plan.held == Held::in_cluster) return launch_held<Policy, T, Ragged, Held::in_cluster>(args, shape, stream);
    if (plan.held == Held::in_groups) return launch_held<Policy, T, Ragged, Held::in_groups>(args, shape, stream);
  }
  if constexpr (kOptions<Policy>) {
    return cudaErrorInvalidValue;  // see Rows::options
  } else {
    if (plan.held == Held::alone) {
      constexpr Held how = Ragged ? Held::in_block : Held::alone;  // not worth a kernel more
      return launch_block<row_held<Policy, T, Ragged, how, false, false>>(args, shape, stream);
    }
    return launch_block<row_block<Policy, T, Ragged>>(args, shape, stream);
  }
}

}  // namespace
}  // namespace normswap
