// What the passes over the tensor have in common: where a block works, a thread's vectors, a block's statistics.
#pragma once

#include "batch_norm/batch_norm_train.h"
#include "column/column_statistics.cuh"
#include "device/launch.h"

namespace normswap {
namespace {

constexpr int kFewPieces = 128;  // which a warp unites alone
constexpr int kEntriesHeld = 8;   // statistics of a channel that a lane keeps in registers while it unites them

struct BatchNormArgs {
  BatchNormTrain n;
  BatchNormPlan p;
  Divider by_strips, by_lanes, by_line, by_inner, by_across;
  int64_t strip_bytes;        // from strip to strip
  unsigned vector_bytes, sample_bytes;  // from row to row of a sample; what comes to it from sample to sample
  unsigned row_bytes;                   // from row to row, where it is always as far; else 0
  int side, rows, piece_rows;
  int finish_warps;  // that unite the pieces of a channel
  float elements;    // of a channel
  double unbiased;

  BatchNormArgs(const BatchNormTrain& norm, const BatchNormPlan& plan)
      : n(norm), p(plan), by_strips(Divider::by(plan.strips)), by_lanes(Divider::by(plan.lanes)),
        by_line(Divider::by(plan.line)), by_inner(Divider::by(norm.sizes.inner)), by_across(Divider::by(plan.across)),
        strip_bytes((plan.line > 1 ? norm.sizes.inner : plan.width) * norm.sizes.itemsize),
        vector_bytes(plan.vec * norm.sizes.itemsize),
        sample_bytes((norm.sizes.channels * norm.sizes.inner - plan.line * plan.vec) * norm.sizes.itemsize),
        side(plan.side), rows(static_cast<int>(plan.rows)), piece_rows(static_cast<int>(plan.piece_rows)),
        finish_warps(plan.pieces > kFewPieces ? kBatchNormThreads / 32 : 1) {
    const int64_t sample = norm.sizes.channels * norm.sizes.inner * norm.sizes.itemsize;
    row_bytes = plan.line == 1 && sample < (int64_t{1} << 32) ? static_cast<unsigned>(sample) : 0;
    unbiased = static_cast<double>(norm.sizes.samples) * static_cast<double>(norm.sizes.inner) - 1;
    elements = static_cast<float>(unbiased + 1);
  }

  __device__ Moments* moments() const { return reinterpret_cast<Moments*>(n.workspace); }
  __device__ float2* sums() const { return reinterpret_cast<float2*>(n.workspace); }
};

// A block's piece, and in it the thread's vectors: in rows first, first + side, ... before `end`.
template <int V>
struct PieceVectors {
  const BatchNormArgs& a;
  int strip, piece, lane, first, end;
  int64_t base;  // of its vector in row 0, in bytes
  __device__ PieceVectors(const BatchNormArgs& args, unsigned item) : a(args) {
    piece = a.by_strips.quotient(static_cast<int>(item));
    strip = static_cast<int>(item) - piece * static_cast<int>(a.p.strips);
    const int row = a.by_lanes.quotient(thread()), begin = piece * a.piece_rows;
    lane = thread() - row * a.p.lanes;
    end = min(begin + a.piece_rows, a.rows);
    const bool works = row < a.side && (strip < a.p.strips - 1 || lane * V < a.p.last_width);
    first = works ? begin + row : end;
    base = strip * a.strip_bytes + lane * a.vector_bytes;
  }
  __device__ int channels() const { return strip == a.p.strips - 1 ? a.p.last_group : a.p.group; }
  __device__ int64_t first_channel() const { return static_cast<int64_t>(strip) * a.p.group; }
  __device__ int count() const { return first < end ? (end - first + a.side - 1) / a.side : 0; }
  // Calls with(k, row) for the vectors in turn, and load(k, row) for those `Many` rows later, of which the first are loaded
  // already. A row that is not there is `end` or more.
  template <int Many, class Load, class With>
  __device__ void for_each(Load load, With with) const {
#pragma unroll 1
    for (int r = first; r < end; r += Many * a.side) {
#pragma unroll
      for (int k = 0; k < Many; ++k) {
        const int row = r + k * a.side;
        with(k, row);
        load(k, row + Many * a.side);
      }
    }
  }
  // Calls of(j, get(channel)) for the V columns, where get reads from memory what a channel has: once a block where columns
  // are channels, by way of `room`. The block calls.
  template <class One, class Get, class Of>
  __device__ void each_column(One* room, Get get, Of of) const {
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
        one = get(first_channel() + min(a.by_inner.quotient(lane * V + j), last));
      }
      of(j, one);
    }
  }
  // Calls of(j, what the strip's channels have of that of column j).
  template <class One, class Of>
  __device__ void each_column(const One* of_channels, Of of) const {
#pragma unroll
    for (int j = 0; j < V; ++j) of(j, of_channels[min(a.by_inner.quotient(lane * V + j), channels() - 1)]);
  }
};

