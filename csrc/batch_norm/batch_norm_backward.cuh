// The backward. With g = dy activation'(z), z = (x - mean) gain + bias (+ residual), over the D elements of a channel
//   dx = gain (g - sum(g) / D - (x - mean) rstd^2 sum(g (x - mean)) / D), or g gain by frozen statistics
//   dbias = sum(g), dweight = sum(g (x - mean)) rstd, dresidual = g
// Sums of the pieces (batch_sums), of the channels (finish_batch_norm_backward), gradients (batch_gradients): x and dy are
// read twice, or once by frozen statistics, whose gradients wait for no sum. The sign of what went into a ReLU is computed
// from x as in the forward; behind a residual it was kept.
#pragma once

#include <algorithm>
#include <iterator>

#include "batch_norm/batch_norm_held.cuh"

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

// x and dy of a thread's vectors, on their way. Last: see Words.
template <class T, int V, bool Last>
struct Incoming {
  static constexpr int many = kPairsAtOnce;
  const Vectors<V>& vectors;
  const BatchNormTrain& n;
  Words<T, V> x[many], dy[many];
  unsigned char signs[many];

  __device__ explicit Incoming(const Vectors<V>& of) : vectors(of), n(of.a.n) {
#pragma unroll
    for (int k = 0; k < many; ++k) load(k, vectors.first + k * vectors.a.side);
  }
  // With nothing on its way yet.
  __device__ Incoming(const Vectors<V>& of, bool) : vectors(of), n(of.a.n) {}
  // Zeros where there is none: they add nothing.
  __device__ void load(int k, int row) {
    x[k] = dy[k] = {};
    load_where(k, row, row < vectors.end, row < vectors.end);
  }
  // x and dy where `apart` from the signs, which `there` asks for.
  __device__ void load_where(int k, int row, bool apart, bool there) {
    const int64_t at = vectors.at(row);
    x[k].template load_where<Last>(apart, n.x, at);
    dy[k].template load_where<Last>(apart, n.dy, at);
    if (n.signs != nullptr && there) signs[k] = n.signs[at / static_cast<int>(sizeof(x[k]))];
  }
  // Calls with(k, row, x - mean, g) for every vector.
  template <class With>
  __device__ void for_each(const ColumnCoefficients<V>& of, With with) {
    vectors.template for_each<many>([&](int k, int row) { load(k, row); },
                                    [&](int k, int row) {
                                      float d[V], g[V];
                                      values(of, k, row, d, g);
                                      with(k, row, d, g);
                                    });
  }

  __device__ void values(const ColumnCoefficients<V>& of, int k, int row, float (&d)[V], float (&g)[V]) const {
    x[k].floats(d);
    dy[k].floats(g);
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
    for (int j = 0; j < V; ++j) z[j] = fmaf(d[j], of.gain[j], of.bias[j]);
    if (n.residual != nullptr) {
      Words<T, V> residual{};
      residual.template load_where<false>(row < vectors.end, n.residual, vectors.at(row));
      float added[V];
      residual.floats(added);
#pragma unroll
      for (int j = 0; j < V; ++j) z[j] = __fadd_rn(rounded<T>(z[j]), added[j]);
    }
    if (n.activation.code == Activation::relu) {
#pragma unroll
      for (int j = 0; j < V; ++j) g[j] = lets_through<T>(z[j]) ? g[j] : 0.f;
      return;
    }
    Floats<V> of_z, of_g;
#pragma unroll
    for (int j = 0; j < V; ++j) of_z.v[j] = rounded<T>(z[j]), of_g.v[j] = g[j];
    of_g = through_slopes<T>(n.activation, of_z, of_g);
#pragma unroll
    for (int j = 0; j < V; ++j) g[j] = row < vectors.end ? of_g.v[j] : 0.f;  // NaN where z, of no row, overflows
  }
};

