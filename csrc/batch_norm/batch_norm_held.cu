// BatchNorm where clusters hold the strips: x is read once, and dy is.
#include "batch_norm/batch_norm_held.cuh"

#include "batch_norm/batch_norm_backward.cuh"
#include "batch_norm/batch_norm_forward.cuh"

namespace normswap {
namespace {

constexpr int V = kBatchNormVec;

using ForwardShared = HeldShared<Moments, Before, ChannelCoefficients>;
using BackwardShared = HeldShared<float2, float4, float2>;

template <class T, bool Even, bool Adds>
__global__ void __launch_bounds__(kBatchNormThreads, Adds ? kHeldBlocks - 1 : kHeldBlocks) batch_held(const BatchNormArgs args) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<ForwardShared*>(memory);
  const BatchNormTrain& n = args.n;
  const Vectors<V, Even> vectors(args, held_item(args));
  cluster_arrive();  // waited for before the first is told
  const HeldVectors<T, V, Even, 1> held(vectors, &shared + 1);
  held.stage({n.x});
  if (thread() < vectors.channels()) shared.before[thread()] = Before::of(n, vectors.first_channel() + thread());
  if (n.batches != nullptr && blockIdx.x == 0 && thread() == 0) ++*n.batches;
  ColumnMoments<V> moments{};
  moments.count = held.count;
  held.for_each_batch([&](int first, int end) {
    if (first == 0 && end > 0) {
      middle_of<T, V>(held.at(0), held.at(min(1, end - 1)), held.at(min(2, end - 1))).floats(moments.pivot);
    }
#pragma unroll 4
    for (int i = first; i < end; ++i) moments.add(held.at(i));
  });
  constexpr int many = Adds ? kAtOnce<T> : kTaken;
  Words<T, V> residual[Adds ? many : 1]{};
  const auto load_residual = [&](int k, int i) {
    if constexpr (Adds) residual[k].template load_where<true>(i < held.count, n.residual, vectors.at(held.row(i)));
  };
#pragma unroll
  for (int k = 0; k < many; ++k) load_residual(k, k);
  float2 columns[V];
  moments.finish(columns);
  shared.handed.put(vectors, columns, moments.count,
                    [&](const float2(&of)[V]) { return unite_columns(of, static_cast<float>(moments.count)); });
  __syncthreads();
  cluster_wait();
  const int lanes = 1 << args.p.log_run;
  shared.handed.for_each_channel(
      vectors, [&](auto visit, float2 first) { return unite_moments(lanes, first.x, visit); },
      [&](int channel, const Moments& united) { shared.tell(args, channel, united); });
  shared.finish(
      vectors,
      [](int of, const Moments& first, auto parts) {
        return unite_moments(of, first.mean, [&](auto with) {
          parts([&](const Moments& m) { with(m.n, float2{m.mean, m.m2}); });
        });
      },
      [&](int channel, const Moments& united) {
        return finish_channel(args, vectors.first_channel() + channel, shared.before[channel], united, stores_channels(args));
      });
  const ColumnCoefficients<V> of(vectors, shared.finished);
#pragma unroll 1
  for (int i = 0; i < held.count; i += many) {
#pragma unroll
    for (int k = 0; k < many; ++k) {
      if (i + k >= held.count) break;
      float z[V];
      held.at(i + k).floats(z);
#pragma unroll
      for (int j = 0; j < V; ++j) z[j] = fmaf(__fsub_rn(z[j], of.mean[j]), of.gain[j], of.bias[j]);
      store_output<Adds>(args, true, vectors.at(held.row(i + k)), z, residual[Adds ? k : 0]);
      load_residual(k, i + k + many);
    }
  }
}

template <class T, bool Even, Through By>
__global__ void __launch_bounds__(kBatchNormThreads, kHeldBlocks) batch_held_gradients(const BatchNormArgs args) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<BackwardShared*>(memory);
  const BatchNormTrain& n = args.n;
  const Vectors<V, Even> vectors(args, held_item(args));
  cluster_arrive();  // waited for before the first is told
  const HeldVectors<T, V, Even, 2> held(vectors, &shared + 1);
  held.stage({n.x, n.dy});
  if (By == Through::signs) held.fetch(n.signs);
  unsigned char signs[kTaken] = {};
  const auto load_signs = [&](int k, int i) {
    if (By != Through::signs || i >= held.count) return;
    signs[k] = __ldcs(n.signs + vectors.at(held.row(i)) / static_cast<int>(sizeof(Words<T, V>)));
  };
#pragma unroll
  for (int k = 0; k < kTaken; ++k) load_signs(k, k);
  const ColumnCoefficients<V> of(vectors, shared.before);
  const Slopes<T, V, Even, By> slopes(vectors);
  float sums[V] = {}, products[V] = {};
  held.for_each_batch([&](int first, int end) {
#pragma unroll 1
    for (int i = first; i < end; i += kTaken) {
#pragma unroll
      for (int k = 0; k < kTaken; ++k) {
        if (i + k >= end) break;
        float d[V], g[V];
        slopes.values(of, held.row(i + k), held.at(i + k, 0), held.at(i + k, 1), signs[k], d, g);
        load_signs(k, i + k + kTaken);
        if constexpr (By == Through::signs) held.at(i + k, 1) = {Pack<T, V>::of(g).raw()};  // dy or 0: they are not read again
#pragma unroll
        for (int j = 0; j < V; ++j) {
          sums[j] = __fadd_rn(sums[j], g[j]);
          products[j] = fmaf(g[j], d[j], products[j]);
        }
      }
    }
  });
  float2 columns[V];
#pragma unroll
  for (int j = 0; j < V; ++j) columns[j] = {sums[j], products[j]};
  shared.handed.put(vectors, columns, 1, [&](const float2(&)[V]) { return float2{tree(sums), tree(products)}; });
  __syncthreads();
  cluster_wait();
  const int lanes = 1 << args.p.log_run;
  shared.handed.for_each_channel(
      vectors, [&](auto visit, float2) { return unite_pairs(lanes, visit); },
      [&](int channel, const float2& united) { shared.tell(args, channel, united); });
  shared.finish(
      vectors,
      [](int of, const float2&, auto parts) {
        return unite_pairs(of, [&](auto with) { parts([&](const float2& pair) { with(1.f, pair); }); });
      },
      [&](int channel, const float2& united) {
        return finish_channel(args, vectors.first_channel() + channel, united, stores_channels(args));
      });
  if (n.dx == nullptr && n.dresidual == nullptr) return;
  const ColumnGradients<V> gradients(vectors, shared.finished);
  const Slopes<T, V, Even, By == Through::signs ? Through::nothing : By> again(vectors);
#pragma unroll 4
  for (int i = 0; i < held.count; ++i) {
    float d[V], g[V];
    again.values(of, held.row(i), held.at(i, 0), held.at(i, 1), 0u, d, g);
    gradients.of(of, g, d);
    store_gradients<T>(vectors, held.row(i), g, d);
  }
}

