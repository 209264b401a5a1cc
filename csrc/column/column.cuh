// What the kernels of column_norm.cuh are made of: where a block works, and the values that normalise a channel.
// column_statistics.cuh has the statistics.
#pragma once

#include "device/behind.cuh"
#include "device/cluster.cuh"
#include "device/copy.cuh"
#include "device/divider.cuh"
#include "device/reduce.cuh"
#include "plan/column_plan.h"

namespace normswap {
namespace {

// Whose statistics: running ones (BatchNorm in eval), or of groups (GroupNorm).
enum class Source { running, group };

// How many of the values of a part one thread holds, and what its mean is divided by.
struct Share {
  float n, reciprocal;
  static Share of(int64_t n) { return {static_cast<float>(n), n > 0 ? 1.f / static_cast<float>(n) : 0.f}; }
};

// How many values there are in a piece: threads in the first `longer` of the rows side by side have a vector more.
struct Sizes {
  int longer;
  Share more, fewer;
  float all, reciprocal;  // values of a group
  static Sizes of(const ColumnPlan& p, int64_t rows, int64_t group_width) {
    const int64_t side = int64_t{1} << p.log_side, each = p.vec / p.parts, deep = rows / side;
    const float all = static_cast<float>(rows * group_width);
    return {static_cast<int>(rows % side), Share::of((deep + 1) * each), Share::of(deep * each), all, 1.f / all};
  }
  __device__ Share share(int row) const { return row < longer ? more : fewer; }
};

struct ColumnArgs {
  // What every thread needs first lies side by side: a line of constants not seen before is a miss.
  const void* x;
  int64_t step, piece_step, batch_step;  // elements to a thread's next vector, the next piece, the next batch entry
  Divider by_pieces, by_strips, by_lanes;
  int pieces, strips, lanes, log_side, width, last_width, piece_rows, last_rows;
  int slots, threads;
  int row_sums;          // room for the statistics that a row of threads hands on
  int run, run_across;   // of lanes that unite_sums has for a group
  int run_side, run_rows, run_step;  // rows they have side by side, and one below the other; statistics to the next
  int log_room;          // for a parameter of the strip's channels
  bool wide;             // y is float32, and the vectors of threads 2 i and 2 i + 1 lie side by side, both or none
  Sizes full, last;      // of pieces
  Divider by_group_width;
  int group_width;
  float all_reciprocal;  // of the values of a group
  float2* parts;   // (slab, group of the strip, piece): mean and sum of squared differences from it
  float2* finals;  // (batch entry, group): mean, rstd
  ColumnPlan p;
  ChannelNorm n;

