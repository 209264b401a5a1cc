// The backward of the row norms: this file, and a policy (row_backward_policy.cuh). row_backward_plan.h says who has what.
//   row_backward    one pass: sums of row after row, exchanged between the warps that share it, then its dx; or, where no
//                   cluster holds a row, the sums alone, and once more for dx. Sums of columns stay in registers.
//   unite_totals    two passes: a row's sums from those of its chunks
#pragma once

#include "device/activation.cuh"
#include "device/cluster.cuh"
#include "device/launch.h"
#include "row_backward/row_backward_policy.cuh"
#include "row_backward/row_backward_tile.cuh"

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

// --- a warp ----------------------------------------------------------------------------------------------------------

// A vector of weights or biases, `absent` where there are none.
template <class Tile>
__device__ inline void column_values(const ChannelVector& vector, int64_t begin, const Tile& tile, int k, float absent,
                                     float (&out)[Tile::V]) {
  using X = typename Tile::X;
  const int64_t at = begin + tile.offset(k);
  if (vector.data == nullptr) {
#pragma unroll
    for (int j = 0; j < Tile::V; ++j) out[j] = absent;
  } else if (sizeof(X) == 4 || vector.dtype == DType::f32) {
    load_values(static_cast<const float*>(vector.data) + at, tile.inside(k), out);
  } else {
    load_values(static_cast<const X*>(vector.data) + at, tile.inside(k), out);
  }
}

template <class Policy, class G, class Tile, Around A>
struct BackwardWarp {
  using X = typename Tile::X;
  using Slot = BackwardSlot<G, Tile, A>;
  using Row = typename Policy::Row;
  static constexpr int V = Tile::V, Slots = Tile::Slots, Group = Tile::Group;
  static constexpr int Weighted = Policy::has_weight ? Slots : 1, Biased = Policy::has_bias ? Slots : 1;
  const BackwardArgs& args;
  int64_t begin;  // the chunk's first element
  Tile tile;      // of the chunk: of a row that is there
  int64_t at;     // the next element of dx that this lane makes
  float w[Weighted][V], dw[Weighted][V], db[Biased][V];

