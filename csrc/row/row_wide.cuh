// The row engine's kernels that work on row after row, and those for rows that no blocks hold:
//   row_team     team: blocks that run at once hold row after row and tell each other their statistics
//   row_partial, row_team, row_apply     both: a team has the first part of each row, the rest is read twice
//   row_partial, row_merge, row_apply    split: for rows and GPUs none of these serves; the input is read twice
#pragma once

#include "device/barrier.cuh"
#include "device/launch.h"
#include "row/row_apply.cuh"

namespace normswap {
namespace {

// What the workspace holds: team, both: what the blocks tell each other. split, both: a statistic and a float a group, then
// the values of the rows.
template <class Stat>
__device__ inline Stat* split_stats(const RowArgs& args) {
  return reinterpret_cast<Stat*>(static_cast<Told*>(args.n.workspace) + args.held_groups * kToldSets);
}

template <class Stat>
__device__ inline float* split_room(const RowArgs& args) {
  return reinterpret_cast<float*>(split_stats<Stat>(args) + args.n.rows * args.sizes.groups);
}

template <class Stat>
__device__ inline RowValues* split_values(const RowArgs& args) {
  return reinterpret_cast<RowValues*>(split_room<Stat>(args) + args.n.rows * args.sizes.groups);
}

// --- team --------------------------------------------------------------------------------------------------------
// A team of args.blocks_a_row blocks does one row after the other, or as much of each as it holds. A warp has the same chunk
// of each, so that its weights stay in registers. A block holds its slices of args.slots rows: while one is normalised the
// statistics of the next are on their way and those after it are being loaded.

// The index of this thread's warp, asked for anew: a register less that lives long. What a kernel of so much shared memory
// spills has no L1 to stay in, and comes back from the L2.
__device__ inline int warp_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread / 32;
}

// The statistics of a row of which every block holds a slice, which is a group, through memory (tell, hear). Partly: the
// others' are in the workspace. Warps wait for barriers in shared memory: `handed_on` for the statistics of the block's
// chunks, `known` for the values of the row.
template <class Policy, class T, bool Partly>
struct TeamExchange {
  using Stat = typename Policy::Stat;
  struct Turn {
    Stat parts[kGroup];
    RowValues values;
    Barrier handed_on, known;
  };
  struct Shared {
    Stat groups[Partly ? 2 : 1][Partly ? kGroupsBoth : kMaxGroups];  // by turns
    Turn turns[kTurnsKept];
  };
  const RowArgs& args;
  Shared& shared;
  int team, rank;

  // A barrier of the block must follow.
  __device__ TeamExchange(const RowArgs& a, Shared& s, int of_team, int of_rank)
      : args(a), shared(s), team(of_team), rank(of_rank) {
    if (threadIdx.x < kTurnsKept) {
      shared.turns[threadIdx.x].handed_on.init(kWarpsTeam);
      shared.turns[threadIdx.x].known.init(32);
    }
  }
  // The statistic of this warp's chunk of this turn's row.
  __device__ void hand_on(int turn, const Stat& mine) const {
    if (threadIdx.x % 32 != 0) return;
    Turn& of = shared.turns[turn % kTurnsKept];
    of.parts[warp_now()] = mine;
    of.handed_on.arrive();
  }
  __device__ void wait_for_block(int turn) const {
    shared.turns[turn % kTurnsKept].handed_on.wait(turn / kTurnsKept % 2);
  }
  // Tells the other blocks what the warps of this one have handed on; a warp calls.
  __device__ void tell_group(int turn) const {
    const int lane = threadIdx.x % 32;
    wait_for_block(turn);
    const Stat* parts = shared.turns[turn % kTurnsKept].parts;
    const Stat group = unite_one<1, kGroup>(lane < kGroup ? parts[lane] : Stat{}, args.sizes.of_group(rank));
    if (lane == 0) tell(told_of(turn) + rank, told(group), turn + 1);
  }
  // Hears what all blocks told; one warp calls, once its block has told: polling for what is not yet there slows all of the
  // memory. Who waits for the values also sees what any lane stored before.
  __device__ void hear_row(int turn, int64_t row) const {
    const Stat stat = hear_groups(turn);
    Turn& of = shared.turns[turn % kTurnsKept];
    if (threadIdx.x % 32 == 0) {
      const RowValues values = Policy::template finish<T>(stat, args);
      of.values = values;
      if (rank == 0) save_values<Policy>(args, row, stat, values);
      if (Partly && rank == 0) split_values<Stat>(args)[row] = values;
    }
    of.known.arrive();
  }
  __device__ RowValues values(int turn) const {
    const Turn& of = shared.turns[turn % kTurnsKept];
    of.known.wait(turn / kTurnsKept % 2);
    return of.values;
  }
  __device__ void look_up_groups(int turn, int64_t row) const {
    const Stat* from = split_stats<Stat>(args) + row * args.sizes.groups;
    Stat* to = groups_of(turn);
#pragma unroll 4
    for (int g = args.held_groups + static_cast<int>(threadIdx.x % 32); g < args.sizes.groups; g += 32) to[g] = from[g];
  }