  ColumnArgs(const ChannelNorm& norm, const ColumnPlan& plan)
      : x(norm.x), by_pieces(Divider::by(plan.pieces)), by_strips(Divider::by(plan.strips)),
        by_lanes(Divider::by(plan.lanes)), lanes(plan.lanes), log_side(plan.log_side), width(plan.width),
        slots(plan.slots), threads(plan.threads), row_sums(sums_of_row(plan)), log_room(log_parameters(plan)),
        by_group_width(Divider::by(norm.channels / norm.num_groups)), parts(static_cast<float2*>(norm.workspace)),
        p(plan), n(norm) {
    step = n.channels << log_side;
    piece_step = p.piece_rows * n.channels;
    batch_step = n.rows * n.channels;
    pieces = static_cast<int>(p.pieces);
    strips = static_cast<int>(p.strips);
    last_width = static_cast<int>(n.channels - (p.strips - 1) * p.width);
    wide = n.behind.wide && on_boundary(n.behind) && p.vec == 8 && lanes % 2 == 0 && last_width % (2 * p.vec) == 0;
    piece_rows = static_cast<int>(p.piece_rows);
    last_rows = static_cast<int>(n.rows - (p.pieces - 1) * p.piece_rows);
    run = 1 << p.log_uniting;
    run_across = 1 << p.log_uniting_across;
    run_side = run / run_across;
    run_rows = (1 << log_side) / run_side;
    run_step = run_side * row_sums;
    group_width = static_cast<int>(n.channels / n.num_groups);
    full = Sizes::of(p, p.piece_rows, group_width);
    last = Sizes::of(p, last_rows, group_width);
    all_reciprocal = 1.f / static_cast<float>(n.rows * group_width);
    finals = parts + p.items / pieces * p.groups * pieces;
  }
  __device__ int width_of(int strip) const { return strip == strips - 1 ? last_width : width; }
};

__device__ inline int thread() { return static_cast<int>(threadIdx.x); }

// Where a thread works in any piece: V channels from `channel` of the strip on, in rows row, row + side, ... Threads that
// no row is left for have no channel of the strip.
template <int V>
struct Column {
  int lane, row, channel;
  int64_t offset;
  __device__ explicit Column(const ColumnArgs& a) : row(a.by_lanes.quotient(thread())) {
    lane = thread() - row * a.lanes;
    channel = row >> a.log_side == 0 ? lane * V : a.width;
    offset = row * a.n.channels + channel;
    asm volatile("" : "+l"(offset));  // or the compiler would compute it anew for every piece
  }
  __device__ bool works(const ColumnArgs& a) const { return channel < a.width; }
};

// A piece, and the thread's `count` vectors of it, the first at `offset`.
struct Piece {
  int batch, strip, piece, count;
  int64_t offset;
  template <int V>
  __device__ Piece(const ColumnArgs& a, const Column<V>& at, int batch_, int strip_, int piece_)
      : batch(batch_), strip(strip_), piece(piece_), count(0),
        offset(at.offset + batch * a.batch_step + piece * a.piece_step + static_cast<int64_t>(strip) * a.width) {
    const int rows = last(a) ? a.last_rows : a.piece_rows;
    if (at.channel < a.width_of(strip)) count = (rows + (1 << a.log_side) - 1 - at.row) >> a.log_side;
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
  __device__ bool last(const ColumnArgs& a) const { return piece == a.pieces - 1; }
  __device__ Sizes sizes(const ColumnArgs& a) const { return last(a) ? a.last : a.full; }
  __device__ int64_t slab(const ColumnArgs& a) const { return static_cast<int64_t>(batch) * a.strips + strip; }
  // Number of the slab's first group of all, and how many there are: of the last strip fewer.
  __device__ int64_t first_group(const ColumnArgs& a) const {
    return batch * a.n.num_groups + static_cast<int64_t>(strip) * a.p.groups;
  }
  __device__ int groups(const ColumnArgs& a) const { return a.by_group_width.quotient(a.width_of(strip)); }
};

// --- finish ------------------------------------------------------------------------------------------------------

// mean and rstd of group `index` of all; `save`: the one thread that writes them down.
__device__ inline float2 finish(const ColumnArgs& a, int64_t index, float2 group, bool save) {
  const ChannelNorm& n = a.n;
  const float var = __fmul_rn(group.y, a.all_reciprocal);
  const float rstd = __frcp_rn(__fsqrt_rn(__fadd_rn(var, static_cast<float>(n.eps))));  // rsqrtf: 2 ulp
  if (save) {
    if (n.mean != nullptr) n.mean[index] = group.x;
    if (n.rstd != nullptr) n.rstd[index] = rstd;
  }
  return {group.x, rstd};
}

// --- apply -------------------------------------------------------------------------------------------------------

// Per channel of the block's strip, in shared memory: what y = (x scale - mean) gain + bias needs.
template <Source From>
struct Parameters {
  static constexpr int kFetched = From == Source::group ? 2 : 5;
  static constexpr int kArrays = kFetched < 3 ? 3 : kFetched;
  float* arrays;
  int log_across, across;  // elements of one
  __device__ Parameters(const ColumnArgs& a, void* shared)
      : arrays(static_cast<float*>(shared)), log_across(a.log_room), across(1 << log_across) {}
  __device__ float* gain() const { return arrays; }  // at first the weight
  __device__ float* bias() const { return arrays + across; }
  __device__ float* mean() const { return arrays + 2 * across; }
  __device__ float* scale() const { return arrays + 3 * across; }
  __device__ float* var() const { return arrays + 4 * across; }

