// The row engine: LayerNorm, RMSNorm, L1 norm and GroupNorm (contiguous) are this file and a policy (row_policy.cuh).
// row_plan.h says how rows are cut; the kernels are the regimes:
//   row_small    subwarp, warp: a row is one chunk, in registers; several rows a block
//   row_held     block, for rows of few chunks of 16-bit elements: a chunk a warp, in registers
//   row_block    block, cluster: the chunks of a row lie in shared memory, of a cluster of blocks if need be
// and in row_wide.cuh
//   row_team     team: blocks that run at once hold a row and tell each other its statistics; persistent
//   row_partial, row_merge, row_apply    split: for rows and GPUs none of these serves; the input is read twice
#pragma once

#include <cooperative_groups.h>

#include "launch.h"
#include "row_policy.cuh"

namespace normswap {
namespace {

// Vector k of a tile, normalised.
template <class Policy, bool Fast, class T, class Tile>
__device__ inline uint4 normalised(const Tile& tile, int k, const RowArgs& args, RowValues values,
                                   const Floats<Tile::V>& w, const Floats<Tile::V>& b) {
  const typename Tile::Vector x = tile.pack(k);
  float out[Tile::V];
#pragma unroll
  for (int j = 0; j < Tile::V; ++j) {
    out[j] = Policy::template apply<T, Fast>(to_float(x.v[j]), values, w.v[j], b.v[j]);
  }
  const uint4 words = words_of<T>(out);
  if constexpr (Policy::affine != Affine::by_channel) return words;
  return args.n.activation == Activation::none ? words : activated(Tile::Vector::of_raw(words), args.n.activation).raw();
}

// Affine parameters of a lane's vectors: of all, loaded by whoever loads the tile so that they come with it, where there
// are registers for them; of some at once otherwise.
template <class Policy, class Tile>
constexpr int kAffineAtOnce = Tile::InRegisters && Tile::V == 8 ? Tile::Slots
                              : Tile::Ragged                    ? 1
                              : Tile::V == 8                    ? (Policy::has_bias ? 2 : 4)
                              : Tile::Slots < 4                 ? Tile::Slots
                                                                : 4;

template <class Policy, class W, class Tile>
using AffineAhead = std::conditional_t<Policy::affine == Affine::by_element,
                                       AffineByElement<Policy, W, Tile, kAffineAtOnce<Policy, Tile>>, AffineNone>;

// Normalise and store the chunk from `begin` on of several rows. All lanes of the warp must call.
template <class Policy, class T, class W, class Tile, int Rows, int Count>
__device__ inline void store_tiles(const Tile (&tiles)[Rows], const RowArgs& args, const int64_t (&rows)[Rows],
                                   int64_t begin, const RowValues (&values)[Rows],
                                   AffineByElement<Policy, W, Tile, Count>& affine) {
  T* y = static_cast<T*>(args.n.y) + begin + rows[0] * args.n.cols;
  Floats<Tile::V> w, b;
  if constexpr (Tile::Ragged) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      tiles[r].store(y + (rows[r] - rows[0]) * args.n.cols, [&](int k) {
        if (Count < Tile::Slots) affine.load(args, begin, tiles[r], k);
        affine.values(Count < Tile::Slots ? 0 : k, args, w, b);
        return normalised<Policy, true, T>(tiles[r], k, args, values[r], w, b);
      });
    }
    return;
  }
  y += Tile::offset(0);
#pragma unroll
  for (int first = 0; first < Tile::Slots; first += Count) {
    if (Count < Tile::Slots) affine.load(args, begin, tiles[0], first);
#pragma unroll
    for (int k = first; k < first + Count && k < Tile::Slots; ++k) {
      affine.values(k - first, args, w, b);
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        if (!tiles[r].inside(k)) continue;
        T* to = y + (rows[r] - rows[0]) * args.n.cols + k * Tile::Lanes * Tile::V;
        store_words(to, normalised<Policy, true, T>(tiles[r], k, args, values[r], w, b));
      }
    }
  }
}

