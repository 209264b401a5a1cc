// The row engine: LayerNorm, RMSNorm, L1 norm and GroupNorm (contiguous) are this file and a policy (row_policy.cuh).
// row_plan.h says how rows are cut; the kernels are the regimes:
//   row_small    subwarp, warp: a row is one chunk, in registers; several rows a block
//   row_pair     warp: a row is a chunk and a part of one, in registers
//   row_held     block, cluster: a chunk a warp, in registers
//   row_block    the same for longer rows, or where there are no clusters: the chunks of a row lie in shared memory
// and in row_wide.cuh
//   row_team     team: blocks that run at once hold row after row and tell each other their statistics
//   row_partial, row_team, row_apply     both: a team has the first part of each row, the rest is read twice
//   row_partial, row_merge, row_apply    split: for rows and GPUs none of these serves; the input is read twice
#pragma once

#include <algorithm>

#include "device/cluster.cuh"
#include "device/launch.h"
#include "row/only_adds.h"
#include "row/row_wide.cuh"

namespace normswap {
namespace {

// row_small: warps on a multiprocessor, so that a lane has 80 registers, or 96.
template <class Tile>
constexpr int kWarpsWanted = Tile::V == 8 || Tile::Slots * Tile::V <= 24 ? 24 : 20;
// With options a lane has 128.
template <class Policy, class Tile>
constexpr int kSmallBlocks = (kOptions<Policy> ? 16 : kWarpsWanted<Tile>) / kWarpsSmall<Tile::Lanes>;

// Rows a lane works on at once in row_small: what is the same for all is then done once.
template <class Tile>
constexpr int kRowsAtOnce = Tile::Slots > 1                   ? (Tile::Slots == 2 && Tile::Lanes == 8 ? 2 : 1)
                            : Tile::Ragged && Tile::Lanes > 8 ? kRowsSubwarp / 2
                                                              : kRowsSubwarp;

// Vectors of a lane whose affine parameters it loads at once in row_small: those of 16-bit rows come from the L1, once the
// statistics are known, since more warps are worth more than parameters ahead.
template <class Policy, class Tile>
constexpr int kAffineSmall = Tile::V == 8 ? std::min(Tile::Slots, Tile::Ragged ? 1 : 2) : kAffineAtOnce<Policy, Tile>;

// --- kernels -----------------------------------------------------------------------------------------------------

template <class Policy, class T, class RowTile>
__global__ void __launch_bounds__(kWarpsSmall<RowTile::Lanes> * 32, kSmallBlocks<Policy, RowTile>)
    row_small(const RowArgs args) {
  follow_predecessor();
  let_successor_start();
  constexpr int Rows = kRowsAtOnce<RowTile>, Lanes = RowTile::Lanes, groups = kWarpsSmall<Lanes> * 32 / Lanes;
  static_assert(RowTile::Whole == 0 || (Lanes == 32 && Rows == 1));  // a row that is not there has no vectors
  const T* x = static_cast<const T*>(args.n.x);
  const T* end = x + args.n.rows * args.n.cols;
  using Row = std::conditional_t<Lanes == 32, unsigned, int64_t>;  // of 256 bytes or more: fewer than 2^32
  const Row first = static_cast<Row>(blockIdx.x) * (Rows * groups) + threadIdx.x / Lanes;
  if (Lanes == 32 && first >= args.n.rows) return;
  Row rows[Rows];
  RowTile tiles[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    rows[r] = first + r * groups;
    const bool there = Lanes == 32 && r == 0 || rows[r] < args.n.rows;
    tiles[r].load(x + rows[r] * args.n.cols, there ? static_cast<int>(args.n.cols) : 0, end);
  }
  constexpr bool adds = kAddsResidual<Policy, RowTile>;
  if constexpr (adds) add_residual<T>(tiles, args, rows, 0);
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
    if (tiles[r].len > 0 && RowTile::lane() == 0) save_values<Policy>(args, rows[r], stats[r], values[r]);
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
    add_residual<T>(first, args, rows, 0);
    add_residual<T>(rest, args, rows, kChunk);
  }
  typename Policy::Stat of_first[1], of_rest[1];
  Policy::statistics(first, args.sizes.chunk, args, of_first);
  Policy::statistics(rest, args.sizes.last_chunk, args, of_rest);
  const auto stat = unite_two(of_first[0], of_rest[0], args.sizes);
  const RowValues values[1] = {Policy::template finish<T>(stat, args)};
  if (threadIdx.x % 32 == 0) save_values<Policy>(args, rows[0], stat, values[0]);
  AffineAhead<Policy, T, First, kAffineSmall<Policy, First>> of_elements;
  apply_tiles<Policy, T>(first, args, rows, 0, values, of_elements);
  AffineAhead<Policy, T, Rest, kAffineSmall<Policy, Rest>> of_others;
  of_others.load_ahead(args, kChunk, rest[0]);
  apply_tiles<Policy, T>(rest, args, rows, kChunk, values, of_others);
}

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
      if constexpr (adds) add_residual<T>(tiles, args, rows, begin);
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
      if (exchange.rank == 0 && threadIdx.x == 0) save_values<Policy>(args, rows[0], stat, values[0]);
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

template <class Policy, class T, class RowTile>
cudaError_t launch_small(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  const LaunchShape shape{grid_of(ceil_div(plan.grid, kRowsAtOnce<RowTile>)), plan.warps * 32, plan.shared, 1, plan.overlap};
  return launch_block<row_small<Policy, T, RowTile>>(args, shape, stream);
}

// On the host; correctly rounded as Divisor::of.
inline Divisor divisor_of(int64_t n) { return {static_cast<float>(n), 1.f / static_cast<float>(n)}; }

inline RowSizes row_sizes(const RowNorm& n, const RowPlan& plan) {
  const int64_t chunk = plan.chunk_len, group = kGroup * chunk, groups = row_groups(plan);
  return {divisor_of(n.cols),
          divisor_of(chunk),
          divisor_of(n.cols - (plan.chunks - 1) * chunk),
          static_cast<float>(group),
          static_cast<float>(n.cols - (groups - 1) * group),
          static_cast<int>(groups)};
}

inline Quotient quotient_by(int64_t divisor) {
  const uint64_t most = ~uint64_t{0}, d = static_cast<uint64_t>(divisor);
  return {divisor, d == 1 ? most : most / d + (most % d == d - 1 ? 1 : 0)};
}

// A row of few vectors wants a kernel of few registers: the smallest of the numbers of slots built that holds it. A row that
// is there needs more than Before.
template <class Policy, class T, bool Ragged, int Lanes, int Before, int Slots, int... More>
cudaError_t launch_slots(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  if constexpr (sizeof...(More) > 0) {
    if (plan.chunk_len > Slots * Lanes * plan.vec) {
      return launch_slots<Policy, T, Ragged, Lanes, Slots, More...>(args, plan, stream);
    }
  }
  constexpr int whole = Lanes == 32 ? Before : 0;  // fewer lanes may have a row that is not there
  return launch_small<Policy, T, Tile<T, Lanes, Slots, Ragged, whole>>(args, plan, stream);
}

// Whether a lane of eight may have several vectors, and no sixteen lanes share a row of whole vectors: see chunk_lanes.
template <class Policy, class T>
constexpr bool kSeveral = sizeof(T) == 2 && (Policy::affine == Affine::by_element || kOptions<Policy>);

template <class Policy, class T, bool Ragged>
cudaError_t launch_rows_of_one_chunk(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  constexpr bool several = kSeveral<Policy, T>;
  constexpr int most = several ? kVectorsShort : 1, all = kChunkSlots<T>;
  if constexpr (several && !Ragged && kOptions<Policy>) {
    if (plan.lanes == 8) return launch_slots<Policy, T, Ragged, 8, 0, 1, most>(args, plan, stream);
    return launch_slots<Policy, T, Ragged, 32, 1, all / 2, all>(args, plan, stream);
  } else if constexpr (several && !Ragged) {
    if (plan.lanes == 8) return launch_slots<Policy, T, Ragged, 8, 0, 1, 2, 3, most>(args, plan, stream);
    return launch_slots<Policy, T, Ragged, 32, 1, 2, 3, all>(args, plan, stream);
  } else {
    if (plan.lanes == 8) return launch_slots<Policy, T, Ragged, 8, 0, 1, most>(args, plan, stream);
    if (plan.lanes == 16) return launch_slots<Policy, T, Ragged, 16, 0, 1>(args, plan, stream);
    if constexpr (Ragged && (kOptions<Policy> || kBehind<Policy>)) {
      return launch_slots<Policy, T, Ragged, 32, 0, all>(args, plan, stream);
    } else if constexpr (kOptions<Policy> || (Ragged && sizeof(T) == 4)) {
      return launch_slots<Policy, T, Ragged, 32, 0, all / 2, all>(args, plan, stream);
    } else if constexpr (Ragged) {
      return launch_slots<Policy, T, Ragged, 32, 0, 1, 2, 4>(args, plan, stream);
    } else if constexpr (Policy::affine != Affine::by_element) {  // few rows are so short
      return launch_slots<Policy, T, Ragged, 32, 0, 1, all / 2, all>(args, plan, stream);
    } else {
      return launch_slots<Policy, T, Ragged, 32, 0, 1, 2, 4, 6, 8>(args, plan, stream);
    }
  }
}

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

// Rows of a chunk and no more than half of one: see fits_warp.
template <class Policy, class T, bool Ragged>
cudaError_t launch_pairs(const RowArgs& args, const RowPlan& plan, const LaunchShape& shape, cudaStream_t stream) {
  if constexpr (Ragged || Policy::affine != Affine::by_element) {
    return cudaErrorInvalidValue;
  } else {
    constexpr int most = kChunkSlots<T> / 2;  // vectors of a lane
    if (has_wide_weights<T>(args) || args.n.out_dtype != args.n.dtype) {  // see kAllThere
      const LaunchShape block{grid_of(args.n.rows), 2 * 32, 0, 1, plan.overlap};
      return launch_held<Policy, T, false, Held::in_block>(args, block, stream);
    }
    if (args.n.cols - kChunk > most / 2 * 32 * plan.vec) {
      return launch_block<row_pair<Policy, T, Tile<T, 32, most, false, most / 2>>>(args, shape, stream);
    }
    return launch_block<row_pair<Policy, T, Tile<T, 32, most / 2, false>>>(args, shape, stream);
  }
}

template <class Policy, class T, bool Ragged>
cudaError_t launch_rows(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  const RowArgs args{n,
                     plan.chunks,
                     held_groups(plan),
                     plan.blocks_a_row,
                     plan.chunk_len,
                     chunk_bytes(plan.chunk_len, sizeof(T)),
                     plan.block_chunks,
                     plan.slots,
                     static_cast<float>(n.eps),
                     static_cast<float>(n.weight_offset),
                     row_sizes(n, plan),
                     quotient_by(n.rows),
                     quotient_by(n.num_groups),
                     quotient_by(n.spatial),
                     quotient_by(ceil_div(n.rows, kRowsSplit)),
                     quotient_by(n.options.rows_per_sample),
                     quotient_by(plan.blocks_a_row)};
  const int cluster = plan.regime == Regime::cluster ? plan.blocks_a_row : 1;
  const LaunchShape shape{grid_of(plan.grid), plan.warps * 32, plan.shared, cluster, plan.overlap};
  cudaError_t error = cudaSuccess;
  switch (plan.regime) {
    case Regime::subwarp:
    case Regime::warp:
      error = plan.chunks == 1 ? launch_rows_of_one_chunk<Policy, T, Ragged>(args, plan, stream)
                               : launch_pairs<Policy, T, Ragged>(args, plan, shape, stream);
      break;
    case Regime::block:
    case Regime::cluster: error = launch_blocks<Policy, T, Ragged>(args, plan, shape, stream); break;
    case Regime::team: error = launch_team<Policy, T, Ragged>(args, plan, shape, stream); break;
    default: error = launch_split<Policy, T, Ragged>(args, plan, shape, stream);
  }
  return error != cudaSuccess ? error : cudaGetLastError();
}

template <class Policy, class T>
cudaError_t launch(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  if (is_ragged(n, sizeof(T))) return launch_rows<Policy, T, true>(n, plan, stream);
  return launch_rows<Policy, T, false>(n, plan, stream);
}

// `layer`, `rms`: of the norms that stand alone.
template <class T>
cudaError_t launch_with_options(const RowNorm& n, const RowPlan& plan, cudaStream_t stream, RowLaunch layer, RowLaunch rms) {
  const bool adds = only_adds(n) && plan.regime != Regime::split && !is_ragged(n, sizeof(T));
  if (adds) return (n.kind == NormKind::rms ? rms : layer)(n, plan, stream);
  return launch<OptionsPolicy, T>(n, plan, stream);
}

}  // namespace
}  // namespace normswap
