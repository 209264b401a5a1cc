// The row engine: LayerNorm, RMSNorm, L1 norm and GroupNorm (contiguous) are this file and a policy.
//
// A policy names a statistic (Moments or Sum), how a chunk's is taken, what a row makes of it (RowValues) and how an
// element is normalised. row_plan.h says how rows are cut; the kernels below are the regimes:
//   row_small    subwarp, warp: a row is one chunk, several rows a block
//   row_block    block, cluster: a warp holds a chunk in registers, statistics meet in shared memory
//   row_partial, row_merge, row_apply    split: rows no cluster holds; the input is read twice
#pragma once

#include <cooperative_groups.h>

#include "reduce.cuh"
#include "vec.cuh"

namespace normswap {
namespace {

struct RowValues {
  float mean, rstd;
};

// What the kernels take: RowNorm without the host's side of it, plus how rows are cut.
struct RowArgs {
  RowNorm n;
  int64_t chunks, blocks_a_row;
  int chunk_len;
};

// A chunk in registers. Vector k of a lane is vector k * Lanes + lane of the chunk; `len` is a multiple of V.
template <class T, int V, int Lanes, int Slots>
struct Tile {
  Pack<T, V> packs[Slots];

  __device__ static int offset(int k) { return (k * Lanes + static_cast<int>(threadIdx.x) % Lanes) * V; }

  __device__ void load(const T* chunk, int len) {
#pragma unroll
    for (int k = 0; k < Slots; ++k) {
      if (offset(k) < len) packs[k] = Pack<T, V>::load(chunk + offset(k));
    }
  }

  // Sum of term(x) over the chunk, in an order fixed by element index; every lane of the chunk holds it.
  template <class Term>
  __device__ float sum(int len, Term term) const {
    float partial[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int k = 0; k < Slots; ++k) {
      if (offset(k) < len) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          float& into = partial[(k * V + j) % 4];
          into = term(to_float(packs[k].v[j]), into);
        }
      }
    }
    return lanes_sum<Lanes>(__fadd_rn(__fadd_rn(partial[0], partial[1]), __fadd_rn(partial[2], partial[3])));
  }
};

// --- policies ----------------------------------------------------------------------------------------------------

// y = (x - mean) rstd w + b, rstd = 1 / sqrt(var + eps), biased variance by two passes over the chunk on chip.
struct Centred {
  using Stat = Moments;
  template <class Tile>
  __device__ static Stat statistic(const Tile& tile, int len) {
    if (len <= 0) return {0.f, 0.f, 0.f};
    const float n = static_cast<float>(len);
    const float mean = __fdiv_rn(tile.sum(len, [](float x, float into) { return __fadd_rn(into, x); }), n);
    const float m2 = tile.sum(len, [mean](float x, float into) {
      const float d = __fsub_rn(x, mean);
      return fmaf(d, d, into);
    });
    return {mean, m2, n};
  }
  template <class T>
  __device__ static RowValues finish(const Stat& s, const RowNorm& n) {
    return {s.mean, rsqrtf(__fadd_rn(__fdiv_rn(s.m2, static_cast<float>(n.cols)), static_cast<float>(n.eps)))};
  }
  __device__ static float apply(float x, RowValues row, float w, float b) {
    return fmaf(__fmul_rn(__fsub_rn(x, row.mean), row.rstd), w, b);
  }
};

struct LayerNormPolicy : Centred {
  static constexpr bool affine_by_channel = false, has_affine = true;
};

struct GroupNormPolicy : Centred {
  static constexpr bool affine_by_channel = true, has_affine = true;
};

// y = x rstd w, rstd = 1 / sqrt(mean(x^2) + eps).
struct RMSNormPolicy {
  using Stat = Sum;
  static constexpr bool affine_by_channel = false, has_affine = true;
  template <class Tile>
  __device__ static Stat statistic(const Tile& tile, int len) {
    return {tile.sum(len, [](float x, float into) { return fmaf(x, x, into); })};
  }
  template <class T>
  __device__ static RowValues finish(const Stat& s, const RowNorm& n) {
    return {0.f, rsqrtf(__fadd_rn(__fdiv_rn(s.sum, static_cast<float>(n.cols)), static_cast<float>(n.eps)))};
  }
  __device__ static float apply(float x, RowValues row, float w, float) {
    return __fmul_rn(__fmul_rn(x, row.rstd), w);
  }
};

