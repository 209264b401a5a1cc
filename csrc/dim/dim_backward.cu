// The gradients of l1_norm and rms_norm along a dimension that is not the last (dim.cuh).
#include "dim/dim.cuh"

namespace normswap {
namespace {

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

template <class Policy>
struct Backward {
  template <class T, int V>
  static void run(const DimNorm& n, const Launched& l, cudaStream_t stream) {
    dim_backward<Policy, T, V><<<l.grid, l.threads, l.bytes, stream>>>(n, l.shape);
  }
};

}  // namespace

int64_t dim_weight_rows(const DimNorm& n) {
  const Shape shape = shape_of(n, vec_of(n));
  return ceil_div(shape.vectors, shape.lanes);
}

cudaError_t l1_norm_dim_backward(const DimNorm& n, cudaStream_t stream) { return launch<Backward<L1>>(n, stream); }
cudaError_t rms_norm_dim_backward(const DimNorm& n, cudaStream_t stream) { return launch<Backward<RMS>>(n, stream); }

}  // namespace normswap