// The same where parameters belong to channels, or there are none.
template <class Policy, bool Fast, class T, class W, class Tile>
__device__ inline void store_tile(const Tile& tile, const RowArgs& args, int64_t row, int64_t begin, RowValues values) {
  using Affine = std::conditional_t<Policy::affine == Affine::by_channel, AffineByChannel<W, Tile::V>, AffineNone>;
  const Affine affine(args, row, begin, tile.len);
  tile.store(static_cast<T*>(args.n.y) + row * args.n.cols + begin, [&](int k) {
    Floats<Tile::V> w, b;
    if (tile.inside(k)) affine(Tile::offset(k), w, b);
    return normalised<Policy, Fast, T>(tile, k, args, values, w, b);
  });
}

// The same for any policy, by the fast formula where that is as good for every row of the warp.
template <class Policy, class T, class W, class Tile, int Rows>
__device__ inline void apply_tiles(const Tile (&tiles)[Rows], const RowArgs& args, const int64_t (&rows)[Rows],
                                   int64_t begin, const RowValues (&values)[Rows], AffineAhead<Policy, W, Tile>& affine) {
  if constexpr (Policy::affine == Affine::by_element) {
    store_tiles<Policy, T, W>(tiles, args, rows, begin, values, affine);
  } else {
    bool fast = true;
#pragma unroll
    for (int r = 0; r < Rows; ++r) fast = fast && Policy::fast(values[r]);
    const bool all = Policy::always_fast || __all_sync(kWholeWarp, fast);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      if (all) {
        store_tile<Policy, true, T, W>(tiles[r], args, rows[r], begin, values[r]);
      } else {
        store_tile<Policy, false, T, W>(tiles[r], args, rows[r], begin, values[r]);
      }
    }
  }
}

// The same for one row.
template <class Policy, class T, class W, class Tile>
__device__ inline void apply_tile(const Tile (&tile)[1], const RowArgs& args, int64_t row, int64_t begin,
                                  RowValues values) {
  const int64_t rows[1] = {row};
  const RowValues all[1] = {values};
  AffineAhead<Policy, W, Tile> affine(args);
  affine.load_ahead(args, begin, tile[0]);
  apply_tiles<Policy, T, W>(tile, args, rows, begin, all, affine);
}

template <class Policy>
__device__ inline void save_values(const RowArgs& a, int64_t row, const typename Policy::Stat& stat, RowValues values) {
  if (a.n.mean != nullptr) a.n.mean[row] = Policy::saved_mean(stat, values, a);
  if (a.n.rstd != nullptr) a.n.rstd[row] = values.rstd;
}

// row_small: blocks on a multiprocessor, so that a lane has 96 or 80 registers.
template <class Tile>
constexpr int kSmallBlocks = (Tile::Slots * Tile::V > 24 ? 20 : 24) / kWarpsSmall<Tile::Lanes>;

// Rows a lane works on at once in row_small: what is the same for all is then done once.
template <class Tile>
constexpr int kRowsAtOnce = Tile::Slots == 1 ? 4 : 1;

template <class T>
constexpr int kChunkSlots = kChunk / 32 / (16 / static_cast<int>(sizeof(T)));

template <class T, bool Ragged, bool Full = false>
using ChunkTile = Tile<T, 32, kChunkSlots<T>, Ragged, Full ? kChunkSlots<T> : 0>;

template <class T, bool Ragged, bool Full>
using StagedChunk = StagedTile<T, 32, kChunkSlots<T>, Ragged, Full ? kChunkSlots<T> : 0>;

// --- kernels -----------------------------------------------------------------------------------------------------

