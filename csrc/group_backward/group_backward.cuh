// What the kernels of group_norm's backward share: formulas, the sums over samples, waiting for a group's sums.
//
// y = act(z), z = (x - mean) gain + bias (+ residual), gain = weight rstd, all rounded where the forward rounds. With
// g = dy act'(z) and over the D elements of a group of a sample
//   a = sum(g gain) / D,  b = sum(g gain (x - mean)) rstd^2 / D
//   dx = g gain - x b + (mean b - a),  dresidual = g,  dbias = sum(g),  dweight = sum(g (x - mean)) rstd
// the last two over the elements of a channel in all samples.
#pragma once

#include "device/activation.cuh"
#include "device/cluster.cuh"
#include "device/copy.cuh"
#include "device/divider.cuh"
#include "device/launch.h"
#include "device/reduce.cuh"
#include "group_backward/group_backward.h"

namespace normswap {
namespace {

// The elements of a vector of any length, as they lie in memory. Last: nobody needs them in the L2 afterwards.
template <class T, int V, bool Whole = (V * sizeof(T) % 16 == 0)>
struct Raw {
  static constexpr int words = V * static_cast<int>(sizeof(T)) / 16;
  uint4 v[words];
  template <bool Last = false>
  __device__ static Raw load(const T* p) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < words; ++i) {
      const uint4* from = reinterpret_cast<const uint4*>(p) + i;
      raw.v[i] = Last ? __ldcs(from) : *from;
    }
    return raw;
  }
  __device__ void floats(float (&out)[V]) const {
#pragma unroll
    for (int i = 0; i < words; ++i) {
      float some[V / words];
      floats_of<T>(v[i], some);
#pragma unroll
      for (int j = 0; j < V / words; ++j) out[i * (V / words) + j] = some[j];
    }
  }
  __device__ static Raw of(const float (&values)[V]) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < words; ++i) {
      float some[V / words];
#pragma unroll
      for (int j = 0; j < V / words; ++j) some[j] = values[i * (V / words) + j];
      raw.v[i] = words_of<T>(some);
    }
    return raw;
  }
  template <bool Last = false>
  __device__ void store(T* p) const {
#pragma unroll
    for (int i = 0; i < words; ++i) {
      uint4* to = reinterpret_cast<uint4*>(p) + i;
      Last ? __stcs(to, v[i]) : store_words(to, v[i]);
    }
  }
};

template <class T, int V>
struct Raw<T, V, false> {
  Pack<T, V> pack;
  template <bool Last = false>
  __device__ static Raw load(const T* p) {
    return {Pack<T, V>::load(p)};
  }
  __device__ void floats(float (&out)[V]) const {
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = to_float(pack.v[j]);
  }
  __device__ static Raw of(const float (&values)[V]) { return {Pack<T, V>::of(values)}; }
  template <bool Last = false>
  __device__ void store(T* p) const {
    pack.store(p);
  }
};

// The elements of words where the next ones are loaded to: made once, so that these words need not stay.
template <class Words, int V>
__device__ inline void take_floats(const Words& words, float (&out)[V]) {
  words.floats(out);
#pragma unroll
  for (int j = 0; j < V; ++j) asm volatile("" : "+f"(out[j]));
}

// What the elements of a channel of a sample have in common.
struct LineValues {
  float mean, gain, bias, rstd;
};

__device__ inline LineValues line_values(const GroupBackward& n, int64_t group, int64_t channel) {
  const float rstd = n.rstd[group];
  const float bias = n.activation.code == Activation::none ? 0.f : channel_value(n.bias, channel, 0.f);
  return {n.mean[group], __fmul_rn(rstd, channel_value(n.weight, channel, 1.f)), bias, rstd};
}

// What follows the norm, where it is worth kernels of its own.
enum class Behind { nothing, relu, any };

// A vector of the residual, which lies in memory or is here.
template <class D, int V>
struct ResidualAt {
  const void* tensor;
  int64_t at;
  __device__ Raw<D, V> operator()() const { return Raw<D, V>::load(static_cast<const D*>(tensor) + at); }
};
template <class D, int V>
struct ResidualHere {
  Raw<D, V> vector;
  __device__ const Raw<D, V>& operator()() const { return vector; }
};

