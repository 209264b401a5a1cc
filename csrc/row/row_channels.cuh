// Affine parameters of which a channel of a row has one of each (GroupNorm).
#pragma once

#include "row/row_policy.cuh"

namespace normswap {
namespace {

// A channel's weight and bias.
struct ChannelParameters {
  float weight, bias;
};

// The same as they lie in memory, where rows are of T and they are of T or float32.
template <class T>
struct ChannelWords {
  unsigned weight, bias;

  __device__ static bool are_wide(const RowArgs& a) { return sizeof(T) == 4 || a.n.weight_dtype == DType::f32; }
  // Of channel i of all.
  __device__ static ChannelWords load(const RowArgs& a, int64_t i) {
    const bool weight = a.n.weight != nullptr, bias = a.n.bias != nullptr;
    ChannelWords words{are_wide(a) ? kOne<float> : kOne<T> & 0xffffu, 0};
    if (are_wide(a)) {
      load_if(weight, words.weight, static_cast<const float*>(a.n.weight) + i);
      load_if(bias, words.bias, static_cast<const float*>(a.n.bias) + i);
    } else {
      load_half_if(weight, words.weight, static_cast<const unsigned short*>(a.n.weight) + i);
      load_half_if(bias, words.bias, static_cast<const unsigned short*>(a.n.bias) + i);
    }
    return words;
  }
  __device__ ChannelParameters floats(const RowArgs& a) const { return {as_float(weight, a), as_float(bias, a)}; }

 private:
  __device__ static float as_float(unsigned word, const RowArgs& a) {
    if constexpr (std::is_same_v<T, Half>) {
      const float half = to_float(Half{static_cast<unsigned short>(word)});
      return are_wide(a) ? __uint_as_float(word) : half;
    } else {
      return __uint_as_float(are_wide(a) ? word : word << 16);
    }
  }
};

// Channels whose parameters a warp has at once.
constexpr int kTableChannels = 32;

// Where a chunk lies among the channels of its row, whichever row.
template <class T>
struct ChannelPlace {
  static constexpr unsigned V = 16 / sizeof(T);
  unsigned channel;    // of the chunk's first element, in the row
  unsigned remainder;  // of that element, in its channel
  enum { one, two, some, many } channels;  // in the chunk; two: no vector lies in both; some: that a warp has lanes for

  // `begin`: of 32 bits where the row is not longer.
  template <class Index, class Tile>
  __device__ void load_ahead(const RowArgs& a, Index begin, const Tile& tile) {
    const unsigned spatial = static_cast<unsigned>(a.n.spatial);
    channel = static_cast<unsigned>(a.by_spatial.of(begin));
    remainder = static_cast<unsigned>(begin) - channel * spatial;
    const unsigned reach = remainder + static_cast<unsigned>(tile.len);
    const bool is_some = spatial >= V && (spatial >= kChunk || reach <= kTableChannels * spatial);
    channels = reach <= spatial ? one : reach <= 2 * spatial && spatial % V == 0 ? two : is_some ? some : many;
  }
  __device__ bool is_few() const { return channels < some; }
  // Of the chunk's c-th channel in row r: channel (r % groups) * channels_per_group + c of all.
  template <class Row>
  __device__ ChannelWords<T> words(const RowArgs& a, Row row, unsigned c) const {
    const Row group = row - a.by_num_groups.of(row) * static_cast<Row>(a.n.num_groups);
    const unsigned channels_per_group = static_cast<unsigned>(a.n.channels_per_group);
    const int64_t first = static_cast<int64_t>(group) * channels_per_group;
    return ChannelWords<T>::load(a, first + min(channel + c, channels_per_group - 1));
  }
  template <class Row>
  __device__ ChannelParameters load(const RowArgs& a, Row row, unsigned c) const {
    return words(a, row, c).floats(a);
  }
  // Of its first one or second one.
  template <class Row>
  __device__ ChannelParameters load_few(const RowArgs& a, Row row, unsigned c) const {
    return load(a, row, c);
  }
};

// The same, with the parameters of the chunk's channels in one row in shared memory: each lane of the warp loads those of a
// channel before the statistics are known.
template <class T>
struct ChannelsInTable : ChannelPlace<T> {
  ChannelWords<T> mine;
  ChannelParameters* table;  // of the warp

  template <class Row, class Index, class Tile>
  __device__ void load_row(const RowArgs& a, Row row, Index begin, const Tile& tile, ChannelParameters* to) {
    this->load_ahead(a, begin, tile);
    mine = this->words(a, row, threadIdx.x % 32);
    table = to;
  }
};
template <class Place>
constexpr bool kInTable = false;
template <class T>
constexpr bool kInTable<ChannelsInTable<T>> = true;

// The same, and the parameters of its first two channels in the row that is next.
template <class T>
struct ChannelsLoaded : ChannelPlace<T> {
  ChannelParameters few[2];

  template <class Row>
  __device__ ChannelParameters load_few(const RowArgs&, Row, unsigned c) const {
    return few[c];
  }
};

// One value a channel, in a row. The warp must call the constructor.
template <class Place, class Row>
struct AffineByChannel {
  static constexpr int V = Place::V;
  const RowArgs& args;
  const Place& place;
  Row row;
  float rstd;
  ChannelParameters few[2];

  __device__ AffineByChannel(const RowArgs& a, const Place& where, Row of_row, RowValues values)
      : args(a), place(where), row(of_row), rstd(values.rstd) {
    if constexpr (kInTable<Place>) {
      place.table[threadIdx.x % 32] = with_rstd(place.mine.floats(args));
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
    const bool second = offset >= static_cast<int>(static_cast<unsigned>(args.n.spatial) - place.remainder);
    all_of(second ? few[1] : few[0], w, b);
  }
  // The same, where there are as many as in the table or fewer.
  __device__ void of_some(int offset, Floats<V>& w, Floats<V>& b) const {
    static_assert(kInTable<Place>);
    const auto [c, left] = channel_at(offset);
    in_two(place.table[c], place.table[min(c + 1, kTableChannels - 1u)], left, w, b);
  }
  // The same, however many.
  __device__ void of_many(int offset, Floats<V>& w, Floats<V>& b) const {
    auto [c, left] = channel_at(offset);
    if (args.n.spatial >= V) return in_two(of_channel(c), of_channel(c + 1), left, w, b);
    ChannelParameters mine = of_channel(c);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (left == 0) {
        left = static_cast<unsigned>(args.n.spatial);
        mine = of_channel(++c);
      }
      w.v[j] = mine.weight;
      b.v[j] = mine.bias;
      --left;
    }
  }

 private:
  struct At {
    unsigned channel;  // of the chunk
    unsigned left;     // elements from there to its end
  };
  __device__ At channel_at(int offset) const {
    const unsigned spatial = static_cast<unsigned>(args.n.spatial), at = place.remainder + offset;
    const unsigned c = args.by_spatial.of(at);
    return {c, (c + 1) * spatial - at};
  }
  __device__ static void all_of(ChannelParameters mine, Floats<V>& w, Floats<V>& b) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      w.v[j] = mine.weight;
      b.v[j] = mine.bias;
    }
  }
  // A vector that lies in two channels at most, with `left` elements in the first.
  __device__ static void in_two(ChannelParameters one, ChannelParameters two, unsigned left, Floats<V>& w, Floats<V>& b) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      w.v[j] = j >= left ? two.weight : one.weight;
      b.v[j] = j >= left ? two.bias : one.bias;
    }
  }
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
