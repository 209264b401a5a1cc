// l1_norm, l2_norm, rms_norm and layer_norm along a dimension that is not the last: x is (outer, n, inner), every (outer, inner) position is
// normalised over n. A thread owns one vector of positions and every R-th index along n, which it keeps in registers;
// the R threads of a vector meet in shared memory. The order of a sum is a function of n alone.
#include "vec.cuh"

namespace normswap {
namespace {

constexpr int kSlots = 8;            // indices a thread holds
constexpr int kMaxLanes = 32;        // vectors of positions a block holds
constexpr int kMinLanes = 8;
constexpr int kThreads = 256;        // of a block, unless n needs more
constexpr int kMaxWhole = 512;       // a longer n is cut into chunks of kLongChunk and the input is read twice
constexpr int kLongChunk = 256;

// How a block is cut: `lanes` vectors of positions by `rows` threads along n.
struct Shape {
  int lanes, rows;
  int64_t chunks, vectors;  // along n; vectors of positions in all
};

Shape shape_of(const DimNorm& n, int vec) {
  Shape s{};
  const int64_t length = n.n <= kMaxWhole ? n.n : kLongChunk;
  s.rows = 1;
  while (s.rows * kSlots < length) s.rows *= 2;
  s.lanes = kThreads / s.rows;
  s.lanes = s.lanes > kMaxLanes ? kMaxLanes : s.lanes < kMinLanes ? kMinLanes : s.lanes;
  s.chunks = n.n <= kMaxWhole ? 1 : ceil_div(n.n, kLongChunk);
  s.vectors = n.outer * (n.inner / vec);
  return s;
}

// The widest vector that divides `inner` and the addresses.
template <class T>
int vec_of(const DimNorm& n) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(n.x) | reinterpret_cast<uintptr_t>(n.y) |
                              reinterpret_cast<uintptr_t>(n.dy);
  constexpr int full = 16 / sizeof(T);
  if (n.inner % full == 0 && addresses % 16 == 0) return full;
  return sizeof(T) == 2 && n.inner % 2 == 0 && addresses % 4 == 0 ? 2 : 1;
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
    return rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(n.n)), static_cast<float>(n.eps)));
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

// This thread's share of the sums of term(x, sum so far, j). The packs hold x; j: of a vector's elements.
template <class T, int V, class Term>
__device__ inline void partial_sums(const Place<T, V>& place, Pack<T, V> (&packs)[kSlots], float (&sums)[V], Term term) {
#pragma unroll
  for (int j = 0; j < V; ++j) sums[j] = 0.f;
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    if (place.has(k)) {
#pragma unroll
      for (int j = 0; j < V; ++j) sums[j] = term(to_float(packs[k].v[j]), sums[j], j);
    }
    packs[k].forget();
  }
}

// A position's sum over n or a chunk, and the mean it is about, which is 0 unless Policy::centred.
template <int V>
struct Sums {
  float mean[V], sum[V];
};

// Of what the block holds, `length` elements; every thread holds them.
template <class Policy, class T, int V>
__device__ inline void block_sums(const Place<T, V>& place, Pack<T, V> (&packs)[kSlots], float* shared, int64_t length,
                                  Sums<V>& of) {
#pragma unroll
  for (int j = 0; j < V; ++j) of.mean[j] = 0.f;
  if constexpr (Policy::centred) {
    partial_sums(place, packs, of.mean, [](float x, float into, int) { return __fadd_rn(into, x); });
    rows_sum(of.mean, shared, place.lanes, place.rows);
#pragma unroll
    for (int j = 0; j < V; ++j) of.mean[j] = __fdiv_rn(of.mean[j], static_cast<float>(length));
    partial_sums(place, packs, of.sum, [&](float x, float into, int j) {
      const float d = __fsub_rn(x, of.mean[j]);
      return fmaf(d, d, into);
    });
  } else {
    partial_sums(place, packs, of.sum, [](float x, float into, int) { return Policy::term(x, into); });
  }
  rows_sum(of.sum, shared, place.lanes, place.rows);
}

// Element i of a vector, whatever its dtype: by loads that no branch keeps apart.
__device__ inline float loaded_parameter(const ChannelVector& vector, int64_t i, float absent) {
  const bool there = vector.data != nullptr, whole = vector.dtype == DType::f32;
  unsigned word = 0;
  load_if(there && whole, word, static_cast<const float*>(vector.data) + i);
  load_half_if(there && !whole, word, static_cast<const unsigned short*>(vector.data) + i);
  const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
  const float value = __uint_as_float(whole ? word : word << 16);
  return !there ? absent : vector.dtype == DType::f16 ? half : value;
}