// y = x / mean|x|, the mean rounded to x's dtype first, as torch.mean returns it.
struct L1NormPolicy {
  using Stat = Sum;
  static constexpr bool affine_by_channel = false, has_affine = false;
  template <class Tile>
  __device__ static Stat statistic(const Tile& tile, int len) {
    return {tile.sum(len, [](float x, float into) { return __fadd_rn(into, fabsf(x)); })};
  }
  template <class T>
  __device__ static RowValues finish(const Stat& s, const RowNorm& n) {
    return {to_float(from_float<T>(__fdiv_rn(s.sum, static_cast<float>(n.cols)))), 0.f};
  }
  __device__ static float apply(float x, RowValues row, float, float) { return __fdiv_rn(x, row.mean); }
};

// --- affine parameters -------------------------------------------------------------------------------------------

template <class W, int V>
__device__ inline Floats<V> affine_pack(const void* data, int64_t at, float absent) {
  Floats<V> out;
  if (data == nullptr) {
#pragma unroll
    for (int j = 0; j < V; ++j) out.v[j] = absent;
    return out;
  }
  // Float weights of 16-bit rows come in pieces of at most 16 bytes.
  constexpr int piece = V * sizeof(W) > 16 ? static_cast<int>(16 / sizeof(W)) : V;
#pragma unroll
  for (int i = 0; i < V; i += piece) {
    const auto raw = Pack<W, piece>::load_cached(static_cast<const W*>(data) + at + i);
#pragma unroll
    for (int j = 0; j < piece; ++j) out.v[i + j] = to_float(raw.v[j]);
  }
  return out;
}

// One value an element of the row.
template <class W, int V>
struct AffineByElement {
  const RowArgs& args;
  int64_t begin;
  __device__ AffineByElement(const RowArgs& a, int64_t, int64_t chunk_begin, int) : args(a), begin(chunk_begin) {}
  __device__ void operator()(int offset, Floats<V>& w, Floats<V>& b) const {
    w = affine_pack<W, V>(args.n.weight, begin + offset, 1.f);
    b = affine_pack<W, V>(args.n.bias, begin + offset, 0.f);
  }
};

// One value a channel: element e of row r belongs to channel (r % groups) * channels_per_group + e / spatial.
template <class W, int V>
struct AffineByChannel {
  const RowArgs& args;
  int64_t channel;     // of the chunk's first element
  unsigned remainder;  // of it within the channel
  unsigned spatial;
  bool one_channel;  // the whole chunk lies in it
  float w0, b0;

  __device__ AffineByChannel(const RowArgs& a, int64_t row, int64_t chunk_begin, int len) : args(a) {
    const int64_t within = chunk_begin / a.n.spatial;
    channel = (row % a.n.num_groups) * a.n.channels_per_group + within;
    remainder = static_cast<unsigned>(chunk_begin - within * a.n.spatial);
    spatial = static_cast<unsigned>(a.n.spatial);
    one_channel = static_cast<int64_t>(remainder) + len <= a.n.spatial;
    w0 = value(a.n.weight, channel, 1.f);
    b0 = value(a.n.bias, channel, 0.f);
  }
  __device__ static float value(const void* data, int64_t at, float absent) {
    return data == nullptr ? absent : to_float(static_cast<const W*>(data)[at]);
  }
  __device__ void operator()(int offset, Floats<V>& w, Floats<V>& b) const {
    float wc = w0, bc = b0;
    unsigned rest = 0, c = 0;
    if (!one_channel) {
      c = (remainder + offset) / spatial;
      rest = (remainder + offset) - c * spatial;
      wc = value(args.n.weight, channel + c, 1.f);
      bc = value(args.n.bias, channel + c, 0.f);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (!one_channel && rest == spatial) {
        rest = 0;
        ++c;
        wc = value(args.n.weight, channel + c, 1.f);
        bc = value(args.n.bias, channel + c, 0.f);
      }
      w.v[j] = wc;
      b.v[j] = bc;
      ++rest;
    }
  }
};

template <class Policy, class W, int V>
struct AffineOf {
  using type = AffineByElement<W, V>;
};
template <class W, int V>
struct AffineOf<GroupNormPolicy, W, V> {
  using type = AffineByChannel<W, V>;
};

// Normalise one vector; the same instructions in every regime.
template <class Policy, class T, int V, class Affine>
__device__ inline void apply_pack(const Pack<T, V>& x, int offset, RowValues row, const Affine& affine, T* y) {
  Floats<V> w, b;
  if constexpr (Policy::has_affine) affine(offset, w, b);
  Pack<T, V> out;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float value = Policy::apply(to_float(x.v[j]), row, Policy::has_affine ? w.v[j] : 1.f,
                                      Policy::has_affine ? b.v[j] : 0.f);
    out.v[j] = from_float<T>(value);
  }
  out.store(y + offset);
}