  __device__ void load_weights() {
    if constexpr (Policy::has_weight) {
#pragma unroll
      for (int k = 0; k < Slots; ++k) {
        column_values(args.n.weight, begin, tile, k, 1.f, w[k]);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          w[k][j] = __fadd_rn(w[k][j], args.weight_offset);
          dw[k][j] = 0.f;
          if (Policy::has_bias) db[k][j] = 0.f;
        }
      }
    }
  }

  // The sums of a turn's rows over the chunk, `left` rows before the end of the piece; every lane of a row holds them. Adds
  // to those of the columns.
  __device__ float2 sums(const Slot& from, int left) {
    const Tile mine = tile_of(left);
    const Row values = row_of(from, mine);
    float sum[2] = {}, other[2] = {};
#pragma unroll
    for (int first = 0; first < Slots; first += Group) {
      if (!mine.any_inside(first)) continue;
      float x[Group][V], dy[Group][V];
      load(from, mine, first, false, x, dy);
      if constexpr (kMayBeActive<A>) {
        if (has_activation()) {
          derive(mine, first, values, x, dy);
          if (keeps()) keep(from, mine, first, dy);
        }
      }
#pragma unroll
      for (int i = 0; i < Group; ++i) {
        const int k = first + i;
        if (V > 1 && i > 0 && !mine.any_inside(k)) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float xhat = Policy::normalised(x[i][j], values), g = weighted(dy[i][j], k, j);
          Policy::add(g, xhat, &sum[(i * V + j) % 2], &other[(i * V + j) % 2]);
          if constexpr (Policy::has_weight) dw[k][j] = fmaf(dy[i][j], xhat, dw[k][j]);
          if constexpr (Policy::has_bias) db[k][j] = __fadd_rn(db[k][j], dy[i][j]);
        }
      }
    }
    float all[Policy::sums];
    all[0] = __fadd_rn(sum[0], sum[1]);
    if constexpr (Policy::sums == 2) all[1] = __fadd_rn(other[0], other[1]);
    lanes_sum<Tile::Lanes>(all);
    return {all[0], Policy::sums == 2 ? all[Policy::sums - 1] : 0.f};
  }

  // Stores dx of a turn's rows.
  __device__ void gradient(const Slot& from, int left, float2 total) const {
    const Tile mine = tile_of(left);
    const Row values = row_of(from, mine);
    const Coefficients c = Policy::finish(total.x, total.y, args.by_cols, values);
    X* const out_at = static_cast<X*>(args.n.dx) + at;
#pragma unroll
    for (int first = 0; first < Slots; first += Group) {
      if (!mine.any_inside(first)) continue;
      float x[Group][V], dy[Group][V];
      load(from, mine, first, keeps(), x, dy);
      if constexpr (A == Around::options) {
        if (!keeps() && has_activation()) derive(mine, first, values, x, dy);
      }
#pragma unroll
      for (int i = 0; i < Group; ++i) {
        const int k = first + i;
        if (V > 1 && i > 0 && !mine.any_inside(k)) continue;
        float out[V];
#pragma unroll
        for (int j = 0; j < V; ++j) out[j] = Policy::gradient(x[i][j], weighted(dy[i][j], k, j), values, c);
        if (!mine.inside(k)) continue;
        constexpr int apart = Tile::Lanes * V;
        if constexpr (A != Around::nothing) add_sum_grad(from, mine, k, at + k * apart, out);
        store(out_at + k * apart, out);
        if constexpr (A != Around::nothing && sizeof(X) == 4 && V == 4) store_apart(at + k * apart, out);
      }
    }
  }

  // What the second pass needs to know of a turn's rows.
  __device__ float2 known_total(const Slot& from) const {
    const float* values = from.row_values();
    return {values[2], values[3]};
  }

 private:
  // This lane's row of the turn; its tile is empty where there is none.
  __device__ Tile tile_of(int left) const {
    Tile mine = tile;
    if (Tile::Rows > 1 && Tile::sub_row() >= left) mine.len = 0;
    return mine;
  }
  // Zeros for a row that is not there: what its slot holds may be no number, and what is added to columns must be 0.
  __device__ Row row_of(const Slot& slot, const Tile& mine) const {
    const float* values = slot.row_values();
    const bool there = Tile::Rows == 1 || mine.len > 0;
    return Policy::template row<X>(there ? values[0] : 0.f, there ? values[1] : 0.f, args.n);
  }
  __device__ float weighted(float dy, int k, int j) const {
    if constexpr (Policy::has_weight) return __fmul_rn(dy, w[k][j]);
    return dy;
  }
  __device__ static void store(X* to, const float (&out)[V]) {
    if constexpr (V == 1) {
      *to = from_float<X>(out[0]);
    } else {
      store_words(to, words_of<X>(out));
    }
  }
  // That of the residual.
  __device__ void store_apart(int64_t at, const float (&out)[V]) const {
    if (args.n.dresidual == nullptr) return;
    const float values[8] = {out[0], out[1], out[2], out[3]};
    const uint4 words = args.n.residual_dtype == DType::f16 ? words_of<Half>(values) : words_of<BFloat16>(values);
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.n.dresidual) + at) = {words.x, words.y};
  }
  __device__ void add_sum_grad(const Slot& from, const Tile& mine, int k, int64_t at, float (&out)[V]) const {
    if (args.n.sum_grad == nullptr) return;
    float more[V];
    if (args.p.sum_bytes > 0) {
      from.load_sum(mine, k, more);
    } else {
      load_values(static_cast<const X*>(args.n.sum_grad) + at, true, more);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = __fadd_rn(out[j], more[j]);
  }

  __device__ static void load(const Slot& from, const Tile& mine, int first, bool kept, float (&x)[Group][V],
                              float (&dy)[Group][V]) {
#pragma unroll
    for (int i = 0; i < Group; ++i) from.load(mine, first + i, kept, x[i], dy[i]);
  }
  __device__ bool has_activation() const { return args.n.activation.code != Activation::none; }
  __device__ bool keeps() const { return A == Around::wide || (A == Around::options && args.p.keeps); }
  // dy by way of the activation; 0 stays so.
  __device__ void derive(const Tile& mine, int first, const Row& values, const float (&x)[Group][V],
                         float (&dy)[Group][V]) const {
#pragma unroll
    for (int i = 0; i < Group; ++i) {
      const int k = first + i;
      float b[V], z[V];
      column_values(args.n.bias, begin, mine, k, 0.f, b);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        z[j] = rounded<G>(Policy::template output<X>(Policy::normalised(x[i][j], values), w[k][j], b[j], args.n));
      }
      times_slope<G>(args.n.activation, z, dy[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) dy[i][j] = mine.inside(k) ? dy[i][j] : 0.f;
    }
  }
  // For the gradient of these rows.
  __device__ static void keep(const Slot& from, const Tile& mine, int first, const float (&dy)[Group][V]) {
#pragma unroll
    for (int i = 0; i < Group; ++i) from.keep(mine, first + i, dy[i]);
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
