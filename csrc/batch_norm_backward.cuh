// The backward. With g = dy activation'(z), z = (x - mean) gain + bias (+ residual), over the D elements of a channel
//   dx = gain (g - sum(g) / D - (x - mean) rstd^2 sum(g (x - mean)) / D), or g gain by frozen statistics
//   dbias = sum(g), dweight = sum(g (x - mean)) rstd, dresidual = g
// Sums of the pieces (batch_sums), of the channels (finish_batch_norm_backward), gradients (batch_gradients): x and dy are
// read twice, or once by frozen statistics, whose gradients wait for no sum. The sign of what went into a ReLU is computed
// from x as in the forward; behind a residual it was kept.
#pragma once

#include "batch_norm_passes.cuh"

namespace normswap {
namespace {

template <class T>
constexpr int kPairsAtOnce = sizeof(T) == 2 ? 4 : 3;  // vectors of x, and of dy, that a thread has in flight

template <class T, int V>
struct Incoming {
  static constexpr int many = kPairsAtOnce<T>;
  Pack<T, V> x[many]{}, dy[many]{};
  unsigned char signs[many]{};

  template <bool Last>
  __device__ void load_some(const Vectors<V>& vectors, int r) {
    const BatchNormTrain& n = vectors.a.n;
#pragma unroll
    for (int k = 0; k < many; ++k) {
      int64_t at;
      if (!vectors.at(r + k * vectors.a.side, at)) continue;
      x[k] = load<Last, T, V>(n.x, at);
      dy[k] = load<Last, T, V>(n.dy, at);
      if (n.signs != nullptr) signs[k] = n.signs[at / V];
    }
  }
  // x - mean and g of vector k, which lies at `at`.
  __device__ void values(const BatchNormTrain& n, const ColumnCoefficients<V>& of, int k, int64_t at, float (&d)[V],
                         float (&g)[V]) const {
    to_floats(x[k], d);
    to_floats(dy[k], g);
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] = __fsub_rn(d[j], of.mean[j]);
    if (n.activation.code == Activation::none) return;
    if (n.signs != nullptr) {
#pragma unroll
      for (int j = 0; j < V; ++j) g[j] = signs[k] >> j & 1 ? g[j] : 0.f;
      return;
    }
    float z[V];
#pragma unroll
    for (int j = 0; j < V; ++j) z[j] = rounded<T>(fmaf(d[j], of.gain[j], of.bias[j]));
    if (n.residual != nullptr) {
      float added[V];
      to_floats(load<false, T, V>(n.residual, at), added);
#pragma unroll
      for (int j = 0; j < V; ++j) z[j] = rounded<T>(__fadd_rn(z[j], added[j]));
    }
    times_slope<T>(n.activation, z, g);
  }
};

// The gradients of a vector; d and g are used up.
template <class T, int V>
__device__ inline void store_gradients(const BatchNormTrain& n, int64_t at, const float (&g)[V], const float (&dx)[V]) {
  if (n.dresidual != nullptr) store(n.dresidual, at, Pack<T, V>::of(g));
  if (n.dx != nullptr) store(n.dx, at, Pack<T, V>::of(dx));
}

template <class T, int V>
__global__ void __launch_bounds__(kBatchNormThreads, 3) batch_sums(const BatchNormArgs args) {
  __shared__ Handed<V> handed;
  __shared__ float4 room[kMostOfStrip];
  const Vectors<V> vectors(args, blockIdx.x);
  float sums[V] = {}, products[V] = {};
  Incoming<T, V> incoming;
  incoming.template load_some<false>(vectors, vectors.first);
  const ColumnCoefficients<V> of(vectors, room);
  for (int r = vectors.first; r < vectors.end;) {
#pragma unroll
    for (int k = 0; k < incoming.many; ++k) {
      int64_t at;
      if (!vectors.at(r + k * args.side, at)) continue;
      float d[V], g[V];
      incoming.values(args.n, of, k, at, d, g);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sums[j] = __fadd_rn(sums[j], g[j]);
        products[j] = fmaf(g[j], d[j], products[j]);
      }
      if (args.n.frozen) {
#pragma unroll
        for (int j = 0; j < V; ++j) d[j] = __fmul_rn(g[j], of.gain[j]);
        store_gradients<T>(args.n, at, g, d);
      }
    }
    r += incoming.many * args.side;
    if (r < vectors.end) incoming.template load_some<false>(vectors, r);
  }
  let_successor_start();
  float2 columns[V];
#pragma unroll
  for (int j = 0; j < V; ++j) columns[j] = {sums[j], products[j]};
  handed.put(vectors, columns, 1, [&](const float2(&)[V]) { return float2{tree(sums), tree(products)}; });
  __syncthreads();
  const int lanes = 1 << args.p.log_run;
  handed.for_each_channel(
      vectors, [&](auto visit, float2) { return unite_pairs(lanes, visit); },
      [&](int channel, float2 united) {
        args.sums()[(vectors.first_channel() + channel) * args.p.pieces + vectors.piece] = united;
      });
}

template <class T, int V>
__global__ void __launch_bounds__(kBatchNormThreads, 3) batch_gradients(const BatchNormArgs args) {
  __shared__ float4 room[kMostOfStrip];
  __shared__ float2 room_of_pairs[kMostOfStrip];
  const Vectors<V> vectors(args, gridDim.x - 1 - blockIdx.x);
  Incoming<T, V> incoming;
  incoming.template load_some<true>(vectors, vectors.first);
  const ColumnCoefficients<V> of(vectors, room);
  follow_predecessor();
  const float2* finished = args.sums() + args.n.sizes.channels * args.p.pieces;
  float a[V], b[V];
  const auto get = [&](int64_t channel) { return __ldcg(finished + channel); };
  vectors.each_column(room_of_pairs, get, [&](int j, const float2& pair) {
    a[j] = pair.x;
    b[j] = pair.y;
  });
  for (int r = vectors.first; r < vectors.end;) {
#pragma unroll
    for (int k = 0; k < incoming.many; ++k) {
      int64_t at;
      if (!vectors.at(r + k * args.side, at)) continue;
      float d[V], g[V];
      incoming.values(args.n, of, k, at, d, g);
#pragma unroll
      for (int j = 0; j < V; ++j) d[j] = fmaf(g[j], of.gain[j], -fmaf(d[j], b[j], a[j]));
      store_gradients<T>(args.n, at, g, d);
    }
    r += incoming.many * args.side;
    if (r < vectors.end) incoming.template load_some<true>(vectors, r);
  }
}

template <class T, int V>
cudaError_t backward_by(const BatchNormArgs& a, bool overlap, cudaStream_t stream) {
  cudaError_t error = launch_pass<batch_sums<T, V>>(a, false, stream);
  const bool follows = !a.n.frozen && (a.n.dx != nullptr || a.n.dresidual != nullptr);
  if (error == cudaSuccess && (follows || a.n.dweight.data != nullptr || a.n.dbias.data != nullptr)) {
    error = finish_batch_norm_backward(a.n, a.p, overlap, stream);
  }
  return error == cudaSuccess && follows ? launch_pass<batch_gradients<T, V>>(a, overlap, stream) : error;
}

template <class T>
cudaError_t batch_norm_backward_of(const BatchNormTrain& n, const BatchNormPlan& plan, bool overlap, cudaStream_t stream) {
  const BatchNormArgs args(n, plan);
  if (plan.vec == 1) return backward_by<T, 1>(args, overlap, stream);
  return backward_by<T, kBatchNormVec>(args, overlap, stream);
}

}  // namespace
}  // namespace normswap
