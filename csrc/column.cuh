// What the kernels of column_norm.cuh are made of: where a block works, statistics of a piece, their union, and the
// values that normalise a channel.
#pragma once

#include "activation.cuh"
#include "cluster.cuh"
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
  // What every thread needs first lies side by side: a line of constants not seen before is a miss.
  const void* x;
  int64_t step, piece_step, batch_step;  // elements to a thread's next vector, the next piece, the next batch entry
  Divider by_pieces, by_strips;
  int pieces, strips, lanes, log_lanes, width, last_width, piece_rows, last_rows;
  int side, log_side;    // rows that a block has side by side
  int many, each;        // of them in a row of statistics that threads hand on; channels of a part
  int row_sums;          // room for such a row
  int run, run_across, run_step;  // of lanes that unite_sums has for a group; elements to their next rows
  Divider by_group_width;
  int group_width;
  float all_reciprocal, full, rest;  // values of a group in all (1 / n), in a full piece, in the last one
  float2* parts;   // (slab, group of the strip, piece): mean and sum of squared differences from it
  float2* finals;  // (slab, group of the strip): mean, rstd
  ColumnPlan p;
  ChannelNorm n;

  ColumnArgs(const ChannelNorm& norm, const ColumnPlan& plan)
      : x(norm.x), by_pieces(Divider::by(plan.pieces)), by_strips(Divider::by(plan.strips)), lanes(plan.lanes),
        log_lanes(plan.log_lanes), width(plan.width), by_group_width(Divider::by(norm.channels / norm.num_groups)),
        row_sums(sums_of_row(plan)), parts(static_cast<float2*>(norm.workspace)), p(plan), n(norm) {
    step = kColumnThreads / lanes * n.channels;
    piece_step = p.piece_rows * n.channels;
    batch_step = n.rows * n.channels;
    pieces = static_cast<int>(p.pieces);
    strips = static_cast<int>(p.strips);
    last_width = static_cast<int>(n.channels - (p.strips - 1) * p.width);
    piece_rows = static_cast<int>(p.piece_rows);
    last_rows = static_cast<int>(n.rows - (p.pieces - 1) * p.piece_rows);
    side = kColumnThreads / lanes;
    log_side = kLogColumnThreads - log_lanes;
    many = lanes < 32 ? 32 / lanes : 1;
    each = p.vec / p.parts;
    run = 1 << p.log_uniting;
    run_across = 1 << p.log_uniting_across;
    run_step = run / run_across * row_sums;
    group_width = static_cast<int>(n.channels / n.num_groups);
    all_reciprocal = 1.f / static_cast<float>(n.rows * group_width);
    full = static_cast<float>(p.piece_rows * group_width);
    rest = static_cast<float>(static_cast<int64_t>(last_rows) * group_width);
    finals = parts + p.items / pieces * p.groups * pieces;
  }
  __device__ int width_of(int strip) const { return strip == strips - 1 ? last_width : width; }
};

__device__ inline int thread() { return static_cast<int>(threadIdx.x); }

// Where a thread works in any piece: V channels from `channel` of the strip on, in rows row, row + side, ...
template <int V>
struct Column {
  int lane, row, channel;
  int64_t offset;
  __device__ explicit Column(const ColumnArgs& a)
      : lane(thread() & (a.lanes - 1)), row(thread() >> a.log_lanes), channel(lane * V),
        offset(row * a.n.channels + channel) {
    asm volatile("" : "+l"(offset));  // or the compiler would compute it anew for every piece
  }
};

// How many of rows first, ..., first + many - 1 and those side, 2 side, ... after them are among `rows`.
__device__ inline int rows_of(const ColumnArgs& a, int rows, int first, int many) {
  return (rows >> a.log_side) * many + min(max((rows & (a.side - 1)) - first, 0), many);
}

// A piece of `rows` rows, and the thread's `count` vectors of it, the first at `offset`.
struct Piece {
  int batch, strip, piece, rows, count;
  int64_t offset;
  template <int V>
  __device__ Piece(const ColumnArgs& a, const Column<V>& at, int batch_, int strip_, int piece_)
      : batch(batch_), strip(strip_), piece(piece_), rows(piece == a.pieces - 1 ? a.last_rows : a.piece_rows),
        count(at.channel < a.width_of(strip) ? rows_of(a, rows, at.row, 1) : 0),
        offset(at.offset + batch * a.batch_step + piece * a.piece_step + static_cast<int64_t>(strip) * a.width) {}
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
  // Number of the slab's first group of all, and how many there are: of the last strip fewer.
  __device__ int64_t first_group(const ColumnArgs& a) const {
    return batch * a.n.num_groups + static_cast<int64_t>(strip) * a.p.groups;
  }
  __device__ int groups(const ColumnArgs& a) const { return a.by_group_width.quotient(a.width_of(strip)); }
};

