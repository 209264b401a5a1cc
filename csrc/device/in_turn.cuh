// What is long to compile, written once and not once a vector or a row. No index into registers but constants: what is
// next comes first, and the others follow.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace normswap {
namespace {

// words[k] = make(k, words[k]).
template <int Slots, class Make>
__device__ inline void each_in_turn(uint4 (&words)[Slots], Make make) {
#pragma unroll 1
  for (int k = 0; k < Slots; ++k) {
    const uint4 now = make(k, words[0]);
#pragma unroll
    for (int i = 0; i < Slots - 1; ++i) words[i] = words[i + 1];
    words[Slots - 1] = now;
  }
}

// words[k] = make(offset in the chunk, of vector k: its words), for those of the lane's vectors that are there.
template <class Tile, class Make>
__device__ inline void in_turn(const Tile& tile, uint4 (&words)[Tile::Slots], Make make) {
#pragma unroll
  for (int k = 0; k < Tile::Slots; ++k) {
    if constexpr (Tile::InRegisters) {
      words[k] = tile.words[k];
    } else {
      words[k] = {};
    }
  }
  each_in_turn(words, [&](int k, uint4 now) {
    if (!tile.inside(k)) return now;
    if constexpr (!Tile::InRegisters) now = tile.pack(k).raw();
    return make(Tile::offset(k), now);
  });
}

// with(tile, row, values) for each of several rows, which are equally far from each other, but for some that are the last one.
template <class Tile, class Row, int Rows, class Values, class With>
__device__ inline void each_row(const Tile (&tiles)[Rows], const Row (&rows)[Rows], const Values (&values)[Rows],
                                With with) {
  Tile tile[Rows];
  Values value[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    tile[r] = tiles[r];
    value[r] = values[r];
  }
  const Row apart = rows[Rows > 1 ? 1 : 0] - rows[0], last = rows[Rows - 1];
#pragma unroll 1
  for (int r = 0; r < Rows; ++r) {
    const Row row = rows[0] + r * apart;
    with(tile[0], row < last ? row : last, value[0]);
#pragma unroll
    for (int i = 0; i + 1 < Rows; ++i) {
      tile[i] = tile[i + 1];
      value[i] = value[i + 1];
    }
  }
}

}  // namespace
}  // namespace normswap