 private:
  __device__ Told* told_of(int turn) const {
    return static_cast<Told*>(args.n.workspace) + (team * kToldSets + turn % kToldSets) * args.blocks_a_row;
  }
  __device__ Stat* groups_of(int turn) const { return shared.groups[Partly ? turn % 2 : 0]; }
  // The statistic of that turn's row.
  __device__ Stat hear_groups(int turn) const {
    constexpr int each = kToldAtOnce / 32;
    const int count = args.blocks_a_row;
    const Told* from = told_of(turn);
    Stat* to = groups_of(turn);
    for (int first = threadIdx.x % 32; first < count; first += kToldAtOnce) {
      float2 what[each];
      hear(what, from + first, 32, (count - first + 31) / 32, turn + 1);
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int g = first + i * 32;
        if (g < count) understand(what[i], args.sizes.of_group(g), to[g]);
      }
    }
    __syncwarp();
    const Stat stat = unite_groups(to, args.sizes);
    __syncwarp();
    return stat;
  }
};

template <class Policy, bool Ragged>
constexpr bool kLean = kWeights<Policy> == 0 && !Ragged;

// A block has as many warps as its slices have chunks; Apart: and kWarpsApart. Partly: its slices are not all of the row.
template <class Policy, class T, bool Ragged, bool Partly, bool Apart>
__global__ void __launch_bounds__((kWarpsTeam + (Apart ? kWarpsApart : 0)) * 32,
                                  Apart ? 1 : kTeamBlocks<kLean<Policy, Ragged>, sizeof(T)>) row_team(const RowArgs args) {
  using Exchange = TeamExchange<Policy, T, Partly>;
  using Tile = ChunkTile<T, Ragged>;
  constexpr bool in_registers = Policy::affine == Affine::by_element, by_channel = Policy::affine == Affine::by_channel;
  using Ahead = AffineAhead<Policy, T, Tile, Tile::Slots>;
  using AffineOfRow = std::conditional_t<by_channel, ChannelsLoaded<T>, Ahead>;
  extern __shared__ __align__(16) char shared[];
  __shared__ typename Exchange::Shared exchanged;
  // Of a warp: what is the same in every row, in memory where registers are few; parameters of its channels, by turns.
  __shared__ struct {
    ChunkPlace place;
    std::conditional_t<in_registers, AffineNone, Ahead> ahead;
    ChannelParameters few[by_channel ? kTurnsKept : 1][2];
  } of_warp[kWarpsTeam];
  static_assert(sizeof(exchanged) + sizeof(of_warp) <= kStatisticsBytes);
  const int blocks = args.blocks_a_row;
  const int teams = gridDim.x / blocks, team = blockIdx.x / blocks, rank = blockIdx.x % blocks;
  const Exchange exchange(args, exchanged, team, rank);
  if (threadIdx.x < kWarpsTeam) {
    auto& each = of_warp[threadIdx.x];
    each.place = ChunkPlace::of(args, static_cast<int64_t>(rank) * kWarpsTeam + threadIdx.x);
    if constexpr (!in_registers) {
      Tile tile;
      tile.len = each.place.len;
      each.ahead.load_ahead(args, each.place.begin, tile);
    }
  }
  __syncthreads();
  const auto in_slot = [&](int slot) {
    const int at = warp_now();
    char* buffer = shared + (slot * kWarpsTeam + at) * args.chunk_bytes;
    return ChunkInShared<Policy, T, Ragged>{args, buffer, of_warp[at].place};
  };
  const auto row_of = [&](int turn) { return team + static_cast<int64_t>(turn) * teams; };
  const auto load_channels = [&](int turn) {
    static_assert(2 * kWarpsTeam == 32);  // a lane a channel
    if constexpr (by_channel) {
      auto& each = of_warp[threadIdx.x % 32 / 2];
      const int c = threadIdx.x % 2;
      each.few[turn % kTurnsKept][c] = each.ahead.load(args, row_of(turn), c);
    }
  };
  if (Apart && warp_now() >= kWarpsTeam) {
    for (int turn = 0; row_of(turn) < args.n.rows; ++turn) {
      if (warp_now() == kWarpsTeam) {
        exchange.tell_group(turn);
      } else {
        exchange.wait_for_block(turn);
        load_channels(turn);
        exchange.hear_row(turn, row_of(turn));
      }
    }
    return;
  }
  for (int slot = 0; slot < args.slots; ++slot) {
    if (row_of(slot) < args.n.rows) in_slot(slot).stage(row_of(slot));
    end_batch();
  }
  AffineOfRow affine;
  if constexpr (in_registers) {
    const ChunkPlace place = of_warp[warp_now()].place;
    Tile tile;
    tile.len = place.len;
    affine.load_ahead(args, place.begin, tile);
  }
  // Statistics of this turn's row, the rest of what is to be done with the one `lag` turns before.
  const int lag = Apart ? max(1, min(args.slots - 2, kMostLag)) : 1;
  for (int turn = 0, slot = 0, slot_before = 0;; ++turn) {
    const int64_t row = row_of(turn), before = row_of(turn - lag), later = row_of(turn - lag + args.slots);
    const bool more = row < args.n.rows;
    if (more) {
      wait_for_all_but<kMaxSlots - 1>(args.slots - 1 - min(turn, lag));
      __syncwarp();
      exchange.hand_on(turn, in_slot(slot).statistic(row));
    }
    if constexpr (!Apart) {  // a warp for each; together, since what waits is then not in the way of what is waited for
      const int warp = warp_now();
      if (warp == 0 && more) exchange.tell_group(turn);
      if (warp == 1 && turn > 0) exchange.hear_row(turn - 1, before);
      if (Partly && warp == 2 && more) exchange.look_up_groups(turn, row);
      if (warp == 3 && turn > 0) load_channels(turn - 1);
      __syncthreads();
    }
    if (turn >= lag) {
      const RowValues values = exchange.values(turn - lag);
      if constexpr (in_registers) affine.forget();
      if constexpr (by_channel) {
        const auto& mine = of_warp[warp_now()];
        static_cast<Ahead&>(affine) = mine.ahead;
        affine.few[0] = mine.few[(turn - lag) % kTurnsKept][0];
        affine.few[1] = mine.few[(turn - lag) % kTurnsKept][1];
      }
      const auto chunk = in_slot(slot_before);
      chunk.apply(before, values, affine, true);
      __syncwarp();
      if (later < args.n.rows) chunk.stage(later);
      end_batch();
      if (row_of(turn - lag + 1) >= args.n.rows) return;
      slot_before = slot_before + 1 == args.slots ? 0 : slot_before + 1;
    }
    slot = slot + 1 == args.slots ? 0 : slot + 1;
  }
}

