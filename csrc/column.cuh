// What the kernels of column_norm.cuh are made of: where a block works, the loads that run ahead, statistics of a piece,
// their union, and the values that normalise a channel.
#pragma once

#include <cooperative_groups.h>

#include "activation.cuh"
#include "column_plan.h"
#include "reduce.cuh"

namespace normswap {
namespace {

// Whose statistics: of the columns of this batch (BatchNorm in training), running ones (in eval), of groups (GroupNorm).
enum class Source { batch, running, group };

struct ColumnArgs {
  ChannelNorm n;
  ColumnPlan p;
  float2* parts;   // (slab, group of the strip, piece): mean and sum of squared differences from it
  float2* finals;  // (slab, group of the strip): mean, rstd
  int64_t step;    // elements from one of a thread's vectors to its next
  __device__ int group_width() const { return static_cast<int>(n.channels / n.num_groups); }
};

__device__ inline int thread() { return static_cast<int>(threadIdx.x); }

// Where a thread works in its block's piece: `count` vectors, V channels of rows ty, ty + side, ... from its first on.
template <int V>
struct Place {
  int slab, piece, count, groups;  // groups of the slab
  int64_t batch, channel, offset;  // of the thread's first vector
  __device__ Place(const ColumnArgs& a, unsigned item) {
    const int lane = thread() % a.p.lanes, side = kColumnThreads / a.p.lanes, ty = thread() / a.p.lanes;
    const unsigned pieces = static_cast<unsigned>(a.p.pieces), strips = static_cast<unsigned>(a.p.strips);
    const unsigned of = item / pieces;
    slab = static_cast<int>(of);
    piece = static_cast<int>(item - of * pieces);
    batch = of / strips;
    const int64_t first_channel = static_cast<int64_t>(of % strips) * a.p.width;
    const int width = static_cast<int>(min(static_cast<int64_t>(a.p.width), a.n.channels - first_channel));
    groups = width / a.group_width();
    channel = first_channel + lane * V;
    const int64_t row = piece * a.p.piece_rows + ty;
    const int64_t left = min(a.n.rows - row, a.p.piece_rows - ty);
    count = lane * V < width && left > 0 ? (static_cast<int>(left) + side - 1) / side : 0;
    offset = (batch * a.n.rows + row) * a.n.channels + channel;
  }
  // The group of the strip that the thread's first channel is in, and the channel's place there.
  __device__ static int group(const ColumnArgs& a) { return thread() % a.p.lanes * V / a.group_width(); }
  __device__ static int group_begin(const ColumnArgs& a) { return thread() % a.p.lanes * V % a.group_width(); }
};

// --- loads -------------------------------------------------------------------------------------------------------

// A thread's own room in shared memory for p.ring vectors, which it alone fills and reads. The loads of items first,
// first + stride, ... run ahead of their use, one for every one used.
template <class T, int V>
struct Ring {
  using Vector = Pack<T, V>;
  const ColumnArgs& args;
  char* room;
  unsigned item, stride;  // being loaded
  int slot, into, from;   // of that item; positions
  int count;
  const T* source;

  __device__ Ring(const ColumnArgs& a, char* shared, unsigned first, unsigned stride_)
      : args(a), room(shared + thread() * sizeof(Vector)), item(first), stride(stride_), into(0), from(0) {
    place();
    for (int i = 0; i < a.p.ring; ++i) load();
  }
  // The next vector; every call is one group of copies.
  __device__ void load() {
    if (slot == args.p.slots) {
      item += stride;
      place();
    }
    if (slot < count) {
      char* to = room + into * kColumnThreads * sizeof(Vector);
      if constexpr (sizeof(Vector) == 16) {
        const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(source) : "memory");
      } else {
        *reinterpret_cast<T*>(to) = *source;
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    source += args.step;
    ++slot;
    into = into + 1 == args.p.ring ? 0 : into + 1;
  }
  // Waits for the vectors of the item whose turn it is.
  __device__ void wait() const {
    if (args.p.ring > args.p.slots) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kColumnAhead) : "memory");
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
  }
  // Vector i of the item.
  __device__ Vector vector(int i) const {
    const int at = from + i;
    return *reinterpret_cast<const Vector*>(room + (at < args.p.ring ? at : at - args.p.ring) * kColumnThreads * sizeof(Vector));
  }
  __device__ void next() {
    from += args.p.slots;
    if (from >= args.p.ring) from -= args.p.ring;
  }