// The gradients of a row's vector, if it is there.
template <class T, int V>
__device__ inline void store_gradients(const Vectors<V>& vectors, int row, const float (&g)[V], const float (&dx)[V]) {
  if (row >= vectors.end) return;
  const BatchNormTrain& n = vectors.a.n;
  const int64_t at = vectors.at(row);
  if (n.dresidual != nullptr) store(n.dresidual, at, Pack<T, V>::of(g));
  if (n.dx != nullptr) store(n.dx, at, Pack<T, V>::of(dx));
}

// The sums of a block's piece. Calls with(x, dy, row, d, g) for each of a thread's vectors in turn, then done().
template <class T, int V, class With, class Done>
__device__ inline void piece_sums(const Vectors<V>& vectors, const ColumnCoefficients<V>& of, Incoming<T, V, false>& incoming,
                                  Handed<V>& handed, With with, Done done) {
  const BatchNormArgs& args = vectors.a;
  float sums[V] = {}, products[V] = {};
  incoming.for_each(of, [&](int k, int row, float (&d)[V], const float (&g)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sums[j] = __fadd_rn(sums[j], g[j]);
      products[j] = fmaf(g[j], d[j], products[j]);
    }
    with(incoming.x[k], incoming.dy[k], row, d, g);
  });
  done();
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
__global__ void __launch_bounds__(kBatchNormThreads, kPairBlocks<T>) batch_sums(const BatchNormArgs args) {
  __shared__ Handed<V> handed;
  __shared__ float4 room[kMostOfStrip];
  const Vectors<V> vectors(args, blockIdx.x);
  Incoming<T, V, false> incoming(vectors);
  const ColumnCoefficients<V> of(vectors, room);
  const auto with = [&](const Words<T, V>&, const Words<T, V>&, int row, float (&d)[V], const float (&g)[V]) {
    if (!args.n.frozen) return;
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] = __fmul_rn(g[j], of.gain[j]);
    store_gradients<T>(vectors, row, g, d);
  };
  piece_sums<T>(vectors, of, incoming, handed, with, [] { let_successor_start(); });
}

// What a column's gradients are made of: dx = g gain - (d b + a).
template <int V>
struct ColumnGradients {
  float a[V], b[V];
  __device__ ColumnGradients(const Vectors<V>& vectors, float2 (&room)[kMostOfStrip]) {
    const float2* finished = vectors.a.sums() + vectors.a.n.sizes.channels * vectors.a.p.pieces;
    const auto get = [&](int64_t channel) { return __ldcg(finished + channel); };
    vectors.each_column(room, get, [&](int j, const float2& pair) {
      a[j] = pair.x;
      b[j] = pair.y;
    });
  }
  __device__ void of(const ColumnCoefficients<V>& c, const float (&g)[V], float (&d)[V]) const {
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] = fmaf(g[j], c.gain[j], -fmaf(d[j], b[j], a[j]));
  }
};

template <class T, int V>
__global__ void __launch_bounds__(kBatchNormThreads, kPairBlocks<T>) batch_gradients(const BatchNormArgs args) {
  __shared__ float4 room[kMostOfStrip];
  __shared__ float2 room_of_pairs[kMostOfStrip];
  const Vectors<V> vectors(args, gridDim.x - 1 - blockIdx.x);
  Incoming<T, V, true> incoming(vectors);
  const ColumnCoefficients<V> of(vectors, room);
  follow_predecessor();
  const ColumnGradients<V> gradients(vectors, room_of_pairs);
  incoming.for_each(of, [&](int, int row, float (&d)[V], const float (&g)[V]) {
    gradients.of(of, g, d);
    store_gradients<T>(vectors, row, g, d);
  });
}

