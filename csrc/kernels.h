// The boundary between the device code (*.cu, nvcc, no torch headers) and the torch side (*.cpp, g++, stable ABI).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "column_plan.h"
#include "row_plan.h"

namespace normswap {

enum class DType : int { f32 = 0, f16 = 1, bf16 = 2 };

// What follows a norm, of its output as rounded to its dtype.
enum class Activation : int {
  none = 0,
  relu = 1,
  silu = 2,
  gelu = 3,
  gelu_tanh = 4,
  leaky_relu = 5,
  clamp = 6,
  hardswish = 7,
  sigmoid = 8,
  tanh = 9
};

// leaky_relu: `low` is its slope; clamp: the bounds; nothing to the others.
struct ActivationArgs {
  Activation code;
  float low, high;
};

// rows x cols contiguous elements, normalised row by row. `weight` and `bias` (both optional, of one dtype: x's or
// float32) hold one value an element of the row for layer_norm and rms_norm, one a channel for group_norm.
// weight and bias start at multiples of 16 bytes; x and y anywhere.
struct RowNorm {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  float* mean;       // (rows), optional: the row's mean (l1_norm: mean |x|)
  float* rstd;       // (rows), optional
  void* workspace;   // row_workspace_bytes(plan, rows)
  int64_t rows, cols;
  double eps;
  double minimum;           // l1_norm: mean |x| counts as at least that; 0: no bound
  double weight_offset;     // rms_norm: the factor is offset + weight
  bool cast_before_weight;  // rms_norm: round to x's dtype before the product with the weight
  int64_t num_groups, channels_per_group, spatial;  // group_norm: row = (sample, group), cols = channels * spatial
  Activation activation;  // group_norm
  DType dtype, weight_dtype;
};

// Whether rows begin and end elsewhere than at multiples of 16 bytes.
inline bool is_ragged(const RowNorm& n, int itemsize) {
  return (reinterpret_cast<uintptr_t>(n.x) | reinterpret_cast<uintptr_t>(n.y)) % 16 != 0 || n.cols * itemsize % 16 != 0;
}

cudaError_t layer_norm(const RowNorm&, const RowPlan&, cudaStream_t);
cudaError_t rms_norm(const RowNorm&, const RowPlan&, cudaStream_t);
cudaError_t l1_norm(const RowNorm&, const RowPlan&, cudaStream_t);
cudaError_t group_norm(const RowNorm&, const RowPlan&, cudaStream_t);

// A vector with one value a channel, in its own dtype; data == nullptr: absent.
struct ChannelVector {
  const void* data;
  DType dtype;
};

// batch x rows x channels contiguous elements, statistics over the rows of each channel (scale_batch_norm: batch = 1)
// or of each group of channels (group_norm, channels last).
struct ChannelNorm {
  const void* x;
  void* y;
  ChannelVector scale, weight, bias;
  ChannelVector running_mean, running_var;  // read in eval; written too in training
  float* mean;  // optional; (channels) in training, (batch, groups) for group_norm
  float* rstd;
  void* workspace;  // column_workspace_bytes(plan)
  int64_t batch, rows, channels, num_groups;
  double eps, momentum;
  Activation activation;  // group_norm
  DType dtype;
  ChannelVector input_bias;  // scale_batch_norm, to be added to x: finite, it cancels in all but the running mean
};

cudaError_t scale_batch_norm(const ChannelNorm&, const ColumnPlan&, cudaStream_t);  // statistics, running stats, apply
cudaError_t affine(const ChannelNorm&, cudaStream_t);  // apply with the running statistics
cudaError_t group_norm_channels_last(const ChannelNorm&, const ColumnPlan&, cudaStream_t);  // statistics, apply

// out_weight[c, :] = a_c weight[c, :], out_bias[c] = a_c linear_bias[c] + bias[c] - (a_c / scale_c) running_mean[c]
struct FoldLinear {
  const void* linear_weight;
  void* out_weight;
  void* out_bias;
  ChannelVector linear_bias, scale, weight, bias, running_mean, running_var;
  int64_t channels, in_features;
  double eps;
  DType dtype;
};

cudaError_t fold_linear(const FoldLinear&, cudaStream_t);

// outer x n x inner contiguous elements, normalised along the middle dimension: x / (max(mean|x|, minimum) + eps)
// (l1_norm), x rsqrt(mean(x^2) + eps) weight (rms_norm, one weight an index along n, optional).
struct DimNorm {
  const void* x;
  const void* dy;  // backward only
  ChannelVector weight;
  void* y;           // backward: dx
  float* statistic;  // (outer, inner): mean |x| or rstd; optional in forward, read in backward
  void* workspace;   // dim_workspace_bytes; backward of rms_norm with a weight: see dim_weight_rows
  int64_t outer, n, inner;
  double eps, minimum;
  DType dtype;
};

// Longer dimensions have no backward kernel.
constexpr int kMaxDimBackward = 512;

int64_t dim_workspace_bytes(const DimNorm&);
cudaError_t l1_norm_dim(const DimNorm&, cudaStream_t);
cudaError_t rms_norm_dim(const DimNorm&, cudaStream_t);
cudaError_t l1_norm_dim_backward(const DimNorm&, cudaStream_t);

// The backward of rms_norm_dim leaves one row of n float32 partial gradients of the weight a block in the workspace.
int64_t dim_weight_rows(const DimNorm&);
cudaError_t rms_norm_dim_backward(const DimNorm&, cudaStream_t);

}  // namespace normswap
