// The row engine: LayerNorm, RMSNorm, L1 norm and GroupNorm (contiguous) are this file and a policy (row_policy.cuh).
// row_plan.h says how rows are cut; the kernels below are the regimes:
//   row_small    subwarp, warp: a row is one chunk, several rows a block
//   row_block    block, cluster: a warp holds a chunk in registers, statistics meet in shared memory
//   row_team     team: the blocks that hold a row meet at a barrier in device memory; persistent, several teams at once
//   row_partial, row_merge, row_apply    split: for rows and GPUs none of these serves; the input is read twice
#pragma once

#include <cooperative_groups.h>

#include "row_policy.cuh"

namespace normswap {
namespace {

// Normalise and store the chunk from `begin` on of several rows at once. All lanes of the warp must call.
template <class Policy, class T, class W, class Tile, int Rows>
__device__ inline void apply_tiles(const Tile (&tiles)[Rows], const RowArgs& args, const int64_t (&rows)[Rows],
                                   int64_t begin, const RowValues (&values)[Rows]) {
  constexpr int V = Tile::V;
  using Affine = typename AffineOf<Policy, W, V, Tile::Ragged>::type;
  Floats<V> w, b;
  const auto normalised = [&](int r, int k) {
    float out[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      out[j] = Policy::template apply<T>(to_float(tiles[r].packs[k].v[j]), values[r], Policy::has_affine ? w.v[j] : 1.f,
                                         Policy::has_affine ? b.v[j] : 0.f);
    }
    return Tile::Vector::of(out);
  };
  T* y = static_cast<T*>(args.n.y) + begin;
  if constexpr (Affine::same_for_all_rows && !Tile::Ragged) {
    const Affine affine(args, rows[0], begin, tiles[0].len);
#pragma unroll
    for (int k = 0; k < Tile::Slots; ++k) {
      if (Tile::offset(k) < tiles[0].len) affine(Tile::offset(k), w, b);
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        if (Tile::offset(k) < tiles[r].len) normalised(r, k).store(y + rows[r] * args.n.cols + Tile::offset(k));
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      const Affine affine(args, rows[r], begin, tiles[r].len);
      tiles[r].store(y + rows[r] * args.n.cols, [&](int k) {
        if constexpr (Policy::has_affine) {
          if (Tile::offset(k) < tiles[r].len) affine(Tile::offset(k), w, b);
        }
        return normalised(r, k);
      });
    }
  }
}

// The same for one row.
template <class Policy, class T, class W, class Tile>
__device__ inline void apply_tile(const Tile (&tile)[1], const RowArgs& args, int64_t row, int64_t begin,
                                  RowValues values) {
  const int64_t rows[1] = {row};
  const RowValues all[1] = {values};
  apply_tiles<Policy, T, W>(tile, args, rows, begin, all);
}

template <class Policy>
__device__ inline void save_values(const RowNorm& n, int64_t row, const typename Policy::Stat& stat, RowValues values) {
  if (n.mean != nullptr) n.mean[row] = Policy::saved_mean(stat, values, n);
  if (n.rstd != nullptr) n.rstd[row] = values.rstd;
}

// Rows a lane works on at once in row_small, so that enough loads are in flight and weights are fetched once.
template <class Tile>
constexpr int kRowsAtOnce = Tile::Slots * Tile::V >= 32 ? 1 : Tile::Slots * Tile::V > 8 ? 32 / (Tile::Slots * Tile::V) : 4;

template <class T>
constexpr int kChunkSlots = kChunk / 32 / (16 / static_cast<int>(sizeof(T)));

template <class T, bool Ragged>
using ChunkTile = Tile<T, 32, kChunkSlots<T>, Ragged>;

// --- kernels -----------------------------------------------------------------------------------------------------

template <class Policy, class T, class W, class RowTile>
__global__ void __launch_bounds__(kWarpsSmall * 32, 4) row_small(const RowArgs args) {
  constexpr int Rows = kRowsAtOnce<RowTile>, Lanes = RowTile::Lanes;
  const int groups = blockDim.x / Lanes;
  const T* x = static_cast<const T*>(args.n.x);
  const T* end = x + args.n.rows * args.n.cols;
  int64_t rows[Rows];
  RowTile tiles[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    rows[r] = (static_cast<int64_t>(blockIdx.x) * Rows + r) * groups + threadIdx.x / Lanes;
    tiles[r].load(x + rows[r] * args.n.cols, rows[r] < args.n.rows ? static_cast<int>(args.n.cols) : 0, end);
  }
  typename Policy::Stat stats[Rows];
  Policy::statistics(tiles, stats);
  RowValues values[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    values[r] = Policy::template finish<T>(stats[r], args.n);
    if (tiles[r].len > 0 && RowTile::lane() == 0) save_values<Policy>(args.n, rows[r], stats[r], values[r]);
  }
  apply_tiles<Policy, T, W>(tiles, args, rows, 0, values);
}

// Load chunk `chunk` of a row and take its statistic.
template <class Policy, class T, class Tile>
__device__ inline typename Policy::Stat load_chunk(Tile (&tile)[1], const RowArgs& args, int64_t row, int64_t chunk) {
  const int64_t begin = chunk * args.chunk_len, left = args.n.cols - begin;
  const T* x = static_cast<const T*>(args.n.x);
  const int len = static_cast<int>(max(int64_t{0}, min(left, static_cast<int64_t>(args.chunk_len))));
  tile[0].load(x + row * args.n.cols + begin, len, x + args.n.rows * args.n.cols);
  typename Policy::Stat stat[1];
  Policy::statistics(tile, stat);
  return stat[0];
}

template <class Policy, class T, class W, bool Ragged, bool Cluster>
__global__ void __launch_bounds__(kMaxWarpsBlock * 32, 2) row_block(const RowArgs args) {
#if __CUDA_ARCH__ < 900
  if constexpr (Cluster) return;  // never launched: row_plan gives clusters to sm_90 and newer only
#endif
  using Stat = typename Policy::Stat;
  __shared__ Stat parts[kMaxWarpsBlock * kMaxCluster];
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
  ChunkTile<T, Ragged> tile[1];
  const Stat mine = load_chunk<Policy, T>(tile, args, row, chunk);
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
  const Stat stat = tree_of(parts, warps * blocks);
  const RowValues values = Policy::template finish<T>(stat, args.n);
  if (chunk == 0 && lane == 0) save_values<Policy>(args.n, row, stat, values);
  apply_tile<Policy, T, W>(tile, args, row, chunk * static_cast<int64_t>(args.chunk_len), values);
}

// A team of args.blocks_a_row blocks a row, row after row; while one team waits at its barrier the others, which share
// its multiprocessors, load and store.
template <class Policy, class T, class W, bool Ragged>
__global__ void __launch_bounds__(kWarpsTeam * 32, kTeamBlocksAMultiprocessor) row_team(const RowArgs args) {
  using Stat = typename Policy::Stat;
  __shared__ Stat parts[kWarpsTeam];
  __shared__ Stat all[kMaxTeam];
  const int warp = threadIdx.x / 32, blocks = static_cast<int>(args.blocks_a_row);
  const int teams = gridDim.x / blocks, team = blockIdx.x / blocks, rank = blockIdx.x % blocks;
  unsigned* count = static_cast<unsigned*>(args.n.workspace) + 32 * team;
  Stat* exchange = reinterpret_cast<Stat*>(static_cast<char*>(args.n.workspace) + 128 * teams) + 2 * blocks * team;
  const int64_t chunk = static_cast<int64_t>(rank) * kWarpsTeam + warp;
  unsigned round = 0;
  for (int64_t row = team; row < args.n.rows; row += teams) {
    ++round;
    ChunkTile<T, Ragged> tile[1];
    const Stat mine = load_chunk<Policy, T>(tile, args, row, chunk);
    if (threadIdx.x % 32 == 0) parts[warp] = mine;
    __syncthreads();
    // Two sets in turn: a block that is a round ahead must not overwrite what another still reads.
    Stat* published = exchange + round % 2 * blocks;
    if (warp == 0) {
      const Stat block = tree_of(parts, kWarpsTeam);
      if (threadIdx.x == 0) published[rank] = block;
    }
    team_barrier(count, blocks, round);
    float* to = reinterpret_cast<float*>(all);
    const float* from = reinterpret_cast<const float*>(published);
    for (int i = threadIdx.x; i < blocks * static_cast<int>(sizeof(Stat) / 4); i += blockDim.x) to[i] = __ldcg(from + i);
    __syncthreads();
    const Stat stat = tree_of(all, blocks);
    const RowValues values = Policy::template finish<T>(stat, args.n);
    if (rank == 0 && threadIdx.x == 0) save_values<Policy>(args.n, row, stat, values);
    apply_tile<Policy, T, W>(tile, args, row, chunk * args.chunk_len, values);
  }
}

// Where a block of the split regime works: kWarpsSplit consecutive chunks of one row, a warp each.
struct SplitPlace {
  int64_t row, chunk;
  __device__ SplitPlace(const RowArgs& args, int64_t at) {
    row = at / args.blocks_a_row;
    chunk = (at - row * args.blocks_a_row) * kWarpsSplit + threadIdx.x / 32;
  }
};

__device__ inline RowValues* split_values(const RowArgs& args) {
  return reinterpret_cast<RowValues*>(static_cast<float*>(args.n.workspace) + 3 * args.n.rows * args.blocks_a_row);
}

template <class Policy, class T, bool Ragged>
__global__ void __launch_bounds__(kWarpsSplit * 32) row_partial(const RowArgs args) {
  using Stat = typename Policy::Stat;
  __shared__ Stat parts[kWarpsSplit];
  const SplitPlace place(args, blockIdx.x);
  ChunkTile<T, Ragged> tile[1];
  const Stat mine = load_chunk<Policy, T>(tile, args, place.row, place.chunk);
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
    split_values(args)[blockIdx.x] = values;
    save_values<Policy>(args.n, blockIdx.x, parts[0], values);
  }
}

template <class Policy, class T, class W, bool Ragged>
__global__ void __launch_bounds__(kWarpsSplit * 32) row_apply(const RowArgs args) {
  // Backwards: what row_partial read last is still in the L2.
  const SplitPlace place(args, static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x);
  ChunkTile<T, Ragged> tile[1];
  load_chunk<Policy, T>(tile, args, place.row, place.chunk);
  apply_tile<Policy, T, W>(tile, args, place.row, place.chunk * args.chunk_len, split_values(args)[place.row]);
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

template <class Kernel>
cudaError_t launch_team(Kernel kernel, RowArgs args, const RowPlan& plan, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(args.n.workspace, 0, team_barrier_bytes(plan), stream);
  if (error != cudaSuccess) return error;
  void* arguments[] = {&args};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(plan.grid)),
                                     dim3(plan.warps * 32), arguments, 0, stream);
}

