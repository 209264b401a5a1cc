#include "column/column_norm.cuh"
#include "plan/make_column_plan.h"

namespace normswap {
namespace {

template <class T>
cudaError_t affine_of(const ChannelNorm& n, cudaStream_t stream) {
  ColumnPlan plan;
  if (!make_apply_plan(n.batch, n.rows, n.channels, sizeof(T), kWideBlock, &plan)) return cudaErrorInvalidConfiguration;
  const ColumnArgs args(n, plan);
  if (plan.vec > 1) return launch_apply<T, 16 / static_cast<int>(sizeof(T)), Source::running>(args, false, stream);
  return launch_apply<T, 1, Source::running>(args, false, stream);
}

}  // namespace

cudaError_t affine(const ChannelNorm& n, cudaStream_t stream) {
  switch (n.dtype) {
    case DType::f32: return affine_of<float>(n, stream);
    case DType::f16: return affine_of<Half>(n, stream);
    default: return affine_of<BFloat16>(n, stream);
  }
}

}  // namespace normswap