// LayerNorm's weight and bias of a thread's indices, loaded with x.
template <bool Present>
struct WeightAndBias {
  float weight[kSlots], bias[kSlots];
  template <class Place>
  __device__ void load(const Place& place) {
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const int64_t i = min(place.index(k), place.end - 1);
      weight[k] = loaded_parameter(place.n.weight, i, 1.f);
      bias[k] = loaded_parameter(place.n.bias, i, 0.f);
    }
  }
};
template <>
struct WeightAndBias<false> {
  template <class Place>
  __device__ void load(const Place&) {}
};

template <class Policy, bool Fast, bool Weighted, class T, int V>
__device__ inline void store_normalised(const Place<T, V>& place, const Pack<T, V> (&packs)[kSlots], const Sums<V>& of,
                                        const typename Policy::Factor (&factor)[V],
                                        const WeightAndBias<Policy::centred && Weighted>& affine) {
  const DimNorm& n = place.n;
  T* y = static_cast<T*>(n.y) + place.offset(0);
#pragma unroll
  for (int k = 0; k < kSlots; ++k, y += place.rows * n.inner) {
    if (!place.has(k)) continue;
    float w = 1.f, b = 0.f;
    if constexpr (Policy::centred && Weighted) {
      w = affine.weight[k];
      b = affine.bias[k];
    } else if constexpr (Weighted) {
      w = channel_value(n.weight, place.index(k), 1.f);
    }
    float out[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float x = to_float(packs[k].v[j]);
      out[j] = Policy::template apply<Fast>(Policy::centred ? __fsub_rn(x, of.mean[j]) : x, factor[j], w, b);
    }
    Pack<T, V>::of(out).store(y);
  }
}

template <class Policy, bool Weighted, class T, int V>
__device__ inline void finish(const Place<T, V>& place, const Pack<T, V> (&packs)[kSlots], const Sums<V>& of,
                              const WeightAndBias<Policy::centred && Weighted>& affine) {
  const DimNorm& n = place.n;
  typename Policy::Factor factor[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float statistic = Policy::statistic(of.sum[j], n);
    factor[j] = Policy::template factor<T>(statistic, n);
    if (place.inside && place.row == 0 && place.begin == 0) {
      if (n.statistic != nullptr) n.statistic[place.vector * V + j] = statistic;
      if (Policy::centred && n.mean != nullptr) n.mean[place.vector * V + j] = of.mean[j];
    }
  }
  if (all_fast(factor)) {
    store_normalised<Policy, true, Weighted>(place, packs, of, factor, affine);
  } else {
    store_normalised<Policy, false, Weighted>(place, packs, of, factor, affine);
  }
}

// n in one chunk: read once, normalised from registers. Without weights these suffice for two of the largest blocks.
template <class Policy, bool Weighted, class T, int V>
__global__ void __launch_bounds__(512, Weighted || Policy::centred ? 1 : 2) dim_whole(const DimNorm n, const Shape shape) {
  extern __shared__ float shared[];
  const Place<T, V> place(n, shape);
  Pack<T, V> packs[kSlots];
  Sums<V> of;
  WeightAndBias<Policy::centred && Weighted> affine;
  place.load(packs, n.x);
  affine.load(place);
  block_sums<Policy>(place, packs, shared, n.n, of);
  finish<Policy, Weighted>(place, packs, of, affine);
}

// Otherwise the sums of every chunk first, (chunks, positions) in the workspace, and behind them the means ...
template <int V>
__device__ inline float* partial_of(const DimNorm& n, const Shape& shape, int64_t chunk, int64_t vector, bool mean) {
  return static_cast<float*>(n.workspace) + (((mean ? shape.chunks : 0) + chunk) * shape.vectors + vector) * V;
}

template <class Policy, class T, int V>
__global__ void __launch_bounds__(512) dim_partial(const DimNorm n, const Shape shape) {
  extern __shared__ float shared[];
  const Place<T, V> place(n, shape);
  Pack<T, V> packs[kSlots];
  Sums<V> of;
  place.load(packs, n.x);
  block_sums<Policy>(place, packs, shared, place.end - place.begin, of);
  if (!place.inside || place.row != 0) return;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    partial_of<V>(n, shape, place.chunk, place.vector, false)[j] = of.sum[j];
    if (Policy::centred) partial_of<V>(n, shape, place.chunk, place.vector, true)[j] = of.mean[j];
  }
}

// Sums of term(chunk, j, sum so far) over the chunks of this block's positions: in turn to a thread, then the tree.
template <class T, int V, class Term>
__device__ inline void over_chunks(const Place<T, V>& place, const Shape& shape, float* shared, float (&sums)[V], Term term) {
#pragma unroll
  for (int j = 0; j < V; ++j) sums[j] = 0.f;
  if (place.inside) {
    for (int64_t chunk = place.row; chunk < shape.chunks; chunk += shape.rows) {
#pragma unroll
      for (int j = 0; j < V; ++j) sums[j] = term(chunk, j, sums[j]);
    }
  }
  rows_sum(sums, shared, shape.lanes, shape.rows);
}

