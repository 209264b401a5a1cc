// What norms along a dimension that is not the last share: x is (outer, n, inner), every (outer, inner) position is
// normalised over n. A thread owns one vector of positions and every R-th index along n, which it keeps in registers;
// the R threads of a vector meet in shared memory. The order of a sum is a function of n alone.
#pragma once

#include "device/vec.cuh"
#include "plan/plan.h"

namespace normswap {
namespace {

constexpr int kSlots = 8;            // indices a thread holds
constexpr int kVec = 4;              // positions a thread has, where they lie so: with more, registers suffice for fewer blocks
constexpr int kMaxLanes = 32;        // vectors of positions a block holds
constexpr int kMinLanes = 8;
constexpr int kThreads = 256;        // of a block, unless n needs more; twice as many of one position each
constexpr int kMaxWhole = 512;       // a longer n is cut into chunks of kLongChunk and the input is read twice
constexpr int kLongChunk = 256;

// How a block is cut: `lanes` vectors of positions by `rows` threads along n.
struct Shape {
  int lanes, rows;
  int64_t chunks, vectors;  // along n; vectors of positions in all
};

inline Shape shape_of(const DimNorm& n, int vec) {
  Shape s{};
  const int64_t length = n.n <= kMaxWhole ? n.n : kLongChunk;
  s.rows = 1;
  while (s.rows * kSlots < length) s.rows *= 2;
  s.lanes = (vec == 1 ? 2 : 1) * kThreads / s.rows;
  s.lanes = s.lanes > kMaxLanes ? kMaxLanes : s.lanes < kMinLanes ? kMinLanes : s.lanes;
  s.chunks = n.n <= kMaxWhole ? 1 : ceil_div(n.n, kLongChunk);
  s.vectors = n.outer * (n.inner / vec);
  return s;
}

// kVec where that divides `inner` and the addresses, else 1.
inline int vec_of(const DimNorm& n) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(n.x) | reinterpret_cast<uintptr_t>(n.y) |
                              reinterpret_cast<uintptr_t>(n.dy);
  const int bytes = kVec * (n.dtype == DType::f32 ? 4 : 2);
  return n.inner % kVec == 0 && addresses % bytes == 0 ? kVec : 1;
}

// The vector of positions a thread works on, and its indices along n.
template <class T, int V>
struct Place {
  const DimNorm& n;
  int lanes, lane, row, rows;
  int64_t vector, chunk, begin, end;  // [begin, end): this chunk's indices along n
  int64_t first;                      // the offset of (outer, 0, inner)
  bool inside;

  __device__ Place(const DimNorm& norm, const Shape& shape) : n(norm), lanes(shape.lanes), rows(shape.rows) {
    lane = threadIdx.x % lanes;
    row = threadIdx.x / lanes;
    const int64_t tiles = (shape.vectors + lanes - 1) / lanes;
    chunk = blockIdx.x / tiles;
    vector = blockIdx.x % tiles * lanes + lane;
    inside = vector < shape.vectors;
    begin = chunk * kLongChunk;
    end = shape.chunks == 1 ? n.n : min(n.n, begin + kLongChunk);
    const int64_t across = n.inner / V, outer = vector / across;
    first = outer * n.n * n.inner + (vector - outer * across) * V;
  }
  __device__ int64_t index(int slot) const { return begin + slot * rows + row; }
  __device__ bool has(int slot) const { return inside && index(slot) < end; }
  __device__ int64_t offset(int slot) const { return first + index(slot) * n.inner; }
  __device__ void load(Pack<T, V> (&packs)[kSlots], const void* from) const {
    const T* p = static_cast<const T*>(from) + offset(0);
#pragma unroll
    for (int k = 0; k < kSlots; ++k, p += rows * n.inner) {
      if (has(k)) packs[k] = Pack<T, V>::load(p);
    }
  }
};

// Sums over the rows of the block in a binary tree, in halves; every row holds them. `shared` has room for a float a
// thread and element of a vector.
template <int V>
__device__ inline void rows_sum(float (&sums)[V], float* shared, int lanes, int rows) {
  constexpr int last = 8;  // rows that one thread adds up
  const int lane = threadIdx.x % lanes, row = threadIdx.x / lanes;
  Floats<V>* column = reinterpret_cast<Floats<V>*>(shared) + lane;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < V; ++j) column[row * lanes].v[j] = sums[j];
  __syncthreads();
  const int threads = rows;
  for (; rows > last; rows /= 2) {
    if (row < rows / 2) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        float& into = column[row * lanes].v[j];
        into = __fadd_rn(into, column[(row + rows / 2) * lanes].v[j]);
      }
    }
    __syncthreads();
  }
  for (int j = row; j < V; j += threads) {
    float part[last];
#pragma unroll
    for (int r = 0; r < last; ++r) part[r] = r < rows ? column[r * lanes].v[j] : 0.f;
#pragma unroll
    for (int half = last / 2; half > 0; half /= 2) {
#pragma unroll
      for (int r = 0; r < half; ++r) {
        if (half < rows) part[r] = __fadd_rn(part[r], part[r + half]);
      }
    }
    column->v[j] = part[0];
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < V; ++j) sums[j] = column->v[j];
}

