// What the kernels of the row engine do with a chunk: statistics, normalise, store.
#pragma once

#include "row/row_channels.cuh"
#include "row/row_options.cuh"

namespace normswap {
namespace {

// A vector, normalised.
template <class Policy, bool Fast, class T, int V>
__device__ inline void normalise(const uint4& words, RowValues values, const Floats<V>& w, const Floats<V>& b,
                                 float (&out)[V]) {
  float x[V];
  floats_of<T>(words, x);
#pragma unroll
  for (int j = 0; j < V; ++j) out[j] = Policy::template apply<T, Fast>(x[j], values, w.v[j], b.v[j]);
}

template <class Policy, bool Fast, class T, class Tile>
__device__ inline uint4 normalised(const Tile& tile, int k, RowValues values, const Floats<Tile::V>& w,
                                   const Floats<Tile::V>& b) {
  float out[Tile::V];
  normalise<Policy, Fast, T>(tile.pack(k).raw(), values, w, b, out);
  return words_of<T>(out);
}

// Affine parameters of a lane's vectors: of all, loaded by whoever loads the tile so that they come with it, where there
// are registers for them; of some at once otherwise.
template <class Policy, class Tile>
constexpr int kAffineAtOnce = Tile::InRegisters && Tile::V == 8   ? Tile::Slots
                              : Tile::Ragged && Tile::Slots > 1 ? 2
                              : Tile::V == 8                      ? (Policy::has_bias ? 2 : 4)
                              : Tile::Slots < 4                   ? Tile::Slots
                                                                  : 4;

template <class Policy, class T, class Tile, int AtOnce = kAffineAtOnce<Policy, Tile>>
using AffineAhead =
    std::conditional_t<Policy::affine == Affine::by_element, AffineByElement<Policy, T, Tile::V, AtOnce>,
                       std::conditional_t<Policy::affine == Affine::by_channel, ChannelPlace<T>, AffineNone>>;

// V parameters of W of the vector at `at` of the row, or what stands for them; `count` of its elements are there.
template <class W, bool Ragged, int V>
__device__ inline void load_parameters(const void* data, const uint4* absent, int64_t at, int count, Floats<V>& to) {
  const W* from = data != nullptr ? static_cast<const W*>(data) + at : reinterpret_cast<const W*>(absent);
  if (Ragged && count < V) return load_some<false>(from, count, to.v);
  load_vectors(from, to.v);
}

// The weights and biases, of W.
template <class Policy, class W, bool Ragged, int V>
__device__ inline void values_at(const RowArgs& args, int64_t at, int count, Floats<V>& w, Floats<V>& b) {
  load_parameters<W, Ragged>(args.n.weight, kOnes<W>.vectors, at, count, w);
  if constexpr (Policy::has_bias) load_parameters<W, Ragged>(args.n.bias, kZeros.vectors, at, count, b);
#pragma unroll
  for (int j = 0; j < V; ++j) w.v[j] = Policy::factor(w.v[j], args);
}

// The same of one row whose chunks have a warp each.
template <class Policy, class T, class Tile, int AtOnce = kAffineAtOnce<Policy, Tile>>
using AffineOfRow = std::conditional_t<Policy::affine == Affine::by_channel, ChannelsInTable<T>,
                                       AffineAhead<Policy, T, Tile, AtOnce>>;

// What its warps keep in shared memory.
template <class Policy, int Warps>
struct AffineTables {
  ChannelParameters of_warp[Policy::affine == Affine::by_channel ? Warps : 1][kTableChannels];
};

// Whether y may be narrow: of 16 bits, where x is float32.
template <class Policy, class T, class Tile>
constexpr bool kMayBeNarrow = sizeof(T) == 4 && kWeights<Policy> == 2 && !Tile::Ragged && !kAllThere<Tile>;

__device__ inline void store_narrow(void* p, const uint4& words, DType dtype) {
  float v[4];
  floats_of<float>(words, v);
  *static_cast<uint2*>(p) = dtype == DType::f16
                                ? uint2{pair_bits<Half>(v[0], v[1]), pair_bits<Half>(v[2], v[3])}
                                : uint2{pair_bits<BFloat16>(v[0], v[1]), pair_bits<BFloat16>(v[2], v[3])};
}

// A chunk in shared memory that its row ends in, of which there is one among many: not worth long code.
template <class Tile>
constexpr bool kRare = !Tile::InRegisters && !Tile::Ragged && Tile::Whole < Tile::Slots;

template <int Count, class With>
__device__ inline void for_each(With with) {
#pragma unroll
  for (int i = 0; i < Count; ++i) with(i);
}

// What is to be stored of a chunk, in code that is short: with parameters of either dtype.
template <class Policy, bool Fast, class T, class Tile>
__device__ inline void make_in_turn(const Tile& tile, const RowArgs& args, int64_t begin, RowValues values,
                                    uint4 (&made)[Tile::Slots]) {
  in_turn(tile, made, [&](int offset, const uint4& x) {
    float out[Tile::V];
    Floats<Tile::V> w, b;
    if constexpr (Policy::affine == Affine::by_element) {
      if (has_wide_weights<T>(args)) {
        values_at<Policy, float, Tile::Ragged>(args, begin + offset, tile.len - offset, w, b);
      } else {
        values_at<Policy, T, Tile::Ragged>(args, begin + offset, tile.len - offset, w, b);
      }
    }
    normalise<Policy, Fast, T>(x, values, w, b, out);
    return words_of<T>(out);
  });
}

// The same with parameters that were loaded ahead, or without any.
template <class Policy, bool Fast, class T, class Tile, class Ahead>
__device__ inline void make_from(const Tile& tile, const RowArgs& args, int64_t begin, RowValues values, Ahead& affine,
                                 uint4 (&made)[Tile::Slots]) {
  Floats<Tile::V> w, b;
#pragma unroll
  for (int k = 0; k < Tile::Slots; ++k) {
    if constexpr (Policy::affine == Affine::by_element) {
      constexpr int Count = Ahead::count;
      if (Count < Tile::Slots && k % Count == 0) affine.load(args, begin, tile, k);
      affine.values(k % Count, args, w, b);
    }
    made[k] = normalised<Policy, Fast, T>(tile, k, values, w, b);
  }
}

// Normalise and store the chunk from `begin` on of several rows that begin anywhere: made first, in whichever way, since such
// stores are long to compile. All lanes of the warp must call.
template <class Policy, class T, class Tile, class Row, int Rows, class Ahead>
__device__ inline void store_anywhere(const Tile (&tiles)[Rows], const RowArgs& args, const Row (&rows)[Rows],
                                      int64_t begin, const RowValues (&values)[Rows], Ahead& affine, bool fast) {
  constexpr bool by_element = Policy::affine == Affine::by_element;
  uint4 made[Rows][Tile::Slots];
  if constexpr (Policy::template always_fast<T>) fast = true;
  if (by_element && kMayBeWide<T, Tile> && has_wide_weights<T>(args)) {
    if (fast) {
      for_each<Rows>([&](int r) { make_in_turn<Policy, true, T>(tiles[r], args, begin, values[r], made[r]); });
    } else {
      for_each<Rows>([&](int r) { make_in_turn<Policy, false, T>(tiles[r], args, begin, values[r], made[r]); });
    }
  } else if (fast) {
    for_each<Rows>([&](int r) { make_from<Policy, true, T>(tiles[r], args, begin, values[r], affine, made[r]); });
  } else if constexpr (by_element) {
    for_each<Rows>([&](int r) { make_from<Policy, false, T>(tiles[r], args, begin, values[r], affine, made[r]); });
  } else {
    for_each<Rows>([&](int r) { make_in_turn<Policy, false, T>(tiles[r], args, begin, values[r], made[r]); });
  }
  T* y = static_cast<T*>(args.n.y) + begin + rows[0] * args.n.cols;
  for_each<Rows>([&](int r) {
    tiles[r].store(y + (rows[r] - rows[0]) * args.n.cols, [&](int k) { return made[r][k]; });
  });
}

// The same of rows that begin and end at vectors. Wide: see has_wide_weights.
template <class Policy, bool Fast, bool Wide, class T, class Tile, class Row, int Rows, class ByElement>
__device__ inline void store_tiles(const Tile (&tiles)[Rows], const RowArgs& args, const Row (&rows)[Rows],
                                   int64_t begin, const RowValues (&values)[Rows], ByElement& affine) {
  constexpr int Count = ByElement::count;
  const int64_t at = begin + rows[0] * args.n.cols;
  Floats<Tile::V> w, b;
  const bool narrow = kMayBeNarrow<Policy, T, Tile> && args.n.out_dtype != DType::f32;
  const int itemsize = narrow ? 2 : static_cast<int>(sizeof(T));
  char* y = static_cast<char*>(args.n.y) + (at + Tile::offset(0)) * itemsize;
#pragma unroll
  for (int first = 0; first < Tile::Slots; first += Count) {
    if (!Wide && Count < Tile::Slots) affine.load(args, begin, tiles[0], first);
#pragma unroll
    for (int k = first; k < first + Count && k < Tile::Slots; ++k) {
      if constexpr (Wide) {
        if (tiles[0].inside(k)) values_at<Policy, float, false>(args, begin + Tile::offset(k), Tile::V, w, b);
      } else {
        affine.values(k - first, args, w, b);
      }
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        if (!tiles[r].inside(k)) continue;
        char* to = y + ((rows[r] - rows[0]) * args.n.cols + k * Tile::Lanes * Tile::V) * itemsize;
        const uint4 made = normalised<Policy, Fast, T>(tiles[r], k, values[r], w, b);
        if (narrow) {
          store_narrow(to, made, args.n.out_dtype);
        } else {
          store_words(to, made);
        }
      }
    }
  }
}

// Chunk `at` of the tensors, with what stands behind it. make(offset, words, values): those of the norm; it is long to compile,
// and so once more only for what is frequent. All lanes of the warp must call.
template <class T, class Tile, class Make>
__device__ inline void store_tile_behind(const Tile& tile, const GroupOptions& behind, int64_t at,
                                         const ActivationArgs& activation, Make make) {
  constexpr int V = Tile::V;
  const bool by_vectors = !Tile::Ragged && on_boundary(behind), wide = V == 8 && behind.wide;
  const bool plain = by_vectors && !wide, adds = plain && behind.residual != nullptr;
  const auto load_residual = [&](int k, uint4& to) {
    load_if(adds && tile.inside(k), to, static_cast<const T*>(behind.residual) + at + Tile::offset(k));
  };
  const auto finish = [&](int k, const float(&norm)[V], const uint4& residual) {
    auto sum = Pack<T, V>::of(norm);
    if (adds) sum = added(sum, Pack<T, V>::of_raw(residual));
    activated(sum, activation).store(static_cast<T*>(behind.y) + at + Tile::offset(k));
  };
  uint4 words[Tile::Slots];
#pragma unroll
  for (int k = 0; k < Tile::Slots; ++k) {
    words[k] = Tile::InRegisters ? tile.pack(k).raw() : uint4{};
    if (!Tile::InRegisters) load_residual(k, words[k]);  // at once, where there are registers for them
  }
  if constexpr (Tile::InRegisters && !Tile::Ragged) {
    if (plain) {
      return each_in_turn(words, [&](int k, const uint4& now) {
        if (!tile.inside(k)) return now;
        uint4 residual = now;
        load_residual(k, residual);
        float out[V];
        make(Tile::offset(k), now, out);
        finish(k, out, residual);
        return now;
      });
    }
  }
  each_in_turn(words, [&](int k, const uint4& now) {
    const bool there = tile.inside(k);
    float out[V] = {};
    if (there) make(Tile::offset(k), Tile::InRegisters ? now : tile.pack(k).raw(), out);
    if constexpr (V == 8) {
      if (by_vectors && wide) {
        store_wide(behind, out, at + Tile::offset(k), there,
                   [&](const Pack<float, 4>& y) { return activated(y, activation); });
        return now;
      }
    }
    if (there && !by_vectors) store_behind<T>(behind, out, at + Tile::offset(k), tile.len - Tile::offset(k), activation);
    if constexpr (!Tile::InRegisters) {
      if (there && plain) finish(k, out, now);
    }
    return now;
  });
}

// The same where parameters belong to channels, or there are none.
template <class Policy, bool Fast, class T, class Tile, class Row, class Where>
__device__ inline void store_tile(const Tile& tile, const RowArgs& args, Row row, int64_t begin, RowValues values,
                                  const Where& where) {
  T* y = static_cast<T*>(args.n.y) + row * args.n.cols + begin;
  if constexpr (Policy::affine == Affine::none) {
    if constexpr (Fast) {
      tile.store(y, [&](int k) { return normalised<Policy, Fast, T>(tile, k, values, {}, {}); });
    } else {
      uint4 made[Tile::Slots];
      make_in_turn<Policy, Fast, T>(tile, args, begin, values, made);
      tile.store(y, [&](int k) { return made[k]; });
    }
  } else {
    constexpr int V = Tile::V;
    const AffineByChannel<Where, Row> affine(args, where, row, values);
    const bool few = where.is_few();
    const auto make = [&](int offset, const uint4& x, float (&out)[V]) {
      Floats<V> w, b;
      if (few) {
        affine.of_few(offset, w, b);
      } else {
        affine.of_many(offset, w, b);
      }
      normalise<Policy, Fast, T>(x, values, w, b, out);
    };
    if constexpr (kBehind<Policy>) {
      store_tile_behind<T>(tile, args.n.behind, row * args.n.cols + begin, args.n.activation, make);
    } else {
      uint4 made[Tile::Slots];
      const bool none = args.n.activation.code == Activation::none, relus = args.n.activation.code == Activation::relu;
      if (!Tile::Ragged && !kRare<Tile> && few) {
        const auto plain = [&](int k) {
          Floats<V> w, b;
          affine.of_few(Tile::offset(k), w, b);
          return normalised<Policy, Fast, T>(tile, k, values, w, b);
        };
        if (none) return tile.store(y, plain);
        return tile.store(y, [&](int k) { return activated(Tile::Vector::of_raw(plain(k)), args.n.activation).raw(); });
      }
      if constexpr (!Tile::Ragged && kInTable<Where>) {
        const bool silus = sizeof(T) == 2 && args.n.activation.code == Activation::silu;
        if (where.channels == where.some && (none || relus || silus)) {
          return tile.store(y, [&](int k) {
            Floats<V> w, b;
            affine.of_some(Tile::offset(k), w, b);
            const uint4 norm = normalised<Policy, Fast, T>(tile, k, values, w, b);
            if (silus) return each_rounded(Tile::Vector::of_raw(norm), silu<T>).raw();
            return relus ? relu(Tile::Vector::of_raw(norm)).raw() : norm;
          });
        }
      }
      in_turn(tile, made, [&](int offset, const uint4& x) {
        float out[V];
        make(offset, x, out);
        const uint4 words = activated(Tile::Vector::of_raw(words_of<T>(out)), args.n.activation).raw();
        if constexpr (!Tile::Ragged) store_words(y + offset, words);
        return words;
      });
      if (Tile::Ragged) tile.store(y, [&](int k) { return made[k]; });
    }
  }
}

template <class Policy, bool Fast, class T, class Tile, class Row, int Rows, class Ahead>
__device__ inline void apply_by(const Tile (&tiles)[Rows], const RowArgs& args, const Row (&rows)[Rows], int64_t begin,
                                const RowValues (&values)[Rows], Ahead& affine) {
  if constexpr (kRare<Tile> && Policy::affine != Affine::by_channel && !kMayBeNarrow<Policy, T, Tile>) {
    static_assert(Rows == 1);
    uint4 made[Tile::Slots];
    make_in_turn<Policy, Fast, T>(tiles[0], args, begin, values[0], made);
    tiles[0].store(static_cast<T*>(args.n.y) + rows[0] * args.n.cols + begin, [&](int k) { return made[k]; });
  } else if constexpr (Policy::affine == Affine::by_element) {
    if constexpr (kMayBeWide<T, Tile>) {
      if (has_wide_weights<T>(args)) return store_tiles<Policy, Fast, true, T>(tiles, args, rows, begin, values, affine);
    }
    store_tiles<Policy, Fast, false, T>(tiles, args, rows, begin, values, affine);
  } else if constexpr (Policy::affine == Affine::none && Fast) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) store_tile<Policy, Fast, T>(tiles[r], args, rows[r], begin, values[r], affine);
  } else {
    each_row(tiles, rows, values, [&](const Tile& tile, Row row, RowValues value) {
      store_tile<Policy, Fast, T>(tile, args, row, begin, value, affine);
    });
  }
}

