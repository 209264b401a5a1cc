// What the passes over the tensor have in common: where a block works, a thread's vectors, a block's statistics.
#pragma once

#include "batch_norm_train.h"
#include "column_statistics.cuh"
#include "launch.h"

namespace normswap {
namespace {

struct BatchNormArgs {
  BatchNormTrain n;
  BatchNormPlan p;
  Divider by_strips, by_lanes, by_parts, by_inner, by_across;
  int64_t outer, strip_step;  // elements from sample to sample, from strip to strip
  int side, rows;

  BatchNormArgs(const BatchNormTrain& norm, const BatchNormPlan& plan)
      : n(norm), p(plan), by_strips(Divider::by(plan.strips)), by_lanes(Divider::by(plan.lanes)),
        by_parts(Divider::by(plan.parts)), by_inner(Divider::by(norm.sizes.inner)), by_across(Divider::by(plan.across)),
        outer(norm.sizes.channels * norm.sizes.inner), strip_step(plan.parts > 1 ? norm.sizes.inner : plan.width),
        side(plan.side), rows(static_cast<int>(plan.rows)) {}

  __device__ Moments* moments() const { return reinterpret_cast<Moments*>(n.workspace); }
  __device__ float2* sums() const { return reinterpret_cast<float2*>(n.workspace); }
};

// A block's piece, and in it the thread's vectors: in rows first, first + side, ... before `end`.
template <int V>
struct Vectors {
  const BatchNormArgs& a;
  int strip, piece, lane, row, first, end;
  int64_t base;  // of its vector in row 0
  __device__ Vectors(const BatchNormArgs& args, unsigned item) : a(args) {
    piece = a.by_strips.quotient(static_cast<int>(item));
    strip = static_cast<int>(item) - piece * static_cast<int>(a.p.strips);
    row = a.by_lanes.quotient(thread());
    lane = thread() - row * a.p.lanes;
    const int64_t begin = piece * a.p.piece_rows;
    end = static_cast<int>(min(begin + a.p.piece_rows, a.p.rows));
    first = row < a.side && (last_strip() ? lane * V < a.p.last_width : true) ? static_cast<int>(begin) + row : end;
    base = strip * a.strip_step + lane * V;
  }
  __device__ bool last_strip() const { return a.p.parts == 1 && strip == a.p.strips - 1; }
  __device__ int channels() const { return last_strip() ? a.p.last_group : a.p.group; }
  __device__ int64_t first_channel() const { return static_cast<int64_t>(strip) * a.p.group; }
  // Whether there is one in row r, and where it lies.
  __device__ bool at(int r, int64_t& offset) const {
    if (a.p.parts == 1) {
      offset = base + r * a.outer;
      return r < end;
    }
    const int sample = a.by_parts.quotient(r), part = r - sample * static_cast<int>(a.p.parts);
    offset = base + sample * a.outer + static_cast<int64_t>(part) * a.p.width;
    return r < end && (part < a.p.parts - 1 || lane * V < a.p.last_width);
  }
  // Calls of(j, get(channel)) for the V columns, where get reads from memory what a channel has: once a block where columns
  // are channels, by way of `room`. The block calls.
  template <class One, class Get, class Of>
  __device__ void each_column(One (&room)[kMostOfStrip], Get get, Of of) const {
    const int last = channels() - 1;
    if (a.n.sizes.inner == 1) {
      for (int i = thread(); i <= last; i += static_cast<int>(blockDim.x)) room[i] = get(first_channel() + i);
      __syncthreads();
#pragma unroll
      for (int j = 0; j < V; ++j) of(j, room[min(lane * V + j, last)]);
      return;
    }
    One one{};
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (j == 0 || a.p.values > 1) {
        one = get(first_channel() + (a.p.parts > 1 ? 0 : min(a.by_inner.quotient(lane * V + j), last)));
      }
      of(j, one);
    }
  }
};

// What the V columns of a thread have: see ChannelCoefficients.
template <int V>
struct ColumnCoefficients {
  float mean[V], gain[V], bias[V];
  __device__ ColumnCoefficients(const Vectors<V>& vectors, float4 (&room)[kMostOfStrip]) {
    const float4* from = reinterpret_cast<const float4*>(vectors.a.n.coefficients);
    const auto get = [&](int64_t channel) { return __ldcg(from + channel); };
    vectors.each_column(room, get, [&](int j, const float4& of) {
      mean[j] = of.x;
      gain[j] = of.y;
      bias[j] = of.z;
    });
  }
};

template <class T, int V>
__device__ inline void to_floats(const Pack<T, V>& pack, float (&out)[V]) {
  if constexpr (sizeof(pack) == 8) {
    const uint2 words = pack.raw();
    const uint4 both{words.x, words.y, 0u, 0u};
    float all[8];
    floats_of<T>(both, all);
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = all[j];
  } else if constexpr (sizeof(pack) == 16) {
    floats_of<T>(pack.raw(), out);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = to_float(pack.v[j]);
  }
}

// Last: nobody needs them in the L2 afterwards.
template <bool Last, class T, int V>
__device__ inline Pack<T, V> load(const void* tensor, int64_t at) {
  const T* p = static_cast<const T*>(tensor) + at;
  if constexpr (Last && sizeof(Pack<T, V>) >= 8) {
    return Pack<T, V>::of_raw(__ldcs(reinterpret_cast<const typename Pack<T, V>::Raw*>(p)));
  } else {
    return Pack<T, V>::load(p);
  }
}

template <class T, int V>
__device__ inline void store(void* tensor, int64_t at, const Pack<T, V>& pack) {
  pack.store(static_cast<T*>(tensor) + at);
}

// What a block's threads hand on: `values` pairs each, and of how many elements each of them is.
template <int V>
struct Handed {
  float2 pairs[kBatchNormThreads * V];
  float counts[kBatchNormThreads];