  // What there is before the statistics are. A value a thread, so that a block waits for memory once; set needs a barrier.
  __device__ void fetch(const ColumnArgs& a, int strip) const {
    const ChannelNorm& n = a.n;
#pragma unroll 1
    for (int i = thread(); i < kFetched * across; i += a.threads) {
      const int array = i >> log_across, c = i & (across - 1);
      const ChannelVector from = array == 0   ? n.weight
                                 : array == 1 ? n.bias
                                 : array == 2 ? n.running_mean
                                 : array == 3 ? n.scale
                                              : n.running_var;
      const float absent = array == 1 || array == 2 ? 0.f : 1.f;
      if (c >= a.width_of(strip)) continue;
      const int64_t channel = static_cast<int64_t>(strip) * a.width + c;
      arrays[i] = channel_value(from, channel, absent);
    }
  }
  // value_of(channel of the strip): mean and rstd of its group. A barrier must follow.
  template <class Value>
  __device__ void set(const ColumnArgs& a, int strip, Value value_of) const {
    for (int c = thread(); c < a.width_of(strip); c += a.threads) {
      const float weight = gain()[c];
      if constexpr (From == Source::running) {
        gain()[c] = weight * rsqrtf(var()[c] + static_cast<float>(a.n.eps));
      } else {
        const float2 value = value_of(c);
        gain()[c] = __fmul_rn(weight, value.y);
        mean()[c] = value.x;
      }
    }
  }
};

// The parameters of a thread's V channels.
template <class T, int V, Source From>
struct ChannelAffine {
  Floats<V> scale, mean, gain, bias;
  __device__ ChannelAffine(const Parameters<From>& parameters, int channel) {
    const auto of = [&](const float* array) { return *reinterpret_cast<const Floats<V>*>(array + channel); };
    mean = of(parameters.mean());
    gain = of(parameters.gain());
    bias = of(parameters.bias());
    if (From == Source::running) scale = of(parameters.scale());
  }
  __device__ void of(const Pack<T, V>& x, float (&out)[V]) const {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float value = to_float(x.v[j]), m = mean.v[j];
      const float centred = From == Source::running ? fmaf(value, scale.v[j], -m) : __fsub_rn(value, m);
      out[j] = fmaf(centred, gain.v[j], bias.v[j]);
    }
  }
  __device__ Pack<T, V> of(const Pack<T, V>& x) const {
    float out[V];
    of(x, out);
    return Pack<T, V>::of(out);
  }
  // The vector at `at` of the tensor.
  __device__ void apply(const ColumnArgs& a, const Pack<T, V>& x, int64_t at) const {
    if (From == Source::group && a.n.behind.any) {
      float out[V];
      of(x, out);
      return store_behind<T>(a.n.behind, out, at, V, a.n.activation);
    }
    const Pack<T, V> pack = of(x);
    (From == Source::group ? activated(pack, a.n.activation) : pack).store(static_cast<T*>(a.n.y) + at);
  }
};

// Calls run(activate) with the function that follows the norm, known before its loop where that is short.
template <class T, int V, Source From, class Run>
__device__ inline void with_activation(const ActivationArgs& activation, Run run) {
  if (From != Source::group || activation.code == Activation::none) return run([](const Pack<T, V>& y) { return y; });
  if (activation.code == Activation::relu) return run([](const Pack<T, V>& y) { return relu(y); });
  run([=](const Pack<T, V>& y) { return activated(y, activation); });
}

}  // namespace
}  // namespace normswap