 private:
  __device__ void place() {
    count = slot = 0;
    if (item >= static_cast<unsigned>(args.p.items)) return;
    const Place<V> at(args, item);
    count = at.count;
    source = static_cast<const T*>(args.n.x) + at.offset;
  }
};

// --- statistics --------------------------------------------------------------------------------------------------

// What a block keeps in shared memory after the ring.
struct Board {
  float* sums;      // (sum_rows, lanes, parts)
  float2* values;   // (groups): of the piece, then of the slab
  float2* parts;    // (groups, pieces): block and cluster
  __device__ Board(const ColumnArgs& a, char* shared, int vector_bytes) {
    sums = reinterpret_cast<float*>(shared + a.p.ring * kColumnThreads * vector_bytes);
    values = reinterpret_cast<float2*>(sums + a.p.sum_rows * a.p.lanes * a.p.parts);
    parts = values + a.p.groups;
  }
};

// What a thread hands on: its V sums over neighbours of one group, over the rows of its warp, and into shared memory.
template <int Parts, int V>
__device__ inline void hand_on(const float (&v)[V], int lanes, float* sums) {
  float part[Parts];
#pragma unroll
  for (int i = 0; i < Parts; ++i) {
    float same[V / Parts];
#pragma unroll
    for (int j = 0; j < V / Parts; ++j) same[j] = v[i * (V / Parts) + j];
    part[i] = tree(same);
  }
  for (int mask = lanes; mask < 32; mask *= 2) {
#pragma unroll
    for (int i = 0; i < Parts; ++i) part[i] = __fadd_rn(part[i], __shfl_xor_sync(kWholeWarp, part[i], mask));
  }
  const int row = lanes < 32 ? thread() / 32 : thread() / lanes, lane = thread() % lanes;
  if (lanes < 32 && thread() % 32 >= lanes) return;
#pragma unroll
  for (int i = 0; i < Parts; ++i) sums[(row * lanes + lane) * Parts + i] = part[i];
}

// Sum over runs of `lanes` lanes; each holds it. The warp calls.
__device__ inline float run_sum(float v, int lanes) {
  for (int mask = 1; mask < lanes; mask *= 2) v = __fadd_rn(v, __shfl_xor_sync(kWholeWarp, v, mask));
  return v;
}

// Calls finish(group, sum) once for each of the strip's groups, with the sum over the block of the threads' values for
// its channels. The whole block calls; finish runs after a barrier, and none follows.
template <int V, class Finish>
__device__ inline void group_sums(const ColumnArgs& a, const float (&v)[V], float* sums, Finish finish) {
  const int lanes = a.p.lanes, parts = a.p.parts, rows = a.p.sum_rows, across = lanes * parts;
  if (parts == 1) {
    hand_on<1>(v, lanes, sums);
  } else if (V >= 2 && parts == 2) {
    hand_on<V >= 2 ? 2 : 1>(v, lanes, sums);
  } else if (V >= 4 && parts == 4) {
    hand_on<V >= 4 ? 4 : 1>(v, lanes, sums);
  } else {
    hand_on<V>(v, lanes, sums);
  }
  __syncthreads();
  const int each = a.group_width() * parts / V;  // sums of a group
  int sharing = 1;                               // threads that share a group
  while (sharing < 32 && sharing < each) sharing *= 2;
  for (int first = 0; first < a.p.groups; first += kColumnThreads / sharing) {
    const int group = first + thread() / sharing;
    float sum = 0.f;
    for (int i = thread() % sharing; group < a.p.groups && i < each; i += sharing) {
#pragma unroll 4
      for (int r = 0; r < rows; ++r) sum = __fadd_rn(sum, sums[r * across + group * each + i]);
    }
    sum = run_sum(sum, sharing);
    if (group < a.p.groups && thread() % sharing == 0) finish(group, sum);
  }
}

// out[j] = of(g) for the group g of the thread's j-th channel.
template <int V, class Of>
__device__ inline void by_channel(const ColumnArgs& a, float (&out)[V], Of of) {
  const int width = a.group_width();
  int group = Place<V>::group(a), within = Place<V>::group_begin(a);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    out[j] = of(min(group, a.p.groups - 1));  // past the last: of no use
    if (++within == width) {
      within = 0;
      ++group;
    }
  }
}