template <class T, bool Even>
cudaError_t forward(const BatchNormArgs& a, cudaStream_t stream) {
  if (a.n.residual != nullptr) return launch_held<batch_held<T, Even, true>, ForwardShared>(a, stream);
  return launch_held<batch_held<T, Even, false>, ForwardShared>(a, stream);
}

template <class T, bool Even>
cudaError_t backward(const BatchNormArgs& a, cudaStream_t stream) {
  switch (through_of(a.n)) {
    case Through::nothing: return launch_held<batch_held_gradients<T, Even, Through::nothing>, BackwardShared>(a, stream);
    case Through::relu: return launch_held<batch_held_gradients<T, Even, Through::relu>, BackwardShared>(a, stream);
    case Through::signs: return launch_held<batch_held_gradients<T, Even, Through::signs>, BackwardShared>(a, stream);
    default: return launch_held<batch_held_gradients<T, Even, Through::any>, BackwardShared>(a, stream);
  }
}

// Calls launch with a value of x's dtype and whether its rows are equally far apart.
template <class Launch>
cudaError_t by_dtype(const BatchNormArgs& args, Launch launch) {
  const auto evenly = [&](auto value) {
    return args.row_bytes > 0 ? launch(value, std::true_type{}) : launch(value, std::false_type{});
  };
  switch (args.n.dtype) {
    case DType::f32: return evenly(float{});
    case DType::f16: return evenly(Half{});
    default: return evenly(BFloat16{});
  }
}

}  // namespace

cudaError_t batch_norm_held_forward(const BatchNormTrain& n, const BatchNormPlan& plan, cudaStream_t stream) {
  const BatchNormArgs args(n, plan);
  return by_dtype(args, [&](auto value, auto even) { return forward<decltype(value), even.value>(args, stream); });
}

cudaError_t batch_norm_held_backward(const BatchNormTrain& n, const BatchNormPlan& plan, cudaStream_t stream) {
  const BatchNormArgs args(n, plan);
  return by_dtype(args, [&](auto value, auto even) { return backward<decltype(value), even.value>(args, stream); });
}

}  // namespace normswap