template <class Policy, class T, bool Ragged>
cudaError_t launch_team(const RowArgs& args, const RowPlan& plan, const LaunchShape& shape, cudaStream_t stream) {
  if constexpr (kOptions<Policy>) {
    return cudaErrorInvalidValue;  // see Rows::options
  } else {
    const int64_t bytes = row_workspace_bytes(plan, args.n.rows);
    const cudaError_t error = cudaMemsetAsync(args.n.workspace, 0, bytes, stream);
    if (error != cudaSuccess) return error;
    if constexpr (kLean<Policy, Ragged> && sizeof(T) == 2) {
      if (plan.warps > kWarpsTeam) return launch_at_once<row_team<Policy, T, Ragged, false, true>>(args, shape, stream);
    }
    return launch_at_once<row_team<Policy, T, Ragged, false, false>>(args, shape, stream);
  }
}

// --- split, and both -----------------------------------------------------------------------------------------------
// Statistics: a block is a group of chunks, a warp a chunk. row_merge and row_apply start while the kernel before them
// ends. row_partial does not, so that row_apply may load x without waiting. In both, row_team stands for row_merge, and does
// not start early either: it has the first groups of all rows, which the other kernels leave out, and so reads half of the
// input or more only once.

// The first element of a row that no team holds.
__host__ __device__ inline int64_t first_split(const RowArgs& args) {
  return static_cast<int64_t>(args.held_groups) * kGroup * args.chunk_len;
}

