// The backward. With g = dy activation'(z), z = (x - mean) gain + bias (+ residual), over the D elements of a channel
//   dx = gain (g - sum(g) / D - (x - mean) rstd^2 sum(g (x - mean)) / D), or g gain by frozen statistics
//   dbias = sum(g), dweight = sum(g (x - mean)) rstd, dresidual = g
// Sums of the pieces (batch_sums), of the channels (finish_batch_norm_backward), gradients (batch_gradients): x and dy are
// read twice, or once by frozen statistics, whose gradients wait for no sum. The sign of what went into a ReLU is computed
// from x as in the forward; behind a residual it was kept.
#pragma once

#include <algorithm>
#include <iterator>

#include "batch_norm/batch_norm_passes.cuh"

namespace normswap {
namespace {

constexpr int kPairsAtOnce = 4;  // vectors of x, and of dy, that a thread has in flight

template <class T>
constexpr int kPairBlocks = sizeof(T) == 2 ? 3 : 2;  // of a multiprocessor, by the registers of a thread

// Not inlined, as slopes (activation.cuh): what is not a ReLU.
template <class T, int V>
__device__ __noinline__ Floats<V> through_slopes(ActivationArgs a, Floats<V> z, Floats<V> g) {
  times_slope<T>(a, z.v, g.v);
  return g;
}

// What dy comes through, where it takes kernels of its own: nothing; a ReLU behind the norm alone, or an activation whose signs
// were kept; any, asked for each vector, and all of frozen statistics.
enum class Through { nothing, relu, signs, any };

inline Through through_of(const BatchNormTrain& n) {
  if (n.frozen) return Through::any;
  if (n.activation.code == Activation::none) return Through::nothing;
  if (n.signs != nullptr) return Through::signs;
  return n.activation.code == Activation::relu && n.residual == nullptr ? Through::relu : Through::any;
}

// What a vector of x, and of dy, says: x - mean and g.
template <class T, int V, bool Even, Through By>
struct Slopes {
  const Vectors<V, Even>& vectors;
  const BatchNormTrain& n;

  __device__ explicit Slopes(const Vectors<V, Even>& of) : vectors(of), n(of.a.n) {}
  __device__ bool are_kept() const { return By == Through::signs || (By == Through::any && n.signs != nullptr); }
  // `signs` of the vector, if they are kept.
  __device__ void values(const ColumnCoefficients<V>& of, int row, const Words<T, V>& x, const Words<T, V>& dy, unsigned signs,
                         float (&d)[V], float (&g)[V]) const {
    x.floats(d);
    dy.floats(g);
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] = __fsub_rn(d[j], of.mean[j]);
    if constexpr (By == Through::signs) {
      by_signs(signs, g);
    } else if constexpr (By != Through::nothing) {
      by_slopes(of, row, signs, d, g);
    }
  }

 private:
  __device__ void by_signs(unsigned signs, float (&g)[V]) const {
#pragma unroll
    for (int j = 0; j < V; ++j) g[j] = signs >> j & 1 ? g[j] : 0.f;
  }
  // By what went into the activation.
  __device__ void by_slopes(const ColumnCoefficients<V>& of, int row, unsigned signs, const float (&d)[V],
                            float (&g)[V]) const {
    if constexpr (By == Through::any) {
      if (n.activation.code == Activation::none) return;
      if (n.signs != nullptr) return by_signs(signs, g);
    }
    float z[V];
#pragma unroll
    for (int j = 0; j < V; ++j) z[j] = fmaf(d[j], of.gain[j], of.bias[j]);
    if (By == Through::any && n.residual != nullptr) {
      Words<T, V> residual{};
      residual.template load_where<false>(row < vectors.end, n.residual, vectors.at(row));
      float added[V];
      residual.floats(added);
#pragma unroll
      for (int j = 0; j < V; ++j) z[j] = __fadd_rn(rounded<T>(z[j]), added[j]);
    }
    if (By == Through::relu || n.activation.code == Activation::relu) {
#pragma unroll
      for (int j = 0; j < V; ++j) g[j] = lets_through<T>(z[j]) ? g[j] : 0.f;
    } else if constexpr (By == Through::any) {
      Floats<V> of_z, of_g;
#pragma unroll
      for (int j = 0; j < V; ++j) of_z.v[j] = rounded<T>(z[j]), of_g.v[j] = g[j];
      of_g = through_slopes<T>(n.activation, of_z, of_g);
#pragma unroll
      for (int j = 0; j < V; ++j) g[j] = row < vectors.end ? of_g.v[j] : 0.f;  // NaN where z, of no row, overflows
    }
  }
};

// x and dy of a thread's vectors, on their way. Last: see Words.
template <class T, int V, bool Even, Through By, bool Last>
struct Incoming {
  static constexpr int many = kPairsAtOnce;
  const Vectors<V, Even>& vectors;
  const Slopes<T, V, Even, By> slopes;
  Words<T, V> x[many], dy[many];
  unsigned char signs[many];