template <class Policy, class T, class W, class RowTile>
void launch_small(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  const int64_t grid = ceil_div(plan.grid, kRowsAtOnce<RowTile>);
  row_small<Policy, T, W, RowTile><<<dim3(static_cast<unsigned>(grid)), plan.warps * 32, 0, stream>>>(args);
}

// A row of few vectors wants a kernel of few registers: the smallest of the numbers of slots built that holds it.
template <class Policy, class T, class W, bool Ragged, int Lanes, int Slots, int... More>
void launch_slots(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  if constexpr (sizeof...(More) > 0) {
    if (plan.chunk_len > Slots * Lanes * plan.vec) {
      return launch_slots<Policy, T, W, Ragged, Lanes, More...>(args, plan, stream);
    }
  }
  launch_small<Policy, T, W, Tile<T, Lanes, Slots, Ragged>>(args, plan, stream);
}

template <class Policy, class T, class W, bool Ragged>
void launch_rows_of_one_chunk(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  if constexpr (sizeof(T) == 4) {
    if (plan.lanes == 8) return launch_slots<Policy, T, W, Ragged, 8, 1, 2, 4>(args, plan, stream);
    if constexpr (Ragged) {
      return launch_slots<Policy, T, W, Ragged, 32, 4, 8>(args, plan, stream);
    } else {
      return launch_slots<Policy, T, W, Ragged, 32, 2, 4, 6, 8>(args, plan, stream);
    }
  } else {
    if (plan.lanes == 8) return launch_slots<Policy, T, W, Ragged, 8, 1, 2>(args, plan, stream);
    if constexpr (Ragged) {
      return launch_slots<Policy, T, W, Ragged, 32, 2, 4>(args, plan, stream);
    } else {
      return launch_slots<Policy, T, W, Ragged, 32, 1, 2, 3, 4>(args, plan, stream);
    }
  }
}

