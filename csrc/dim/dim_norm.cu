// l1_norm, l2_norm, rms_norm and layer_norm along a dimension that is not the last (dim.cuh).
#include "dim/dim.cuh"

namespace normswap {
namespace {

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
    for (int j = 0; j < V; ++j) of.mean[j] = Divisor::of(static_cast<float>(length)).divide<true>(of.mean[j]);
    partial_sums(place, packs, of.sum, [&](float x, float into, int j) {
      const float d = __fsub_rn(x, of.mean[j]);
      return fmaf(d, d, into);
    });
  } else {
    partial_sums(place, packs, of.sum, [](float x, float into, int) { return Policy::term(x, into); });
  }
  rows_sum(of.sum, shared, place.lanes, place.rows);
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

// How many of the largest blocks a multiprocessor's registers are to hold.
template <class Policy, bool Weighted, class T>
constexpr int kWholeBlocks = sizeof(T) == 4 && (Weighted || Policy::centred) ? 1 : 2;

// n in one chunk: read once, normalised from registers.
template <class Policy, bool Weighted, class T, int V>
__global__ void __launch_bounds__(512, kWholeBlocks<Policy, Weighted, T>) dim_whole(const DimNorm n, const Shape shape) {
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

template <class Policy>
struct Forward {
  template <class T, int V>
  static void run(const DimNorm& n, const Launched& l, cudaStream_t stream) {
    if (l.shape.chunks > 1) {
      dim_partial<Policy, T, V><<<l.grid, l.threads, l.bytes, stream>>>(n, l.shape);
      dim_apply<Policy, T, V><<<l.grid, l.threads, l.bytes, stream>>>(n, l.shape);
    } else if (Policy::weighted && (n.weight.data != nullptr || n.bias.data != nullptr)) {
      dim_whole<Policy, Policy::weighted, T, V><<<l.grid, l.threads, l.bytes, stream>>>(n, l.shape);
    } else {
      dim_whole<Policy, false, T, V><<<l.grid, l.threads, l.bytes, stream>>>(n, l.shape);
    }
  }
};

}  // namespace

int64_t dim_workspace_bytes(const DimNorm& n, int values) {
  const int64_t chunks = shape_of(n, vec_of(n)).chunks;
  return chunks == 1 ? 0 : values * chunks * n.outer * n.inner * static_cast<int64_t>(sizeof(float));
}

cudaError_t l1_norm_dim(const DimNorm& n, cudaStream_t stream) { return launch<Forward<L1>>(n, stream); }
cudaError_t l2_norm_dim(const DimNorm& n, cudaStream_t stream) { return launch<Forward<L2>>(n, stream); }
cudaError_t rms_norm_dim(const DimNorm& n, cudaStream_t stream) { return launch<Forward<RMS>>(n, stream); }
cudaError_t layer_norm_dim(const DimNorm& n, cudaStream_t stream) { return launch<Forward<LayerNorm>>(n, stream); }

}  // namespace normswap
