// The backward of group_norm of channels_last tensors. A slab is a strip of whole groups of a sample; blocks take pieces of
// its rows, for their sums and later for the gradients (see group_backward.cuh). A slab of one piece is done at once.
#pragma once

#include "group_backward_strips.cuh"

namespace normswap {
namespace {

// The sums of a strip's channels in a piece, into the first row of shared.sums. The block calls. after(): once the vectors
// are done with.
template <bool Active, class T, class D, int V, class After>
__device__ inline void piece_sums(const ColumnsArgs& a, const SlabPiece& of, const ColumnsShared& shared,
                                  ColumnVectors<T, D, V>& vectors, After after) {
  float sums[V] = {}, products[V] = {};
  const ColumnSlopes<D, V, Active> slopes(vectors, shared);
  vectors.template for_each<false>([&](const float (&x)[V], float (&g)[V], int64_t at) {
    slopes.apply(a.n, at, x, g);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sums[j] = __fadd_rn(sums[j], g[j]);
      products[j] = fmaf(g[j], __fsub_rn(x[j], slopes.mean[j]), products[j]);
    }
  });
  const bool mine = vectors.row < a.p.side && vectors.lane * V < of.width;
  float2* const to = shared.sums + vectors.row * a.p.width + vectors.lane * V;
  if (mine) {
#pragma unroll
    for (int j = 0; j < V; ++j) to[j] = {sums[j], products[j]};
  }
  after();
  for (int half = a.p.half_side; half > 0; half /= 2) {
    __syncthreads();
    if (!mine || vectors.row >= half || vectors.row + half >= a.p.side) continue;
#pragma unroll
    for (int j = 0; j < V; ++j) to[j] = plus(to[j], to[half * a.p.width + j]);
  }
  __syncthreads();
}

// The gradients of a piece.
template <bool Active, class T, class D, int V>
__device__ inline void piece_gradients(const ColumnsArgs& a, const ColumnsShared& shared, ColumnVectors<T, D, V>& vectors) {
  const ColumnSlopes<D, V, Active> slopes(vectors, shared);
  float of_x[V], constant[V];
  vectors.values_of(shared.of_x, of_x);
  vectors.values_of(shared.constant, constant);
  vectors.template for_each<true>([&](const float (&x)[V], float (&g)[V], int64_t at) {
    slopes.apply(a.n, at, x, g);
    if (a.n.dresidual != nullptr) Raw<D, V>::template store<true>(static_cast<D*>(a.n.dresidual) + at, g);
    if (a.n.dx == nullptr) return;
#pragma unroll
    for (int j = 0; j < V; ++j) g[j] = GroupValues{of_x[j], constant[j]}.gradient(g[j], x[j], slopes.gain[j]);
    Raw<T, V>::template store<true>(static_cast<T*>(a.n.dx) + at, g);
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
  for (int c = threadIdx.x; c < of.width; c += blockDim.x) {
    to[c] = shared.sums[c];
    __threadfence();
  }
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

// What the sums of a slab are for. The block calls.
__device__ inline void finish_slab(const ColumnsArgs& a, const SlabPiece& of, const ColumnsShared& shared) {
  if (a.line_sums != nullptr) {
    for (int c = threadIdx.x; c < of.width; c += blockDim.x) {
      const float2 sums = shared.sums[c];
      const float rstd = a.n.rstd[of.group(a, c)];
      a.line_sums[of.sample * a.n.sizes.channels + of.channel + c] = {sums.x, __fmul_rn(sums.y, rstd)};
    }
  }
  if (!a.gradients) return;
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int g = static_cast<int>(threadIdx.x) / 32; g < of.width / a.group_width; g += warps) {
    const int first = g * a.group_width;
    const float2 sums = warp_sums(a.group_width, [&](int i) {
      const float gain = shared.gain[first + i];
      return float2{__fmul_rn(shared.sums[first + i].x, gain), __fmul_rn(shared.sums[first + i].y, gain)};
    });
    if (threadIdx.x % 32 == 0) {
      const int64_t group = of.group(a, first);
      const GroupValues values = GroupValues::of(sums, a.n.mean[group], a.n.rstd[group], a.reciprocal);
      a.values[group] = {values.of_x, values.constant};
      __threadfence();
    }
  }
  __syncthreads();
}

// Active: with an activation.
template <class T, class D, int V, bool Active>
__global__ void __launch_bounds__(kPassingThreads, kPassingBlocks) group_columns(const ColumnsArgs args) {
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
    const auto load_values = [&] {
      for (int c = threadIdx.x; c < of.width; c += blockDim.x) {
        const float2 values = __ldcg(args.values + of.group(args, c));
        shared.of_x[c] = values.x;
        shared.constant[c] = values.y;
      }
      __syncthreads();
    };
    const auto go_on = [&] {
      ticket = tickets.hear();
      begin(ticket);
    };
    __syncthreads();
    tickets.ask();
    for (int c = threadIdx.x; c < of.width; c += blockDim.x) {
      const LineValues line = line_values(args.n, of.group(args, c), of.channel + c);
      shared.mean[c] = line.mean;
      shared.gain[c] = line.gain;
      shared.bias[c] = line.bias;
    }
    if (turn.gradients) {
      wait_until_ready(args.ready + of.slab);
      load_values();
      piece_gradients<Active>(args, shared, vectors);
      go_on();
      continue;
    }
    __syncthreads();
    const bool gradients_now = at_once && args.gradients;
    piece_sums<Active>(args, of, shared, vectors, [&] {
      if (!gradients_now) go_on();
    });
    if (!unite_slab(args, of, shared)) continue;
    finish_slab(args, of, shared);
    if (!args.gradients) continue;
    if (!at_once) {
      if (threadIdx.x == 0) set_ready(args.ready + of.slab);
      continue;
    }
    vectors.template begin<true, true>(of);
    load_values();
    piece_gradients<Active>(args, shared, vectors);
    go_on();
  }
}

// --- launch --------------------------------------------------------------------------------------------------------

inline ColumnsArgs columns_args(const GroupBackward& n, const GroupColumnsPlan& p) {
  const GroupSizes& s = n.sizes;
  ColumnsArgs a{};
  a.n = n;
  a.p = p;
  a.group_width = static_cast<int>(s.channels / s.num_groups);
  a.pieces = static_cast<int>(p.pieces);
  a.bunches = static_cast<int>(p.bunches);
  a.slabs = static_cast<int>(p.slabs);
  a.lag = static_cast<int>(p.lag);
  a.gradients = n.dx != nullptr || n.dresidual != nullptr;
  a.tickets = a.slabs * a.pieces * (a.gradients && a.pieces > 1 ? 2 : 1);
  a.reciprocal = 1.f / static_cast<float>(s.spatial * a.group_width);
  a.values = static_cast<float2*>(n.workspace);
  float2* room = a.values + s.batch * s.num_groups;
  if (n.dweight.data != nullptr || n.dbias.data != nullptr) {
    a.line_sums = room;
    room += s.batch * s.channels;
  }
  a.piece_sums = room;
  a.bunch_sums = a.piece_sums + p.slabs * p.pieces * p.width;
  a.ticket = reinterpret_cast<unsigned*>(a.bunch_sums + p.slabs * p.bunches * p.width);
  a.arrived = a.ticket + 1;
  a.bunch_arrived = a.arrived + p.slabs * p.bunches;
  a.ready = a.bunch_arrived + p.slabs;
  return a;
}

template <class T, class D, int V>
cudaError_t launch_columns_backward(const ColumnsArgs& a, bool overlap, cudaStream_t stream) {
  const int64_t flags = 1 + a.p.slabs * (a.p.bunches + 2);
  const cudaError_t error = cudaMemsetAsync(a.ticket, 0, flags * sizeof(unsigned), stream);
  if (error != cudaSuccess) return error;
  const LaunchShape shape{grid_of(a.tickets < a.p.blocks ? a.tickets : a.p.blocks), kPassingThreads, a.p.shared, 1, false};
  const bool active = V == 1 || a.n.activation.code != Activation::none;
  return active ? launch_block<group_columns<T, D, V, true>>(a, shape, stream)
                : launch_block<group_columns<T, D, V, V == 1>>(a, shape, stream);
}

template <class T, class D>
cudaError_t group_columns_of(const GroupBackward& n, const GroupColumnsPlan& p, bool overlap, cudaStream_t stream) {
  const ColumnsArgs args = columns_args(n, p);
  cudaError_t error = p.vec == 1 ? launch_columns_backward<T, D, 1>(args, overlap, stream)
                                 : launch_columns_backward<T, D, 16 / static_cast<int>(sizeof(T))>(args, overlap, stream);
  if (error == cudaSuccess) error = launch_sum_lines(n, args.line_sums, 1, overlap, stream);
  return error == cudaSuccess ? cudaGetLastError() : error;
}

}  // namespace
}  // namespace normswap