// And where they lie. Even: rows are equally far from each other.
template <int V, bool Even>
struct Vectors : PieceVectors<V> {
  using PieceVectors<V>::PieceVectors;
  // The vector of row r, in bytes.
  __device__ int64_t at(int r) const {
    const BatchNormArgs& a = this->a;
    const uint64_t row = static_cast<unsigned>(r);
    if constexpr (Even) return this->base + static_cast<int64_t>(row * a.row_bytes);
    const uint64_t samples = static_cast<uint64_t>(static_cast<unsigned>(a.by_line.quotient(r))) * a.sample_bytes;
    return this->base + static_cast<int64_t>(samples + row * a.vector_bytes);
  }
};

// What the V columns of a thread have: see ChannelCoefficients.
template <int V>
struct ColumnCoefficients {
  float mean[V], gain[V], bias[V];
  // From memory, by way of `room`; the block calls.
  __device__ ColumnCoefficients(const PieceVectors<V>& vectors, float4* room) {
    const float4* from = reinterpret_cast<const float4*>(vectors.a.n.coefficients);
    const auto get = [&](int64_t channel) { return __ldcg(from + channel); };
    vectors.each_column(room, get, [&](int j, const float4& of) { set(j, of.x, of.y, of.z); });
  }
  // From those of the strip's channels.
  __device__ ColumnCoefficients(const PieceVectors<V>& vectors, const ChannelCoefficients* channels) {
    vectors.each_column(channels, [&](int j, const ChannelCoefficients& of) { set(j, of.mean, of.gain, of.bias); });
  }

 private:
  __device__ void set(int j, float of_mean, float of_gain, float of_bias) {
    mean[j] = of_mean;
    gain[j] = of_gain;
    bias[j] = of_bias;
  }
};

using normswap::load_if;

// The same of fewer bytes, and past the L2 of what nobody needs there afterwards.
__device__ inline void load_if(bool there, uint2& words, const void* p) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %3, 0;\n\t@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n\t}"
               : "+r"(words.x), "+r"(words.y)
               : "l"(p), "r"(static_cast<int>(there)));
}
__device__ inline void load_last_if(bool there, uint2& words, const void* p) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %3, 0;\n\t@p ld.global.cs.v2.b32 {%0, %1}, [%2];\n\t}"
               : "+r"(words.x), "+r"(words.y)
               : "l"(p), "r"(static_cast<int>(there)));
}
__device__ inline void load_last_if(bool there, uint4& words, const void* p) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %5, 0;\n\t@p ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
               : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
               : "l"(p), "r"(static_cast<int>(there)));
}

// V elements as they lie in memory.
template <class T, int V>
struct Words {
  using Raw = typename RawOf<sizeof(T) * V>::type;
  Raw raw;
  __device__ void floats(float (&out)[V]) const {
    if constexpr (sizeof(Raw) == 16) {
      floats_of<T>(raw, out);
    } else if constexpr (V > 1) {
      float all[2 * V];
      floats_of<T>(uint4{raw.x, raw.y, 0u, 0u}, all);
#pragma unroll
      for (int j = 0; j < V; ++j) out[j] = all[j];
    } else {
      out[0] = to_float(Pack<T, 1>::of_raw(raw).v[0]);
    }
  }
  // What is not there stays as it is.
  template <bool Last>
  __device__ void load_where(bool there, const void* tensor, int64_t at) {
    const char* p = static_cast<const char*>(tensor) + at;
    if constexpr (V == 1) {
      if (there) raw = *reinterpret_cast<const Raw*>(p);
    } else if constexpr (Last) {
      load_last_if(there, raw, p);
    } else {
      load_if(there, raw, p);
    }
  }
};