// Each rounded to D; 16-bit ones in pairs.
template <class D, int V>
__device__ inline void round_each(float (&v)[V]) {
  if constexpr (sizeof(D) == 2 && V % 2 == 0) {
#pragma unroll
    for (int j = 0; j < V; j += 2) {
      const float2 both = floats_of_pair<D>(pair_bits<D>(v[j], v[j + 1]));
      v[j] = both.x, v[j + 1] = both.y;
    }
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = rounded<D>(v[j]);
  }
}

// The largest that is 0 when rounded to D.
template <class D>
constexpr float kRoundsToZero = std::is_same_v<D, Half> ? 0x1p-25f : sizeof(D) == 2 ? 0x1p-134f : 0.f;

// As through_activation, of z before it is rounded, or of what came out.
template <class D, int V, class Residual>
__device__ inline void through_relu(const GroupBackward& n, Residual residual, float (&z)[V], float (&g)[V]) {
  float most = kRoundsToZero<D>;
  if (n.residual != nullptr) {
    residual().floats(z);
    most = 0.f;
  }
#pragma unroll
  for (int j = 0; j < V; ++j) g[j] = z[j] <= most ? 0.f : g[j];
}

// g of a vector: dy at first. `d`: x - mean. residual(): the vector of it, asked for where there is one. D: dtype of y and
// dy.
template <class D, Behind B = Behind::any, int V, class Residual>
__device__ inline void through_activation(const GroupBackward& n, Residual residual, const float (&d)[V],
                                          const float (&gain)[V], const float (&bias)[V], float (&g)[V]) {
  if (B == Behind::any && n.activation.code == Activation::none) return;
  float z[V];
#pragma unroll
  for (int j = 0; j < V; ++j) z[j] = fmaf(d[j], gain[j], bias[j]);
  if (B == Behind::relu || n.activation.code == Activation::relu) return through_relu<D>(n, residual, z, g);
  round_each<D>(z);
  if (n.residual != nullptr) {
    float r[V];
    residual().floats(r);
#pragma unroll
    for (int j = 0; j < V; ++j) z[j] = __fadd_rn(z[j], r[j]);
    round_each<D>(z);
  }
  times_slope<D>(n.activation, z, g);
}

// What a group's elements need of its sums.
struct GroupValues {
  float of_x, constant;
  // sums: of g gain, of g gain (x - mean).
  __device__ static GroupValues of(float2 sums, float mean, float rstd, float reciprocal) {
    const float b = __fmul_rn(rstd, __fmul_rn(rstd, __fmul_rn(sums.y, reciprocal)));
    return {-b, fmaf(mean, b, -__fmul_rn(sums.x, reciprocal))};
  }
  __device__ float gradient(float g, float x, float gain) const { return fmaf(g, gain, fmaf(x, of_x, constant)); }
};

// Sums over runs of `lanes` lanes, a power of two; each holds them. The warp calls.
__device__ inline float2 run_sums(float2 v, int lanes) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    const float x = __shfl_xor_sync(kWholeWarp, v.x, mask), y = __shfl_xor_sync(kWholeWarp, v.y, mask);
    if (mask < lanes) v = {__fadd_rn(v.x, x), __fadd_rn(v.y, y)};
  }
  return v;
}

__device__ inline float2 plus(float2 v, float2 w) { return {__fadd_rn(v.x, w.x), __fadd_rn(v.y, w.y)}; }

// Sum over get(i), i < count, by a warp; each lane holds it.
template <class Get>
__device__ inline float2 warp_sums(int count, Get get) {
  float2 sums{0.f, 0.f};
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32) sums = plus(sums, get(i));
  return run_sums(sums, 32);
}

// --- waiting for the sums of a group -------------------------------------------------------------------------------
// Blocks take tickets: who holds one knows that all before it are held by blocks that run, so that it may wait for them.
// Sums come before what waits for them.

// True in every thread of the block that arrives last of `all`; what the others wrote before they arrived is then seen.
__device__ inline bool arrives_last(unsigned* arrived, unsigned all) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrived, 1u) == all - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// One thread, for what it wrote before.
__device__ inline void set_ready(unsigned* flag) {
  asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}