template <class T>
__global__ void __launch_bounds__(kBatchNormThreads, kBatchBlocksHeld) backward_held(const BatchNormArgs args) {
  constexpr int V = kBatchNormVec, many = kPairsAtOnce;
  extern __shared__ __align__(16) char memory[];
  __shared__ Handed<V> handed;
  __shared__ float4 room[kMostOfStrip];
  __shared__ float2 room_of_pairs[kMostOfStrip], of_warps[kBatchNormThreads / 32];
  const Vectors<V> vectors(args, blockIdx.x);
  const HeldOrder<Words<T, V>> order(vectors.count(), 2);
  auto* const held = order.mine(memory);
  auto* const held_dy = held + order.levels * kBatchNormThreads;
  const auto get_coefficients = [&] { return ColumnCoefficients<V>(vectors, room); };
  {
    Incoming<T, V, false> incoming(vectors);
    int seen = 0;
    const auto hold = [&](const Words<T, V>& x, const Words<T, V>& dy, int, float (&)[V], const float (&)[V]) {
      if (seen < order.levels) {
        held[seen * kBatchNormThreads] = x.raw;
        held_dy[seen * kBatchNormThreads] = dy.raw;
      }
      ++seen;
    };
    piece_sums<T>(vectors, get_coefficients(), incoming, handed, hold, [] {});
  }
  Incoming<T, V, true> incoming(vectors, false);
  const auto load_some = [&](int from) {
#pragma unroll
    for (int k = 0; k < many; ++k) {
      const int q = from + k;
      incoming.load_where(k, vectors.first + order.index(q) * args.side, q < order.loaded, q < order.count);
    }
  };
  load_some(0);
  wait_for_strip(vectors, 0);
  float2* const finished = args.sums() + args.n.sizes.channels * args.p.pieces;
  for_channels_of_block(vectors, [&](int64_t channel, bool there) {
    for_channel(args, channel, there, args.sums(), of_warps,
                [](const float2& first, auto parts) { return unite_pieces(first, parts); },
                [&](float2 sums) { finish_channel(args, channel, sums, finished); });
  });
  wait_for_strip(vectors, 1);
  const ColumnCoefficients<V> of = get_coefficients();
  const ColumnGradients<V> gradients(vectors, room_of_pairs);
#pragma unroll 1
  for (int from = 0; from < order.count;) {
#pragma unroll
    for (int k = 0; k < many; ++k) {
      const int q = from + k, at = order.index(q), row = vectors.first + at * args.side;
      if (q >= order.loaded && q < order.count) {
        incoming.x[k].raw = held[at * kBatchNormThreads];
        incoming.dy[k].raw = held_dy[at * kBatchNormThreads];
      }
      float d[V], g[V];
      incoming.values(of, k, row, d, g);
      gradients.of(of, g, d);
      if (q < order.count) store_gradients<T>(vectors, row, g, d);
    }
    from += many;
    if (from < order.count) load_some(from);
  }
}

template <class T, int V>
cudaError_t backward_in_three(const BatchNormArgs& a, bool overlap, cudaStream_t stream) {
  cudaError_t error = launch_pass<batch_sums<T, V>>(a, false, stream);
  const bool follows = !a.n.frozen && (a.n.dx != nullptr || a.n.dresidual != nullptr);
  const ChannelVector* vectors[] = {&a.n.dweight, &a.n.dbias, &a.n.dscale, &a.n.dinput_bias};
  const auto asked = [](const ChannelVector* v) { return v->data != nullptr; };
  if (error == cudaSuccess && (follows || std::any_of(std::begin(vectors), std::end(vectors), asked))) {
    error = finish_batch_norm_backward(a.n, a.p, overlap, stream);
  }
  return error == cudaSuccess && follows ? launch_pass<batch_gradients<T, V>>(a, overlap, stream) : error;
}

template <class T>
cudaError_t batch_norm_backward_of(const BatchNormTrain& n, const BatchNormPlan& plan, bool overlap, cudaStream_t stream) {
  const BatchNormArgs args(n, plan);
  if (plan.vec == 1) return backward_in_three<T, 1>(args, overlap, stream);
  if (n.held && (n.dx != nullptr || n.dresidual != nullptr)) {
    const cudaError_t error = launch_held<backward_held<T>>(args, stream);
    if (error != cudaErrorCooperativeLaunchTooLarge) return error;
    cudaGetLastError();  // here not all run at once
  }
  return backward_in_three<T, kBatchNormVec>(args, overlap, stream);
}

}  // namespace
}  // namespace normswap
