// Normalisation with statistics down the columns of (batch, rows, channels) memory: scale -> BatchNorm (batch = 1, a
// group is one channel) and GroupNorm of channels_last tensors (a batch entry a sample). column_plan.h says how columns
// are cut; the kernels below are the regimes:
//   column_block    block, cluster: the pieces of a slab lie in shared memory of a block, or of the blocks of a cluster
//   column_partial, column_finish, column_apply    split: for slabs none of these holds; the input is read twice
#pragma once

#include "column.cuh"
#include "launch.h"

namespace normswap {
namespace {

template <class T, int V, Source From>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks) column_block(const ColumnArgs args) {
  extern __shared__ __align__(16) char shared[];
  const Ring<T, V> ring(args, shared, blockIdx.x, gridDim.x);
  const Board board(args, shared, sizeof(Pack<T, V>));
  const Place<V> at(args, blockIdx.x);
  const int pieces = static_cast<int>(args.p.pieces);
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if (pieces > 1) cluster.sync();  // every block of the cluster runs: its shared memory is there
#endif
  piece_statistics(args, at, ring, board, [&](int group, float mean, float m2) {
    float2* part = &board.parts[group * pieces + at.piece];
#if __CUDA_ARCH__ >= 900
    for (int rank = 0; rank < pieces; ++rank) *cluster.map_shared_rank(part, rank) = {mean, m2};
#else
    *part = {mean, m2};  // pieces == 1: row_plan gives clusters to sm_90 and newer only
#endif
  });
  ChannelAffine<T, V, From> affine(args, at);
#if __CUDA_ARCH__ >= 900
  if (pieces > 1) cluster.sync();
#endif
  if (pieces == 1) __syncthreads();
  finish_groups<From>(args, at, 0, kColumnThreads / args.p.sharing, [&](int i) { return board.parts[i]; },
                      board.values, at.piece == 0);
  __syncthreads();
  affine.set(args, board.values);
  T* y = static_cast<T*>(args.n.y) + at.offset;
  for (int i = 0; i < at.count; ++i, y += args.step) affine.apply(args, ring.vector(i), y);
}

template <class T, int V>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks) column_partial(const ColumnArgs args) {
  extern __shared__ __align__(16) char shared[];
  Ring<T, V> ring(args, shared, blockIdx.x, gridDim.x);
  const Board board(args, shared, sizeof(Pack<T, V>));
  for (unsigned item = blockIdx.x; item < static_cast<unsigned>(args.p.items); item += gridDim.x) {
    const Place<V> at(args, item);
    piece_statistics(args, at, ring, board, [&](int group, float mean, float m2) {
      args.parts[(static_cast<int64_t>(at.slab) * args.p.groups + group) * args.p.pieces + at.piece] = {mean, m2};
    });
    for (int i = 0; i < args.p.slots; ++i) ring.load();
    ring.next();
    __syncthreads();
  }
}

// As many groups of a slab as the block can take at once.
template <int V, Source From>
__global__ void __launch_bounds__(kColumnThreads) column_finish(const ColumnArgs args) {
  const int slab = static_cast<int>(blockIdx.x), first_group = static_cast<int>(blockIdx.y) * (kColumnThreads / args.p.sharing);
  const Place<V> at(args, slab * static_cast<unsigned>(args.p.pieces));
  const int64_t first = static_cast<int64_t>(slab) * args.p.groups;
  const float2* parts = args.parts + first * args.p.pieces;
  finish_groups<From>(args, at, first_group, args.p.groups, [&](int i) { return parts[i]; }, args.finals + first, true);
}

template <class T, int V, Source From>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks) column_apply(const ColumnArgs args) {
  // Backwards: what column_partial read last is still in the L2.
  const Place<V> at(args, gridDim.x - 1 - blockIdx.x);
  ChannelAffine<T, V, From> affine(args, at);
  if constexpr (From != Source::running) {
    extern __shared__ __align__(16) char shared[];
    float2* values = reinterpret_cast<float2*>(shared);
    fetch_values(args, args.finals + static_cast<int64_t>(at.slab) * args.p.groups, values);
    affine.set(args, values);
  }
  const T* x = static_cast<const T*>(args.n.x) + at.offset;
  T* y = static_cast<T*>(args.n.y) + at.offset;
  constexpr int at_once = From == Source::running ? 2 : 4;
  for (int first = 0; first < at.count; first += at_once) {
    Pack<T, V> packs[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (first + i < at.count) packs[i] = Pack<T, V>::load(x + (first + i) * args.step);
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      packs[i].forget();
      if (first + i < at.count) affine.apply(args, packs[i], y + (first + i) * args.step);
    }
  }
}

// --- launch ------------------------------------------------------------------------------------------------------

inline int64_t column_step(const ChannelNorm& n, const ColumnPlan& p) { return kColumnThreads / p.lanes * n.channels; }

inline dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }

template <class T, int V, Source From>
cudaError_t launch_split(const ColumnArgs& a, cudaStream_t stream) {
  if (const cudaError_t error = allow_shared<column_partial<T, V>>(a.p.shared); error != cudaSuccess) return error;
  column_partial<T, V><<<grid_of(a.p.grid), kColumnThreads, a.p.shared, stream>>>(a);
  const int64_t runs = ceil_div(a.p.groups, kColumnThreads / a.p.sharing);
  const dim3 slabs(static_cast<unsigned>(a.p.items / a.p.pieces), static_cast<unsigned>(runs));
  column_finish<V, From><<<slabs, kColumnThreads, 0, stream>>>(a);
  column_apply<T, V, From><<<grid_of(a.p.items), kColumnThreads, a.p.groups * sizeof(float2), stream>>>(a);
  return cudaGetLastError();
}

template <class T, int V, Source From>
cudaError_t launch_columns(const ChannelNorm& n, const ColumnPlan& p, cudaStream_t stream) {
  ColumnArgs args{n, p, static_cast<float2*>(n.workspace), nullptr, column_step(n, p)};
  args.finals = args.parts + p.items / p.pieces * p.groups * p.pieces;
  if (p.regime == Regime::split) return launch_split<T, V, From>(args, stream);
  const LaunchShape shape{p.grid, kColumnThreads, p.shared};
  return launch_block<column_block<T, V, From>>(args, shape, static_cast<int>(p.pieces), stream);
}

template <class T, Source From>
cudaError_t launch_vec(const ChannelNorm& n, const ColumnPlan& p, cudaStream_t stream) {
  if (p.vec > 1) return launch_columns<T, 16 / static_cast<int>(sizeof(T)), From>(n, p, stream);
  return launch_columns<T, 1, From>(n, p, stream);
}

template <Source From>
cudaError_t launch_statistics(const ChannelNorm& n, const ColumnPlan& p, cudaStream_t stream) {
  switch (n.dtype) {
    case DType::f32: return launch_vec<float, From>(n, p, stream);
    case DType::f16: return launch_vec<__half, From>(n, p, stream);
    default: return launch_vec<__nv_bfloat16, From>(n, p, stream);
  }
}

}  // namespace
}  // namespace normswap
