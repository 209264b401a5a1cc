// The backward of the row norms: this file, what a warp does (row_backward_warp.cuh) and a policy (row_backward_policy.cuh).
// row_backward_plan.h says who has what.
//   row_backward    one pass: sums of row after row, exchanged between the warps that share it, then its dx; or, where no
//                   cluster holds a row, the sums alone, and once more for dx. Sums of columns stay in registers.
//   unite_totals    two passes: a row's sums from those of its chunks
#pragma once

#include "device/cluster.cuh"
#include "device/launch.h"
#include "row_backward/row_backward_warp.cuh"

namespace normswap {
namespace {

// --- the sums of a row ---------------------------------------------------------------------------------------------

// The sums of rows whose chunks belong to several warps, of a block or of a cluster. A warp sends those of turn t + 4 when
// all have sent those of turn t + 2, and so heard those of turn t: four sets in turn.
struct SumsExchange {
  struct Shared {
    float2 parts[kSumsInFlight][kMaxCluster * kMaxWarpsBackward];
    Barrier barriers[kWarpsBackwardLean][kSumsInFlight];  // of a team
  };
  static_assert(sizeof(Shared) <= kExchangeBytes - 512);
  const BackwardArgs& args;
  Shared& shared;
  int team, place, rank;

  // All threads call; then a barrier of the block.
  __device__ void open() const {
    const bool clustered = args.p.blocks_a_row > 1, mine = threadIdx.x < kSumsInFlight;
    for (int i = 0; mine && i < args.p.teams; ++i) {
      shared.barriers[i][threadIdx.x].init(clustered ? 1 : args.p.block_chunks);
    }
    __syncwarp();
    if (!clustered) return;
    if (mine) shared.barriers[0][threadIdx.x].arrive_expecting(bytes());  // a team alone
    __syncwarp();
    cluster_arrive_with_inboxes();
    cluster_wait();
  }
  // All lanes hold the sums of this warp's chunk.
  __device__ void send(int turn, float2 sums) const {
    const int lane = threadIdx.x % 32, set = turn % kSumsInFlight;
    if (args.p.blocks_a_row > 1) {
      float2* to = shared.parts[set] + rank * args.p.block_chunks + place;
      if (lane < args.p.blocks_a_row) send_to_block(to, inbox(set), lane, sums);
    } else if (lane == 0) {
      shared.parts[set][team * args.p.block_chunks + place] = sums;
      shared.barriers[team][set].arrive();
    }
  }
  __device__ float2 hear(int turn) const {
    const int set = turn % kSumsInFlight;
    Barrier& barrier = shared.barriers[team][set];
    barrier.wait(turn / kSumsInFlight % 2);
    if (args.p.blocks_a_row > 1 && threadIdx.x == 0) barrier.arrive_expecting(bytes());
    return unite(shared.parts[set] + team * args.p.block_chunks);
  }

 private:
  __device__ unsigned bytes() const { return static_cast<unsigned>(args.p.chunks * sizeof(float2)); }
  __device__ const Inbox& inbox(int set) const { return reinterpret_cast<const Inbox&>(shared.barriers[0][set]); }

  // The binary tree over a row's chunks by index; every lane holds it.
  __device__ float2 unite(const float2* parts) const {
    const int first = (static_cast<int>(threadIdx.x) & (args.tree_lanes - 1)) * 4, chunks = static_cast<int>(args.p.chunks);
    float x[4], y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 part = first + i < chunks ? parts[first + i] : float2{};
      x[i] = part.x;
      y[i] = part.y;
    }
    float2 sum{tree(x), tree(y)};
    for (int mask = 1; mask < args.tree_lanes; mask *= 2) {
      sum.x = __fadd_rn(sum.x, __shfl_xor_sync(kWholeWarp, sum.x, mask));
      sum.y = __fadd_rn(sum.y, __shfl_xor_sync(kWholeWarp, sum.y, mask));
    }
    return sum;
  }
};

// --- sums of columns -------------------------------------------------------------------------------------------------

// What the block's warps hold of a column, added in the order of the teams and, of short rows, of the rows of a warp; by
// way of all of the dynamic shared memory. All threads call.
template <class Tile, int Slots>
__device__ inline void store_column_sums(const BackwardArgs& args, const Tile& tile, const float (&held)[Slots][Tile::V],
                                         float* room, int64_t piece, int rank, int which) {
  const BackwardPlan& p = args.p;
  float* mine = room + (threadIdx.x / 32 * Tile::Rows + Tile::sub_row()) * p.chunk_len;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < Slots; ++k) {
#pragma unroll
    for (int j = 0; j < Tile::V; ++j) {
      if (tile.inside(k)) mine[tile.offset(k) + j] = held[k][j];
    }
  }
  __syncthreads();
  const int64_t begin = static_cast<int64_t>(rank) * p.block_chunks * kChunk;
  const int64_t left = args.n.cols - begin;
  const int count = static_cast<int>(min(left, static_cast<int64_t>(p.block_chunks) * kChunk));
  for (int c = threadIdx.x; c < count; c += blockDim.x) {
    const float* from = room + c / kChunk * p.chunk_len + c % kChunk;
    float sum = 0.f;
    for (int i = 0; i < p.teams * Tile::Rows; ++i) sum = __fadd_rn(sum, from[i * p.block_chunks * p.chunk_len]);
    if (p.pieces == 1) {
      set_channel_value(which == 0 ? args.n.dweight : args.n.dbias, begin + c, sum);
    } else {
      args.n.partials[(piece * 2 + which) * args.n.cols + begin + c] = sum;
    }
  }
}