// Starts loading elements [begin, begin + length) of a row, as far as they are there.
template <class T, class Tile>
__device__ inline void load_piece(Tile& tile, const RowArgs& args, int64_t row, int64_t begin, int64_t length) {
  const int64_t len = row < args.n.rows ? max(int64_t{0}, min(args.n.cols - begin, length)) : 0;
  const T* x = static_cast<const T*>(args.n.x);
  tile.load(x + row * args.n.cols + begin, static_cast<int>(len), x + args.n.rows * args.n.cols);
}

template <class Policy, class T, bool Ragged>
__global__ void __launch_bounds__(kWarpsSplit * 32, kOptions<Policy> && sizeof(T) == 4 ? 1 : 2)
    row_partial(const RowArgs args) {
  using Stat = typename Policy::Stat;
  __shared__ Stat parts[kGroup];
  let_successor_start();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < args.held_groups * kToldSets; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    static_cast<Told*>(args.n.workspace)[i] = {};
  }
  // The same group of all rows comes first: row_apply does them in the opposite order (split).
  const int64_t nth = args.by_rows.of(blockIdx.x), row = blockIdx.x - nth * args.n.rows;
  const int group = args.held_groups + static_cast<int>(nth);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  ChunkTile<T, Ragged> tile[1];
  const int64_t begin = (int64_t{group} * kGroup + warp) * args.chunk_len;
  [[maybe_unused]] const int64_t rows[1] = {row};
  load_piece<T>(tile[0], args, row, begin, args.chunk_len);
  if constexpr (kOptions<Policy>) {
    add_residual<T, false>(tile, args, rows, begin);
  } else {
    tile[0].settle();
  }
  Stat mine[1];
  Policy::statistics(tile, tile[0].len == args.chunk_len ? args.sizes.chunk : args.sizes.last_chunk, args, mine);
  if (lane == 0) parts[warp] = mine[0];
  __syncthreads();
  if (warp == 0) {
    const Stat united = unite_one<1, kGroup>(lane < kGroup ? parts[lane] : Stat{}, args.sizes.of_group(group));
    if (lane == 0) split_stats<Stat>(args)[row * args.sizes.groups + group] = united;
  }
}

