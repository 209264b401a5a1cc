// The forward: moments of the pieces (batch_moments), coefficients of the channels (finish_batch_norm), the output
// (batch_apply). x is read twice; what is read last in the first pass is read first in the second, from the L2.
#pragma once

#include "batch_norm/batch_norm_passes.cuh"

namespace normswap {
namespace {

template <class T>
constexpr int kAtOnce = 16 / static_cast<int>(sizeof(T));  // vectors of a tensor that a thread has in flight

// Mean and sum of squared differences of `count` values a column, by differences from a pivot, one of them. What is left of
// squares about an outlier has their rounding errors: of three values the middle one is none.
template <int V>
struct ColumnMoments {
  float pivot[V], sums[V], squares[V];
  int count;

  template <class T>
  __device__ void add(const Words<T, V>& words) {
    float x[V];
    words.floats(x);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float d = __fsub_rn(x[j], pivot[j]);
      sums[j] = __fadd_rn(sums[j], d);
      squares[j] = fmaf(d, d, squares[j]);
    }
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

// The middle one of three values, column by column.
template <class T, int V>
__device__ inline Words<T, V> middle_of(const Words<T, V>& first, const Words<T, V>& second, const Words<T, V>& third) {
  float a[V], b[V], c[V];
  first.floats(a), second.floats(b), third.floats(c);
#pragma unroll
  for (int j = 0; j < V; ++j) a[j] = fmaxf(fminf(a[j], b[j]), fminf(fmaxf(a[j], b[j]), c[j]));
  return {Pack<T, V>::of(a).raw()};
}

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

template <class T, int V, bool Even>
__global__ void __launch_bounds__(kBatchNormThreads, 4) batch_moments(const BatchNormArgs args) {
  __shared__ Handed<V> handed;
  const Vectors<V, Even> vectors(args, blockIdx.x);
  constexpr int many = kAtOnce<T>;
  Words<T, V> x[many]{};
  const auto load = [&](int k, int row) {
    x[k].template load_where<false>(row < vectors.end, args.n.x, vectors.at(row));
  };
#pragma unroll
  for (int k = 0; k < many; ++k) load(k, vectors.first + k * args.side);
  // Rows that are not there are the pivot, of which nothing is left.
  const auto or_else = [&](int k, const Words<T, V>& other) {
    return vectors.first + k * args.side < vectors.end ? x[k] : other;
  };
  const Words<T, V> pivot = middle_of<T, V>(x[0], or_else(1, x[0]), or_else(2, x[0]));
  ColumnMoments<V> moments{};
  pivot.floats(moments.pivot);
  moments.count = vectors.count();
#pragma unroll
  for (int k = 1; k < many; ++k) x[k] = or_else(k, pivot);
  vectors.template for_each<many>(
      [&](int k, int row) {
        x[k] = pivot;
        load(k, row);
      },
      [&](int k, int) { moments.add(x[k]); });
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

// The vector at `at`, if it is there, finished: the residual is added, the activation follows, of a ReLU behind a residual the
// signs are kept.
template <bool Adds, class T, int V>
__device__ inline void store_output(const BatchNormArgs& a, bool there, int64_t at, const float (&norm)[V],
                                    const Words<T, V>& residual) {
  Pack<T, V> y = Pack<T, V>::of(norm);
  [[maybe_unused]] float z[V];
  if constexpr (Adds) {
    float added[V];
    Words<T, V>{y.raw()}.floats(z);
    residual.floats(added);
#pragma unroll
    for (int j = 0; j < V; ++j) z[j] = __fadd_rn(z[j], added[j]);
    y = Pack<T, V>::of(z);
  }
  if (a.n.activation.code == Activation::relu) {
    if constexpr (Adds) {
      if (a.n.signs != nullptr) {
        unsigned signs = 0;
#pragma unroll
        for (int j = 0; j < V; ++j) signs |= static_cast<unsigned>(lets_through<T>(z[j])) << j;
        if (there) a.n.signs[at / static_cast<int>(sizeof(y))] = static_cast<unsigned char>(signs);
      }
    }
    y = relu(y);
  } else if (a.n.activation.code != Activation::none) {
    y = activated_vector(y, a.n.activation);
  }
  if (there) store(a.n.y, at, y);
}

// Adds: a residual.
template <class T, int V, bool Even, bool Adds>
__global__ void __launch_bounds__(kBatchNormThreads, Adds ? 3 : 4) batch_apply(const BatchNormArgs args) {
  __shared__ float4 room[kMostOfStrip];
  const Vectors<V, Even> vectors(args, gridDim.x - 1 - blockIdx.x);
  constexpr int many = kAtOnce<T>;
  Words<T, V> x[many]{}, residual[Adds ? many : 1]{};
  const auto load_some = [&](int r) {
#pragma unroll
    for (int k = 0; k < many; ++k) {
      const bool there = r + k * args.side < vectors.end;
      const int64_t at = vectors.at(r + k * args.side);
      x[k].template load_where<true>(there, args.n.x, at);
      if constexpr (Adds) residual[k].template load_where<true>(there, args.n.residual, at);
    }
  };
  load_some(vectors.first);
  follow_predecessor();
  const ColumnCoefficients<V> of(vectors, room);
#pragma unroll 1
  for (int r = vectors.first; r < vectors.end;) {
#pragma unroll
    for (int k = 0; k < many; ++k) {
      float z[V];
      x[k].floats(z);
#pragma unroll
      for (int j = 0; j < V; ++j) z[j] = fmaf(__fsub_rn(z[j], of.mean[j]), of.gain[j], of.bias[j]);
      store_output<Adds>(args, r + k * args.side < vectors.end, vectors.at(r + k * args.side), z, residual[Adds ? k : 0]);
    }
    r += many * args.side;
    if (r < vectors.end) load_some(r);
  }
}

template <class T, int V, bool Even>
cudaError_t run_forward(const BatchNormArgs& a, bool overlap, cudaStream_t stream) {
  if (!a.n.frozen) {
    if (const cudaError_t error = launch_pass<batch_moments<T, V, Even>>(a, false, stream); error != cudaSuccess) return error;
  }
  const cudaError_t error = finish_batch_norm(a.n, a.p, overlap && !a.n.frozen, stream);
  if (error != cudaSuccess) return error;
  if (a.n.residual != nullptr) return launch_pass<batch_apply<T, V, Even, true>>(a, overlap, stream);
  return launch_pass<batch_apply<T, V, Even, false>>(a, overlap, stream);
}

template <class T>
cudaError_t batch_norm_forward_of(const BatchNormTrain& n, const BatchNormPlan& plan, bool overlap, cudaStream_t stream) {
  const BatchNormArgs args(n, plan);
  if (plan.vec == 1) return run_forward<T, 1, false>(args, overlap, stream);
  if (args.row_bytes > 0) return run_forward<T, kBatchNormVec, true>(args, overlap, stream);
  return run_forward<T, kBatchNormVec, false>(args, overlap, stream);
}

}  // namespace
}  // namespace normswap
