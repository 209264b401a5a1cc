// Statistics of columns: what a thread holds, a block's piece of a strip, a slab. The sizes say of how many values each is.
#pragma once

#include "column/column.cuh"

namespace normswap {
namespace {

constexpr int kBatches = 4;  // of a thread's vectors, which arrive one after the other

// The sum of the values that belong to part p of Parts, as a tree.
template <int Parts, int V>
__device__ inline float sum_of_part(const float (&v)[V], int p) {
  float same[V / Parts];
#pragma unroll
  for (int j = 0; j < V / Parts; ++j) same[j] = v[p * (V / Parts) + j];
  return tree(same);
}

// Mean and sum of squared differences of what the thread holds: vector(i) for i < count; wait(batch) waits for a batch. By
// differences from a pivot, the mean of the first vector: that of k of n values is so near the mean of all that the squares
// about it are at most 1 + n / k times those about the mean. All alike have exactly their mean, and no squares.
template <int Parts, int V, class Wait, class Vector>
__device__ inline void thread_moments(int slots, int count, const Share& share, Wait wait, Vector vector,
                                      float (&mean)[Parts], float (&m2)[Parts]) {
  constexpr int Each = V / Parts;
  const Divisor n{share.n, share.reciprocal};
  const int batch = (slots + kBatches - 1) / kBatches;
  float sums[V] = {}, squares[V] = {};
#pragma unroll
  for (int b = 0; b < kBatches; ++b) {
    wait(b);
    if (b == 0) {
      float first[V] = {};
      if (count > 0) {
        const auto x = vector(0);
#pragma unroll
        for (int j = 0; j < V; ++j) first[j] = to_float(x.v[j]);
      }
#pragma unroll
      for (int p = 0; p < Parts; ++p) mean[p] = __fmul_rn(sum_of_part<Parts>(first, p), 1.f / Each);
    }
    const int end = min(count, (b + 1) * batch);
#pragma unroll 1
    for (int i = b * batch; i < end; ++i) {
      const auto x = vector(i);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float d = __fsub_rn(to_float(x.v[j]), mean[j / Each]);
        sums[j] = __fadd_rn(sums[j], d);
        squares[j] = fmaf(d, d, squares[j]);
      }
    }
  }
#pragma unroll
  for (int p = 0; p < Parts; ++p) {
    const float sum = sum_of_part<Parts>(sums, p), correction = n.template divide<true>(sum);
    const float about_mean = fmaf(-correction, sum, sum_of_part<Parts>(squares, p));
    mean[p] = __fadd_rn(mean[p], correction);
    m2[p] = about_mean < 0.f ? 0.f : about_mean;  // NaN stays
  }
}

// Statistics of the thread's vectors of a piece, into the block's rows of them.
template <int Parts, int V, class Wait, class Vector>
__device__ inline void hand_on(const ColumnArgs& a, const Column<V>& at, int count, const Sizes& sizes, Wait wait,
                               Vector vector, float2* sums) {
  float mean[Parts], m2[Parts];
  thread_moments<Parts, V>(a.slots, count, sizes.share(at.row), wait, vector, mean, m2);
  if (!at.works(a)) return;
  sums += at.row * a.row_sums + at.lane * Parts;
  if constexpr (Parts == 1) {
    *sums = {mean[0], m2[0]};
  } else {
#pragma unroll
    for (int p = 0; p < Parts; p += 2) {
      *reinterpret_cast<float4*>(sums + p) = {mean[p], m2[p], mean[p + 1], m2[p + 1]};
    }
  }
}

// Calls run(Parts) with a.p.parts as a constant.
template <int V, class Run>
__device__ inline void with_parts(const ColumnArgs& a, Run run) {
  if constexpr (V == 1) {
    run(std::integral_constant<int, V>{});
  } else {
    switch (a.p.parts) {
      case 1: return run(std::integral_constant<int, 1>{});
      case 2: return run(std::integral_constant<int, 2>{});
      case 4: return run(std::integral_constant<int, 4>{});
      default: return run(std::integral_constant<int, V>{});
    }
  }
}

// Sum over runs of `lanes` lanes; each holds it. The warp calls.
__device__ inline float run_sum(float v, int lanes) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    const float other = __shfl_xor_sync(kWholeWarp, v, mask);
    if (mask < lanes) v = __fadd_rn(v, other);
  }
  return v;
}