// --- kernels ---------------------------------------------------------------------------------------------------------

// See kWarpsBackwardLean.
template <class Policy, class Tile, Around A>
constexpr int kMostWarps = !Policy::has_bias && A == Around::nothing && sizeof(typename Tile::X) == 2 ? kWarpsBackwardLean : kMaxWarpsBackward;

template <class Policy, class G, class Tile, Around A>
__global__ void __launch_bounds__(kMostWarps<Policy, Tile, A> * 32, 1) row_backward(const BackwardArgs args) {
  extern __shared__ __align__(16) char shared[];
  __shared__ SumsExchange::Shared exchanged;
  const BackwardPlan& p = args.p;
  const int warp = threadIdx.x / 32, team = warp / p.block_chunks, place = warp % p.block_chunks;
  // Once more from the end: what was read last is still in the L2.
  const int64_t block = args.pass == Pass::gradient ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t piece = block / p.blocks_a_row;
  const int rank = static_cast<int>(block % p.blocks_a_row), chunk = rank * p.block_chunks + place;
  const SumsExchange exchange{args, exchanged, team, place, rank};
  const bool exchanges = args.pass == Pass::both && p.chunks > 1 && args.n.dx != nullptr;
  if (exchanges) exchange.open();
  __syncthreads();
  follow_predecessor();
  let_successor_start();
  using Slot = BackwardSlot<G, Tile, A>;
  BackwardWarp<Policy, G, Tile, A> mine{args, chunk * int64_t{kChunk}};
  const int64_t left_of_row = max(int64_t{0}, args.n.cols - mine.begin);
  mine.tile.len = mine.tile.extent =
      Tile::Full ? kChunk : static_cast<int>(min(left_of_row, static_cast<int64_t>(p.chunk_len)));
  const int step = p.teams * Tile::Rows, lag = exchanges ? p.lag : 0;
  const int64_t row = piece * p.rows_a_piece + team * Tile::Rows, end = min(args.n.rows, (piece + 1) * p.rows_a_piece);
  // Rows from the warp's first one of this turn to the end of the piece: a turn more is `step` less.
  int left = chunk < p.chunks ? static_cast<int>(max(int64_t{0}, end - row)) : 0;
  int left_done = left, left_staged = left;
  const int ring = p.slots * p.slot_bytes;
  char* const memory = shared + warp * ring;
  const auto next = [&](int slot) { return slot + p.slot_bytes == ring ? 0 : slot + p.slot_bytes; };
  BackwardStage<G, Tile, A> stage(args, memory, row, mine.begin, step);
  if (left > 0) {
    for (int slot = 0; slot < ring; slot += p.slot_bytes, left_staged -= step) {
      stage.next(args, slot, left_staged, mine.tile.len);
    }
  }
  mine.load_weights();
  mine.at = (row + Tile::sub_row()) * args.n.cols + mine.begin + Tile::offset(0);
  const unsigned apart = static_cast<unsigned>(step * args.n.cols);
  unsigned first = static_cast<unsigned>(row * args.n.cols + mine.begin), first_done = first;
  int in = 0, out = 0;
  for (int turn = 0; left_done > 0; ++turn) {
    float2 total{};
    if (left > 0) {
      wait_for_all_but<kMaxSlotsBackward - 1>(p.slots - 1 - lag);
      __syncwarp();
      if (args.pass != Pass::gradient) total = mine.sums(Slot{args, memory + in, first}, left);
      if (exchanges) exchange.send(turn, total);
      if (args.pass == Pass::sums && threadIdx.x % 32 == 0) {
        args.sums[(row + static_cast<int64_t>(turn) * step) * p.chunks + chunk] = total;
      }
      in = next(in);
      left -= step;
      first += apart;
    }
    if (turn < lag) continue;
    if (args.n.dx != nullptr && args.pass != Pass::sums) {
      const Slot from{args, memory + out, first_done};
      if (exchanges) total = exchange.hear(turn - lag);
      if (args.pass == Pass::gradient) total = mine.known_total(from);
      mine.gradient(from, left_done, total);
      mine.at += static_cast<int64_t>(step) * args.n.cols;
    }
    __syncwarp();
    stage.next(args, out, left_staged, mine.tile.len);
    left_staged -= step;
    left_done -= step;
    first_done += apart;
    out = next(out);
  }
  float* room = reinterpret_cast<float*>(shared);
  if constexpr (Policy::has_weight) {
    if (args.pass == Pass::gradient) return;
    if (args.n.dweight.data != nullptr) store_column_sums(args, mine.tile, mine.dw, room, piece, rank, 0);
    if constexpr (Policy::has_bias) {
      if (args.n.dbias.data != nullptr) store_column_sums(args, mine.tile, mine.db, room, piece, rank, 1);
    }
  }
}