// The same for any policy, by the fast formula where that will do for every row of the warp.
template <class Policy, class T, class Tile, class Row, int Rows, class Ahead>
__device__ inline void apply_tiles(const Tile (&tiles)[Rows], const RowArgs& args, const Row (&rows)[Rows],
                                   int64_t begin, const RowValues (&values)[Rows], Ahead& affine) {
  if constexpr (kOptions<Policy>) {
    each_row(tiles, rows, values, [&](const Tile& tile, Row row, RowValues value) {
      store_with_options<T>(tile, args, row, begin, value);
    });
  } else if constexpr (Policy::template always_fast<T> && !(Tile::Ragged && Policy::affine == Affine::by_element)) {
    apply_by<Policy, true, T>(tiles, args, rows, begin, values, affine);
  } else {
    bool fast = true;
    if constexpr (!Policy::template always_fast<T>) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) fast = fast && Policy::fast(values[r], args);
      fast = __all_sync(kWholeWarp, fast);
    }
    if constexpr (Tile::Ragged) {
      store_anywhere<Policy, T>(tiles, args, rows, begin, values, affine, fast);
    } else if (fast) {
      apply_by<Policy, true, T>(tiles, args, rows, begin, values, affine);
    } else {
      apply_by<Policy, false, T>(tiles, args, rows, begin, values, affine);
    }
  }
}