struct L1 {
  static constexpr bool weighted = false, centred = false;
  using Factor = Divisor;
  __device__ static float term(float x, float into) { return __fadd_rn(into, fabsf(x)); }
  // What is kept for the backward, from the sum.
  __device__ static float statistic(float sum, const DimNorm& n) { return __fdiv_rn(sum, static_cast<float>(n.n)); }
  // What elements are divided by.
  template <class T>
  __device__ static Factor factor(float mean, const DimNorm& n) {
    return Divisor::of(l1_divisor<T>(mean, n.eps, n.minimum));
  }
  template <bool Fast>
  __device__ static float apply(float x, const Factor& divisor, float, float = 0.f) {
    return divisor.divide<Fast>(x);
  }

  // With d the divisor, m = mean|x| and s = sum(dy x / d): dx = dy / d - sign(x) s / (n d), the second term only where d
  // follows m.
  template <class T>
  __device__ static float shared_term(float s, float mean, const Factor& divisor, const DimNorm& n) {
    return l1_follows<T>(mean, n.minimum) ? s / static_cast<float>(n.n) / divisor.value : 0.f;
  }
  template <bool Fast>
  __device__ static float gradient(float x, float dy, const Factor& divisor, float, float shared) {
    const float sign = x > 0.f ? 1.f : x < 0.f ? -1.f : 0.f;
    return fmaf(-sign, shared, divisor.divide<Fast>(dy));
  }
};

struct L2 {
  static constexpr bool weighted = false, centred = false;
  using Factor = Divisor;
  __device__ static float term(float x, float into) { return fmaf(x, x, into); }
  __device__ static float statistic(float sum, const DimNorm&) { return __fsqrt_rn(sum); }
  template <class T>
  __device__ static Factor factor(float norm, const DimNorm& n) {
    return Divisor::of(l2_divisor<T>(norm, n.eps));
  }
  template <bool Fast>
  __device__ static float apply(float x, const Factor& divisor, float, float) {
    return divisor.divide<Fast>(x);
  }
};

struct Multiplier {
  float value;
  __device__ bool fast() const { return true; }
};

struct RMS {
  static constexpr bool weighted = true, centred = false;
  using Factor = Multiplier;
  __device__ static float term(float x, float into) { return fmaf(x, x, into); }
  __device__ static float statistic(float sum, const DimNorm& n) {
    const float mean = Divisor::of(static_cast<float>(n.n)).mean_of(sum);
    return rsqrtf(__fadd_rn(mean, static_cast<float>(n.eps)));
  }
  // What elements are multiplied with.
  template <class T>
  __device__ static Factor factor(float rstd, const DimNorm&) {
    return {rstd};
  }
  template <bool Fast>
  __device__ static float apply(float x, const Factor& rstd, float w, float = 0.f) {
    return x * rstd.value * w;
  }

  // With s = sum(dy w x rstd): dx = rstd dy w - x rstd s rstd / n.
  template <class T>
  __device__ static float shared_term(float s, float, const Factor& rstd, const DimNorm& n) {
    return s / static_cast<float>(n.n) * rstd.value;
  }
  template <bool Fast>
  __device__ static float gradient(float x, float dy, const Factor& rstd, float w, float shared) {
    return fmaf(-x * rstd.value, shared, dy * w * rstd.value);
  }
};

// Centred: the sum is of squared differences from the mean.
struct LayerNorm {
  static constexpr bool weighted = true, centred = true;
  using Factor = Multiplier;
  __device__ static float statistic(float sum, const DimNorm& n) { return RMS::statistic(sum, n); }
  template <class T>
  __device__ static Factor factor(float rstd, const DimNorm&) {
    return {rstd};
  }
  template <bool Fast>
  __device__ static float apply(float centred, const Factor& rstd, float w, float b) {
    return fmaf(__fmul_rn(centred, rstd.value), w, b);
  }
};

// True when the fast formulas are as good for all of them.
template <int V, class Factor>
__device__ inline bool all_fast(const Factor (&factor)[V]) {
  bool fast = true;
#pragma unroll
  for (int j = 0; j < V; ++j) fast = fast && factor[j].fast();
  return fast;
}

// How launches cut a block, of `V` positions a vector.
struct Launched {
  Shape shape;
  dim3 grid;
  int threads;
  size_t bytes;
};

// Returns false where there are too many blocks.
inline bool cut_blocks(const DimNorm& n, int V, Launched* l) {
  l->shape = shape_of(n, V);
  l->threads = l->shape.lanes * l->shape.rows;
  l->bytes = sizeof(float) * l->threads * V;
  const int64_t blocks = ceil_div(l->shape.vectors, l->shape.lanes) * l->shape.chunks;
  l->grid = dim3(static_cast<unsigned>(blocks));
  return blocks <= 0x7fffffff;
}

template <class Launch, class T, int V>
cudaError_t launch_vec(const DimNorm& n, cudaStream_t stream) {
  Launched l;
  if (!cut_blocks(n, V, &l)) return cudaErrorInvalidConfiguration;
  Launch::template run<T, V>(n, l, stream);
  return cudaGetLastError();
}

template <class Launch, int V>
cudaError_t launch_dtype(const DimNorm& n, cudaStream_t stream) {
  switch (n.dtype) {
    case DType::f32: return launch_vec<Launch, float, V>(n, stream);
    case DType::f16: return launch_vec<Launch, Half, V>(n, stream);
    default: return launch_vec<Launch, BFloat16, V>(n, stream);
  }
}

// Launch::run<T, V>, for the dtype and the vector.
template <class Launch>
cudaError_t launch(const DimNorm& n, cudaStream_t stream) {
  return vec_of(n) == 1 ? launch_dtype<Launch, 1>(n, stream) : launch_dtype<Launch, kVec>(n, stream);
}

}  // namespace
}  // namespace normswap
