// A chunk of a row in shared memory and in registers. The lanes own the same elements wherever the row lies: where rows do not start at
// multiples of 16 bytes (Ragged), a lane's vector is cut from the two aligned ones that hold it, and stores pass the
// piece that belongs to the neighbour's aligned vector on to it.
#pragma once

#include "cluster.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace normswap {
namespace {

// How a chunk lies over lanes: vector k of a lane is vector k * Lanes + lane of the chunk. Unless Ragged, `len` is a
// multiple of V. The first Whole vectors of every lane are surely there.
template <class T, int Lanes_, int Slots_, bool Ragged_, int Whole_>
struct TileShape {
  static constexpr int Lanes = Lanes_, Slots = Slots_, V = 16 / sizeof(T);
  static constexpr int Whole = Whole_;
  static constexpr bool Ragged = Ragged_;
  using Vector = Pack<T, V>;

  int len;

  __device__ static int lane() { return static_cast<int>(threadIdx.x % Lanes); }
  __device__ static int offset(int k) { return k * Lanes * V + lane() * V; }
  __device__ bool inside(int k) const { return k < Whole || offset(k) < len; }
  __device__ static int phase(const T* p) { return static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16); }

  // make(k) gives the k-th vector to store, as words. All lanes of the warp must call.
  template <class Make>
  __device__ void store(T* chunk, Make make) const {
    if constexpr (Ragged) {
      store_ragged(chunk, make);
    } else {
      T* mine = chunk + offset(0);
#pragma unroll
      for (int k = 0; k < Slots; ++k) {
        if (inside(k)) store_words(mine + k * Lanes * V, make(k));
      }
    }
  }

 private:
  // The aligned vector in memory at this lane's place holds the end of the vector before and the start of this one.
  template <class Make>
  __device__ void store_ragged(T* chunk, Make make) const {
    const int shift = phase(chunk), skipped = shift / static_cast<int>(sizeof(T));
    uint4 before{};
#pragma unroll
    for (int k = 0; k <= Slots; ++k) {
      const uint4 mine = k < Slots ? make(k < Slots ? k : 0) : uint4{};
      const uint4 given = lane() == Lanes - 1 ? before : mine;
      const uint4 left = {from_left(given.x), from_left(given.y), from_left(given.z), from_left(given.w)};
      const uint4 merged = shift == 0 ? mine : window<sizeof(T)>(left, mine, 16 - shift);
      const int first = offset(k) - skipped;
      if ((k < Whole || first + V <= len) && (k > 0 || first >= 0)) {
        store_words(chunk + first, merged);
      } else if (first < len) {
        const Vector pieces = Vector::of_raw(merged);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          if (first + j >= 0 && first + j < len) chunk[first + j] = pieces.v[j];
        }
      }
      before = mine;
    }
  }

  __device__ static unsigned from_left(unsigned value) {
    return __shfl_sync(0xffffffffu, value, (lane() + Lanes - 1) % Lanes, Lanes);
  }
};

// A chunk in registers: as words, since the compiler would keep 16-bit elements each in a register of its own.
template <class T, int Lanes_, int Slots_, bool Ragged_, int Whole_ = 0>
struct Tile : TileShape<T, Lanes_, Slots_, Ragged_, Whole_> {
  using Shape = TileShape<T, Lanes_, Slots_, Ragged_, Whole_>;
  using Vector = typename Shape::Vector;
  using Shape::inside, Shape::len, Shape::offset, Shape::phase, Shape::Slots, Shape::V, Shape::Whole;
  static constexpr bool InRegisters = true;

  uint4 words[Slots];

  __device__ Vector pack(int k) const { return Vector::of_raw(words[k]); }

  // Zeros beyond the chunk, so that sums need not ask. `end`: of the tensor; nothing is read from there on.
  __device__ void load(const T* chunk, int length, const T* end) {
    len = length;
    const T* mine = chunk + offset(0);
    if constexpr (Ragged_) {
      const int shift = phase(mine);
      mine -= shift / static_cast<int>(sizeof(T));
      // Of all but the tensor's last rows the aligned vectors that hold the chunk, and one more, are there to be read.
      const bool safe = chunk + len + 2 * V <= end;
      if (safe) {
#pragma unroll
        for (int k = 0; k < Slots; ++k) {
          const T* p = mine + k * Shape::Lanes * V;
          uint4 low{}, high{};
          load_if(inside(k), low, p);
          load_if(inside(k) && shift > 0, high, p + V);
          words[k] = window<sizeof(T)>(low, high, shift);
          if (k >= Whole) clear_past_end(k);
        }
      } else {
#pragma unroll
        for (int k = 0; k < Slots; ++k) words[k] = load_by_element(chunk + offset(k), len - offset(k));
      }
    } else {
#pragma unroll
      for (int k = 0; k < Slots; ++k) {
        words[k] = {};
        load_if(inside(k), words[k], mine + k * Shape::Lanes * V);
      }
    }
  }