template <class Policy>
__device__ inline void save_values(const RowArgs& a, int64_t row, const typename Policy::Stat& stat, RowValues values) {
  if (a.n.mean != nullptr) a.n.mean[row] = Policy::saved_mean(stat, values, a);
  if (a.n.rstd != nullptr) a.n.rstd[row] = values.rstd;
}

template <class T>
constexpr int kChunkSlots = kChunk / 32 / (16 / static_cast<int>(sizeof(T)));

template <class T, bool Ragged, bool Full = false>
using ChunkTile = Tile<T, 32, kChunkSlots<T>, Ragged, Full ? kChunkSlots<T> : 0>;

template <class T, bool Ragged, bool Full>
using StagedChunk = StagedTile<T, 32, kChunkSlots<T>, Ragged, Full ? kChunkSlots<T> : 0>;

// Where a row's chunk lies.
struct ChunkPlace {
  int64_t begin;
  int len;

  __device__ static ChunkPlace of(const RowArgs& args, int64_t index) {
    const int64_t begin = index * args.chunk_len, left = args.n.cols - begin;
    return {begin, static_cast<int>(max(int64_t{0}, min(left, static_cast<int64_t>(args.chunk_len))))};
  }
};

// A chunk of one row after the other in shared memory; a warp sees to it.
template <class Policy, class T, bool Ragged>
struct ChunkInShared {
  using Stat = typename Policy::Stat;
  const RowArgs& args;
  char* buffer;
  ChunkPlace place;