// Unites statistics (mean, squares) by a run of lanes, each of which holds the result; the warp calls. each(visit) calls
// visit(size, statistics) for those of the calling lane; reciprocal: of all sizes. Means relative to one of them, the
// pivot, which rounds less where they are large.
template <class Each>
__device__ inline float2 unite_run(int lanes, float reciprocal, float pivot, Each each) {
  float sum = 0.f, m2 = 0.f;
  each([&](float size, float2 one) { sum = fmaf(size, __fsub_rn(one.x, pivot), sum); });
  const float shift = __fmul_rn(run_sum(sum, lanes), reciprocal);
  each([&](float size, float2 one) {
    const float d = __fsub_rn(__fsub_rn(one.x, pivot), shift);
    m2 = __fadd_rn(m2, fmaf(__fmul_rn(size, d), d, one.y));
  });
  return {__fadd_rn(pivot, shift), run_sum(m2, lanes)};
}

// Statistics of the strip's groups in a piece, from the block's rows: publish(group, lane, statistics) by the lanes of a
// run. The block calls, after a barrier; none follows.
template <class Publish>
__device__ inline void unite_sums(const ColumnArgs& a, const Sizes& sizes, const float2* sums, Publish publish) {
  const ColumnPlan& p = a.p;
  const int lane = thread() & (a.run - 1), across = lane & (a.run_across - 1);
  const int row = lane >> p.log_uniting_across, longer = sizes.longer;
  const float more = sizes.more.n, fewer = sizes.fewer.n;
  for (int first = 0; first < p.groups; first += a.threads >> p.log_uniting) {
    if (first + ((thread() & ~31) >> p.log_uniting) >= p.groups) break;  // the warp has none
    const int group = first + (thread() >> p.log_uniting);
    const float2* of_group = sums + min(group, p.groups - 1) * p.across;
    const float2 united = unite_run(a.run, sizes.reciprocal, of_group->x, [&](auto visit) {
      for (int i = across; i < p.across; i += a.run_across) {
        const float2* at = of_group + row * a.row_sums + i;
        int r = row;
#pragma unroll 4
        for (int k = 0; k < a.run_rows; ++k, r += a.run_side, at += a.run_step) visit(r < longer ? more : fewer, *at);
      }
    });
    if (group < p.groups) publish(group, lane, united);
  }
}

// A slab's group from the statistics of its pieces, by a run of lanes.
__device__ inline float2 unite_pieces(const ColumnArgs& a, const float2* parts) {
  const int lanes = 1 << a.p.log_sharing, last = a.pieces - 1;
  return unite_run(lanes, a.all_reciprocal, parts->x, [&](auto visit) {
#pragma unroll 8
    for (int p = thread() & (lanes - 1); p <= last; p += lanes) visit(p == last ? a.last.all : a.full.all, parts[p]);
  });
}

// The same of the few pieces that a cluster has, by one thread.
__device__ inline float2 unite_few(const ColumnArgs& a, const float2* parts) {
  float2 one[kMaxCluster];
#pragma unroll
  for (int p = 0; p < kMaxCluster; ++p) one[p] = p < a.pieces ? parts[p] : float2{parts->x, 0.f};
  float d[kMaxCluster], v[kMaxCluster];
  const float pivot = one[0].x;
  const auto size_of = [&](int p) { return p == a.pieces - 1 ? a.last.all : p < a.pieces ? a.full.all : 0.f; };
#pragma unroll
  for (int p = 0; p < kMaxCluster; ++p) {
    d[p] = __fsub_rn(one[p].x, pivot);
    v[p] = __fmul_rn(size_of(p), d[p]);
  }
  const float shift = __fmul_rn(tree(v), a.all_reciprocal);
#pragma unroll
  for (int p = 0; p < kMaxCluster; ++p) {
    const float off = __fsub_rn(d[p], shift);
    v[p] = p < a.pieces ? fmaf(__fmul_rn(size_of(p), off), off, one[p].y) : 0.f;
  }
  return {__fadd_rn(pivot, shift), tree(v)};
}

}  // namespace
}  // namespace normswap