template <class Policy, class T, class W, int V, class Tile>
__device__ inline void apply_tile(const Tile& tile, const RowArgs& args, int64_t row, int64_t begin, int len,
                                  RowValues values) {
  if (len <= 0) return;
  const typename AffineOf<Policy, W, V>::type affine(args, row, begin, len);
  T* y = static_cast<T*>(args.n.y) + row * args.n.cols + begin;
#pragma unroll
  for (int k = 0; k < sizeof(tile.packs) / sizeof(tile.packs[0]); ++k) {
    if (Tile::offset(k) < len) {
      apply_pack<Policy, T, V>(tile.packs[k], Tile::offset(k), values, affine, y);
    }
  }
}

__device__ inline void save_values(const RowNorm& n, int64_t row, RowValues values) {
  if (n.mean != nullptr) n.mean[row] = values.mean;
  if (n.rstd != nullptr) n.rstd[row] = values.rstd;
}

// --- kernels -----------------------------------------------------------------------------------------------------

template <class T, int V>
constexpr int kSlots = 32 / (V * static_cast<int>(sizeof(T)) < 4 ? 1 : V * static_cast<int>(sizeof(T)) / 4);

template <class Policy, class T, class W, int V, int Lanes>
__global__ void __launch_bounds__(kWarpsSmall * 32) row_small(const RowArgs args) {
  using RowTile = Tile<T, V, Lanes, Lanes == 8 ? kSlots<T, V> / 2 : kSlots<T, V>>;
  const int64_t row = blockIdx.x * static_cast<int64_t>(blockDim.x / Lanes) + threadIdx.x / Lanes;
  const int len = row < args.n.rows ? static_cast<int>(args.n.cols) : 0;
  RowTile tile;
  tile.load(static_cast<const T*>(args.n.x) + row * args.n.cols, len);
  const RowValues values = Policy::template finish<T>(Policy::statistic(tile, len), args.n);
  if (len > 0 && threadIdx.x % Lanes == 0) save_values(args.n, row, values);
  apply_tile<Policy, T, W, V>(tile, args, row, 0, len, values);
}

template <class Policy, class T, class W, int V, bool Cluster>
__global__ void __launch_bounds__(kMaxWarpsBlock * 32) row_block(const RowArgs args) {
#if __CUDA_ARCH__ < 900
  if constexpr (Cluster) return;  // never launched: row_plan gives clusters to sm_90 and newer only
#endif
  using Stat = typename Policy::Stat;
  __shared__ Stat parts[kWarpsCluster * kMaxCluster];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int blocks = 1, rank = 0;
#if __CUDA_ARCH__ >= 900
  if constexpr (Cluster) {
    const auto cluster = cooperative_groups::this_cluster();
    blocks = cluster.num_blocks();
    rank = cluster.block_rank();
    cooperative_groups::cluster_group::barrier_arrive();  // waited for below, once the loads are under way
  }
#endif
  const int64_t row = blockIdx.x / blocks;
  const int chunk = rank * warps + warp;
  const int64_t begin = static_cast<int64_t>(chunk) * args.chunk_len;
  const int64_t left = args.n.cols - begin;
  const int len = static_cast<int>(left < args.chunk_len ? left : args.chunk_len);

  Tile<T, V, 32, kSlots<T, V>> tile;
  tile.load(static_cast<const T*>(args.n.x) + row * args.n.cols + begin, len);
  const Stat mine = Policy::statistic(tile, len);
  if constexpr (!Cluster) {
    if (lane == 0) parts[chunk] = mine;
    __syncthreads();
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (Cluster) {
    const auto cluster = cooperative_groups::this_cluster();
    cooperative_groups::cluster_group::barrier_wait();  // every block of the cluster runs: its shared memory is there
    if (lane < blocks) *cluster.map_shared_rank(&parts[chunk], lane) = mine;
    cluster.sync();
  }
#endif
  const RowValues values = Policy::template finish<T>(tree_of(parts, warps * blocks), args.n);
  if (chunk == 0 && lane == 0) save_values(args.n, row, values);
  apply_tile<Policy, T, W, V>(tile, args, row, begin, len, values);
}

// Where a block of the split regime works: kWarpsSplit consecutive chunks of one row, a warp each.
struct SplitPlace {
  int64_t row, block, begin;
  int len;
  __device__ SplitPlace(const RowArgs& args, int64_t at) {
    row = at / args.blocks_a_row;
    block = at - row * args.blocks_a_row;
    begin = (block * kWarpsSplit + threadIdx.x / 32) * args.chunk_len;
    const int64_t left = args.n.cols - begin;
    len = static_cast<int>(left < args.chunk_len ? left : args.chunk_len);
  }
};

template <class Stat>
__device__ inline RowValues* split_values(const RowArgs& args) {
  return reinterpret_cast<RowValues*>(static_cast<float*>(args.n.workspace) + 3 * args.n.rows * args.blocks_a_row);
}

template <class Policy, class T, int V>
__global__ void __launch_bounds__(kWarpsSplit * 32) row_partial(const RowArgs args) {
  using Stat = typename Policy::Stat;
  __shared__ Stat parts[kWarpsSplit];
  const SplitPlace place(args, blockIdx.x);
  Tile<T, V, 32, kSlots<T, V>> tile;
  tile.load(static_cast<const T*>(args.n.x) + place.row * args.n.cols + place.begin, place.len);
  const Stat mine = Policy::statistic(tile, place.len);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x < 32) {
    const Stat block = tree_of(parts, kWarpsSplit);
    if (threadIdx.x == 0) static_cast<Stat*>(args.n.workspace)[blockIdx.x] = block;
  }
}

