// What the kernels of the row engine do with a chunk: statistics, normalise, store.
#pragma once

#include "row_options.cuh"

namespace normswap {
namespace {

// Vector k of a tile, normalised.
template <class Policy, bool Fast, class T, class Tile>
__device__ inline void normalise(const Tile& tile, int k, RowValues values, const Floats<Tile::V>& w,
                                 const Floats<Tile::V>& b, float (&out)[Tile::V]) {
  float x[Tile::V];
  floats_of<T>(tile.pack(k).raw(), x);
#pragma unroll
  for (int j = 0; j < Tile::V; ++j) {
    out[j] = Policy::template apply<T, Fast>(x[j], values, w.v[j], b.v[j]);
  }
}

template <class Policy, bool Fast, class T, class Tile>
__device__ inline uint4 normalised(const Tile& tile, int k, RowValues values, const Floats<Tile::V>& w,
                                   const Floats<Tile::V>& b) {
  float out[Tile::V];
  normalise<Policy, Fast, T>(tile, k, values, w, b, out);
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

template <class Policy, class W, class Tile, int AtOnce = kAffineAtOnce<Policy, Tile>>
using AffineAhead =
    std::conditional_t<Policy::affine == Affine::by_element, AffineByElement<Policy, W, Tile::V, AtOnce>,
                       std::conditional_t<Policy::affine == Affine::by_channel, ChannelPlace<Tile::V>, AffineNone>>;

// Normalise and store the chunk from `begin` on of several rows. All lanes of the warp must call.
template <class Policy, class T, class W, class Tile, int Rows, int Count>
__device__ inline void store_tiles(const Tile (&tiles)[Rows], const RowArgs& args, const int64_t (&rows)[Rows],
                                   int64_t begin, const RowValues (&values)[Rows],
                                   AffineByElement<Policy, W, Tile::V, Count>& affine) {
  T* y = static_cast<T*>(args.n.y) + begin + rows[0] * args.n.cols;
  Floats<Tile::V> w, b;
  if constexpr (Tile::Ragged) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      tiles[r].store(y + (rows[r] - rows[0]) * args.n.cols, [&](int k) {
        if (Count < Tile::Slots && k % Count == 0) affine.load(args, begin, tiles[r], k);
        affine.values(k % Count, args, w, b);
        return normalised<Policy, true, T>(tiles[r], k, values[r], w, b);
      });
    }
    return;
  }
  y += Tile::offset(0);
#pragma unroll
  for (int first = 0; first < Tile::Slots; first += Count) {
    if (Count < Tile::Slots) affine.load(args, begin, tiles[0], first);
#pragma unroll
    for (int k = first; k < first + Count && k < Tile::Slots; ++k) {
      affine.values(k - first, args, w, b);
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        if (!tiles[r].inside(k)) continue;
        T* to = y + (rows[r] - rows[0]) * args.n.cols + k * Tile::Lanes * Tile::V;
        store_words(to, normalised<Policy, true, T>(tiles[r], k, values[r], w, b));
      }
    }
  }
}

// The same where parameters belong to channels, or there are none.
template <class Policy, bool Fast, class T, class W, class Tile, class Where>
__device__ inline void store_tile(const Tile& tile, const RowArgs& args, int64_t row, int64_t begin, RowValues values,
                                  const Where& where) {
  T* y = static_cast<T*>(args.n.y) + row * args.n.cols + begin;
  if constexpr (Policy::affine == Affine::none) {
    tile.store(y, [&](int k) { return normalised<Policy, Fast, T>(tile, k, values, {}, {}); });
  } else {
    const AffineByChannel<Where, Tile::V> affine(args, where, row, values);
    const auto make = [&](int k, const Floats<Tile::V>& w, const Floats<Tile::V>& b) {
      const auto pack = Tile::Vector::of_raw(normalised<Policy, Fast, T>(tile, k, values, w, b));
      return activated(pack, args.n.activation).raw();
    };
    if (args.n.behind.any) {
#pragma unroll
      for (int k = 0; k < Tile::Slots; ++k) {
        if (!tile.inside(k)) continue;
        Floats<Tile::V> w, b;
        affine.of_many(Tile::offset(k), w, b);
        float out[Tile::V];
        normalise<Policy, Fast, T>(tile, k, values, w, b, out);
        store_behind<T>(args.n.behind, out, row * args.n.cols + begin + Tile::offset(k), tile.len - Tile::offset(k),
                        args.n.activation);
      }
      return;
    }
    // Stores of ragged tiles take all lanes.
    if (Tile::Ragged ? __all_sync(kWholeWarp, where.is_few()) : where.is_few()) {
      tile.store(y, [&](int k) {
        Floats<Tile::V> w, b;
        affine.of_few(Tile::offset(k), w, b);
        return make(k, w, b);
      });
    } else {
      tile.store(y, [&](int k) {
        Floats<Tile::V> w{}, b{};
        if (tile.inside(k)) affine.of_many(Tile::offset(k), w, b);
        return make(k, w, b);
      });
    }
  }
}

// The same for any policy, by the fast formula where that is as good for every row of the warp.
template <class Policy, class T, class W, class Tile, int Rows, class Ahead>
__device__ inline void apply_tiles(const Tile (&tiles)[Rows], const RowArgs& args, const int64_t (&rows)[Rows],
                                   int64_t begin, const RowValues (&values)[Rows], Ahead& affine) {
  if constexpr (Policy::affine == Affine::by_element) {
    store_tiles<Policy, T, W>(tiles, args, rows, begin, values, affine);
  } else if constexpr (kOptions<Policy>) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) store_with_options<T>(tiles[r], args, rows[r], begin, values[r]);
  } else {
    bool fast = true;
#pragma unroll
    for (int r = 0; r < Rows; ++r) fast = fast && Policy::fast(values[r]);
    const bool all = Policy::always_fast || __all_sync(kWholeWarp, fast);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      if (all) {
        store_tile<Policy, true, T, W>(tiles[r], args, rows[r], begin, values[r], affine);
      } else {
        store_tile<Policy, false, T, W>(tiles[r], args, rows[r], begin, values[r], affine);
      }
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
template <class Policy, class T, class W, bool Ragged>
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
    return place.len == kChunk ? statistic_of<true>(row) : statistic_of<false>(row);
  }
  template <bool Full, class Affine>
  __device__ void apply_to(int64_t row, RowValues values, Affine& affine, bool loaded) const {
    const StagedChunk<T, Ragged, Full> tiles[1] = {staged<Full>(row)};
    const int64_t rows[1] = {row};
    const RowValues all[1] = {values};
    if (!loaded) affine.load_ahead(args, place.begin, tiles[0]);
    apply_tiles<Policy, T, W>(tiles, args, rows, place.begin, all, affine);
  }
  // `affine`: the chunk's parameters, or where to load them.
  template <class Affine>
  __device__ void apply(int64_t row, RowValues values, Affine& affine, bool loaded) const {
    if (place.len == kChunk) return apply_to<true>(row, values, affine, loaded);
    apply_to<false>(row, values, affine, loaded);
  }
};

}  // namespace
}  // namespace normswap