template <class Policy, class T, class W, class RowTile>
__global__ void __launch_bounds__(kWarpsSmall<RowTile::Lanes> * 32, kSmallBlocks<RowTile>) row_small(const RowArgs args) {
  follow_predecessor();
  let_successor_start();
  constexpr int Rows = kRowsAtOnce<RowTile>, Lanes = RowTile::Lanes, groups = kWarpsSmall<Lanes> * 32 / Lanes;
  const T* x = static_cast<const T*>(args.n.x);
  const T* end = x + args.n.rows * args.n.cols;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (Rows * groups) + threadIdx.x / Lanes;
  if (Lanes == 32 && first >= args.n.rows) return;
  int64_t rows[Rows];
  RowTile tiles[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    rows[r] = first + r * groups;
    const bool there = Lanes == 32 && r == 0 || rows[r] < args.n.rows;
    tiles[r].load(x + rows[r] * args.n.cols, there ? static_cast<int>(args.n.cols) : 0, end);
  }
  AffineAhead<Policy, W, RowTile> affine(args);
  affine.load_ahead(args, 0, tiles[0]);
  typename Policy::Stat stats[Rows];
  Policy::statistics(tiles, args.cols, stats);
  RowValues values[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    values[r] = Policy::template finish<T>(stats[r], args);
    if (tiles[r].len > 0 && RowTile::lane() == 0) save_values<Policy>(args, rows[r], stats[r], values[r]);
  }
  apply_tiles<Policy, T, W>(tiles, args, rows, 0, values, affine);
}

// A row a block, a chunk a warp, in registers.
template <class Policy, class T, class W, bool Ragged>
__global__ void __launch_bounds__(kWarpsHeld * 32, 2) row_held(const RowArgs args) {
  follow_predecessor();
  let_successor_start();
  using Stat = typename Policy::Stat;
  using HeldTile = ChunkTile<T, Ragged>;
  __shared__ Stat parts[kWarpsHeld];
  const int chunk = static_cast<int>(threadIdx.x / 32);
  const int64_t rows[1] = {blockIdx.x}, begin = static_cast<int64_t>(chunk) * kChunk;
  const T* x = static_cast<const T*>(args.n.x);
  HeldTile tiles[1];
  tiles[0].load(x + rows[0] * args.n.cols + begin, static_cast<int>(min(args.n.cols - begin, int64_t{kChunk})),
                x + args.n.rows * args.n.cols);
  Stat stats[1];
  Policy::statistics(tiles, tiles[0].len == kChunk ? args.chunk : args.last_chunk, stats);
  if (threadIdx.x % 32 == 0) parts[chunk] = stats[0];
  __syncthreads();
  const Stat stat = unite_each<1>(parts, static_cast<int>(args.chunks));
  const RowValues values[1] = {Policy::template finish<T>(stat, args)};
  if (threadIdx.x == 0) save_values<Policy>(args, rows[0], stat, values[0]);
  AffineAhead<Policy, W, HeldTile> affine(args);
  affine.load_ahead(args, begin, tiles[0]);
  apply_tiles<Policy, T, W>(tiles, args, rows, begin, values, affine);
}

// The chunks of a row that a block works on, in shared memory; a warp sees to every `warps`-th.
template <class Policy, class T, class W, bool Ragged>
struct Slice {
  using Stat = typename Policy::Stat;
  const RowArgs& args;
  char* buffers;
  int64_t first;  // the row's chunk that is the slice's first