// ... which every block then unites for its positions, means as Chan's formula does.
template <class Policy, class T, int V>
__global__ void __launch_bounds__(512) dim_apply(const DimNorm n, const Shape shape) {
  extern __shared__ float shared[];
  const Place<T, V> place(n, shape);
  Pack<T, V> packs[kSlots];
  Sums<V> of{};
  WeightAndBias<Policy::centred> affine;
  place.load(packs, n.x);
  affine.load(place);
  const auto sum_of = [&](int64_t chunk) { return partial_of<V>(n, shape, chunk, place.vector, false); };
  if constexpr (Policy::centred) {
    const auto mean_of = [&](int64_t chunk) { return partial_of<V>(n, shape, chunk, place.vector, true); };
    const auto length = [&](int64_t chunk) { return static_cast<float>(min(n.n - chunk * kLongChunk, int64_t{kLongChunk})); };
    float pivot[V];
#pragma unroll
    for (int j = 0; j < V; ++j) pivot[j] = place.inside ? mean_of(0)[j] : 0.f;
    over_chunks(place, shape, shared, of.mean, [&](int64_t chunk, int j, float into) {
      return fmaf(length(chunk), __fsub_rn(mean_of(chunk)[j], pivot[j]), into);
    });
#pragma unroll
    for (int j = 0; j < V; ++j) of.mean[j] = __fadd_rn(pivot[j], __fdiv_rn(of.mean[j], static_cast<float>(n.n)));
    over_chunks(place, shape, shared, of.sum, [&](int64_t chunk, int j, float into) {
      const float d = __fsub_rn(mean_of(chunk)[j], of.mean[j]);
      return __fadd_rn(into, fmaf(__fmul_rn(length(chunk), d), d, sum_of(chunk)[j]));
    });
  } else {
    over_chunks(place, shape, shared, of.sum,
                [&](int64_t chunk, int j, float into) { return __fadd_rn(into, sum_of(chunk)[j]); });
  }
  finish<Policy, Policy::weighted>(place, packs, of, affine);
}

// sums: of dy w x normalised. Leaves the block's share of the weight's gradient in the workspace, if there is one.
template <class Policy, bool Fast, class T, int V>
__device__ inline void backward_sums(const Place<T, V>& place, int64_t block, Pack<T, V> (&x)[kSlots],
                                     Pack<T, V> (&dy)[kSlots], const typename Policy::Factor (&factor)[V],
                                     float (&sums)[V]) {
  const DimNorm& n = place.n;
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    float of_weight = 0.f;
    if (place.has(k)) {
      const float w = Policy::weighted ? channel_value(n.weight, place.index(k), 1.f) : 1.f;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float normalised = Policy::template apply<Fast>(to_float(x[k].v[j]), factor[j], 1.f);
        const float product = normalised * to_float(dy[k].v[j]);
        sums[j] = fmaf(product, w, sums[j]);
        of_weight += product;
      }
    }
    if constexpr (Policy::weighted) {
      if (n.workspace != nullptr) {
        for (int mask = place.lanes / 2; mask > 0; mask /= 2) of_weight += __shfl_xor_sync(0xffffffffu, of_weight, mask);
        if (place.lane == 0 && place.index(k) < place.end) {
          static_cast<float*>(n.workspace)[block * n.n + place.index(k)] = of_weight;
        }
      }
    }
    x[k].forget();
    dy[k].forget();
  }
}

template <class Policy, bool Fast, class T, int V>
__device__ inline void store_gradient(const Place<T, V>& place, const Pack<T, V> (&x)[kSlots],
                                      const Pack<T, V> (&dy)[kSlots], const typename Policy::Factor (&factor)[V],
                                      const float (&shared)[V]) {
  const DimNorm& n = place.n;
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    if (!place.has(k)) continue;
    const float w = Policy::weighted ? channel_value(n.weight, place.index(k), 1.f) : 1.f;
    float out[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      out[j] =
          Policy::template gradient<Fast>(to_float(x[k].v[j]), to_float(dy[k].v[j]), factor[j], w, shared[j]);
    }
    Pack<T, V>::of(out).store(static_cast<T*>(n.y) + place.offset(k));
  }
}