// The block waits.
__device__ inline void wait_until_ready(const unsigned* flag) {
  if (threadIdx.x == 0) {
    for (unsigned ready = 0; ready == 0;) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(flag) : "memory");
      if (ready == 0) __nanosleep(40);
    }
  }
  __syncthreads();
}

// A block's tickets, one after the other; the next is asked for early, since it takes its time. A block that waits for
// what belongs to tickets before its own waits for no other, whichever it has taken ahead.
class Tickets {
 public:
  __device__ Tickets(unsigned* next, int* shared) : next_(next), shared_(shared) { ask(); }
  __device__ void ask() {
    if (threadIdx.x == 0) asked_ = atomicAdd(next_, 1u);
  }
  // What was asked for last. The block calls; a barrier follows before it asks again.
  __device__ int hear() const {
    if (threadIdx.x == 0) *shared_ = static_cast<int>(asked_);
    __syncthreads();
    return *shared_;
  }

 private:
  unsigned* next_;
  int* shared_;
  unsigned asked_ = 0;
};

// Work number `ticket`: the sums of piece `piece` of set `set` (a group, a slab), or its gradients, which follow `lag`
// pieces behind: at least as many as a set has.
struct Turn {
  bool gradients;
  int set, piece;
  __device__ static Turn of(int ticket, int sets, int pieces, int lag) {
    const int all = sets * pieces, paired = ticket - lag, second = paired >= 2 * (all - lag) ? 2 : paired % 2;
    if (paired < 0) return {false, ticket / pieces, ticket % pieces};
    const bool gradients = second != 0;
    const int item = second == 2 ? ticket - all : gradients ? paired / 2 : paired / 2 + lag;
    return {gradients, item / pieces, item % pieces};
  }
};

// --- dweight and dbias ---------------------------------------------------------------------------------------------

constexpr int kColumnsAtOnce = 16, kRowsAtOnceOfSums = 32;

// (batch, channels, pieces) pairs of sums of g and of g (x - mean) rstd, over the batch and the pieces.
struct LineSums {
  const float2* sums;
  ChannelVector dweight, dbias;
  int64_t batch, channels, pieces;
};

__global__ void __launch_bounds__(kColumnsAtOnce * kRowsAtOnceOfSums) sum_lines(const LineSums a) {
  __shared__ float2 rows[kRowsAtOnceOfSums][kColumnsAtOnce + 1];
  follow_predecessor();
  let_successor_start();
  const int column = threadIdx.x % kColumnsAtOnce, row = threadIdx.x / kColumnsAtOnce;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kColumnsAtOnce + column;
  float2 sums{0.f, 0.f};
  if (channel < a.channels) {
#pragma unroll 4
    for (int64_t i = row; i < a.batch * a.pieces; i += kRowsAtOnceOfSums) {
      const int64_t sample = a.pieces == 1 ? i : i / a.pieces;
      sums = plus(sums, a.sums[(sample * a.channels + channel) * a.pieces + (i - sample * a.pieces)]);
    }
  }
  rows[row][column] = sums;
  for (int half = kRowsAtOnceOfSums / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) rows[row][column] = plus(rows[row][column], rows[row + half][column]);
  }
  if (row > 0 || channel >= a.channels) return;
  if (a.dbias.data != nullptr) set_channel_value(a.dbias, channel, rows[0][column].x);
  if (a.dweight.data != nullptr) set_channel_value(a.dweight, channel, rows[0][column].y);
}

inline cudaError_t launch_sum_lines(const GroupBackward& n, const float2* sums, int64_t pieces, bool overlap,
                                    cudaStream_t stream) {
  if (n.dweight.data == nullptr && n.dbias.data == nullptr) return cudaSuccess;
  const LineSums args{sums, n.dweight, n.dbias, n.sizes.batch, n.sizes.channels, pieces};
  const LaunchShape shape{grid_of(ceil_div(n.sizes.channels, kColumnsAtOnce)), kColumnsAtOnce * kRowsAtOnceOfSums, 0, 1,
                          overlap};
  return launch_block<sum_lines>(args, shape, stream);
}

}  // namespace
}  // namespace normswap
