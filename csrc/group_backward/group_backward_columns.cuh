// The backward of group_norm of channels_last tensors: the sums of a piece, the gradients of one, and the kernel whose blocks
// take pieces for the one and later for the other. A slab of one piece is done at once.
#pragma once

#include "group_backward/group_backward_strips.cuh"

namespace normswap {
namespace {

__device__ inline void load_line_values(const ColumnsArgs& a, const SlabPiece& of, const ColumnsShared& shared) {
  for (int c = threadIdx.x; c < of.width; c += blockDim.x) {
    const LineValues line = line_values(a.n, of.group(a, c), of.channel + c);
    shared.mean[c] = line.mean;
    shared.rstd[c] = line.rstd;
    shared.gain[c] = line.gain;
    shared.bias[c] = line.bias;
  }
}

// The sums of a strip's channels in a piece, into the first row of shared.sums. The block calls. after(): once the vectors
// are done with.
template <Behind B, class Vectors, class After>
__device__ inline void piece_sums(const ColumnsArgs& a, const SlabPiece& of, const ColumnsShared& shared, Vectors& vectors,
                                  After after) {
  using D = typename Vectors::D;
  constexpr int V = Vectors::V;
  float sums[V] = {}, products[V] = {};
  const ColumnSlopes<D, V, B> slopes(vectors, shared);
  vectors.template for_each<false>([&](const float (&x)[V], float (&g)[V], const typename Vectors::Residual& residual, int64_t) {
    slopes.apply(a.n, residual, x, g);
    if constexpr (Vectors::Keeps && B != Behind::nothing) vectors.keep(g);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sums[j] = __fadd_rn(sums[j], g[j]);
      products[j] = fmaf(g[j], __fsub_rn(x[j], slopes.mean[j]), products[j]);
    }
  });
  after();
  // Those of a warp's rows, then those of the warps; of rows wider than a warp, those of the rows.
  const int lanes = a.p.lanes, row = static_cast<int>(threadIdx.x) % 32 / lanes;
  for (int rows = lanes > 32 ? 1 : 32 / lanes, half = a.p.half_rows; half > 0; rows = half, half /= 2) {
    const bool adds = row < half && row + half < rows;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float sum = __shfl_down_sync(kWholeWarp, sums[j], half * lanes);
      const float product = __shfl_down_sync(kWholeWarp, products[j], half * lanes);
      if (adds) sums[j] = __fadd_rn(sums[j], sum), products[j] = __fadd_rn(products[j], product);
    }
  }
  if (vectors.row < a.p.side && (lanes > 32 || row == 0) && vectors.lane * V < of.width) {
    float2* const to = shared.sums + (lanes > 32 ? vectors.row : threadIdx.x / 32) * a.p.width + vectors.lane * V;
#pragma unroll
    for (int j = 0; j < V; ++j) to[j] = {sums[j], products[j]};
  }
  __syncthreads();
  for (int c = threadIdx.x; c < of.width; c += blockDim.x) {
    float2 all = shared.sums[c];
    for (int i = 1; i < a.p.sum_rows; ++i) all = plus(all, shared.sums[i * a.p.width + c]);
    shared.sums[c] = all;
  }
  __syncthreads();
}

// The gradients of a piece.
template <Behind B, class Vectors>
__device__ inline void piece_gradients(const ColumnsArgs& a, const ColumnsShared& shared, Vectors& vectors) {
  using T = typename Vectors::T;
  using D = typename Vectors::D;
  constexpr int V = Vectors::V;
  const ColumnSlopes<D, V, B> slopes(vectors, shared);
  float of_x[V], constant[V];
  vectors.values_of(shared.of_x, of_x);
  vectors.values_of(shared.constant, constant);
  vectors.template for_each<true>([&](const float (&x)[V], float (&g)[V], const typename Vectors::Residual& residual, int64_t at) {
    if constexpr (!Vectors::Keeps) slopes.apply(a.n, residual, x, g);
    if (a.n.dresidual != nullptr) Raw<D, V>::of(g).template store<true>(static_cast<D*>(a.n.dresidual) + at);
    if (a.n.dx == nullptr) return;
#pragma unroll
    for (int j = 0; j < V; ++j) g[j] = GroupValues{of_x[j], constant[j]}.gradient(g[j], x[j], slopes.gain[j]);
    Raw<T, V>::of(g).template store<true>(static_cast<T*>(a.n.dx) + at);
  });
}

// The sums over `count` (count <= kBunch or not) rows of `from`, a channel of the strip each thread, into shared.sums.
__device__ inline void unite_rows(const ColumnsArgs& a, const SlabPiece& of, const ColumnsShared& shared,
                                  const float2* from, int count) {
  for (int c = threadIdx.x; c < of.width; c += blockDim.x) {
    float2 sums = __ldcg(from + c);
#pragma unroll 8
    for (int i = 1; i < count; ++i) sums = plus(sums, __ldcg(from + static_cast<int64_t>(i) * a.p.width + c));
    shared.sums[c] = sums;
  }
  __syncthreads();
}

__device__ inline void write_sums(const SlabPiece& of, const ColumnsShared& shared, float2* to) {
  for (int c = threadIdx.x; c < of.width; c += blockDim.x) to[c] = shared.sums[c];
}