  __device__ const T* x(int64_t row) const { return static_cast<const T*>(args.n.x) + row * args.n.cols + place.begin; }
  __device__ void stage(int64_t row) const {
    const T* end = static_cast<const T*>(args.n.x) + args.n.rows * args.n.cols;
    stage_chunk<T, Ragged>(buffer, x(row), place.len, end);
  }
  template <bool Full>
  __device__ StagedChunk<T, Ragged, Full> staged(int64_t row) const {
    StagedChunk<T, Ragged, Full> tile;
    tile.len = place.len;
    tile.chunk = staged_chunk<T, Ragged>(buffer, x(row));
    return tile;
  }
  template <bool Full>
  __device__ Stat statistic_of(int64_t row) const {
    ChunkTile<T, Ragged, Full> tiles[1];
    staged<Full>(row).copy_to(tiles[0]);
    Stat stat[1];
    Policy::statistics(tiles, Full || place.len == args.chunk_len ? args.sizes.chunk : args.sizes.last_chunk, args, stat);
    return stat[0];
  }
  __device__ Stat statistic(int64_t row) const {
    if (!Ragged && place.len == kChunk) return statistic_of<!Ragged>(row);
    return statistic_of<false>(row);
  }
  template <bool Full, class Affine>
  __device__ void apply_to(int64_t row, RowValues values, Affine& affine, bool loaded) const {
    const StagedChunk<T, Ragged, Full> tiles[1] = {staged<Full>(row)};
    const int64_t rows[1] = {row};
    const RowValues all[1] = {values};
    if (!loaded) affine.load_ahead(args, place.begin, tiles[0]);
    apply_tiles<Policy, T>(tiles, args, rows, place.begin, all, affine);
  }
  // `affine`: the chunk's parameters, or where to load them.
  template <class Affine>
  __device__ void apply(int64_t row, RowValues values, Affine& affine, bool loaded) const {
    if (!Ragged && place.len == kChunk) return apply_to<!Ragged>(row, values, affine, loaded);
    apply_to<false>(row, values, affine, loaded);
  }
};

}  // namespace
}  // namespace normswap
