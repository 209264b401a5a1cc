// What a warp has of x and dy, of the rows of one turn: in shared memory, where copies arrive ahead of their turn.
#pragma once

#include "row_backward.h"
#include "row_tile.cuh"

namespace normswap {
namespace {

enum class Pass { both, sums, gradient };

struct BackwardArgs {
  RowBackward n;
  BackwardPlan p;
  Pass pass;
  float cols, weight_offset;
  int tree_lanes;  // that unite the sums of a row's chunks, four each
  float2* sums;    // (rows, chunks)
  float2* totals;  // (rows)
};

// 32 elements a lane: a chunk of a row over 32 lanes, or four short rows over eight each.
template <class X, int Lanes_, bool Ragged_>
struct BackwardTile : TileShape<X, Lanes_, 32 * static_cast<int>(sizeof(X)) / 16, Ragged_, 0> {
  using Shape = TileShape<X, Lanes_, 32 * static_cast<int>(sizeof(X)) / 16, Ragged_, 0>;
  using Shape::inside, Shape::lane, Shape::len, Shape::offset, Shape::phase, Shape::store_piece;
  using Shape::Slots, Shape::V;
  static constexpr int Lanes = Lanes_, Rows = 32 / Lanes_;
  static constexpr bool Ragged = Ragged_;

  __device__ bool whole(int k) const { return offset(k) + V <= len; }

  // Stores the row's chunk at `to`; make(k) gives the k-th vector, as words. All lanes of the warp must call.
  template <class Make>
  __device__ void store(X* to, Make make) const {
    if constexpr (!Ragged) {
#pragma unroll
      for (int k = 0; k < Slots; ++k) {
        if (inside(k)) store_words(to + offset(k), make(k));
      }
    } else {
      // As TileShape::store_ragged, but one vector after the other, which takes few registers.
      const int shift = phase(to), skipped = shift / static_cast<int>(sizeof(X));
      uint4 before{};
#pragma unroll
      for (int k = 0; k <= Slots; ++k) {
        const uint4 mine = k < Slots ? make(k) : uint4{};
        const uint4 left = Shape::template from_left<0>(before, mine);
        const uint4 merged = shift > 0 ? window<sizeof(X)>(left, mine, 16 - shift) : mine;
        const int first = offset(k) - skipped;
        X* place = to + first;
        if (first >= 0 && first + V <= len) {
          store_words(place, merged);
        } else if (first < len) {
          store_piece(place, merged, max(-first, 0), min(len - first, V));
        }
        before = mine;
      }
    }
  }
};

// The rows of a warp's turn. `first` is the element of the tensors that the copies begin with.
template <class X, class G, class Tile>
struct BackwardSlot {
  static constexpr int V = Tile::V;
  const BackwardArgs& args;
  char* memory;
  int64_t first;

  __device__ float* row_values() const {
    return reinterpret_cast<float*>(memory + args.p.slot_bytes - 64) + threadIdx.x % 32 / Tile::Lanes * 4;
  }

  // Starts copying so many elements, and what belongs to so many rows from `row` on.
  __device__ void stage(int64_t row, int rows, int elements) const {
    const int64_t all = args.n.rows * args.n.cols;
    const X* x = static_cast<const X*>(args.n.x);
    const G* dy = static_cast<const G*>(args.n.dy);
    stage_chunk<X, Tile::Ragged>(memory, x + first, elements, x + all);
    stage_chunk<G, Tile::Ragged>(memory + args.p.x_bytes, dy + first, elements, dy + all);
    const int lane = threadIdx.x % 32;
    if (lane < rows) {
      float* to = reinterpret_cast<float*>(memory + args.p.slot_bytes - 64) + lane * 4;
      if (args.n.mean != nullptr) copy_async_word(to, args.n.mean + row + lane);
      if (args.n.rstd != nullptr) copy_async_word(to + 1, args.n.rstd + row + lane);
      if (args.pass == Pass::gradient) {
        copy_async_word(to + 2, &args.totals[row + lane].x);
        copy_async_word(to + 3, &args.totals[row + lane].y);
      }
    }
    if (args.n.sum_grad != nullptr && lane * 128 < elements * static_cast<int>(sizeof(X))) {
      const char* line = reinterpret_cast<const char*>(static_cast<const X*>(args.n.sum_grad) + first) + lane * 128;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
    }
  }

  // A lane's k-th vector of x and of dy, zeros past the end of the row.
  __device__ void load(const Tile& tile, int k, float (&x)[V], float (&dy)[V]) const {
    const int at = static_cast<int>(threadIdx.x) % 32 / Tile::Lanes * static_cast<int>(args.n.cols) + tile.offset(k);
    read<X>(memory, Tile::Lanes < 32 ? at : tile.offset(k), x);
    read<G>(memory + args.p.x_bytes, Tile::Lanes < 32 ? at : tile.offset(k), dy);
    if (Tile::Ragged && !tile.whole(k)) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (tile.offset(k) + j >= tile.len) x[j] = dy[j] = 0.f;
      }
    }
  }

 private:
  template <class T>
  __device__ void read(const char* staged, int at, float (&out)[V]) const {
    constexpr int per = 16 / static_cast<int>(sizeof(T));
    const int phase = Tile::Ragged ? static_cast<int>(first * static_cast<int64_t>(sizeof(T)) % 16) : 0;
    const char* from = staged + phase + at * static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < V / per; ++i) {
      uint4 words;
      if constexpr (Tile::Ragged) {
        const int shift = (phase + at * static_cast<int>(sizeof(T))) % 16;
        const uint4* aligned = reinterpret_cast<const uint4*>(from - shift) + i;
        words = window<sizeof(T)>(aligned[0], aligned[1], shift);
      } else {
        words = reinterpret_cast<const uint4*>(from)[i];
      }
      float some[per];
      floats_of<T>(words, some);
#pragma unroll
      for (int j = 0; j < per; ++j) out[i * per + j] = some[j];
    }
  }
};

}  // namespace
}  // namespace normswap
