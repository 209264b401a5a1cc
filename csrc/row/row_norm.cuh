// The row engine: LayerNorm, RMSNorm, L1 norm and GroupNorm (contiguous) are this and a policy (row_policy.cuh).
// row_plan.h says how rows are cut; the kernels are the regimes: rows in a warp's registers (row_small.cuh), in those of a
// block or a cluster (row_held.cuh), and longer ones (row_wide.cuh).
#pragma once

#include "row/only_adds.h"
#include "row/row_held.cuh"
#include "row/row_small.cuh"
#include "row/row_wide.cuh"

namespace normswap {
namespace {

// On the host; correctly rounded as Divisor::of.
inline Divisor divisor_of(int64_t n) { return {static_cast<float>(n), 1.f / static_cast<float>(n)}; }

inline RowSizes row_sizes(const RowNorm& n, const RowPlan& plan) {
  const int64_t chunk = plan.chunk_len, group = kGroup * chunk, groups = row_groups(plan);
  return {divisor_of(n.cols),
          divisor_of(chunk),
          divisor_of(n.cols - (plan.chunks - 1) * chunk),
          static_cast<float>(group),
          static_cast<float>(n.cols - (groups - 1) * group),
          static_cast<int>(groups)};
}

inline Quotient quotient_by(int64_t divisor) {
  const uint64_t most = ~uint64_t{0}, d = static_cast<uint64_t>(divisor);
  return {divisor, d == 1 ? most : most / d + (most % d == d - 1 ? 1 : 0)};
}

// Rows of a chunk and no more than half of one: see fits_warp.
template <class Policy, class T, bool Ragged>
cudaError_t launch_pairs(const RowArgs& args, const RowPlan& plan, const LaunchShape& shape, cudaStream_t stream) {
  if constexpr (Ragged || Policy::affine != Affine::by_element) {
    return cudaErrorInvalidValue;
  } else {
    constexpr int most = kChunkSlots<T> / 2;  // vectors of a lane
    if (has_wide_weights<T>(args) || args.n.out_dtype != args.n.dtype) {  // see kAllThere
      const LaunchShape block{grid_of(args.n.rows), 2 * 32, 0, 1, plan.overlap};
      return launch_held<Policy, T, false, Held::in_block>(args, block, stream);
    }
    if (args.n.cols - kChunk > most / 2 * 32 * plan.vec) {
      return launch_block<row_pair<Policy, T, Tile<T, 32, most, false, most / 2>>>(args, shape, stream);
    }
    return launch_block<row_pair<Policy, T, Tile<T, 32, most / 2, false>>>(args, shape, stream);
  }
}

template <class Policy, class T, bool Ragged>
cudaError_t launch_rows(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  const RowArgs args{n,
                     plan.chunks,
                     held_groups(plan),
                     plan.blocks_a_row,
                     plan.chunk_len,
                     chunk_bytes(plan.chunk_len, sizeof(T)),
                     plan.block_chunks,
                     plan.slots,
                     static_cast<float>(n.eps),
                     static_cast<float>(n.weight_offset),
                     row_sizes(n, plan),
                     quotient_by(n.rows),
                     quotient_by(n.num_groups),
                     quotient_by(n.spatial),
                     quotient_by(ceil_div(n.rows, kRowsSplit)),
                     quotient_by(n.options.rows_per_sample),
                     quotient_by(plan.blocks_a_row),
                     n.mean != nullptr || n.rstd != nullptr};
  const int cluster = plan.regime == Regime::cluster ? plan.blocks_a_row : 1;
  const LaunchShape shape{grid_of(plan.grid), plan.warps * 32, plan.shared, cluster, plan.overlap};
  cudaError_t error = cudaSuccess;
  switch (plan.regime) {
    case Regime::subwarp:
    case Regime::warp:
      error = plan.chunks == 1 ? launch_rows_of_one_chunk<Policy, T, Ragged>(args, plan, stream)
                               : launch_pairs<Policy, T, Ragged>(args, plan, shape, stream);
      break;
    case Regime::block:
    case Regime::cluster: error = launch_blocks<Policy, T, Ragged>(args, plan, shape, stream); break;
    case Regime::team: error = launch_team<Policy, T, Ragged>(args, plan, shape, stream); break;
    default: error = launch_split<Policy, T, Ragged>(args, plan, shape, stream);
  }
  return error != cudaSuccess ? error : cudaGetLastError();
}

template <class Policy, class T>
cudaError_t launch(const RowNorm& n, const RowPlan& plan, cudaStream_t stream) {
  if (is_ragged(n, sizeof(T))) return launch_rows<Policy, T, true>(n, plan, stream);
  return launch_rows<Policy, T, false>(n, plan, stream);
}

// `layer`, `rms`: of the norms that stand alone.
template <class T>
cudaError_t launch_with_options(const RowNorm& n, const RowPlan& plan, cudaStream_t stream, RowLaunch layer, RowLaunch rms) {
  const bool adds = only_adds(n) && plan.regime != Regime::split && !is_ragged(n, sizeof(T));
  if (adds) return (n.kind == NormKind::rms ? rms : layer)(n, plan, stream);
  return launch<OptionsPolicy, T>(n, plan, stream);
}

}  // namespace
}  // namespace normswap