// True in the block that has the sums of the slab, in shared.sums, from its pieces': the last of them.
__device__ inline bool unite_slab(const ColumnsArgs& a, const SlabPiece& of, const ColumnsShared& shared) {
  if (a.pieces == 1) return true;
  const int64_t width = a.p.width, first = static_cast<int64_t>(of.slab) * a.pieces;
  write_sums(of, shared, a.piece_sums + (first + of.piece) * width);
  const int bunch = of.piece / kBunch, begin = bunch * kBunch, count = min(kBunch, a.pieces - begin);
  const int64_t bunch_index = static_cast<int64_t>(of.slab) * a.bunches + bunch;
  if (!arrives_last(a.arrived + bunch_index, count)) return false;
  unite_rows(a, of, shared, a.piece_sums + (first + begin) * width, count);
  if (a.bunches == 1) return true;
  write_sums(of, shared, a.bunch_sums + bunch_index * width);
  if (!arrives_last(a.bunch_arrived + of.slab, a.bunches)) return false;
  unite_rows(a, of, shared, a.bunch_sums + static_cast<int64_t>(of.slab) * a.bunches * width, a.bunches);
  return true;
}

// What the sums of a slab are for: those of the `lines`, and take(group, its first channel of the strip, lane of the run that
// has it, what its elements need of its sums). The block calls.
template <class Take>
__device__ inline void finish_slab(const ColumnsArgs& a, const SlabPiece& of, const ColumnsShared& shared, bool lines,
                                   Take take) {
  if (lines && a.line_sums != nullptr) {
    for (int c = threadIdx.x; c < of.width; c += blockDim.x) {
      const float2 sums = shared.sums[c];
      a.line_sums[of.sample * a.n.sizes.channels + of.channel + c] = {sums.x, __fmul_rn(sums.y, shared.rstd[c])};
    }
  }
  if (!a.gradients) return;
  // A run of lanes for a group, as many side by side as there are.
  const int lane = static_cast<int>(threadIdx.x) & (a.run - 1), side = static_cast<int>(blockDim.x) / a.run;
  const int groups = a.by_group_width.quotient(of.width), warp = static_cast<int>(threadIdx.x) / 32 * 32 / a.run;
  for (int some = 0; some + warp < groups; some += side) {
    const int group = some + static_cast<int>(threadIdx.x) / a.run, first = min(group, groups - 1) * a.group_width;
    float2 sums{0.f, 0.f};
    for (int i = lane; i < a.group_width; i += a.run) {
      const float gain = shared.gain[first + i];
      sums = plus(sums, {__fmul_rn(shared.sums[first + i].x, gain), __fmul_rn(shared.sums[first + i].y, gain)});
    }
    const GroupValues values = GroupValues::of(run_sums(sums, a.run), shared.mean[first], shared.rstd[first], a.reciprocal);
    if (group < groups) take(of.group(a, first), first, lane, values);
  }
  __syncthreads();
}

// For the block's own elements.
__device__ inline auto keep_values(const ColumnsArgs& a, const ColumnsShared& shared) {
  return [&](int64_t, int first, int lane, const GroupValues& values) {
    for (int i = lane; i < a.group_width; i += a.run) {
      shared.of_x[first + i] = values.of_x;
      shared.constant[first + i] = values.constant;
    }
  };
}

template <class T, class D, int V, Behind B>
__global__ void __launch_bounds__(kSlabThreads, kSlabBlocks) group_columns(const ColumnsArgs args) {
  extern __shared__ __align__(16) char memory[];
  __shared__ int heard;
  const ColumnsShared shared(args, reinterpret_cast<float*>(memory));
  const bool at_once = args.pieces == 1;
  ColumnVectors<T, D, V> vectors(args);
  const auto turn_of = [&](int ticket) {
    return args.gradients && !at_once ? Turn::of(ticket, args.slabs, args.pieces, args.lag)
                                      : Turn{false, ticket / args.pieces, ticket % args.pieces};
  };
  // Starts with the vectors of a turn.
  const auto begin = [&](int ticket) {
    if (ticket >= args.tickets) return;
    const Turn turn = turn_of(ticket);
    if (turn.gradients) {
      vectors.template begin<true, false>(SlabPiece(args, turn));
    } else {
      vectors.template begin<false, false>(SlabPiece(args, turn));
    }
  };
  Tickets tickets(args.ticket, &heard);
  int ticket = tickets.hear();
  begin(ticket);
  while (ticket < args.tickets) {
    const Turn turn = turn_of(ticket);
    const SlabPiece of(args, turn);
    const auto go_on = [&] {
      ticket = tickets.hear();
      begin(ticket);
    };
    __syncthreads();
    tickets.ask();
    load_line_values(args, of, shared);
    if (turn.gradients) {
      wait_until_ready(args.ready + of.slab);
      for (int c = threadIdx.x; c < of.width; c += blockDim.x) {
        const float2 values = __ldcg(args.values + of.group(args, c));
        shared.of_x[c] = values.x;
        shared.constant[c] = values.y;
      }
      __syncthreads();
      piece_gradients<B>(args, shared, vectors);
      go_on();
      continue;
    }
    __syncthreads();
    const bool gradients_now = at_once && args.gradients;
    piece_sums<B>(args, of, shared, vectors, [&] {
      if (!gradients_now) go_on();
    });
    if (!unite_slab(args, of, shared)) continue;
    if (!gradients_now) {
      finish_slab(args, of, shared, true, [&](int64_t group, int, int lane, const GroupValues& values) {
        if (lane == 0) args.values[group] = {values.of_x, values.constant};
      });
      if (args.gradients && threadIdx.x == 0) set_ready(args.ready + of.slab);
      continue;
    }
    finish_slab(args, of, shared, true, keep_values(args, shared));
    vectors.template begin<true, true>(of);
    piece_gradients<B>(args, shared, vectors);
    go_on();
  }
}

}  // namespace
}  // namespace normswap