template <class Policy, class T>
__global__ void __launch_bounds__(256) row_merge(const RowArgs args) {
  using Stat = typename Policy::Stat;
  Stat* parts = static_cast<Stat*>(args.n.workspace) + blockIdx.x * args.blocks_a_row;
  tree_in_place(parts, args.blocks_a_row);
  if (threadIdx.x == 0) {
    const RowValues values = Policy::template finish<T>(parts[0], args.n);
    split_values<Stat>(args)[blockIdx.x] = values;
    save_values(args.n, blockIdx.x, values);
  }
}

template <class Policy, class T, class W, int V>
__global__ void __launch_bounds__(kWarpsSplit * 32) row_apply(const RowArgs args) {
  // Backwards: what row_partial read last is still in the L2.
  const SplitPlace place(args, static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x);
  Tile<T, V, 32, kSlots<T, V>> tile;
  tile.load(static_cast<const T*>(args.n.x) + place.row * args.n.cols + place.begin, place.len);
  const RowValues values = split_values<typename Policy::Stat>(args)[place.row];
  apply_tile<Policy, T, W, V>(tile, args, place.row, place.begin, place.len, values);
}

// --- launch ------------------------------------------------------------------------------------------------------

template <class Kernel>
cudaError_t launch_cluster(Kernel kernel, const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = plan.cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.grid));
  config.blockDim = dim3(plan.warps * 32);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <class Policy, class T, class W, int V>
cudaError_t launch_rows(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  const RowArgs args{n, plan.chunks, ceil_div(plan.chunks, kWarpsSplit), plan.chunk_len};
  const dim3 grid(static_cast<unsigned>(plan.grid)), block(plan.warps * 32);
  switch (plan.regime) {
    case Regime::subwarp: row_small<Policy, T, W, V, 8><<<grid, block, 0, stream>>>(args); break;
    case Regime::warp: row_small<Policy, T, W, V, 32><<<grid, block, 0, stream>>>(args); break;
    case Regime::block: row_block<Policy, T, W, V, false><<<grid, block, 0, stream>>>(args); break;
    case Regime::cluster: {
      const cudaError_t error = launch_cluster(row_block<Policy, T, W, V, true>, args, plan, stream);
      if (error != cudaSuccess) return error;
      break;
    }
    default:
      row_partial<Policy, T, V><<<grid, block, 0, stream>>>(args);
      row_merge<Policy, T><<<dim3(static_cast<unsigned>(n.rows)), 256, 0, stream>>>(args);
      row_apply<Policy, T, W, V><<<grid, block, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

template <class Policy, class T, class W>
cudaError_t launch_vec(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  constexpr int full = 16 / static_cast<int>(sizeof(T));
  if (plan.vec == full) return launch_rows<Policy, T, W, full>(n, plan, stream);
  if constexpr (sizeof(T) == 2) {
    if (plan.vec == 2) return launch_rows<Policy, T, W, 2>(n, plan, stream);
  }
  return launch_rows<Policy, T, W, 1>(n, plan, stream);
}

template <class Policy, class T>
cudaError_t launch_weight(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  if constexpr (Policy::has_affine && sizeof(T) == 2) {
    if (n.weight_dtype == DType::f32) return launch_vec<Policy, T, float>(n, plan, stream);
  }
  return launch_vec<Policy, T, T>(n, plan, stream);
}

template <class Policy>
cudaError_t launch(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  switch (n.dtype) {
    case DType::f32: return launch_weight<Policy, float>(n, plan, stream);
    case DType::f16: return launch_weight<Policy, __half>(n, plan, stream);
    default: return launch_weight<Policy, __nv_bfloat16>(n, plan, stream);
  }
}

}  // namespace
}  // namespace normswap
