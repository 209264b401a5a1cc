#include "column_norm.cuh"

namespace normswap {
namespace {

template <class T, int V>
void launch_affine(const ColumnArgs& a, cudaStream_t stream) {
  column_apply<T, V, Source::running><<<grid_of(a.p.grid), kColumnThreads, 0, stream>>>(a);
}

template <class T>
cudaError_t affine_of(const ChannelNorm& n, cudaStream_t stream) {
  ColumnPlan plan;
  if (!make_apply_plan(n.rows, n.channels, sizeof(T), &plan)) return cudaErrorInvalidConfiguration;
  const ColumnArgs args(n, plan);
  if (args.p.vec > 1) {
    launch_affine<T, 16 / static_cast<int>(sizeof(T))>(args, stream);
  } else {
    launch_affine<T, 1>(args, stream);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t scale_batch_norm(const ChannelNorm& n, const ColumnPlan& plan, cudaStream_t stream) {
  return launch_statistics<Source::batch>(n, plan, stream);
}

cudaError_t affine(const ChannelNorm& n, cudaStream_t stream) {
  switch (n.dtype) {
    case DType::f32: return affine_of<float>(n, stream);
    case DType::f16: return affine_of<__half>(n, stream);
    default: return affine_of<__nv_bfloat16>(n, stream);
  }
}

}  // namespace normswap