  __device__ explicit Incoming(const Vectors<V, Even>& of) : vectors(of), slopes(of) {
#pragma unroll
    for (int k = 0; k < many; ++k) load(k, vectors.first + k * vectors.a.side);
  }
  // Zeros where there is none: they add nothing.
  __device__ void load(int k, int row) {
    x[k] = dy[k] = {};
    const bool there = row < vectors.end;
    const int64_t at = vectors.at(row);
    x[k].template load_where<Last>(there, slopes.n.x, at);
    dy[k].template load_where<Last>(there, slopes.n.dy, at);
    if (slopes.are_kept()) {
      if (there) signs[k] = slopes.n.signs[at / static_cast<int>(sizeof(x[k]))];
    }
  }
  // Calls with(k, row, x - mean, g) for every vector.
  template <class With>
  __device__ void for_each(const ColumnCoefficients<V>& of, With with) {
    vectors.template for_each<many>([&](int k, int row) { load(k, row); },
                                    [&](int k, int row) {
                                      float d[V], g[V];
                                      slopes.values(of, row, x[k], dy[k], signs[k], d, g);
                                      with(k, row, d, g);
                                    });
  }
};

// The gradients of a row's vector, if it is there.
template <class T, int V, bool Even>
__device__ inline void store_gradients(const Vectors<V, Even>& vectors, int row, const float (&g)[V], const float (&dx)[V]) {
  if (row >= vectors.end) return;
  const BatchNormTrain& n = vectors.a.n;
  const int64_t at = vectors.at(row);
  if (n.dresidual != nullptr) store(n.dresidual, at, Pack<T, V>::of(g));
  if (n.dx != nullptr) store(n.dx, at, Pack<T, V>::of(dx));
}

template <class T, int V, bool Even, Through By>
__global__ void __launch_bounds__(kBatchNormThreads, kPairBlocks<T>) batch_sums(const BatchNormArgs args) {
  __shared__ Handed<V> handed;
  __shared__ float4 room[kMostOfStrip];
  const Vectors<V, Even> vectors(args, blockIdx.x);
  Incoming<T, V, Even, By, false> incoming(vectors);
  const ColumnCoefficients<V> of(vectors, room);
  float sums[V] = {}, products[V] = {};
  incoming.for_each(of, [&](int, int row, float (&d)[V], const float (&g)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sums[j] = __fadd_rn(sums[j], g[j]);
      products[j] = fmaf(g[j], d[j], products[j]);
    }
    if constexpr (By == Through::any) {
      if (!args.n.frozen) return;
#pragma unroll
      for (int j = 0; j < V; ++j) d[j] = __fmul_rn(g[j], of.gain[j]);
      store_gradients<T>(vectors, row, g, d);
    }
  });
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

// What a column's gradients are made of: dx = g gain - (d b + a).
template <int V>
struct ColumnGradients {
  float a[V], b[V];
  // From memory, by way of `room`; the block calls.
  __device__ ColumnGradients(const PieceVectors<V>& vectors, float2 (&room)[kMostOfStrip]) {
    const float2* finished = vectors.a.sums() + vectors.a.n.sizes.channels * vectors.a.p.pieces;
    const auto get = [&](int64_t channel) { return __ldcg(finished + channel); };
    vectors.each_column(room, get, [&](int j, const float2& pair) { set(j, pair); });
  }
  // From those of the strip's channels.
  __device__ ColumnGradients(const PieceVectors<V>& vectors, const float2* channels) {
    vectors.each_column(channels, [&](int j, const float2& pair) { set(j, pair); });
  }
  __device__ void of(const ColumnCoefficients<V>& c, const float (&g)[V], float (&d)[V]) const {
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] = fmaf(g[j], c.gain[j], -fmaf(d[j], b[j], a[j]));
  }