// A block a row. By the tree over the chunks; spoils what it reads.
__global__ void __launch_bounds__(256) unite_totals(const BackwardArgs args) {
  follow_predecessor();
  let_successor_start();
  float2* v = args.sums + blockIdx.x * args.p.chunks;
  for (int64_t stride = 1; stride < args.p.chunks; stride *= 2) {
    for (int64_t i = threadIdx.x * 2 * stride; i + stride < args.p.chunks; i += blockDim.x * 2 * stride) {
      v[i] = {__fadd_rn(v[i].x, v[i + stride].x), __fadd_rn(v[i].y, v[i + stride].y)};
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) args.totals[blockIdx.x] = v[0];
}

// --- launch ----------------------------------------------------------------------------------------------------------

template <auto kernel>
cudaError_t launch_backward(BackwardArgs args, Pass pass, cudaStream_t stream) {
  const BackwardPlan& p = args.p;
  args.pass = pass;
  const LaunchShape shape{grid_of(p.grid), p.warps * 32, p.shared, p.one_pass ? p.blocks_a_row : 1, p.overlap};
  return launch_block<kernel>(args, shape, stream);
}

template <auto kernel>
cudaError_t launch_passes(const BackwardArgs& args, cudaStream_t stream) {
  if (args.p.one_pass) return launch_backward<kernel>(args, Pass::both, stream);
  cudaError_t error = launch_backward<kernel>(args, Pass::sums, stream);
  if (error != cudaSuccess || args.n.dx == nullptr) return error;
  error = launch_block<unite_totals>(args, {grid_of(args.n.rows), 256, 0, 1, args.p.overlap}, stream);
  return error == cudaSuccess ? launch_backward<kernel>(args, Pass::gradient, stream) : error;
}

template <class Policy, class G, class Tile, Around A = Around::nothing>
cudaError_t launch_tile(const BackwardArgs& args, cudaStream_t stream) {
  return launch_passes<row_backward<Policy, G, Tile, A>>(args, stream);
}

// See takes_narrow_grad.
template <class X, class G>
constexpr bool kNarrow = sizeof(G) < sizeof(X);

template <class Policy, class X, class G, int V>
cudaError_t launch_vectors(const BackwardArgs& args, cudaStream_t stream) {
  if constexpr (Policy::has_weight) {
    using Any = BackwardTile<X, 32, V, false>;
    if constexpr (sizeof(G) == 2 && V > 1 && !kNarrow<X, G>) {
      if (args.p.wide) return launch_tile<Policy, G, Any, Around::wide>(args, stream);
    }
    if constexpr (V > 1) {
      const bool passes = args.n.activation.code == Activation::none;
      if (args.p.with && passes) return launch_tile<Policy, G, Any, Around::sums>(args, stream);
    }
    if constexpr (!kNarrow<X, G>) {
      if (args.p.with) return launch_tile<Policy, G, Any, Around::options>(args, stream);
    }
  }
  if (args.p.lanes == 8) return launch_tile<Policy, G, BackwardTile<X, 8, V, false>>(args, stream);
  if constexpr (V > 1) {
    if (args.n.cols % kChunk == 0) return launch_tile<Policy, G, BackwardTile<X, 32, V, true>>(args, stream);
  }
  return launch_tile<Policy, G, BackwardTile<X, 32, V, false>>(args, stream);
}

template <class Policy, class X, class G = X>
cudaError_t launch_row_backward(const RowBackward& n, const BackwardPlan& p, cudaStream_t stream) {
  int tree_lanes = 1;
  while (tree_lanes * 4 < p.chunks && tree_lanes < 32) tree_lanes *= 2;
  float2* sums = reinterpret_cast<float2*>(n.sums);
  const float offset = n.weight.data == nullptr ? 0.f : static_cast<float>(n.weight_offset);
  const float by_cols = 1.f / static_cast<float>(n.cols);
  BackwardArgs args{n, p, Pass::both, by_cols, offset, tree_lanes, sums, sums + n.rows * p.chunks};
  if (n.dx == nullptr) args.p.keeps = args.p.wide = false;  // no gradient is made of it
  constexpr int per = 16 / static_cast<int>(sizeof(X));
  cudaError_t error = cudaSuccess;
  if (kNarrow<X, G> || n.cols % per == 0) {
    error = launch_vectors<Policy, X, G, per>(args, stream);
  } else if constexpr (!kNarrow<X, G>) {
    error = launch_vectors<Policy, X, G, 1>(args, stream);
  }
  return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace
}  // namespace normswap
