// What a warp has of x, dy and a gradient of the sum, of the rows of one turn: in shared memory, where copies arrive ahead of
// their turn.
#pragma once

#include "row/row_tile.cuh"
#include "row_backward/row_backward.h"

namespace normswap {
namespace {

enum class Pass { both, sums, gradient };

// What is around the norm, where it takes kernels of its own. sums, of whole vectors: a gradient of the sum in front of it, or
// one of 16 bits of the residual; options: these or an activation behind it; wide: an activation, of which what comes of dy,
// of 16 bits, is kept in float32.
enum class Around { nothing, sums, options, wide };

template <Around A>
constexpr bool kMayBeActive = A == Around::options || A == Around::wide;

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

// Where the gradient of the sum lies in a slot.
__device__ inline int sum_at(const BackwardPlan& p) { return p.slot_bytes - 64 - p.sum_bytes; }

// V values from `p` on, which is a multiple of V values from a boundary of 16 bytes.
template <class T, int V>
__device__ inline void load_values(const T* p, bool there, float (&out)[V]) {
  if constexpr (V == 1) {
    out[0] = there ? to_float(*p) : 0.f;
  } else if constexpr (V * sizeof(T) == 8) {
    uint2 words{};
    if (there) words = *reinterpret_cast<const uint2*>(p);
    float some[8];
    floats_of<T>({words.x, words.y, 0u, 0u}, some);
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = some[j];
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

// Starts copying the whole vectors of a warp's rows to an address of shared memory.
template <class T, class Tile>
__device__ inline void stage_vectors(unsigned to, const T* from, int elements) {
  constexpr int each = 16 / static_cast<int>(sizeof(T)), most = kChunk / 32 / each;
  const int lane = static_cast<int>(threadIdx.x) % 32, left = elements - lane * each;
  to += lane * 16;
  from += lane * each;
#pragma unroll
  for (int i = 0; i < most; ++i) {
    if (Tile::Full || i * 32 * each < left) copy_async(to + i * 32 * 16, from + i * 32 * each);
  }
}

// What is copied ahead for a warp's turns, from `row` on, `step` rows at a time. Lane l copies, for row l % Rows of a turn,
// its mean, its rstd or, in the second pass, one of its two sums.
template <class G, class Tile, Around A>
struct BackwardStage {
  using X = typename Tile::X;
  char* memory;      // of the warp
  unsigned address;  // the same: worked out anew for each copy it would take three instructions
  const X* x;
  const G* dy;
  const X* sum;  // the gradient of the sum, null where none is to be copied
  const float* value;
  int64_t elements;  // from turn to turn
  int value_step, value_at;
  bool values;

  __device__ BackwardStage(const BackwardArgs& args, char* memory_, int64_t row, int64_t begin, int step)
      : memory(memory_), address(shared_address(memory_)), x(static_cast<const X*>(args.n.x) + row * args.n.cols + begin),
        dy(static_cast<const G*>(args.n.dy) + row * args.n.cols + begin), sum(nullptr), elements(step * args.n.cols) {
    if (A != Around::nothing && args.p.sum_bytes > 0 && args.pass != Pass::sums) {
      sum = static_cast<const X*>(args.n.sum_grad) + row * args.n.cols + begin;
    }
    const int lane = static_cast<int>(threadIdx.x) % 32, which = lane / Tile::Rows;
    const float* totals = args.pass == Pass::gradient ? reinterpret_cast<const float*>(args.totals) : nullptr;
    const float* of = which == 0 ? args.n.mean : which == 1 ? args.n.rstd : which < 4 ? totals : nullptr;
    const int each = which < 2 ? 1 : 2;  // floats of a row
    values = of != nullptr;
    value = of + (row + lane % Tile::Rows) * each + (which == 3);
    value_step = step * each;
    value_at = args.p.slot_bytes - 64 + (lane % Tile::Rows * 4 + which) * static_cast<int>(sizeof(float));
    asm volatile("" : "+r"(address));
  }
  // Of the next turn to `slot`, `left` rows before the end of the piece, of `len` elements each in the chunk.
  __device__ void next(const BackwardArgs& args, int slot, int left, int len) {
    if (left > 0) {
      const int count = Tile::Rows == 1 ? len : min(Tile::Rows, left) * static_cast<int>(args.n.cols);
      if constexpr (Tile::V == 1) {
        const int64_t all = args.n.rows * args.n.cols;
        stage_chunk<X, true>(memory + slot, x, count, static_cast<const X*>(args.n.x) + all);
        stage_chunk<G, true>(memory + slot + args.p.x_bytes, dy, count, static_cast<const G*>(args.n.dy) + all);
        if (A != Around::nothing && sum != nullptr) {
          stage_chunk<X, true>(memory + slot + sum_at(args.p), sum, count, static_cast<const X*>(args.n.sum_grad) + all);
        }
      } else {
        stage_vectors<X, Tile>(address + slot, x, count);
        stage_vectors<G, Tile>(address + slot + args.p.x_bytes, dy, count);
        if (A != Around::nothing && sum != nullptr) stage_vectors<X, Tile>(address + slot + sum_at(args.p), sum, count);
      }
      if (values && static_cast<int>(threadIdx.x) % 32 % Tile::Rows < left) copy_async_word(address + slot + value_at, value);
      x += elements;
      dy += elements;
      if (A != Around::nothing && sum != nullptr) sum += elements;
      value += value_step;
    }
    end_batch();
  }
};

// The rows of a warp's turn. `first`: the element of the tensors that the copies begin with, but for multiples of 2^32.
template <class G, class Tile, Around A>
struct BackwardSlot {
  using X = typename Tile::X;
  static constexpr int V = Tile::V;
  const BackwardArgs& args;
  char* memory;
  unsigned first;

  // Of this lane's row: mean, rstd and, in the second pass, the two sums.
  __device__ const float* row_values() const {
    return reinterpret_cast<const float*>(memory + args.p.slot_bytes - 64) + Tile::sub_row() * 4;
  }

  // A lane's k-th vector of x and of dy, or what was kept of that; zeros past the end of the row.
  __device__ void load(const Tile& tile, int k, bool kept, float (&x)[V], float (&dy)[V]) const {
    const int at = place(tile, k);
    load_values(begin_of<X>(memory) + at, tile.inside(k), x);
    G* const from = begin_of<G>(memory + args.p.x_bytes) + at;
    if (A == Around::wide && kept) {
      load_wide(from, tile.inside(k), dy);
    } else {
      load_values(from, tile.inside(k), dy);
    }
  }
  // And of the gradient of the sum.
  __device__ void load_sum(const Tile& tile, int k, float (&out)[V]) const {
    load_values(begin_of<X>(memory + sum_at(args.p)) + place(tile, k), tile.inside(k), out);
  }
  // In the place of a vector of dy what behind the activation comes of it.
  __device__ void keep(const Tile& tile, int k, const float (&dy)[V]) const {
    if (!tile.inside(k)) return;
    G* const to = begin_of<G>(memory + args.p.x_bytes) + place(tile, k);
    if constexpr (A == Around::wide) {
      *reinterpret_cast<float4*>(to) = {dy[0], dy[1], dy[2], dy[3]};
      *reinterpret_cast<float4*>(to + args.p.chunk_len) = {dy[4], dy[5], dy[6], dy[7]};
    } else if constexpr (V == 1) {
      *to = from_float<G>(dy[0]);
    } else {
      constexpr int per = 16 / static_cast<int>(sizeof(G));
#pragma unroll
      for (int i = 0; i < V; i += per) {
        float some[per];
#pragma unroll
        for (int j = 0; j < per; ++j) some[j] = dy[i + j];
        *reinterpret_cast<uint4*>(to + i) = words_of<G>(some);
      }
    }
  }

 private:
  // A vector's first four floats have the place of its eight elements, the others that of elements a chunk further.
  __device__ void load_wide(const G* from, bool there, float (&out)[V]) const {
    const float4 nothing{}, first = there ? *reinterpret_cast<const float4*>(from) : nothing;
    const float4 second = there ? *reinterpret_cast<const float4*>(from + args.p.chunk_len) : nothing;
    const float all[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = all[j];
  }
  __device__ int place(const Tile& tile, int k) const {
    return (Tile::Rows > 1 ? Tile::sub_row() * static_cast<int>(args.n.cols) : 0) + tile.offset(k);
  }
  template <class T>
  __device__ T* begin_of(char* staged) const {
    constexpr int per = 16 / static_cast<int>(sizeof(T));
    return reinterpret_cast<T*>(staged) + (V == 1 ? first % per : 0);
  }
};

}  // namespace
}  // namespace normswap
