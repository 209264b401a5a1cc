// The forward: moments of the pieces (batch_moments), coefficients of the channels (finish_batch_norm), the output
// (batch_apply). x is read twice; what is read last in the first pass is read first in the second, from the L2.
#pragma once

#include "batch_norm_passes.cuh"

namespace normswap {
namespace {

template <class T>
constexpr int kAtOnce = 16 / static_cast<int>(sizeof(T));  // vectors of a tensor that a thread has in flight

// Mean and sum of squared differences of `count` values a column, by differences from a pivot, one of them.
template <int V>
struct ColumnMoments {
  float pivot[V], sums[V], squares[V];
  int count;

  template <class T>
  __device__ void add(const Pack<T, V>& pack) {
    float x[V];
    to_floats(pack, x);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float d = __fsub_rn(x[j], pivot[j]);
      sums[j] = __fadd_rn(sums[j], d);
      squares[j] = fmaf(d, d, squares[j]);
    }
    ++count;
  }
  __device__ void finish(float2 (&out)[V]) const {
    const float reciprocal = count > 0 ? __frcp_rn(static_cast<float>(count)) : 0.f;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float shift = __fmul_rn(sums[j], reciprocal), m2 = fmaf(-shift, sums[j], squares[j]);
      out[j] = {__fadd_rn(pivot[j], shift), m2 < 0.f ? 0.f : m2};  // NaN stays
    }
  }
};

// The same of V columns that are one channel, from those of each, `count` values.
template <int V>
__device__ inline float2 unite_columns(const float2 (&columns)[V], float count) {
  if constexpr (V == 1) return columns[0];
  const float pivot = columns[0].x;
  float v[V];
#pragma unroll
  for (int j = 0; j < V; ++j) v[j] = __fsub_rn(columns[j].x, pivot);
  const float shift = __fmul_rn(tree(v), 1.f / V);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float d = __fsub_rn(__fsub_rn(columns[j].x, pivot), shift);
    v[j] = fmaf(__fmul_rn(count, d), d, columns[j].y);
  }
  return {__fadd_rn(pivot, shift), tree(v)};
}

template <class T, int V>
__global__ void __launch_bounds__(kBatchNormThreads, 4) batch_moments(const BatchNormArgs args) {
  __shared__ Handed<V> handed;
  const Vectors<V> vectors(args, blockIdx.x);
  ColumnMoments<V> moments{};
  constexpr int many = kAtOnce<T>;
  Pack<T, V> x[many]{};
  bool there[many];
  const auto load_some = [&](int r) {
#pragma unroll
    for (int k = 0; k < many; ++k) {
      int64_t at;
      there[k] = vectors.at(r + k * args.side, at);
      if (there[k]) x[k] = load<false, T, V>(args.n.x, at);
    }
  };
  load_some(vectors.first);
  to_floats(x[0], moments.pivot);
  if (!there[0]) to_floats(x[1], moments.pivot);  // one of the two is there, if any is
  for (int r = vectors.first;;) {
#pragma unroll
    for (int k = 0; k < many; ++k) {
      if (there[k]) moments.add(x[k]);
    }
    r += many * args.side;
    if (r >= vectors.end) break;
    load_some(r);
  }
  let_successor_start();
  float2 columns[V];
  moments.finish(columns);
  handed.put(vectors, columns, moments.count,
             [&](const float2(&of)[V]) { return unite_columns(of, static_cast<float>(moments.count)); });
  __syncthreads();
  const int lanes = 1 << args.p.log_run;
  handed.for_each_channel(
      vectors, [&](auto visit, float2 first) { return unite_moments(lanes, first.x, visit); },
      [&](int channel, const Moments& united) {
        args.moments()[(vectors.first_channel() + channel) * args.p.pieces + vectors.piece] = united;
      });
}

// The vector at `at`, finished: the residual is added, the activation follows, a ReLU's signs are kept.
template <class T, int V>
__device__ inline void store_output(const BatchNormArgs& a, int64_t at, const float (&norm)[V], const Pack<T, V>& residual) {
  Pack<T, V> y = Pack<T, V>::of(norm);
  if (a.n.residual != nullptr) {
    float sums[V], added[V];
    to_floats(y, sums);
    to_floats(residual, added);
#pragma unroll
    for (int j = 0; j < V; ++j) sums[j] = __fadd_rn(sums[j], added[j]);
    y = Pack<T, V>::of(sums);
  }
  if (a.n.activation.code == Activation::relu) {
    float z[V];
    to_floats(y, z);
    unsigned signs = 0;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const bool passes = !(z[j] <= 0.f);  // NaN does
      signs |= static_cast<unsigned>(passes) << j;
      z[j] = passes ? z[j] : 0.f;
    }
    y = Pack<T, V>::of(z);
    if (a.n.signs != nullptr) a.n.signs[at / V] = static_cast<unsigned char>(signs);
  } else {
    y = activated(y, a.n.activation);
  }
  store(a.n.y, at, y);
}

template <class T, int V>
__global__ void __launch_bounds__(kBatchNormThreads, 4) batch_apply(const BatchNormArgs args) {
  __shared__ float4 room[kMostOfStrip];
  const Vectors<V> vectors(args, gridDim.x - 1 - blockIdx.x);
  constexpr int many = kAtOnce<T>;
  Pack<T, V> x[many]{}, residual[many]{};
  const auto load_some = [&](int r) {
#pragma unroll
    for (int k = 0; k < many; ++k) {
      int64_t at;
      if (!vectors.at(r + k * args.side, at)) continue;
      x[k] = load<true, T, V>(args.n.x, at);
      if (args.n.residual != nullptr) residual[k] = load<true, T, V>(args.n.residual, at);
    }
  };
  load_some(vectors.first);
  follow_predecessor();
  const ColumnCoefficients<V> of(vectors, room);
  for (int r = vectors.first; r < vectors.end;) {
#pragma unroll
    for (int k = 0; k < many; ++k) {
      int64_t at;
      if (!vectors.at(r + k * args.side, at)) continue;
      float norm[V];
      to_floats(x[k], norm);
#pragma unroll
      for (int j = 0; j < V; ++j) norm[j] = fmaf(__fsub_rn(norm[j], of.mean[j]), of.gain[j], of.bias[j]);
      store_output(args, at, norm, residual[k]);
    }
    r += many * args.side;
    if (r < vectors.end) load_some(r);
  }
}

template <class T, int V>
cudaError_t forward_by(const BatchNormArgs& a, bool overlap, cudaStream_t stream) {
  if (!a.n.frozen) {
    if (const cudaError_t error = launch_pass<batch_moments<T, V>>(a, false, stream); error != cudaSuccess) return error;
  }
  const cudaError_t error = finish_batch_norm(a.n, a.p, overlap && !a.n.frozen, stream);
  return error == cudaSuccess ? launch_pass<batch_apply<T, V>>(a, overlap, stream) : error;
}

template <class T>
cudaError_t batch_norm_forward_of(const BatchNormTrain& n, const BatchNormPlan& plan, bool overlap, cudaStream_t stream) {
  const BatchNormArgs args(n, plan);
  if (plan.vec == 1) return forward_by<T, 1>(args, overlap, stream);
  return forward_by<T, kBatchNormVec>(args, overlap, stream);
}

}  // namespace
}  // namespace normswap