template <class Policy, class T, class W, bool Ragged>
cudaError_t launch_rows(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  const int64_t blocks_a_row = plan.regime == Regime::team ? plan.cluster : ceil_div(plan.chunks, kWarpsSplit);
  const RowArgs args{n, plan.chunks, blocks_a_row, plan.chunk_len};
  const dim3 grid(static_cast<unsigned>(plan.grid)), block(plan.warps * 32);
  cudaError_t error = cudaSuccess;
  switch (plan.regime) {
    case Regime::subwarp:
    case Regime::warp: launch_rows_of_one_chunk<Policy, T, W, Ragged>(args, plan, stream); break;
    case Regime::block: row_block<Policy, T, W, Ragged, false><<<grid, block, 0, stream>>>(args); break;
    case Regime::cluster:
      error = launch_cluster(row_block<Policy, T, W, Ragged, true>, args, plan, stream);
      break;
    case Regime::team: error = launch_team(row_team<Policy, T, W, Ragged>, args, plan, stream); break;
    default:
      row_partial<Policy, T, Ragged><<<grid, block, 0, stream>>>(args);
      row_merge<Policy, T><<<dim3(static_cast<unsigned>(n.rows)), 256, 0, stream>>>(args);
      row_apply<Policy, T, W, Ragged><<<grid, block, 0, stream>>>(args);
  }
  return error != cudaSuccess ? error : cudaGetLastError();
}

template <class Policy, class T, class W>
cudaError_t launch_ragged(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  const bool aligned = (reinterpret_cast<uintptr_t>(n.x) | reinterpret_cast<uintptr_t>(n.y)) % 16 == 0;
  if (aligned && n.cols % plan.vec == 0) return launch_rows<Policy, T, W, false>(n, plan, stream);
  return launch_rows<Policy, T, W, true>(n, plan, stream);
}

template <class Policy, class T>
cudaError_t launch_weight(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  constexpr bool one_dtype = !Policy::has_affine || std::is_same_v<Policy, RMSNormPolicy<true>>;
  if constexpr (!one_dtype && sizeof(T) == 2) {
    if (n.weight_dtype == DType::f32) return launch_ragged<Policy, T, float>(n, plan, stream);
  }
  return launch_ragged<Policy, T, T>(n, plan, stream);
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