// Whether a ReLU lets z through, rounded to T, without the rounding: up to this number nothing is left of it. NaN passes.
template <class T>
constexpr float kRoundsToZero = std::is_same_v<T, Half> ? 0x1p-25f : std::is_same_v<T, BFloat16> ? 0x1p-134f : 0.f;
template <class T>
__device__ inline bool lets_through(float z) {
  return !(z <= kRoundsToZero<T>);
}

template <class T, int V>
__device__ inline void store(void* tensor, int64_t at, const Pack<T, V>& pack) {
  pack.store(reinterpret_cast<T*>(static_cast<char*>(tensor) + at));
}

// What a block's threads hand on: `values` pairs each, and of how many elements each of them is.
template <int V>
struct Handed {
  float2 pairs[kBatchNormThreads * V];
  float counts[kBatchNormThreads];

  // The V pairs of columns that are one channel are united by unite(pairs).
  template <class Unite>
  __device__ void put(const PieceVectors<V>& of, const float2 (&pairs_of)[V], int count, Unite unite) {
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
  __device__ void for_each_channel(const PieceVectors<V>& of, Unite unite, Publish publish) const {
    const BatchNormArgs& a = of.a;
    const int run = 1 << a.p.log_run, channels = of.channels(), lane = thread() & (run - 1);
    constexpr int log_vec = V == 4 ? 2 : 0;
    const int entries = a.p.across * a.side, log_values = a.p.values > 1 ? log_vec : 0;
    const bool few = a.p.across == 1 && a.side <= kEntriesHeld * run;
    for (int first = 0; first < channels; first += static_cast<int>(blockDim.x) >> a.p.log_run) {
      if (first + ((thread() & ~31) >> a.p.log_run) >= channels) break;  // the warp has none
      const int channel = first + (thread() >> a.p.log_run), from = min(channel, channels - 1) * a.p.across;
      // The few of a lane are read once.
      float held_counts[kEntriesHeld];
      float2 held_pairs[kEntriesHeld];
      if (few) {
        const float* count = counts + (from >> log_values) + lane * a.p.lanes;
        const float2* pair = pairs + from + ((lane * a.p.lanes) << log_values);
        const int counts_step = run * a.p.lanes, pairs_step = counts_step << log_values;
#pragma unroll
        for (int k = 0; k < kEntriesHeld; ++k, count += counts_step, pair += pairs_step) {
          if (lane + k * run < a.side) held_counts[k] = *count, held_pairs[k] = *pair;
        }
      }
      const auto visit = [&](auto with) {
        if (few) {
#pragma unroll
          for (int k = 0; k < kEntriesHeld; ++k) {
            if (lane + k * run < a.side) with(held_counts[k], held_pairs[k]);
          }
          return;
        }
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
// pivot, one of them; then the squares about their mean, and what that is off by itself: the pivot may be an outlier.
template <class Visit>
__device__ inline Moments unite_moments(int lanes, float pivot, Visit visit) {
  float n = 0.f, sum = 0.f, squares = 0.f, rest = 0.f;
  visit([&](float count, float2 one) {
    n = __fadd_rn(n, count);
    sum = fmaf(count, __fsub_rn(one.x, pivot), sum);
  });
  n = run_sum(n, lanes);
  sum = run_sum(sum, lanes);
  const float mean = __fadd_rn(pivot, n > 0.f ? __fdiv_rn(sum, n) : 0.f);
  visit([&](float count, float2 one) {
    const float d = __fsub_rn(one.x, mean), weighted = __fmul_rn(count, d);
    squares = __fadd_rn(squares, fmaf(weighted, d, one.y));
    rest = __fadd_rn(rest, weighted);
  });
  rest = run_sum(rest, lanes);
  const float off = n > 0.f ? __fdiv_rn(rest, n) : 0.f;
  const float about = fmaf(-off, rest, run_sum(squares, lanes));
  return {isfinite(mean) ? __fadd_rn(mean, off) : mean, about < 0.f ? 0.f : about, n};
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
