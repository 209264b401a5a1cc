// What the kernels of column_norm.cuh are made of: where a block works, statistics of a piece, their union, and the
// values that normalise a channel.
#pragma once

#include <cooperative_groups.h>

#include "activation.cuh"
#include "column_plan.h"
#include "reduce.cuh"

namespace normswap {
namespace {

// Whose statistics: of the columns of this batch (BatchNorm in training), running ones (in eval), of groups (GroupNorm).
enum class Source { batch, running, group };

// Quotients of numbers below 2^31 by one known on the host.
struct Divider {
  unsigned factor;
  int shift;
  static Divider by(int64_t n) {
    const int shift = 31 + log_of(power_of_two_from(n));
    return {static_cast<unsigned>(((uint64_t{1} << shift) + n - 1) / n), shift};
  }
  __device__ int quotient(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<unsigned>(n)) * factor >> shift);
  }
};

struct ColumnArgs {
  ChannelNorm n;
  ColumnPlan p;
  float2* parts;   // (slab, group of the strip, piece): mean and sum of squared differences from it
  float2* finals;  // (slab, group of the strip): mean, rstd
  int64_t step;    // elements from one of a thread's vectors to its next
  int group_width, pieces, strips;
  int sums;        // statistics that the threads of a block hand on
  Divider by_pieces, by_strips, by_group_width;
  ColumnArgs(const ChannelNorm& norm, const ColumnPlan& plan)
      : n(norm), p(plan), parts(static_cast<float2*>(n.workspace)), step(kColumnThreads / p.lanes * n.channels),
        group_width(static_cast<int>(n.channels / n.num_groups)), pieces(static_cast<int>(p.pieces)),
        strips(static_cast<int>(p.strips)), sums(block_sums(p)), by_pieces(Divider::by(pieces)), by_strips(Divider::by(strips)),
        by_group_width(Divider::by(group_width)) {
    finals = parts + p.items / pieces * p.groups * pieces;
  }
  __device__ int side() const { return kColumnThreads >> p.log_lanes; }
};

__device__ inline int thread() { return static_cast<int>(threadIdx.x); }

// Where a thread works in any piece: V channels from `channel` of the strip on, in rows row, row + side, ... The first
// channel is number `within` of the strip's group `group`.
template <int V>
struct Column {
  int lane, row, channel, group, within;
  __device__ explicit Column(const ColumnArgs& a)
      : lane(thread() & (a.p.lanes - 1)), row(thread() >> a.p.log_lanes), channel(lane * V),
        group(a.by_group_width.quotient(channel)), within(channel - group * a.group_width) {}
  // visit(j, the group of the j-th channel).
  template <class Visit>
  __device__ void by_channel(const ColumnArgs& a, Visit visit) const {
    int at = group, next = within;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      visit(j, min(at, a.p.groups - 1));  // past the last: of no use
      if (++next == a.group_width) {
        next = 0;
        ++at;
      }
    }
  }
};

// A piece of `rows` rows, and the thread's `count` vectors of it, the first at `offset`.
struct Piece {
  int batch, strip, piece, rows, count;
  int64_t channel, offset;
  template <int V>
  __device__ Piece(const ColumnArgs& a, const Column<V>& at, int batch_, int strip_, int piece_)
      : batch(batch_), strip(strip_), piece(piece_), channel(static_cast<int64_t>(strip) * a.p.width + at.channel) {
    const int64_t first = piece * a.p.piece_rows;
    rows = static_cast<int>(min(a.n.rows - first, a.p.piece_rows));
    count = at.channel < a.p.width && channel < a.n.channels ? rows_of(a, at.row, 1) : 0;
    offset = (batch * a.n.rows + first + at.row) * a.n.channels + channel;
  }
  // Number `item` of all, the pieces of a slab one after the other.
  template <int V>
  __device__ static Piece of_slab(const ColumnArgs& a, const Column<V>& at, int item) {
    const int slab = a.by_pieces.quotient(item), batch = a.by_strips.quotient(slab);
    return {a, at, batch, slab - batch * a.strips, item - slab * a.pieces};
  }
  // As they lie in memory: strip after strip of the same rows.
  template <int V>
  __device__ static Piece in_memory(const ColumnArgs& a, const Column<V>& at, int item) {
    const int row = a.by_strips.quotient(item), batch = a.by_pieces.quotient(row);
    return {a, at, batch, item - row * a.strips, row - batch * a.pieces};
  }
  __device__ int64_t slab(const ColumnArgs& a) const { return static_cast<int64_t>(batch) * a.strips + strip; }
  // How many of rows first, ..., first + many - 1 and those side, 2 side, ... after them are in the piece.
  __device__ int rows_of(const ColumnArgs& a, int first, int many) const {
    const int rest = (rows & (a.side() - 1)) - first;
    return (rows >> (kLogColumnThreads - a.p.log_lanes)) * many + min(max(rest, 0), many);
  }
  // Groups of the slab: of the last strip fewer.
  __device__ int groups(const ColumnArgs& a) const {
    return static_cast<int>(min(a.n.num_groups - static_cast<int64_t>(strip) * a.p.groups, static_cast<int64_t>(a.p.groups)));
  }
};

