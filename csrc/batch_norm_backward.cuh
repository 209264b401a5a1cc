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

template <int V>
constexpr int kPairsAtOnce = V == 1 ? 4 : 3;  // vectors of x, and of dy, that a thread has in flight

template <class T, int V>
struct Incoming {
  static constexpr int many = kPairsAtOnce<V>;
  Pack<T, V> x[many]{}, dy[many]{};
  unsigned char signs[many]{};
  int64_t at[many];
  bool there[many];

  template <bool Last>
  __device__ void load_some(const Vectors<V>& vectors, int r) {
    const BatchNormTrain& n = vectors.a.n;
#pragma unroll
    for (int k = 0; k < many; ++k) {
      there[k] = vectors.at(r + k * vectors.a.side, at[k]);
      if (!there[k]) continue;
      x[k] = load<Last, T, V>(n.x, at[k]);
      dy[k] = load<Last, T, V>(n.dy, at[k]);
      if (n.signs != nullptr) signs[k] = n.signs[at[k] / V];
    }
  }
  // x - mean and g of vector k.
  __device__ void values(const BatchNormTrain& n, const ColumnValues<V>& of, int k, float (&d)[V], float (&g)[V]) const {
    to_floats(x[k], d);
    to_floats(dy[k], g);
    const Floats<V> mean = of.mean();
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] = __fsub_rn(d[j], mean.v[j]);
    if (n.activation.code == Activation::none) return;
    if (n.signs != nullptr) {
#pragma unroll
      for (int j = 0; j < V; ++j) g[j] = signs[k] >> j & 1 ? g[j] : 0.f;
      return;
    }
    const Floats<V> gain = of.gain(), bias = of.bias();
    float z[V];
#pragma unroll
    for (int j = 0; j < V; ++j) z[j] = rounded<T>(fmaf(d[j], gain.v[j], bias.v[j]));
    if (n.residual != nullptr) {
      float added[V];
      to_floats(load<false, T, V>(n.residual, at[k]), added);
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
  extern __shared__ __align__(16) float shared[];
  const Vectors<V> vectors(args, blockIdx.x);
  const ColumnValues<V> of(vectors, shared);
  float sums[V] = {}, products[V] = {};
  Incoming<T, V> incoming;
  incoming.template load_some<false>(vectors, vectors.first);
  of.fill_coefficients(vectors);
  __syncthreads();
  for (int r = vectors.first; r < vectors.end;) {
#pragma unroll
    for (int k = 0; k < incoming.many; ++k) {
      if (!incoming.there[k]) continue;
      float d[V], g[V];
      incoming.values(args.n, of, k, d, g);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sums[j] = __fadd_rn(sums[j], g[j]);
        products[j] = fmaf(g[j], d[j], products[j]);
      }
      if (args.n.frozen) {
        const Floats<V> gain = of.gain();
#pragma unroll
        for (int j = 0; j < V; ++j) d[j] = __fmul_rn(g[j], gain.v[j]);
        store_gradients<T>(args.n, incoming.at[k], g, d);
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
  extern __shared__ __align__(16) float shared[];
  const Vectors<V> vectors(args, gridDim.x - 1 - blockIdx.x);
  const ColumnValues<V> of(vectors, shared);
  Incoming<T, V> incoming;
  incoming.template load_some<true>(vectors, vectors.first);
  of.fill_coefficients(vectors);
  follow_predecessor();
  of.fill_pairs(vectors, args.sums() + args.n.sizes.channels * args.p.pieces);
  __syncthreads();
  for (int r = vectors.first; r < vectors.end;) {
#pragma unroll
    for (int k = 0; k < incoming.many; ++k) {
      if (!incoming.there[k]) continue;
      float d[V], g[V];
      incoming.values(args.n, of, k, d, g);
      const Floats<V> gain = of.gain(), a = of.of(3), b = of.of(4);
#pragma unroll
      for (int j = 0; j < V; ++j) d[j] = fmaf(g[j], gain.v[j], -fmaf(d[j], b.v[j], a.v[j]));
      store_gradients<T>(args.n, incoming.at[k], g, d);
    }
    r += incoming.many * args.side;
    if (r < vectors.end) incoming.template load_some<true>(vectors, r);
  }
}

template <class T, int V>
cudaError_t backward_by(const BatchNormArgs& a, bool overlap, cudaStream_t stream) {
  cudaError_t error = launch_pass<batch_sums<T, V>>(a, 3, false, stream);
  const bool follows = !a.n.frozen && (a.n.dx != nullptr || a.n.dresidual != nullptr);
  if (error == cudaSuccess && (follows || a.n.dweight.data != nullptr || a.n.dbias.data != nullptr)) {
    error = finish_batch_norm_backward(a.n, a.p, overlap, stream);
  }
  return error == cudaSuccess && follows ? launch_pass<batch_gradients<T, V>>(a, 5, overlap, stream) : error;
}

template <class T>
cudaError_t batch_norm_backward_of(const BatchNormTrain& n, const BatchNormPlan& plan, bool overlap, cudaStream_t stream) {
  const BatchNormArgs args(n, plan);
  if (plan.vec == 1) return backward_by<T, 1>(args, overlap, stream);
  return backward_by<T, 16 / static_cast<int>(sizeof(T))>(args, overlap, stream);
}

}  // namespace
}  // namespace normswap