template <class Policy, class T, int V>
__global__ void __launch_bounds__(512) dim_backward(const DimNorm n, const Shape shape) {
  extern __shared__ float shared[];
  const Place<T, V> place(n, shape);
  Pack<T, V> x[kSlots], dy[kSlots];
  place.load(x, n.x);
  place.load(dy, n.dy);
  float sums[V] = {}, statistic[V];
  typename Policy::Factor factor[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    statistic[j] = place.inside ? n.statistic[place.vector * V + j] : 1.f;
    factor[j] = Policy::template factor<T>(statistic[j], n);
  }
  const bool fast = __all_sync(0xffffffffu, all_fast(factor));  // the sums are taken by whole warps
  if (fast) {
    backward_sums<Policy, true>(place, blockIdx.x, x, dy, factor, sums);
  } else {
    backward_sums<Policy, false>(place, blockIdx.x, x, dy, factor, sums);
  }
  rows_sum(sums, shared, shape.lanes, shape.rows);
#pragma unroll
  for (int j = 0; j < V; ++j) sums[j] = Policy::template shared_term<T>(sums[j], statistic[j], factor[j], n);
  if (fast) {
    store_gradient<Policy, true>(place, x, dy, factor, sums);
  } else {
    store_gradient<Policy, false>(place, x, dy, factor, sums);
  }
}

// --- launch ------------------------------------------------------------------------------------------------------

template <class Policy, class T, int V, bool Backward>
cudaError_t launch_vec(const DimNorm& n, cudaStream_t stream) {
  const Shape shape = shape_of(n, V);
  const int threads = shape.lanes * shape.rows;
  const size_t bytes = sizeof(float) * threads * V;
  const int64_t blocks = ceil_div(shape.vectors, shape.lanes) * shape.chunks;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks));
  if constexpr (Backward) {
    dim_backward<Policy, T, V><<<grid, threads, bytes, stream>>>(n, shape);
  } else if (shape.chunks == 1) {
    if (Policy::weighted && (n.weight.data != nullptr || n.bias.data != nullptr)) {
      dim_whole<Policy, Policy::weighted, T, V><<<grid, threads, bytes, stream>>>(n, shape);
    } else {
      dim_whole<Policy, false, T, V><<<grid, threads, bytes, stream>>>(n, shape);
    }
  } else {
    dim_partial<Policy, T, V><<<grid, threads, bytes, stream>>>(n, shape);
    dim_apply<Policy, T, V><<<grid, threads, bytes, stream>>>(n, shape);
  }
  return cudaGetLastError();
}

template <class Policy, class T, bool Backward>
cudaError_t launch_dtype(const DimNorm& n, cudaStream_t stream) {
  const int vec = vec_of<T>(n);
  if (vec == 1) return launch_vec<Policy, T, 1, Backward>(n, stream);
  if constexpr (sizeof(T) == 2) {
    if (vec == 2) return launch_vec<Policy, T, 2, Backward>(n, stream);
  }
  return launch_vec<Policy, T, 16 / sizeof(T), Backward>(n, stream);
}

template <class Policy, bool Backward>
cudaError_t launch(const DimNorm& n, cudaStream_t stream) {
  switch (n.dtype) {
    case DType::f32: return launch_dtype<Policy, float, Backward>(n, stream);
    case DType::f16: return launch_dtype<Policy, __half, Backward>(n, stream);
    default: return launch_dtype<Policy, __nv_bfloat16, Backward>(n, stream);
  }
}

int vec_of_dtype(const DimNorm& n) { return n.dtype == DType::f32 ? vec_of<float>(n) : vec_of<__half>(n); }

}  // namespace

int64_t dim_workspace_bytes(const DimNorm& n, int values) {
  const int64_t chunks = shape_of(n, vec_of_dtype(n)).chunks;
  return chunks == 1 ? 0 : values * chunks * n.outer * n.inner * static_cast<int64_t>(sizeof(float));
}

int64_t dim_weight_rows(const DimNorm& n) {
  const Shape shape = shape_of(n, vec_of_dtype(n));
  return ceil_div(shape.vectors, shape.lanes);
}

cudaError_t l1_norm_dim(const DimNorm& n, cudaStream_t stream) { return launch<L1, false>(n, stream); }
cudaError_t rms_norm_dim(const DimNorm& n, cudaStream_t stream) { return launch<RMS, false>(n, stream); }
cudaError_t l2_norm_dim(const DimNorm& n, cudaStream_t stream) { return launch<L2, false>(n, stream); }
cudaError_t layer_norm_dim(const DimNorm& n, cudaStream_t stream) { return launch<LayerNorm, false>(n, stream); }
cudaError_t l1_norm_dim_backward(const DimNorm& n, cudaStream_t stream) { return launch<L1, true>(n, stream); }
cudaError_t rms_norm_dim_backward(const DimNorm& n, cudaStream_t stream) { return launch<RMS, true>(n, stream); }

}  // namespace normswap
