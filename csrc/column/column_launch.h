// Column statistics on CUDA tensors: plan, workspace, launch.
#pragma once

#include "abi/tensors.h"

namespace normswap {

using ColumnLaunch = cudaError_t (*)(const ChannelNorm&, const ColumnPlan&, cudaStream_t);

// The plan of column statistics of `input` on its device. Returns false where such columns cannot be done (in `regime`).
bool column_plan_of(const ChannelNorm& n, const Tensor& input, Regime regime, ColumnPlan* plan);

// Runs `launch` with a workspace. Returns false, having done nothing, where no plan serves; a regime asked for must.
inline bool run_columns(const char* op, ColumnLaunch launch, ChannelNorm n, const Tensor& input, Regime regime) {
  ColumnPlan plan;
  if (!column_plan_of(n, input, regime, &plan)) {
    STD_TORCH_CHECK(regime == Regime::automatic, op, ": these columns cannot be done in regime ", static_cast<int>(regime));
    return false;
  }
  const int64_t bytes = column_workspace_bytes(plan);
  const OptionalTensor workspace = bytes > 0 ? OptionalTensor(scratch(input, bytes)) : std::nullopt;
  n.workspace = bytes > 0 ? workspace->mutable_data_ptr() : nullptr;
  check_launch(launch(n, plan, stream_of(input)));
  return true;
}

}  // namespace normswap