  __device__ Slice(const RowArgs& a, char* shared, int rank)
      : args(a), buffers(shared), first(static_cast<int64_t>(rank) * a.block_chunks) {}
  __device__ char* buffer(int chunk) const { return buffers + chunk * args.chunk_bytes; }
  __device__ const T* row_start(int64_t row) const { return static_cast<const T*>(args.n.x) + row * args.n.cols; }
  __device__ int64_t begin(int chunk) const { return (first + chunk) * args.chunk_len; }
  __device__ int len(int chunk) const {
    return static_cast<int>(
        max(int64_t{0}, min(args.n.cols - begin(chunk), static_cast<int64_t>(args.chunk_len))));
  }
  __device__ void stage(int64_t row, int chunk) const {
    const T* end = static_cast<const T*>(args.n.x) + args.n.rows * args.n.cols;
    stage_chunk<T, Ragged>(buffer(chunk), row_start(row) + begin(chunk), len(chunk), end);
  }
  template <bool Full>
  __device__ StagedChunk<T, Ragged, Full> staged(int64_t row, int chunk) const {
    StagedChunk<T, Ragged, Full> tile;
    tile.len = len(chunk);
    tile.chunk = staged_chunk<T, Ragged>(buffer(chunk), row_start(row) + begin(chunk));
    return tile;
  }
  template <bool Full>
  __device__ Stat statistic_of(int64_t row, int chunk) const {
    ChunkTile<T, Ragged, Full> tiles[1];
    staged<Full>(row, chunk).copy_to(tiles[0]);
    Stat stat[1];
    Policy::statistics(tiles, Full || tiles[0].len == args.chunk_len ? args.chunk : args.last_chunk, stat);
    return stat[0];
  }
  __device__ Stat statistic(int64_t row, int chunk) const {
    return len(chunk) == kChunk ? statistic_of<true>(row, chunk) : statistic_of<false>(row, chunk);
  }
  template <bool Full>
  __device__ void apply_to(int64_t row, int chunk, RowValues values) const {
    const StagedChunk<T, Ragged, Full> tiles[1] = {staged<Full>(row, chunk)};
    apply_tile<Policy, T, W>(tiles, args, row, begin(chunk), values);
  }
  __device__ void apply(int64_t row, int chunk, RowValues values) const {
    if (len(chunk) == kChunk) return apply_to<true>(row, chunk, values);
    apply_to<false>(row, chunk, values);
  }
};

template <class Policy, class T, class W, bool Ragged, bool Cluster>
__global__ void __launch_bounds__(kWarpsBlock * 32, kBlocksAMultiprocessor) row_block(const RowArgs args) {
#if __CUDA_ARCH__ < 900
  if constexpr (Cluster) return;  // never launched: row_plan gives clusters to sm_90 and newer only
#endif
  follow_predecessor();
  let_successor_start();
  using Stat = typename Policy::Stat;
  extern __shared__ __align__(16) char shared[];
  __shared__ Stat parts[kMaxChunks];
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
  const Slice<Policy, T, W, Ragged> slice(args, shared, rank);
  for (int c = warp; c < args.block_chunks; c += warps) slice.stage(row, c);
  wait_for_copies();
#if __CUDA_ARCH__ >= 900
  // Every block of the cluster runs: its shared memory is there.
  if constexpr (Cluster) cooperative_groups::cluster_group::barrier_wait();
#endif
  for (int c = warp; c < args.block_chunks; c += warps) {
    const Stat stat = slice.statistic(row, c);
    const int at = rank * args.block_chunks + c;
    if constexpr (!Cluster) {
      if (lane == 0) parts[at] = stat;
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (Cluster) {
      if (lane < blocks) *cooperative_groups::this_cluster().map_shared_rank(&parts[at], lane) = stat;
    }
#endif
  }
  if constexpr (!Cluster) __syncthreads();
#if __CUDA_ARCH__ >= 900
  if constexpr (Cluster) cooperative_groups::this_cluster().sync();
#endif
  const Stat stat = unite_chunks(parts, static_cast<int>(args.chunks));
  const RowValues values = Policy::template finish<T>(stat, args);
  if (rank == 0 && threadIdx.x == 0) save_values<Policy>(args, row, stat, values);
  for (int c = warp; c < args.block_chunks; c += warps) slice.apply(row, c, values);
}

}  // namespace
}  // namespace normswap

#include "row_wide.cuh"