// How many values a group has in a piece.
__device__ inline float piece_size(const ColumnArgs& a, int64_t piece) {
  const int64_t rows = min(a.n.rows - piece * a.p.piece_rows, a.p.piece_rows);
  return static_cast<float>(rows * a.group_width());
}

// Statistics of the piece whose turn it is in the ring: publish(group, mean, m2) once for each of the strip's groups; no
// barrier follows.
template <class T, int V, class Publish>
__device__ inline void piece_statistics(const ColumnArgs& a, const Place<V>& at, const Ring<T, V>& ring,
                                        const Board& board, Publish publish) {
  float sums[V] = {}, mean[V];
  ring.wait();
#pragma unroll
  for (int i = 0; i < kColumnSlots; ++i) {
    if (i >= at.count) break;
    const Pack<T, V> x = ring.vector(i);
#pragma unroll
    for (int j = 0; j < V; ++j) sums[j] = __fadd_rn(sums[j], to_float(x.v[j]));
  }
  const float size = piece_size(a, at.piece);
  group_sums(a, sums, board.sums, [&](int group, float sum) { board.values[group].x = __fdiv_rn(sum, size); });
  __syncthreads();
  by_channel(a, mean, [&](int group) { return board.values[group].x; });
#pragma unroll
  for (int j = 0; j < V; ++j) sums[j] = 0.f;
#pragma unroll
  for (int i = 0; i < kColumnSlots; ++i) {
    if (i >= at.count) break;
    const Pack<T, V> x = ring.vector(i);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float d = __fsub_rn(to_float(x.v[j]), mean[j]);
      sums[j] = fmaf(d, d, sums[j]);
    }
  }
  group_sums(a, sums, board.sums, [&](int group, float m2) { publish(group, board.values[group].x, m2); });
}

// A slab's group from the statistics of its pieces, part(p) (mean, squares), by a run of p.sharing lanes, each of which
// holds the result; the warp calls. Means relative to the first, as in unite.
template <class Part>
__device__ inline Moments unite_pieces(const ColumnArgs& a, Part part) {
  const int lanes = a.p.sharing, pieces = static_cast<int>(a.p.pieces);
  const float n = static_cast<float>(a.n.rows * a.group_width()), full = piece_size(a, 0);
  const float last = piece_size(a, pieces - 1), pivot = part(0).x;
  float sum = 0.f, m2 = 0.f;
#pragma unroll 8
  for (int p = thread() % lanes; p < pieces; p += lanes) {
    sum = fmaf(p == pieces - 1 ? last : full, __fsub_rn(part(p).x, pivot), sum);
  }
  const float mean = __fadd_rn(pivot, __fdiv_rn(run_sum(sum, lanes), n));
#pragma unroll 8
  for (int p = thread() % lanes; p < pieces; p += lanes) {
    const float2 one = part(p);
    const float d = __fsub_rn(one.x, mean);
    m2 = __fadd_rn(m2, fmaf(__fmul_rn(p == pieces - 1 ? last : full, d), d, one.y));
  }
  return {mean, run_sum(m2, lanes), n};
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
template <Source From, int V, class Part>
__device__ inline void finish_groups(const ColumnArgs& a, const Place<V>& at, int first, int stride, Part part,
                                     float2* values, bool save) {
  const int64_t strip = at.slab % static_cast<int>(a.p.strips), index = at.batch * a.n.num_groups + strip * a.p.groups;
  for (int run = first; run < a.p.groups; run += stride) {
    const int group = run + thread() / a.p.sharing, read = min(group, a.p.groups - 1) * static_cast<int>(a.p.pieces);
    const Moments united = unite_pieces(a, [&](int p) { return part(read + p); });
    if (group < at.groups && thread() % a.p.sharing == 0) values[group] = finish<From>(a.n, index + group, united, save);
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
  __device__ ChannelAffine(const ColumnArgs& a, const Place<V>& at) {
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
  __device__ void set(const ColumnArgs& a, const float2* values) {
    float rstd[V];
    by_channel(a, mean, [&](int group) { return values[group].x; });
    by_channel(a, rstd, [&](int group) { return values[group].y; });
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float rest = From == Source::batch ? __fmul_rn(scale[j], rstd[j]) : 0.f;
      gain[j] = fmaf(gain[j], rstd[j], rest);
    }
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
