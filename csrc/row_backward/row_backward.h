// The boundary of the backward of row norms between device code and the torch side; kernels.h has the forward's.
#pragma once

#include "abi/kernels.h"
#include "plan/row_backward_plan.h"

namespace normswap {

// rows x cols contiguous elements; all pointers but the column vectors' start at multiples of 16 bytes.
struct RowBackward {
  const void* x;
  const void* dy;            // of the norm's output (rows x cols), or of the activation's
  const void* sum_grad;      // optional, x's dtype: what else reaches x, and is added to dx
  ChannelVector weight;      // (cols), optional, as is the bias, which only an activation asks for
  ChannelVector bias;
  const float* mean;         // (rows) as the forward saved it: layer_norm's mean, l1_norm's mean |x|
  const float* rstd;         // (rows), not of l1_norm
  void* dx;                  // optional, x's dtype
  void* dresidual;           // optional, where dx of float32 is, in rows of whole vectors: dx rounded to 16 bits
  DType residual_dtype;      // of that
  ChannelVector dweight;     // (cols), optional
  ChannelVector dbias;       // (cols), optional
  float* partials;           // backward_partials floats, if dweight or dbias are asked for
  float* sums;               // backward_sums floats
  int64_t rows, cols;
  double eps, minimum;       // l1_norm
  double weight_offset;      // rms_norm
  bool cast_before_weight;   // rms_norm
  ActivationArgs activation;
  DType dtype, grad_dtype;   // of x; of dy: x's or float32, or see takes_narrow_grad
};

cudaError_t layer_norm_backward_f32(const RowBackward&, const BackwardPlan&, cudaStream_t);
cudaError_t layer_norm_backward_f16(const RowBackward&, const BackwardPlan&, cudaStream_t);
cudaError_t layer_norm_backward_bf16(const RowBackward&, const BackwardPlan&, cudaStream_t);
cudaError_t rms_norm_backward_f32(const RowBackward&, const BackwardPlan&, cudaStream_t);
cudaError_t rms_norm_backward_f16(const RowBackward&, const BackwardPlan&, cudaStream_t);
cudaError_t rms_norm_backward_bf16(const RowBackward&, const BackwardPlan&, cudaStream_t);
cudaError_t l1_norm_backward(const RowBackward&, const BackwardPlan&, cudaStream_t);
// Adds the partial column sums, in the order of the pieces.
cudaError_t add_column_sums(const RowBackward&, const BackwardPlan&, cudaStream_t);

}  // namespace normswap