// --- statistics --------------------------------------------------------------------------------------------------

// The sum of the values that belong to part p of Parts, as a tree.
template <int Parts, int V>
__device__ inline float sum_of_part(const float (&v)[V], int p) {
  float same[V / Parts];
#pragma unroll
  for (int j = 0; j < V / Parts; ++j) same[j] = v[p * (V / Parts) + j];
  return tree(same);
}

// Mean and sum of squared differences of what the thread holds: vector(i) for i < count. The second pass also sums the
// differences, which tells what the first mean's rounding left; all alike have exactly their mean, and no squares.
template <int Parts, int V, class Vector>
__device__ inline void thread_moments(int count, Vector vector, float (&mean)[Parts], float (&m2)[Parts]) {
  const float size = static_cast<float>(count * (V / Parts));
  const Divisor n{size, count > 0 ? __frcp_rn(size) : 0.f};
  float sums[V] = {}, squares[V] = {};
#pragma unroll
  for (int i = 0; i < kColumnSlots; ++i) {
    if (i >= count) break;
    const auto x = vector(i);
#pragma unroll
    for (int j = 0; j < V; ++j) sums[j] = __fadd_rn(sums[j], to_float(x.v[j]));
  }
#pragma unroll
  for (int p = 0; p < Parts; ++p) mean[p] = __fmul_rn(sum_of_part<Parts>(sums, p), n.reciprocal);
#pragma unroll
  for (int j = 0; j < V; ++j) sums[j] = 0.f;
#pragma unroll
  for (int i = 0; i < kColumnSlots; ++i) {
    if (i >= count) break;
    const auto x = vector(i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float d = __fsub_rn(to_float(x.v[j]), mean[j / (V / Parts)]);
      sums[j] = __fadd_rn(sums[j], d);
      squares[j] = fmaf(d, d, squares[j]);
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

// Unites those of a warp's rows, of `own` values a thread, `all` in all: every row's lanes hold the result.
template <int Parts>
__device__ inline void unite_rows(int lanes, float own, float all, float (&mean)[Parts], float (&m2)[Parts]) {
  const float reciprocal = all > 0.f ? __frcp_rn(all) : 0.f;
  float pivot[Parts], sum[Parts];
#pragma unroll
  for (int p = 0; p < Parts; ++p) {
    pivot[p] = __shfl_sync(kWholeWarp, mean[p], thread() & (lanes - 1));
    sum[p] = __fmul_rn(own, __fsub_rn(mean[p], pivot[p]));
  }
  for (int mask = lanes; mask < 32; mask *= 2) {
#pragma unroll
    for (int p = 0; p < Parts; ++p) sum[p] = __fadd_rn(sum[p], __shfl_xor_sync(kWholeWarp, sum[p], mask));
  }
#pragma unroll
  for (int p = 0; p < Parts; ++p) {
    const float shift = __fmul_rn(sum[p], reciprocal), d = __fsub_rn(__fsub_rn(mean[p], pivot[p]), shift);
    mean[p] = __fadd_rn(pivot[p], shift);
    m2[p] = fmaf(__fmul_rn(own, d), d, m2[p]);
  }
  for (int mask = lanes; mask < 32; mask *= 2) {
#pragma unroll
    for (int p = 0; p < Parts; ++p) m2[p] = __fadd_rn(m2[p], __shfl_xor_sync(kWholeWarp, m2[p], mask));
  }
}

// Statistics of what the thread and its warp's other rows hold of a piece, into the block's rows of them.
template <int Parts, int V, class Vector>
__device__ inline void hand_on(const ColumnArgs& a, const Column<V>& at, const Piece& piece, Vector vector, float2* sums) {
  const int lanes = a.p.lanes;
  float mean[Parts], m2[Parts];
  thread_moments<Parts, V>(piece.count, vector, mean, m2);
  int row = at.row;
  if (lanes < 32) {
    constexpr float each = V / Parts;
    const int many = 32 >> a.p.log_lanes;
    row = thread() / 32;
    unite_rows(lanes, each * piece.count, each * piece.rows_of(a, row * many, many), mean, m2);
    if (thread() % 32 >= lanes) return;
  }
  sums += row * Parts * (lanes + 1) + at.lane;
#pragma unroll
  for (int p = 0; p < Parts; ++p) sums[p * (lanes + 1)] = {mean[p], m2[p]};
}

// Calls run(Parts) with a.p.parts as a constant. BatchNorm's groups are channels.
template <int V, Source From, class Run>
__device__ inline void with_parts(const ColumnArgs& a, Run run) {
  if constexpr (From == Source::batch || V == 1) {
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
  for (int mask = 1; mask < lanes; mask *= 2) v = __fadd_rn(v, __shfl_xor_sync(kWholeWarp, v, mask));
  return v;
}

// Unites statistics (mean, squares) of n values, by a run of lanes, each of which holds the result; the warp calls.
// each(visit) calls visit(size, statistics) for those of the calling lane. Means relative to one of them, the pivot, which
// rounds less where they are large.
template <class Each>
__device__ inline Moments unite_run(int lanes, float n, float pivot, Each each) {
  float sum = 0.f, m2 = 0.f;
  each([&](float size, float2 one) { sum = fmaf(size, __fsub_rn(one.x, pivot), sum); });
  const float shift = __fdiv_rn(run_sum(sum, lanes), n);
  each([&](float size, float2 one) {
    const float d = __fsub_rn(__fsub_rn(one.x, pivot), shift);
    m2 = __fadd_rn(m2, fmaf(__fmul_rn(size, d), d, one.y));
  });
  return {__fadd_rn(pivot, shift), run_sum(m2, lanes), n};
}

// Statistics of the strip's groups in a piece, from the block's rows: publish(group, lane, statistics) by the lanes of a
// run. The block calls, after a barrier; none follows.
template <int V, class Publish>
__device__ inline void unite_sums(const ColumnArgs& a, const Piece& piece, const float2* sums, Publish publish) {
  const ColumnPlan& p = a.p;
  const int run = 1 << p.log_uniting, side = 1 << p.log_uniting_across, row_step = run >> p.log_uniting_across;
  const int lane = thread() & (run - 1), first_row = lane >> p.log_uniting_across;
  const int many = p.lanes < 32 ? 32 >> p.log_lanes : 1, each = V >> p.log_parts;
  const float n = static_cast<float>(piece.rows * a.group_width);
  for (int first = 0; first < p.groups; first += kColumnThreads >> p.log_uniting) {
    if (first + ((thread() & ~31) >> p.log_uniting) >= p.groups) break;  // the warp has none
    const int group = first + (thread() >> p.log_uniting), sum = min(group, p.groups - 1) * p.across;
    const auto at = [&](int row, int i) {
      return sums[(row * p.parts + (i & (p.parts - 1))) * (p.lanes + 1) + (i >> p.log_parts)];
    };
    const Moments united = unite_run(run, n, at(0, sum).x, [&](auto visit) {
      for (int row = first_row; row < p.sum_rows; row += row_step) {
        const float size = static_cast<float>(piece.rows_of(a, row * many, many) * each);
        for (int i = lane & (side - 1); i < p.across; i += side) visit(size, at(row, sum + i));
      }
    });
    if (group < p.groups) publish(group, lane, float2{united.mean, united.m2});
  }
}

// A slab's group from the statistics of its pieces, part(p).
template <class Part>
__device__ inline Moments unite_pieces(const ColumnArgs& a, Part part) {
  const int lanes = 1 << a.p.log_sharing, last = a.pieces - 1;
  const float all = static_cast<float>(a.n.rows * a.group_width), full = static_cast<float>(a.p.piece_rows * a.group_width);
  const float rest = static_cast<float>((a.n.rows - last * a.p.piece_rows) * a.group_width);
  return unite_run(lanes, all, part(0).x, [&](auto visit) {
#pragma unroll 16
    for (int p = thread() & (lanes - 1); p <= last; p += lanes) visit(p == last ? rest : full, part(p));
  });
}

// Statistics of a scaled column from those of the column: u = s z has mean s mu and variance s^2 var.
__device__ inline void update_running(const ChannelNorm& n, int64_t channel, const Moments& column, float scale) {
  const float momentum = static_cast<float>(n.momentum);
  if (n.running_mean.data != nullptr) {
    const float old = channel_value(n.running_mean, channel, 0.f);
    set_channel_value(n.running_mean, channel, (1.f - momentum) * old + momentum * (scale * column.mean));
  }
  if (n.running_var.data != nullptr) {
    const float unbiased = scale * scale * __fdiv_rn(column.m2, static_cast<float>(n.rows - 1));
    const float old = channel_value(n.running_var, channel, 0.f);
    set_channel_value(n.running_var, channel, (1.f - momentum) * old + momentum * unbiased);
  }
}

// mean and rstd of group `index` (batch: of a channel) of all; `save`: the one thread that writes them down.
template <Source From>
__device__ inline float2 finish(const ChannelNorm& n, int64_t index, const Moments& group, bool save) {
  const float scale = From == Source::batch ? channel_value(n.scale, index, 1.f) : 1.f;
  const float var = __fmul_rn(__fmul_rn(scale, scale), __fdiv_rn(group.m2, group.n));
  const float rstd = __frcp_rn(__fsqrt_rn(__fadd_rn(var, static_cast<float>(n.eps))));  // rsqrtf: 2 ulp
  if (save) {
    if (From == Source::batch) update_running(n, index, group, scale);
    if (n.mean != nullptr) n.mean[index] = group.mean;
    if (n.rstd != nullptr) n.rstd[index] = rstd;
  }
  return {group.mean, rstd};
}

// Mean and rstd of the slab's groups from `first` on, `stride` apart in runs of as many as the block can take at once,
// into `values`; the block calls. part(i): i = group * pieces + piece. `save`: this is the one place that writes them down.
template <Source From, class Part>
__device__ inline void finish_groups(const ColumnArgs& a, const Piece& at, int first, int stride, Part part,
                                     float2* values, bool save) {
  const int64_t index = at.batch * a.n.num_groups + static_cast<int64_t>(at.strip) * a.p.groups;
  const int groups = at.groups(a);
  for (int run = first; run < groups; run += stride) {
    const int group = run + (thread() >> a.p.log_sharing), read = min(group, groups - 1) * a.pieces;
    const Moments united = unite_pieces(a, [&](int p) { return part(read + p); });
    if (group < groups && (thread() & ((1 << a.p.log_sharing) - 1)) == 0) values[group] = finish<From>(a.n, index + group, united, save);
  }
}

// Those values of the slab at `finals` that other blocks have left there, into shared memory; a barrier follows.
__device__ inline void fetch_values(const ColumnArgs& a, const float2* finals, float2* values) {
  for (int group = thread(); group < a.p.groups; group += kColumnThreads) values[group] = __ldcg(finals + group);
  __syncthreads();
}

// --- apply -------------------------------------------------------------------------------------------------------

// y = (x scale - mean) gain + bias of V channels. In training the scale is part of the gain, and `scale` what rounding
// their product cut off.
template <class T, int V, Source From>
struct ChannelAffine {
  float scale[V], mean[V], gain[V], bias[V];

  // Parameters that are there before the statistics are; of channels past the last: none.
  __device__ void fetch(const ColumnArgs& a, const Piece& at) {
    const int64_t c = at.channel;
    const bool inside = at.count > 0;
    float by[V];
    channel_values(a.n.weight, c, inside, 1.f, gain);
    channel_values(a.n.bias, c, inside, 0.f, bias);
    if (From != Source::group) channel_values(a.n.scale, c, inside, 1.f, by);
    if (From == Source::running) {
      float var[V];
      channel_values(a.n.running_mean, c, inside, 0.f, mean);
      channel_values(a.n.running_var, c, inside, 1.f, var);
#pragma unroll
      for (int j = 0; j < V; ++j) gain[j] *= rsqrtf(var[j] + static_cast<float>(a.n.eps));
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      scale[j] = From == Source::running ? by[j] : 0.f;
      if (From == Source::batch) {
        const float product = __fmul_rn(gain[j], by[j]);
        scale[j] = fmaf(gain[j], by[j], -product);
        gain[j] = product;
      }
    }
  }
  // values: mean and rstd of the strip's groups, in shared memory.
  __device__ void set(const ColumnArgs& a, const Column<V>& at, const float2* values) {
    at.by_channel(a, [&](int j, int group) {
      const float2 value = values[group];
      mean[j] = value.x;
      gain[j] = fmaf(gain[j], value.y, From == Source::batch ? __fmul_rn(scale[j], value.y) : 0.f);
    });
  }
  __device__ void apply(const ColumnArgs& a, const Pack<T, V>& x, T* y) const {
    float out[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float value = to_float(x.v[j]);
      out[j] = fmaf(From == Source::running ? fmaf(value, scale[j], -mean[j]) : __fsub_rn(value, mean[j]), gain[j], bias[j]);
    }
    const Pack<T, V> pack = Pack<T, V>::of(out);
    (From == Source::group ? activated(pack, a.n.activation) : pack).store(y);
  }
};

}  // namespace
}  // namespace normswap