// How many values there are, in a piece of so many rows, of a group: those a thread holds of one part, those that a row
// of the block's statistics has of one part, all. The same for all full pieces.
struct Sizes {
  int rows;
  float own, own_reciprocal, row, row_reciprocal, all_reciprocal;
  static __device__ float reciprocal(float n) { return n > 0.f ? __frcp_rn(n) : 0.f; }
  template <int V>
  __device__ Sizes(const ColumnArgs& a, const Column<V>& at, int rows_) : rows(rows_) {
    own = static_cast<float>(rows_of(a, rows, at.row, 1) * a.each);
    own_reciprocal = reciprocal(own);
    row = static_cast<float>(rows_of(a, rows, at.row & -a.many, a.many) * a.each);
    row_reciprocal = reciprocal(row);
    all_reciprocal = reciprocal(static_cast<float>(rows * a.group_width));
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
template <int Unroll, int Parts, int V, class Vector>
__device__ inline void thread_moments(int count, const Sizes& sizes, Vector vector, float (&mean)[Parts], float (&m2)[Parts]) {
  const Divisor n{sizes.own, sizes.own_reciprocal};
  float sums[V] = {}, squares[V] = {};
#pragma unroll Unroll
  for (int i = 0; i < count; ++i) {
    const auto x = vector(i);
#pragma unroll
    for (int j = 0; j < V; ++j) sums[j] = __fadd_rn(sums[j], to_float(x.v[j]));
  }
#pragma unroll
  for (int p = 0; p < Parts; ++p) mean[p] = __fmul_rn(sum_of_part<Parts>(sums, p), n.reciprocal);
#pragma unroll
  for (int j = 0; j < V; ++j) sums[j] = 0.f;
#pragma unroll Unroll
  for (int i = 0; i < count; ++i) {
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

// Unites those of a warp's rows; every row's lanes hold the result.
template <int Parts>
__device__ inline void unite_rows(int lanes, const Sizes& sizes, float (&mean)[Parts], float (&m2)[Parts]) {
  float pivot[Parts], sum[Parts];
#pragma unroll
  for (int p = 0; p < Parts; ++p) {
    pivot[p] = __shfl_sync(kWholeWarp, mean[p], thread() & (lanes - 1));
    sum[p] = __fmul_rn(sizes.own, __fsub_rn(mean[p], pivot[p]));
  }
  for (int mask = lanes; mask < 32; mask *= 2) {
#pragma unroll
    for (int p = 0; p < Parts; ++p) sum[p] = __fadd_rn(sum[p], __shfl_xor_sync(kWholeWarp, sum[p], mask));
  }
#pragma unroll
  for (int p = 0; p < Parts; ++p) {
    const float shift = __fmul_rn(sum[p], sizes.row_reciprocal), d = __fsub_rn(__fsub_rn(mean[p], pivot[p]), shift);
    mean[p] = __fadd_rn(pivot[p], shift);
    m2[p] = fmaf(__fmul_rn(sizes.own, d), d, m2[p]);
  }
  for (int mask = lanes; mask < 32; mask *= 2) {
#pragma unroll
    for (int p = 0; p < Parts; ++p) m2[p] = __fadd_rn(m2[p], __shfl_xor_sync(kWholeWarp, m2[p], mask));
  }
}

// Statistics of what the thread and its warp's other rows hold of a piece, into the block's rows of them.
template <int Unroll, int Parts, int V, class Vector>
__device__ inline void hand_on(const ColumnArgs& a, const Column<V>& at, int count, const Sizes& sizes, Vector vector,
                               float2* sums) {
  float mean[Parts], m2[Parts];
  thread_moments<Unroll, Parts, V>(count, sizes, vector, mean, m2);
  int row = at.row;
  if (a.lanes < 32) {
    unite_rows(a.lanes, sizes, mean, m2);
    row = thread() / 32;
    if (thread() % 32 >= a.lanes) return;
  }
  sums += row * a.row_sums + at.lane * Parts;
  if constexpr (Parts == 1) {
    *sums = {mean[0], m2[0]};
  } else {
#pragma unroll
    for (int p = 0; p < Parts; p += 2) {
      *reinterpret_cast<float4*>(sums + p) = {mean[p], m2[p], mean[p + 1], m2[p + 1]};
    }
  }
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
  const int lane = thread() & (a.run - 1), row = lane >> p.log_uniting_across, rows_at_once = a.run >> p.log_uniting_across;
  const int offset = row * a.row_sums + (lane & (a.run_across - 1)), left = p.across - (lane & (a.run_across - 1));
  for (int first = 0; first < p.groups; first += kColumnThreads >> p.log_uniting) {
    if (first + ((thread() & ~31) >> p.log_uniting) >= p.groups) break;  // the warp has none
    const int group = first + (thread() >> p.log_uniting);
    const float2* of_group = sums + min(group, p.groups - 1) * p.across;
    const auto unite_group = [&](auto size_of) {
      return unite_run(a.run, sizes.all_reciprocal, of_group->x, [&](auto visit) {
        const float2* at = of_group + offset;
#pragma unroll 1
        for (int r = row; r < p.sum_rows; r += rows_at_once, at += a.run_step) {
          const float size = size_of(r);
#pragma unroll 1
          for (int i = 0; i < left; i += a.run_across) visit(size, at[i]);
        }
      });
    };
    const bool even = (sizes.rows & (a.side - 1)) == 0;  // all rows have as many values
    const float2 united = even ? unite_group([&](int) { return sizes.row; }) : unite_group([&](int r) {
      return static_cast<float>(rows_of(a, sizes.rows, r * a.many, a.many) * a.each);
    });
    if (group < p.groups) publish(group, lane, united);
  }
}

// A slab's group from the statistics of its pieces, by a run of lanes.
__device__ inline float2 unite_pieces(const ColumnArgs& a, const float2* parts) {
  const int lanes = 1 << a.p.log_sharing, last = a.pieces - 1;
  return unite_run(lanes, a.all_reciprocal, parts->x, [&](auto visit) {
#pragma unroll 8
    for (int p = thread() & (lanes - 1); p <= last; p += lanes) visit(p == last ? a.rest : a.full, parts[p]);
  });
}

// The same of the few pieces that a cluster has, by one thread.
__device__ inline float2 unite_few(const ColumnArgs& a, const float2* parts) {
  float d[kMaxCluster], v[kMaxCluster];
  const float pivot = parts->x;
#pragma unroll
  for (int p = 0; p < kMaxCluster; ++p) {
    d[p] = p < a.pieces ? __fsub_rn(parts[p].x, pivot) : 0.f;
    v[p] = __fmul_rn(p == a.pieces - 1 ? a.rest : a.full, d[p]);
  }
  const float shift = __fmul_rn(tree(v), a.all_reciprocal);
#pragma unroll
  for (int p = 0; p < kMaxCluster; ++p) {
    const float off = __fsub_rn(d[p], shift), size = p == a.pieces - 1 ? a.rest : a.full;
    v[p] = p < a.pieces ? fmaf(__fmul_rn(size, off), off, parts[p].y) : 0.f;
  }
  return {__fadd_rn(pivot, shift), tree(v)};
}

// A channel's scale in training: NaN where the bias of its input is not finite, as all that comes of the column then is.
__device__ inline float batch_scale(const ChannelNorm& n, int64_t channel) {
  const float bias = channel_value(n.input_bias, channel, 0.f), scale = channel_value(n.scale, channel, 1.f);
  return isfinite(bias) ? scale : __fsub_rn(bias, bias);
}

// What finish needs of a channel in training.
struct Kept {
  float scale, mean, var, input_bias;
  template <Source From>
  static __device__ Kept of(const ChannelNorm& n, int64_t channel) {
    if (From != Source::batch) return {1.f, 0.f, 0.f, 0.f};
    return {batch_scale(n, channel), channel_value(n.running_mean, channel, 0.f),
            channel_value(n.running_var, channel, 0.f), channel_value(n.input_bias, channel, 0.f)};
  }
};

// Statistics of a scaled column from those of the column: u = s (z + c) has mean s (mu + c) and variance s^2 var.
__device__ inline void update_running(const ChannelNorm& n, int64_t channel, float2 column, const Kept& kept) {
  const float momentum = static_cast<float>(n.momentum), rest = __fsub_rn(1.f, momentum), scale = kept.scale;
  if (n.running_mean.data != nullptr) {
    const float mean = __fmul_rn(scale, __fadd_rn(column.x, kept.input_bias));
    set_channel_value(n.running_mean, channel, fmaf(momentum, mean, __fmul_rn(rest, kept.mean)));
  }
  if (n.running_var.data != nullptr) {
    const float unbiased = __fmul_rn(__fmul_rn(scale, scale), __fdiv_rn(column.y, static_cast<float>(n.rows - 1)));
    set_channel_value(n.running_var, channel, fmaf(momentum, unbiased, __fmul_rn(rest, kept.var)));
  }
}

// mean and rstd of group `index` (batch: of a channel) of all; `save`: the one thread that writes them down.
template <Source From>
__device__ inline float2 finish(const ColumnArgs& a, int64_t index, float2 group, const Kept& kept, bool save) {
  const ChannelNorm& n = a.n;
  const float var = __fmul_rn(__fmul_rn(kept.scale, kept.scale), __fmul_rn(group.y, a.all_reciprocal));
  const float rstd = __frcp_rn(__fsqrt_rn(__fadd_rn(var, static_cast<float>(n.eps))));  // rsqrtf: 2 ulp
  if (save) {
    if (From == Source::batch) update_running(n, index, group, kept);
    if (n.mean != nullptr) n.mean[index] = group.x;
    if (n.rstd != nullptr) n.rstd[index] = rstd;
  }
  return {group.x, rstd};
}

// --- apply -------------------------------------------------------------------------------------------------------

// Per channel of the block's strip, in shared memory: what y = (x scale - mean) gain + bias needs. In training the scale
// is part of the gain.
template <Source From, int V>
struct Parameters {
  static constexpr int kFetched = From == Source::group ? 2 : From == Source::batch ? 3 : 5;
  static constexpr int kArrays = kFetched < 3 ? 3 : kFetched;
  static constexpr int kLogV = log_of(V);
  float* arrays;
  int log_across, across;  // elements of one
  __device__ Parameters(const ColumnArgs& a, void* shared)
      : arrays(static_cast<float*>(shared)), log_across(max(a.log_lanes + kLogV, 2)), across(1 << log_across) {}
  __device__ float* gain() const { return arrays; }              // at first the weight
  __device__ float* bias() const { return arrays + across; }
  __device__ float* mean() const { return arrays + 2 * across; }
  __device__ float* scale_before() const { return mean(); }      // batch: before set
  __device__ float* scale() const { return arrays + 3 * across; }
  __device__ float* var() const { return arrays + 4 * across; }

  // What there is before the statistics are. A value a thread, so that a block waits for memory once; set needs a barrier.
  __device__ void fetch(const ColumnArgs& a, int strip) const {
    const ChannelNorm& n = a.n;
    for (int i = thread(); i < kFetched * across; i += kColumnThreads) {
      const int array = i >> log_across, c = i & (across - 1);
      const bool running = From == Source::running;
      const ChannelVector from = array == 0   ? n.weight
                                 : array == 1 ? n.bias
                                 : array == 2 ? (running ? n.running_mean : n.scale)
                                 : array == 3 ? n.scale
                                              : n.running_var;
      const float absent = array == 1 || (running && array == 2) ? 0.f : 1.f;
      if (c >= a.width_of(strip)) continue;
      const int64_t channel = static_cast<int64_t>(strip) * a.width + c;
      arrays[i] = From == Source::batch && array == 2 ? batch_scale(n, channel) : channel_value(from, channel, absent);
    }
  }
  // value(channel of the strip, its group): mean and rstd. A barrier must follow.
  template <class Value>
  __device__ void set(const ColumnArgs& a, int strip, Value value_of) const {
    for (int c = thread(); c < a.width_of(strip); c += kColumnThreads) {
      const float weight = gain()[c];
      if constexpr (From == Source::running) {
        gain()[c] = weight * rsqrtf(var()[c] + static_cast<float>(a.n.eps));
      } else {
        const float2 value = value_of(c, a.by_group_width.quotient(c));
        if constexpr (From == Source::group) {
          gain()[c] = __fmul_rn(weight, value.y);
        } else {
          const float scale = scale_before()[c], product = __fmul_rn(weight, scale);
          const float rest = __fmul_rn(fmaf(weight, scale, -product), value.y);  // what rounding the product cut off
          gain()[c] = fmaf(product, value.y, rest);
        }
        mean()[c] = value.x;
      }
    }
  }
};

// The parameters of a thread's V channels.
template <class T, int V, Source From>
struct ChannelAffine {
  Floats<V> scale, mean, gain, bias;
  __device__ ChannelAffine(const Parameters<From, V>& parameters, int channel) {
    const auto of = [&](const float* array) { return *reinterpret_cast<const Floats<V>*>(array + channel); };
    mean = of(parameters.mean());
    gain = of(parameters.gain());
    bias = of(parameters.bias());
    if (From == Source::running) scale = of(parameters.scale());
  }
  __device__ void apply(const ColumnArgs& a, const Pack<T, V>& x, T* y) const {
    float out[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float value = to_float(x.v[j]), m = mean.v[j];
      const float centred = From == Source::running ? fmaf(value, scale.v[j], -m) : __fsub_rn(value, m);
      out[j] = fmaf(centred, gain.v[j], bias.v[j]);
    }
    const Pack<T, V> pack = Pack<T, V>::of(out);
    (From == Source::group ? activated(pack, a.n.activation) : pack).store(y);
  }
};

}  // namespace
}  // namespace normswap