template <class Policy, class T>
__global__ void __launch_bounds__(256) row_merge(const RowArgs args) {
  using Stat = typename Policy::Stat;
  let_successor_start();
  follow_predecessor();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * args.sizes.groups;
  const Stat* parts = split_stats<Stat>(args) + first;
  const Stat stat = args.sizes.groups <= kMaxGroups
                        ? unite_groups(parts, args.sizes)
                        : unite_in_memory(parts, split_room<Stat>(args) + first, args.sizes);
  if (threadIdx.x == 0) {
    const RowValues values = Policy::template finish<T>(stat, args);
    split_values<Stat>(args)[blockIdx.x] = values;
    save_values<Policy>(args, blockIdx.x, stat, values);
  }
}

// A warp takes a piece of several rows, so that its weights are loaded once. Backwards: in split, what row_partial read last
// is still in the L2.
template <class Policy, class T, bool Ragged>
__global__ void __launch_bounds__(kWarpsApply * 32, 2) row_apply(const RowArgs args) {
  using Piece = Tile<T, 32, kPiece / 32 / (16 / static_cast<int>(sizeof(T))), Ragged>;
  const int64_t at = static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x;
  const int64_t sets = args.by_sets.divisor, place = args.by_sets.of(at);
  const int64_t begin = first_split(args) + (place * kWarpsApply + threadIdx.x / 32) * kPiece;
  Piece pieces[kRowsSplit];
  int64_t rows[kRowsSplit];
  RowValues values[kRowsSplit];
#pragma unroll
  for (int r = 0; r < kRowsSplit; ++r) {
    rows[r] = (at - place * sets) * kRowsSplit + r;
    load_piece<T>(pieces[r], args, rows[r], begin, kPiece);
  }
  AffineAhead<Policy, T, Piece> affine;
  affine.load_ahead(args, begin, pieces[0]);
#pragma unroll
  for (Piece& piece : pieces) piece.settle();
  follow_predecessor();
  let_successor_start();
#pragma unroll
  for (int r = 0; r < kRowsSplit; ++r) {
    values[r] = split_values<typename Policy::Stat>(args)[min(rows[r], args.n.rows - 1)];
  }
  apply_tiles<Policy, T>(pieces, args, rows, begin, values, affine);
}

template <class Policy, class T, bool Ragged>
cudaError_t launch_split(const RowArgs& args, const RowPlan& plan, const LaunchShape& shape, cudaStream_t stream) {
  const int64_t pieces = ceil_div(args.n.cols - first_split(args), kPiece * kWarpsApply);
  const LaunchShape partial{shape.grid, kWarpsSplit * 32, 0, 1, false};
  const LaunchShape merge{grid_of(args.n.rows), 256, 0, 1, plan.overlap};
  RowArgs second = args;
  const bool summed = kOptions<Policy> && args.n.options.residual != nullptr;  // what row_partial stored is normalised
  if (summed) second.n.x = args.n.options.sum;
  const LaunchShape apply{grid_of(pieces * ceil_div(args.n.rows, kRowsSplit)), kWarpsApply * 32, 0, 1,
                          plan.overlap && !summed};
  const LaunchShape team{grid_of(args.held_groups), shape.threads, shape.shared, 1, false};
  cudaError_t error = launch_block<row_partial<Policy, T, Ragged>>(args, partial, stream);
  if (error != cudaSuccess) return error;
  if constexpr (!Ragged && sizeof(T) == 4 && !kOptions<Policy>) {
    if (args.held_groups > 0) error = launch_at_once<row_team<Policy, T, false, true, false>>(args, team, stream);
  }
  if (args.held_groups == 0) error = launch_block<row_merge<Policy, T>>(args, merge, stream);
  return error == cudaSuccess ? launch_block<row_apply<Policy, T, Ragged>>(second, apply, stream) : error;
}

}  // namespace
}  // namespace normswap
