// What a warp has of x and dy, of the rows of one turn: in shared memory, where copies arrive ahead of their turn.
#pragma once

#include "row/row_tile.cuh"
#include "row_backward/row_backward.h"

namespace normswap {
namespace {

enum class Pass { both, sums, gradient };

struct BackwardArgs {
  RowBackward n;
  BackwardPlan p;
  Pass pass;
  float by_cols, weight_offset;  // by_cols: 1 / cols
  int tree_lanes;                // that unite the sums of a row's chunks, four each
  float2* sums;                  // (rows, chunks)
  float2* totals;                // (rows)
};

// 32 elements a lane: a chunk of a row over 32 lanes, or four short rows over eight each; vector k of a lane is vector
// k * Lanes + lane. V is what 16 bytes of X hold, or 1 where rows begin elsewhere than at multiples of 16 bytes: which of
// these follows from the row length. Full: the chunk is.
template <class X_, int Lanes_, int V_, bool Full_>
struct BackwardTile {
  using X = X_;
  static constexpr int Lanes = Lanes_, V = V_, Slots = 32 / V, Rows = 32 / Lanes;
  static constexpr int Group = V == 1 ? 8 : 16 / V;  // vectors that are loaded at once
  static constexpr bool Full = Full_;

  int len;     // of this lane's row, in the chunk
  int extent;  // of any lane's

  __device__ static int lane() { return static_cast<int>(threadIdx.x % Lanes); }
  __device__ static int sub_row() { return static_cast<int>(threadIdx.x % 32) / Lanes; }
  __device__ static int offset(int k) { return (k * Lanes + lane()) * V; }
  __device__ bool inside(int k) const { return Full || offset(k) < len; }
  // Whether any lane's is: the same for all lanes.
  __device__ bool any_inside(int k) const { return Full || k * Lanes * V < extent; }
};

// V values from `p` on, which is a multiple of V values from a boundary of 16 bytes.
template <class T, int V>
__device__ inline void load_values(const T* p, bool there, float (&out)[V]) {
  if constexpr (V == 1) {
    out[0] = there ? to_float(*p) : 0.f;
  } else {
    constexpr int per = 16 / static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < V / per; ++i) {
      uint4 words{};
      if (there) words = *reinterpret_cast<const uint4*>(p + i * per);
      float some[per];
      floats_of<T>(words, some);
#pragma unroll
      for (int j = 0; j < per; ++j) out[i * per + j] = some[j];
    }
  }
}

// The rows of a warp's turn. `first` is the element of the tensors that the copies begin with.
template <class G, class Tile>
struct BackwardSlot {
  using X = typename Tile::X;
  static constexpr int V = Tile::V;
  const BackwardArgs& args;
  char* memory;
  int64_t first;

  // Of this lane's row: mean, rstd and, in the second pass, the two sums.
  __device__ const float* row_values() const {
    return reinterpret_cast<const float*>(memory + args.p.slot_bytes - 64) + Tile::sub_row() * 4;
  }

  // Starts copying so many elements, and what belongs to so many rows from `row` on.
  __device__ void stage(int64_t row, int rows, int elements) const {
    const int64_t all = args.n.rows * args.n.cols;
    const X* x = static_cast<const X*>(args.n.x);
    const G* dy = static_cast<const G*>(args.n.dy);
    stage_chunk<X, V == 1>(memory, x + first, Tile::Full ? kChunk : elements, x + all);
    stage_chunk<G, V == 1>(memory + args.p.x_bytes, dy + first, Tile::Full ? kChunk : elements, dy + all);
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
  }

  // A lane's k-th vector of x and of dy, zeros past the end of the row.
  __device__ void load(const Tile& tile, int k, float (&x)[V], float (&dy)[V]) const {
    const int cols = static_cast<int>(args.n.cols);
    const int at = (Tile::Rows > 1 ? Tile::sub_row() * cols : 0) + tile.offset(k);
    load_values(begin_of<X>(memory) + at, tile.inside(k), x);
    load_values(begin_of<G>(memory + args.p.x_bytes) + at, tile.inside(k), dy);
  }

 private:
  template <class T>
  __device__ const T* begin_of(const char* staged) const {
    constexpr int per = 16 / static_cast<int>(sizeof(T));
    return reinterpret_cast<const T*>(staged) + (V == 1 ? static_cast<int>(first) % per : 0);
  }
};

}  // namespace
}  // namespace normswap
