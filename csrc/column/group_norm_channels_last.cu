#include "column/column_norm.cuh"

cudaError_t normswap::group_norm_channels_last(const ChannelNorm& n, const ColumnPlan& plan, cudaStream_t stream) {
  return launch_statistics<Source::group>(n, plan, stream);
}
