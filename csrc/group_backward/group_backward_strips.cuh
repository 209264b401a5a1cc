// The strips that channels_last groups are cut into (group_backward_plan.h), and what a thread has of one.
#pragma once

#include "group_backward/group_backward.cuh"

namespace normswap {
namespace {

struct ColumnsArgs {
  GroupBackward n;
  GroupColumnsPlan p;
  Divider by_pieces, by_strips, by_group_width;
  int run;  // lanes that unite the channels of a group
  int group_width, pieces, bunches, slabs, lag, tickets;
  bool gradients;      // of x or the residual; else those of weight and bias alone
  float reciprocal;    // of the elements of a group
  float2* line_sums;   // (batch, channels); null: not wanted
  float2* piece_sums;  // (slabs, pieces, width)
  float2* bunch_sums;  // (slabs, bunches, width)
  float2* values;      // (batch, num_groups): GroupValues
  unsigned* ticket;
  unsigned* arrived;        // (slabs, bunches)
  unsigned* bunch_arrived;  // (slabs)
  unsigned* ready;          // (slabs)
};

// Where a block works.
struct SlabPiece {
  int slab, piece, channel, width;  // its first channel, and how many
  int64_t sample;
  __device__ SlabPiece(const ColumnsArgs& a, const Turn& turn) : slab(turn.set), piece(turn.piece) {
    const int row = a.by_strips.quotient(slab);
    sample = row;
    channel = (slab - row * static_cast<int>(a.p.strips)) * a.p.width;
    width = min(a.p.width, static_cast<int>(a.n.sizes.channels) - channel);
  }
  __device__ int64_t group(const ColumnsArgs& a, int c) const {
    return sample * a.n.sizes.num_groups + a.by_group_width.quotient(channel + c);
  }
};

// What a block has in shared memory, a value a channel of the strip, and room to unite its rows' sums.
struct ColumnsShared {
  float *mean, *rstd, *gain, *bias, *of_x, *constant;
  float2* sums;  // (sum_rows, width)
  __device__ ColumnsShared(const ColumnsArgs& args, float* shared) {
    const int width = (args.p.width + 3) / 4 * 4;  // so that all start at vectors
    mean = shared;
    rstd = mean + width;
    gain = rstd + width;
    bias = gain + width;
    of_x = bias + width;
    constant = of_x + width;
    sums = reinterpret_cast<float2*>(constant + width);
  }
};

// Where a thread works: V channels from `channel` of the strip on, in rows row, row + side, ... before `rows`. A warp has
// whole rows where it can; threads to which nothing is left have row `side`.
template <int V_>
struct ColumnPlace {
  static constexpr int V = V_;
  const ColumnsArgs& a;
  int lane, row, left;
  int64_t at, step;  // of the next vector in the tensor, and to the one after

  __device__ explicit ColumnPlace(const ColumnsArgs& args) : a(args) {
    const int thread = static_cast<int>(threadIdx.x), lanes = a.p.lanes;
    const int whole = lanes > 32 ? 0 : 32 / lanes;  // rows of a warp
    const int at = whole > 0 ? thread % 32 : thread, there = at / lanes;
    row = whole == 0 ? there : there < whole ? thread / 32 * whole + there : a.p.side;
    lane = at - there * lanes;
    step = a.p.side * a.n.sizes.channels;
  }
  __device__ void go_to(const SlabPiece& of) { start(of, at, left); }
  // Where the thread's vectors of a piece begin, and how many there are.
  __device__ void start(const SlabPiece& of, int64_t& begin, int& count) const {
    const int64_t first = static_cast<int64_t>(of.piece) * a.p.piece_rows + row, channels = a.n.sizes.channels;
    const int64_t rows = min(a.n.sizes.spatial - first, static_cast<int64_t>(a.p.piece_rows - row));
    const bool works = row < a.p.side && lane * V < of.width && rows > 0;
    count = works ? static_cast<int>((rows + a.p.side - 1) / a.p.side) : 0;
    begin = (of.sample * a.n.sizes.spatial + first) * channels + of.channel + lane * V;
  }
  // Of the thread's channels.
  __device__ void values_of(const float* channels, float (&out)[V]) const {
    const Floats<V> some = *reinterpret_cast<const Floats<V>*>(channels + lane * V);
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = some.v[j];
  }
};

// A thread's vectors, some of them in registers.
template <class T_, class D_, int V>
struct ColumnVectors : ColumnPlace<V> {
  using T = T_;
  using D = D_;
  using Place = ColumnPlace<V>;
  using Residual = ResidualAt<D, V>;
  using Place::a, Place::at, Place::left, Place::step;
  static constexpr int Each = kVectorsAtOnce<V, sizeof(T) == sizeof(D)>;
  Raw<T, V> x[Each];
  Raw<D, V> dy[Each];

  __device__ explicit ColumnVectors(const ColumnsArgs& args) : Place(args) {}
  // Starts with the first ones. Again: after for_each, with those of the same piece.
  template <bool Last, bool Again>
  __device__ void begin(const SlabPiece& of) {
    this->go_to(of);
    if (Again && left <= Each) return;  // none was overwritten
#pragma unroll
    for (int k = 0; k < Each; ++k) {
      if (k < left) load<Last>(k, at + k * step);
    }
  }
  template <bool Last>
  __device__ void load(int k, int64_t from) {
    x[k] = Raw<T, V>::template load<Last>(static_cast<const T*>(a.n.x) + from);
    dy[k] = Raw<D, V>::template load<Last>(static_cast<const D*>(a.n.dy) + from);
  }
  // with(x, dy, the residual's, by a function, where it lies) for every vector.
  template <bool Last, class With>
  __device__ void for_each(With with) {
#pragma unroll 1
    for (; left > 0; left -= Each) {
#pragma unroll
      for (int k = 0; k < Each; ++k) {
        if (k >= left) break;
        float values[V], g[V];
        take_floats(x[k], values);
        take_floats(dy[k], g);
        if (k + Each < left) load<Last>(k, at + Each * step);
        with(values, g, Residual{a.n.residual, at}, at);
        at += step;
      }
    }
  }
  static constexpr bool Keeps = false;  // g, between the sums and the gradients
};

// What leads from dy to g, in registers.
template <class D, int V, Behind B>
struct ColumnSlopes {
  float mean[V], gain[V], bias[V];
  template <class Vectors>
  __device__ ColumnSlopes(const Vectors& vectors, const ColumnsShared& shared) {
    vectors.values_of(shared.mean, mean);
    vectors.values_of(shared.gain, gain);
    if constexpr (B != Behind::nothing) vectors.values_of(shared.bias, bias);
  }
  // dy at first.
  template <class Residual>
  __device__ void apply(const GroupBackward& n, const Residual& residual, const float (&x)[V], float (&g)[V]) const {
    if constexpr (B != Behind::nothing) {
      float d[V];
#pragma unroll
      for (int j = 0; j < V; ++j) d[j] = __fsub_rn(x[j], mean[j]);
      through_activation<D, B>(n, residual, d, gain, bias, g);
    }
  }
};

}  // namespace
}  // namespace normswap