namespace normswap {
namespace {

// --- launch ------------------------------------------------------------------------------------------------------

template <class Policy, class T, class W, class RowTile>
cudaError_t launch_small(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  const LaunchShape shape{grid_of(ceil_div(plan.grid, kRowsAtOnce<RowTile>)), plan.warps * 32, 0, 1, plan.overlap};
  return launch_block<row_small<Policy, T, W, RowTile>>(args, shape, stream);
}

// On the host; correctly rounded as Divisor::of.
inline Divisor divisor_of(int64_t n) { return {static_cast<float>(n), 1.f / static_cast<float>(n)}; }

// A row of few vectors wants a kernel of few registers: the smallest of the numbers of slots built that holds it. More
// than Before are needed.
template <class Policy, class T, class W, bool Ragged, int Lanes, int Before, int Slots, int... More>
cudaError_t launch_slots(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  if constexpr (sizeof...(More) > 0) {
    if (plan.chunk_len > Slots * Lanes * plan.vec) {
      return launch_slots<Policy, T, W, Ragged, Lanes, Slots, More...>(args, plan, stream);
    }
  }
  return launch_small<Policy, T, W, Tile<T, Lanes, Slots, Ragged, Before>>(args, plan, stream);
}

template <class Policy, class T, class W, bool Ragged>
cudaError_t launch_rows_of_one_chunk(const RowArgs& args, const RowPlan& plan, cudaStream_t stream) {
  if (plan.lanes == 8) return launch_slots<Policy, T, W, Ragged, 8, 0, 1>(args, plan, stream);
  if (plan.lanes == 16) return launch_slots<Policy, T, W, Ragged, 16, 0, 1>(args, plan, stream);
  if constexpr (sizeof(T) == 2) {
    return launch_slots<Policy, T, W, Ragged, 32, 0, 1, 2, 3, 4>(args, plan, stream);
  } else if constexpr (Ragged) {
    return launch_slots<Policy, T, W, Ragged, 32, 0, 4, 8>(args, plan, stream);
  } else {
    return launch_slots<Policy, T, W, Ragged, 32, 0, 1, 2, 4, 6, 8>(args, plan, stream);
  }
}

template <class Policy, class T, class W, bool Ragged>
cudaError_t launch_rows(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  const int64_t blocks_a_row = plan.regime == Regime::split ? row_groups(plan) : plan.cluster;
  const RowArgs args{n,
                     plan.chunks,
                     blocks_a_row,
                     plan.chunk_len,
                     chunk_bytes(plan.chunk_len, sizeof(T)),
                     plan.block_chunks,
                     plan.slots,
                     static_cast<float>(n.eps),
                     static_cast<float>(n.weight_offset),
                     divisor_of(n.cols),
                     divisor_of(plan.chunk_len),
                     divisor_of(n.cols - (plan.chunks - 1) * plan.chunk_len)};
  const int cluster = plan.regime == Regime::cluster ? plan.cluster : 1;
  const LaunchShape shape{grid_of(plan.grid), plan.warps * 32, plan.shared, cluster, plan.overlap};
  cudaError_t error = cudaSuccess;
  switch (plan.regime) {
    case Regime::subwarp:
    case Regime::warp: error = launch_rows_of_one_chunk<Policy, T, W, Ragged>(args, plan, stream); break;
    case Regime::block:
      error = plan.held ? launch_block<row_held<Policy, T, W, Ragged>>(args, shape, stream)
                        : launch_block<row_block<Policy, T, W, Ragged, false>>(args, shape, stream);
      break;
    case Regime::cluster: error = launch_block<row_block<Policy, T, W, Ragged, true>>(args, shape, stream); break;
    case Regime::team:
      error = launch_team<row_team<Policy, T, W, Ragged>>(args, shape, n.workspace, row_workspace_bytes(plan, n.rows),
                                                          stream);
      break;
    default: error = launch_split<Policy, T, W, Ragged>(args, plan, stream);
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
  if constexpr (Policy::affine != Affine::none && sizeof(T) == 2) {
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
