// A chunk of a row in shared memory and in registers. The lanes own the same elements wherever the row lies: where rows
// do not start at multiples of 16 bytes (Ragged), a lane's vector is cut from the two aligned ones that hold it, and
// stores pass the piece that belongs to the neighbour's aligned vector on to it.
#pragma once

#include "device/copy.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

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
  // The aligned vector in memory at this lane's place holds the end of the vector before and the start of this one; the
  // first lane has the one before from the last.
  template <class Make>
  __device__ void store_ragged(T* chunk, Make make) const {
    uint4 merged[Slots + 1];
#pragma unroll
    for (int k = 0; k < Slots; ++k) merged[k] = make(k);
    merged[Slots] = {};
    const int shift = phase(chunk), skipped = shift / static_cast<int>(sizeof(T));
    const bool more = len + skipped > Slots * Lanes * V;  // than Slots vectors
    if constexpr (Lanes == 32) {
      const bool all = __any_sync(kWholeWarp, more);
      by_words(__shfl_sync(kWholeWarp, shift, 0), [&](auto words) {
        constexpr int first = 4 - words.value - (sizeof(T) < 4);  // word of the vector before
        const int rest = sizeof(T) < 4 && shift % 4 == 0 ? 4 : 2;
        if (all) merged[Slots] = window_at<first, sizeof(T)>(from_left<first>(merged[Slots - 1], {}), {}, rest);
#pragma unroll
        for (int k = Slots - 1; k >= 0; --k) {
          const uint4 left = from_left<first>(k > 0 ? merged[k > 0 ? k - 1 : 0] : uint4{}, merged[k]);
          merged[k] = window_at<first, sizeof(T)>(left, merged[k], rest);
        }
      });
    } else {
#pragma unroll
      for (int k = Slots; k >= 0; --k) {
        const uint4 left = from_left<0>(k > 0 ? merged[k > 0 ? k - 1 : 0] : uint4{}, merged[k]);
        if (shift > 0) merged[k] = window<sizeof(T)>(left, merged[k], 16 - shift);
      }
    }
    T* mine = chunk + (offset(0) - skipped);
#pragma unroll
    for (int k = 0; k <= Slots; ++k) {
      if (k == Slots && !more) break;
      const int first = offset(k) - skipped;
      if ((k < Whole || first + V <= len) && (k > 0 || first >= 0)) {
        store_words(mine + k * Lanes * V, merged[k]);
      } else if (first < len) {
        store_piece(mine + k * Lanes * V, merged[k], k > 0 ? 0 : max(-first, 0), k < Whole ? V : min(len - first, V));
      }
    }
  }

  // Elements [from, to) of a vector to its aligned place.
  __device__ static void store_piece(T* place, const uint4& vector, int from, int to) {
    const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
    constexpr int per = 4 / static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = i * per, last = first + per - 1;
      const auto halves = [&](int j) { return reinterpret_cast<unsigned short*>(place) + j; };
      if (from <= first && last < to) reinterpret_cast<unsigned*>(place)[i] = words[i];
      if (per == 2 && from <= first && to == last) *halves(first) = static_cast<unsigned short>(words[i]);
      if (per == 2 && from == last && last < to) *halves(last) = static_cast<unsigned short>(words[i] >> 16);
    }
  }

  // The left neighbour's vector, that of the last lane `before`: of its words those from First on, and 0 for the others.
  template <int First>
  __device__ static uint4 from_left(const uint4& before, const uint4& mine) {
    const uint4 given = lane() == Lanes - 1 ? before : mine;
    return {First <= 0 ? from_left(given.x) : 0u, First <= 1 ? from_left(given.y) : 0u,
            First <= 2 ? from_left(given.z) : 0u, First <= 3 ? from_left(given.w) : 0u};
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

  // Starts loading; settle() ends it. `end`: of the tensor; nothing is read from there on.
  __device__ void load(const T* chunk, int length, const T* end) {
    len = length;
    const T* mine = chunk + offset(0);
#pragma unroll
    for (int k = 0; k < Slots; ++k) words[k] = {};
    if constexpr (Ragged_) {
#pragma unroll
      for (int k = 0; k < Slots; ++k) next[k] = {};
      shift = phase(chunk);
      // Of all but the tensor's last rows the aligned vectors that hold the chunk, and one more, are there to be read.
      const bool safe = chunk + len + 2 * V <= end;
      if (safe) {
        mine -= shift / static_cast<int>(sizeof(T));
#pragma unroll
        for (int k = 0; k < Slots; ++k) {
          load_if(inside(k), words[k], mine + k * Shape::Lanes * V);
          load_if(inside(k) && shift > 0, next[k], mine + k * Shape::Lanes * V + V);
        }
      } else {
        shift = 0;
#pragma unroll
        for (int k = 0; k < Slots; ++k) words[k] = load_by_element(chunk + offset(k), len - offset(k));
      }
    } else {
#pragma unroll
      for (int k = 0; k < Slots; ++k) load_if(inside(k), words[k], mine + k * Shape::Lanes * V);
    }
  }

  // Zeros beyond the chunk, so that sums need not ask.
  __device__ void settle() {
    if constexpr (Ragged_) {
      if constexpr (Shape::Lanes == 32) {
        by_words(__shfl_sync(kWholeWarp, shift, 0), [&](auto first) {
#pragma unroll
          for (int k = 0; k < Slots; ++k) words[k] = window_at<first.value, sizeof(T)>(words[k], next[k], shift % 4);
        });
      } else {
#pragma unroll
        for (int k = 0; k < Slots; ++k) words[k] = window<sizeof(T)>(words[k], next[k], shift);
      }
#pragma unroll
      for (int k = Whole; k < Slots; ++k) clear_past_end(k);
    }
  }

  // What a vector that the chunk ends in holds of what follows: zeros instead.
  __device__ void clear_past_end(int k) {
    const int left = len - offset(k);
    words[k] = {first_of<0>(words[k].x, left), first_of<1>(words[k].y, left), first_of<2>(words[k].z, left),
                first_of<3>(words[k].w, left)};
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
      float x[V];
      floats_of<T>(words[k], x);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        float& into = partial[(k * V + j) % 4];
        const bool there = k < Whole || len - offset(k) > (Ragged_ ? j : 0);
        into = term(Centred ? __fsub_rn(x[j], there ? mean : 0.f) : x[j], into);
      }
    }
    return __fadd_rn(__fadd_rn(partial[0], partial[1]), __fadd_rn(partial[2], partial[3]));
  }

 private:
  // Ragged, until settle(): what follows words[k] in memory, and the first byte of the two that is this lane's.
  uint4 next[Ragged_ ? Slots : 1];
  int shift;

  // Word I of a vector of which the first `left` elements are to stay.
  template <int I>
  __device__ static unsigned first_of(unsigned word, int left) {
    constexpr int per = 4 / static_cast<int>(sizeof(T));
    if (per == 2 && left == I * per + 1) return word & 0xffffu;
    return left > I * per ? word : 0u;
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
