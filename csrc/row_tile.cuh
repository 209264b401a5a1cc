// A chunk of a row in shared memory and in registers. The lanes own the same elements wherever the row lies: where rows do not start at
// multiples of 16 bytes (Ragged), a lane's vector is cut from the two aligned ones that hold it, and stores pass the
// piece that belongs to the neighbour's aligned vector on to it.
#pragma once

#include "reduce.cuh"
#include "vec.cuh"

namespace normswap {
namespace {

// How a chunk lies over lanes: vector k of a lane is vector k * Lanes + lane of the chunk. Unless Ragged, `len` is a
// multiple of V. Full: the chunk is as long as the tile, so that no vector needs asking whether it is there.
template <class T, int Lanes_, int Slots_, bool Ragged_, bool Full_>
struct TileShape {
  static constexpr int Lanes = Lanes_, Slots = Slots_, V = 16 / sizeof(T);
  static constexpr bool Ragged = Ragged_, Full = Full_;
  using Vector = Pack<T, V>;

  int len;

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % Lanes; }
  __device__ static int offset(int k) { return (k * Lanes + lane()) * V; }
  __device__ bool inside(int k) const { return Full || offset(k) < len; }
  __device__ static int phase(const T* p) { return static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16); }

  // make(k) gives the k-th vector to store. All lanes of the warp must call.
  template <class Make>
  __device__ void store(T* chunk, Make make) const {
    if constexpr (Ragged) {
      store_ragged(chunk, make);
    } else {
#pragma unroll
      for (int k = 0; k < Slots; ++k) {
        if (inside(k)) make(k).store(chunk + offset(k));
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
      const uint4 mine = k < Slots ? make(k < Slots ? k : 0).raw() : uint4{};
      const uint4 given = lane() == Lanes - 1 ? before : mine;
      const uint4 left = {from_left(given.x), from_left(given.y), from_left(given.z), from_left(given.w)};
      const uint4 merged = shift == 0 ? mine : window<sizeof(T)>(left, mine, 16 - shift);
      const int first = offset(k) - skipped;
      if (first >= 0 && first + V <= len) {
        *reinterpret_cast<uint4*>(chunk + first) = merged;
      } else {
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

// A chunk in registers.
template <class T, int Lanes_, int Slots_, bool Ragged_, bool Full_ = false>
struct Tile : TileShape<T, Lanes_, Slots_, Ragged_, Full_> {
  using Shape = TileShape<T, Lanes_, Slots_, Ragged_, Full_>;
  using Vector = typename Shape::Vector;
  using Shape::inside, Shape::len, Shape::offset, Shape::phase, Shape::Slots, Shape::V;
  static constexpr bool InRegisters = true;

  Vector packs[Slots];

  __device__ Vector pack(int k) const { return packs[k]; }

  // `end`: of the tensor; nothing is read from there on.
  __device__ void load(const T* chunk, int length, const T* end) {
    len = length;
#pragma unroll
    for (int k = 0; k < Slots; ++k) {
      if (inside(k)) {
        if constexpr (Ragged_) {
          packs[k] = load_ragged(chunk + offset(k), len - offset(k), end);
        } else {
          packs[k] = Vector::load(chunk + offset(k));
        }
      }
    }
  }

  // See Pack::forget.
  __device__ void forget() {
#pragma unroll
    for (int k = 0; k < Slots; ++k) packs[k].forget();
  }

  // Partial sums of term(x) over this lane's elements of the chunk, in an order fixed by element index.
  template <class Term>
  __device__ float partial_sum(Term term) const {
    float partial[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int k = 0; k < Slots; ++k) {
      if (inside(k)) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          float& into = partial[(k * V + j) % 4];
          if (Full_ || !Ragged_ || offset(k) + j < len) into = term(to_float(packs[k].v[j]), into);
        }
      }
    }
    return __fadd_rn(__fadd_rn(partial[0], partial[1]), __fadd_rn(partial[2], partial[3]));
  }

 private:
  __device__ static Vector load_ragged(const T* p, int valid, const T* end) {
    const int shift = phase(p);
    const T* aligned = p - shift / static_cast<int>(sizeof(T));
    const bool crosses = shift / static_cast<int>(sizeof(T)) + valid > V && shift > 0;
    if (aligned + (crosses ? 2 * V : V) <= end) {
      const uint4 low = __ldg(reinterpret_cast<const uint4*>(aligned));
      const uint4 high = crosses ? __ldg(reinterpret_cast<const uint4*>(aligned + V)) : low;
      return Vector::of_raw(window<sizeof(T)>(low, high, shift));
    }
    Vector pack{};
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (j < valid) pack.v[j] = p[j];
    }
    return pack;
  }
};

// A chunk in shared memory, with what precedes and follows it within its 16-byte vectors.
template <class T, int Lanes_, int Slots_, bool Ragged_, bool Full_>
struct StagedTile : TileShape<T, Lanes_, Slots_, Ragged_, Full_> {
  using Shape = TileShape<T, Lanes_, Slots_, Ragged_, Full_>;
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

  __device__ void copy_to(Tile<T, Lanes_, Slots_, Ragged_, Full_>& tile) const {
    tile.len = this->len;
#pragma unroll
    for (int k = 0; k < Slots; ++k) {
      if (inside(k)) tile.packs[k] = pack(k);
    }
  }
};

// --- staging -----------------------------------------------------------------------------------------------------

__device__ inline void copy_async(void* shared, const void* global, int bytes) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}

__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

// Starts copying a chunk with all of the 16-byte vectors that hold it, as far as they lie before `end`; the warp calls.
template <class T, bool Ragged>
__device__ inline void stage_chunk(char* buffer, const T* chunk, int len, const T* end) {
  if (!Ragged && len == kChunk) {
#pragma unroll
    for (int i = 0; i < kChunk * static_cast<int>(sizeof(T)) / 512; ++i) {
      const int at = (i * 32 + static_cast<int>(threadIdx.x) % 32) * 16;
      copy_async(buffer + at, reinterpret_cast<const char*>(chunk) + at, 16);
    }
    return;
  }
  const char* from = reinterpret_cast<const char*>(chunk);
  const int phase = Ragged ? static_cast<int>(reinterpret_cast<uintptr_t>(from) % 16) : 0;
  from -= phase;
  const int bytes = len > 0 ? phase + len * static_cast<int>(sizeof(T)) : 0;
  for (int i = threadIdx.x % 32 * 16; i < bytes; i += 32 * 16) {
    const int64_t there = Ragged ? reinterpret_cast<const char*>(end) - (from + i) : 16;
    copy_async(buffer + i, from + i, there < 16 ? static_cast<int>(there) : 16);
  }
}

// Where stage_chunk put the chunk.
template <class T, bool Ragged>
__device__ inline const T* staged_chunk(const char* buffer, const T* chunk) {
  return reinterpret_cast<const T*>(buffer + (Ragged ? reinterpret_cast<uintptr_t>(chunk) % 16 : 0));
}

}  // namespace
}  // namespace normswap
