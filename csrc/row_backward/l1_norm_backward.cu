#include "row_backward/row_backward.cuh"

cudaError_t normswap::l1_norm_backward(const RowBackward& n, const BackwardPlan& plan, cudaStream_t stream) {
  switch (n.dtype) {
    case DType::f32: return launch_row_backward<L1NormBackward, float>(n, plan, stream);
    case DType::f16: return launch_row_backward<L1NormBackward, Half>(n, plan, stream);
    default: return launch_row_backward<L1NormBackward, BFloat16>(n, plan, stream);
  }
}
