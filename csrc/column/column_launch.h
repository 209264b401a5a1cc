// Column statistics on CUDA tensors: plan, workspace, launch.
#pragma once

#include "abi/views.h"

namespace normswap {

using ColumnLaunch = cudaError_t(const ChannelNorm&, const ColumnPlan&, cudaStream_t);

// Gives what calls give (abi/calls.h): kDeclined also where such columns cannot be done (in `regime`).
int32_t launched(ColumnLaunch* launch, ChannelNorm n, Memory& memory, int32_t device, Regime regime);

}  // namespace normswap
