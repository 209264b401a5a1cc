// Affine parameters of which a channel of a row has one of each (GroupNorm).
#pragma once

#include "row/row_policy.cuh"

namespace normswap {
namespace {

// One of a channel, whatever its dtype: by loads that no branch keeps apart.
__device__ inline float channel_parameter(const void* data, DType dtype, int64_t i, float absent) {
  const bool there = data != nullptr, whole = dtype == DType::f32;
  unsigned word = 0;
  load_if(there && whole, word, static_cast<const float*>(data) + i);
  load_half_if(there && !whole, word, static_cast<const unsigned short*>(data) + i);
  const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
  const float value = __uint_as_float(whole ? word : word << 16);
  return !there ? absent : dtype == DType::f16 ? half : value;
}

// A channel's weight and bias.
struct ChannelParameters {
  float weight, bias;
};

// Channels whose parameters a warp has at once.
constexpr int kTableChannels = 32;

// Where a chunk lies among the channels of its row, whichever row.
template <int V>
struct ChannelPlace {
  unsigned channel;    // of the chunk's first element, in the row
  unsigned remainder;  // of that element, in its channel
  enum { one, two, some, many } channels;  // in the chunk; two: no vector lies in both; some: that a warp has lanes for

  template <class Tile>
  __device__ void load_ahead(const RowArgs& a, int64_t begin, const Tile& tile) {
    channel = static_cast<unsigned>(a.by_spatial.of(begin));
    remainder = static_cast<unsigned>(begin - channel * a.n.spatial);
    const int64_t reach = static_cast<int64_t>(remainder) + tile.len;
    channels = reach <= a.n.spatial                                  ? one
               : reach <= 2 * a.n.spatial && a.n.spatial % V == 0    ? two
               : reach <= kTableChannels * a.n.spatial && a.n.spatial >= V ? some
                                                                     : many;
  }
  __device__ bool is_few() const { return channels < some; }
  // Of the chunk's c-th channel in row r: channel (r % groups) * channels_per_group + c of all.
  __device__ ChannelParameters load(const RowArgs& a, int64_t row, unsigned c) const {
    const int64_t first = (row - a.by_num_groups.of(row) * a.n.num_groups) * a.n.channels_per_group;
    const int64_t i = first + min(channel + c, static_cast<unsigned>(a.n.channels_per_group) - 1);
    return {channel_parameter(a.n.weight, a.n.weight_dtype, i, 1.f), channel_parameter(a.n.bias, a.n.weight_dtype, i, 0.f)};
  }
  // Of its first one or second one.
  __device__ ChannelParameters load_few(const RowArgs& a, int64_t row, unsigned c) const {
    return load(a, row, c);
  }
};

// The same, with the parameters of the chunk's channels in one row in shared memory: each lane of the warp loads those of a
// channel before the statistics are known.
template <int V>
struct ChannelsInTable : ChannelPlace<V> {
  ChannelParameters mine;
  ChannelParameters* table;  // of the warp

  template <class Tile>
  __device__ void load_row(const RowArgs& a, int64_t row, int64_t begin, const Tile& tile, ChannelParameters* to) {
    this->load_ahead(a, begin, tile);
    mine = this->load(a, row, threadIdx.x % 32);
    table = to;
  }
};
template <class Place>
constexpr bool kInTable = false;
template <int V>
constexpr bool kInTable<ChannelsInTable<V>> = true;

// The same, and the parameters of its first two channels in the row that is next.
template <int V>
struct ChannelsLoaded : ChannelPlace<V> {
  ChannelParameters few[2];

  __device__ ChannelParameters load_few(const RowArgs&, int64_t, unsigned c) const {
    return few[c];
  }
};

// One value a channel, in a row. The warp must call the constructor.
template <class Place, int V>
struct AffineByChannel {
  const RowArgs& args;
  const Place& place;
  int64_t row;
  float rstd;
  ChannelParameters few[2];

  __device__ AffineByChannel(const RowArgs& a, const Place& where, int64_t of_row, RowValues values)
      : args(a), place(where), row(of_row), rstd(values.rstd) {
    if constexpr (kInTable<Place>) {
      place.table[threadIdx.x % 32] = with_rstd(place.mine);
      __syncwarp();
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if constexpr (kInTable<Place>) {
        few[c] = place.table[c];
      } else {
        few[c] = with_rstd(place.load_few(args, row, c));
      }
    }
  }
  // The vector at `offset` of the chunk, where there are few.
  __device__ void of_few(int offset, Floats<V>& w, Floats<V>& b) const {
    const bool second = place.channels == place.two && place.remainder + offset >= args.n.spatial;
    const ChannelParameters mine = second ? few[1] : few[0];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      w.v[j] = mine.weight;
      b.v[j] = mine.bias;
    }
  }
  // The same, however many.
  __device__ void of_many(int offset, Floats<V>& w, Floats<V>& b) const {
    const unsigned spatial = static_cast<unsigned>(args.n.spatial), at = place.remainder + offset;
    const unsigned c = static_cast<unsigned>(args.by_spatial.of(at)), rest = at - c * spatial;
    if (spatial >= V) {  // the vector lies in two channels at most
      const ChannelParameters one = of_channel(c), two = of_channel(c + 1);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const bool second = rest + j >= spatial;
        w.v[j] = second ? two.weight : one.weight;
        b.v[j] = second ? two.bias : one.bias;
      }
      return;
    }
    ChannelParameters mine = of_channel(c);
    unsigned at_channel = c, left = spatial - rest;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (left == 0) {
        left = spatial;
        mine = of_channel(++at_channel);
      }
      w.v[j] = mine.weight;
      b.v[j] = mine.bias;
      --left;
    }
  }

 private:
  // Of the chunk's c-th channel.
  __device__ ChannelParameters of_channel(unsigned c) const {
    if constexpr (kInTable<Place>) {
      if (place.channels == place.some) return place.table[min(c, kTableChannels - 1u)];
    }
    return with_rstd(place.load(args, row, c));
  }
  __device__ ChannelParameters with_rstd(ChannelParameters p) const { return {__fmul_rn(rstd, p.weight), p.bias}; }
};

}  // namespace
}  // namespace normswap