 private:
  __device__ void set(int j, const float2& pair) {
    a[j] = pair.x;
    b[j] = pair.y;
  }
};

template <class T, int V, bool Even, Through By>
__global__ void __launch_bounds__(kBatchNormThreads, kPairBlocks<T>) batch_gradients(const BatchNormArgs args) {
  __shared__ float4 room[kMostOfStrip];
  __shared__ float2 room_of_pairs[kMostOfStrip];
  const Vectors<V, Even> vectors(args, gridDim.x - 1 - blockIdx.x);
  Incoming<T, V, Even, By, true> incoming(vectors);
  const ColumnCoefficients<V> of(vectors, room);
  follow_predecessor();
  const ColumnGradients<V> gradients(vectors, room_of_pairs);
  incoming.for_each(of, [&](int, int row, float (&d)[V], const float (&g)[V]) {
    gradients.of(of, g, d);
    store_gradients<T>(vectors, row, g, d);
  });
}

template <class T, int V, bool Even, Through By>
cudaError_t run_backward(const BatchNormArgs& a, bool overlap, cudaStream_t stream) {
  cudaError_t error = launch_pass<batch_sums<T, V, Even, By>>(a, false, stream);
  const bool follows = !a.n.frozen && (a.n.dx != nullptr || a.n.dresidual != nullptr);
  const ChannelVector* vectors[] = {&a.n.dweight, &a.n.dbias, &a.n.dscale, &a.n.dinput_bias};
  const auto asked = [](const ChannelVector* v) { return v->data != nullptr; };
  if (error == cudaSuccess && (follows || std::any_of(std::begin(vectors), std::end(vectors), asked))) {
    error = finish_batch_norm_backward(a.n, a.p, overlap, stream);
  }
  return error == cudaSuccess && follows ? launch_pass<batch_gradients<T, V, Even, By>>(a, overlap, stream) : error;
}

template <class T, bool Even>
cudaError_t run_through(const BatchNormArgs& a, bool overlap, cudaStream_t stream) {
  switch (through_of(a.n)) {
    case Through::nothing: return run_backward<T, kBatchNormVec, Even, Through::nothing>(a, overlap, stream);
    case Through::relu: return run_backward<T, kBatchNormVec, Even, Through::relu>(a, overlap, stream);
    case Through::signs: return run_backward<T, kBatchNormVec, Even, Through::signs>(a, overlap, stream);
    default: return run_backward<T, kBatchNormVec, Even, Through::any>(a, overlap, stream);
  }
}

template <class T>
cudaError_t batch_norm_backward_of(const BatchNormTrain& n, const BatchNormPlan& plan, bool overlap, cudaStream_t stream) {
  const BatchNormArgs args(n, plan);
  if (plan.vec == 1) return run_backward<T, 1, false, Through::any>(args, overlap, stream);
  return args.row_bytes > 0 ? run_through<T, true>(args, overlap, stream) : run_through<T, false>(args, overlap, stream);
}

}  // namespace
}  // namespace normswap