  // What a vector that the chunk ends in holds of what follows: zeros instead.
  __device__ void clear_past_end(int k) {
    if (offset(k) + V <= len) return;
    const int bits = (len - offset(k)) * static_cast<int>(sizeof(T)) * 8;
    words[k] = {first_bits(words[k].x, bits), first_bits(words[k].y, bits - 32), first_bits(words[k].z, bits - 64),
                first_bits(words[k].w, bits - 96)};
  }

  __device__ void forget() {
#pragma unroll
    for (int k = 0; k < Slots; ++k) normswap::forget(words[k]);
  }

  // Sum over this lane's elements of the chunk, in an order fixed by their index: term(x - mean, into) adds an element's
  // share (x's where not Centred), none for 0.
  template <bool Centred, class Term>
  __device__ float partial_sum(float mean, Term term) const {
    float partial[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int k = 0; k < Slots; ++k) {
      const Vector x = pack(k);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        float& into = partial[(k * V + j) % 4];
        const bool there = k < Whole || offset(k) + (Ragged_ ? j : 0) < len;
        into = term(Centred ? __fsub_rn(to_float(x.v[j]), there ? mean : 0.f) : to_float(x.v[j]), into);
      }
    }
    return __fadd_rn(__fadd_rn(partial[0], partial[1]), __fadd_rn(partial[2], partial[3]));
  }

 private:
  __device__ static unsigned first_bits(unsigned word, int bits) {
    return bits <= 0 ? 0u : bits >= 32 ? word : word & ((1u << bits) - 1);
  }

  __device__ static uint4 load_by_element(const T* p, int valid) {
    Vector pack = Vector::of_raw({});
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (j < valid) pack.v[j] = p[j];
    }
    return pack.raw();
  }
};

// A chunk in shared memory, with what precedes and follows it within its 16-byte vectors.
template <class T, int Lanes_, int Slots_, bool Ragged_, int Whole_>
struct StagedTile : TileShape<T, Lanes_, Slots_, Ragged_, Whole_> {
  using Shape = TileShape<T, Lanes_, Slots_, Ragged_, Whole_>;
  using Vector = typename Shape::Vector;
  using Shape::inside, Shape::offset, Shape::phase, Shape::Slots, Shape::V;
  static constexpr bool InRegisters = false;

  const T* chunk;

  __device__ Vector pack(int k) const {
    if constexpr (!Ragged_) {
      return Vector::of_raw(*reinterpret_cast<const uint4*>(chunk + offset(k)));
    } else {
      if (!inside(k)) return Vector{};
      const int shift = phase(chunk);
      const uint4* aligned = reinterpret_cast<const uint4*>(chunk + offset(k) - shift / static_cast<int>(sizeof(T)));
      return Vector::of_raw(window<sizeof(T)>(aligned[0], aligned[1], shift));
    }
  }

  __device__ void copy_to(Tile<T, Lanes_, Slots_, Ragged_, Whole_>& tile) const {
    tile.len = this->len;
#pragma unroll
    for (int k = 0; k < Slots; ++k) {
      tile.words[k] = inside(k) ? pack(k).raw() : uint4{};
      if (Ragged_ && k >= Whole_) tile.clear_past_end(k);
    }
  }
};

// --- staging -----------------------------------------------------------------------------------------------------

// Starts copying a chunk with all of the 16-byte vectors that hold it, as far as they lie before `end`; the warp calls.
template <class T, bool Ragged>
__device__ inline void stage_chunk(char* buffer, const T* chunk, int len, const T* end) {
  if (!Ragged && len == kChunk) {
#pragma unroll
    for (int i = 0; i < kChunk * static_cast<int>(sizeof(T)) / 512; ++i) {
      const int at = (i * 32 + static_cast<int>(threadIdx.x) % 32) * 16;
      copy_async(buffer + at, reinterpret_cast<const char*>(chunk) + at);
    }
    return;
  }
  const char* from = reinterpret_cast<const char*>(chunk);
  const int phase = Ragged ? static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16) : 0;
  from -= phase;
  const int bytes = len > 0 ? phase + len * static_cast<int>(sizeof(T)) : 0;
#pragma unroll 1
  for (int i = threadIdx.x % 32 * 16; i < bytes; i += 32 * 16) {
    const int64_t there = Ragged ? end - reinterpret_cast<const T*>(from + i) : 16;
    if (there >= 16 / static_cast<int>(sizeof(T))) {
      copy_async(buffer + i, from + i);
    } else {  // what follows the tensor is not to be read
#pragma unroll 1
      for (int j = 0; j < there; ++j) reinterpret_cast<T*>(buffer + i)[j] = reinterpret_cast<const T*>(from + i)[j];
    }
  }
}

// Where stage_chunk put the chunk.
template <class T, bool Ragged>
__device__ inline const T* staged_chunk(const char* buffer, const T* chunk) {
  return reinterpret_cast<const T*>(buffer + (Ragged ? reinterpret_cast<uintptr_t>(chunk) % 16 : 0));
}

}  // namespace
}  // namespace normswap