  // The V pairs of columns that are one channel are united by unite(pairs).
  template <class Unite>
  __device__ void put(const Vectors<V>& of, const float2 (&pairs_of)[V], int count, Unite unite) {
    const bool apart = of.a.p.values > 1;
    counts[thread()] = static_cast<float>(apart ? count : count * V);
    if (apart) {
#pragma unroll
      for (int j = 0; j < V; ++j) pairs[thread() * V + j] = pairs_of[j];
    } else {
      pairs[thread()] = unite(pairs_of);
    }
  }
  // Calls unite(visit) for every channel of the strip by a run of lanes, where visit(with) calls with(count, pair) for
  // those of the calling lane; then publish(channel of the strip, what it gave) by the first of them. The block calls.
  template <class Unite, class Publish>
  __device__ void for_each_channel(const Vectors<V>& of, Unite unite, Publish publish) const {
    const BatchNormArgs& a = of.a;
    const int run = 1 << a.p.log_run, channels = of.channels(), lane = thread() & (run - 1);
    constexpr int log_vec = V == 4 ? 2 : 0;
    const int entries = a.p.across * a.side, log_values = a.p.values > 1 ? log_vec : 0;
    for (int first = 0; first < channels; first += static_cast<int>(blockDim.x) >> a.p.log_run) {
      if (first + ((thread() & ~31) >> a.p.log_run) >= channels) break;  // the warp has none
      const int channel = first + (thread() >> a.p.log_run), from = min(channel, channels - 1) * a.p.across;
      const auto visit = [&](auto with) {
        for (int i = lane; i < entries; i += run) {
          const int row = a.by_across.quotient(i), entry = from + i - row * a.p.across;
          with(counts[row * a.p.lanes + (entry >> log_values)], pairs[((row * a.p.lanes) << log_values) + entry]);
        }
      };
      const auto united = unite(visit, pairs[from]);
      if (lane == 0 && channel < channels) publish(channel, united);
    }
  }
};

// Moments of what visit(with) shows a run of lanes, each of which holds the result; the warp calls. Means relative to a
// pivot, one of them; then the squares about their mean.
template <class Visit>
__device__ inline Moments unite_moments(int lanes, float pivot, Visit visit) {
  float n = 0.f, sum = 0.f, squares = 0.f;
  visit([&](float count, float2 one) {
    n = __fadd_rn(n, count);
    sum = fmaf(count, __fsub_rn(one.x, pivot), sum);
  });
  n = run_sum(n, lanes);
  sum = run_sum(sum, lanes);
  const float shift = n > 0.f ? __fdiv_rn(sum, n) : 0.f;
  visit([&](float count, float2 one) {
    const float d = __fsub_rn(__fsub_rn(one.x, pivot), shift);
    squares = __fadd_rn(squares, fmaf(__fmul_rn(count, d), d, one.y));
  });
  return {__fadd_rn(pivot, shift), run_sum(squares, lanes), n};
}

// Plain sums of the same.
template <class Visit>
__device__ inline float2 unite_pairs(int lanes, Visit visit) {
  float2 sums{0.f, 0.f};
  visit([&](float, float2 pair) { sums = {__fadd_rn(sums.x, pair.x), __fadd_rn(sums.y, pair.y)}; });
  return {run_sum(sums.x, lanes), run_sum(sums.y, lanes)};
}

template <auto kernel>
cudaError_t launch_pass(const BatchNormArgs& a, bool overlap, cudaStream_t stream) {
  return launch_block<kernel>(a, {grid_of(a.p.items), a.p.threads, 0, 1, overlap}, stream);
}

}  // namespace
}  // namespace normswap
