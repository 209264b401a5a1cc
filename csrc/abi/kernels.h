// The boundary between the device code (*.cu, nvcc, no torch headers) and the torch side (*.cpp, g++, stable ABI).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

namespace normswap {

// How their work is cut: plan/.
struct RowPlan;
struct ColumnPlan;

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

// What stands behind a group norm, all of it optional: y = activation(norm + residual), the sum rounded to y's dtype. y is
// that of the norm.
struct GroupOptions {
  const void* residual;  // as y
  void* y;
  bool wide;  // y is float32, whatever x is
  bool any;   // one of these is asked for
};

// Which norm norm_with_options takes.
enum class NormKind : int { layer = 0, rms = 1, l2 = 2 };

// What stands before and behind a norm of rows, all of it optional.
struct RowOptions {
  const void* residual;  // like x, and added to it: their sum as rounded to x's dtype is what is normalised ...
  void* sum;             // ... and stored
  DType residual_dtype;  // x's; unless ragged also 16 bits beside float32, where one block has a row
  // y = norm * (1 + scale) + shift: one value an element of the row for every rows_per_sample rows, `sample_stride`
  // elements from one sample's to the next.
  const void* scale;
  const void* shift;
  int64_t rows_per_sample, sample_stride;
  DType scale_dtype;  // x's or float32
  ActivationArgs activation;
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
  ActivationArgs activation;  // group_norm
  GroupOptions behind;        // group_norm
  // out_dtype, of y: x's; unless ragged also float32 of 16 bits (norm_with_options), 16 bits of float32 (layer_norm, which may
  // have a residual: see only_adds).
  DType dtype, weight_dtype, out_dtype;
  NormKind kind;       // norm_with_options
  RowOptions options;  // norm_with_options
};

// Whether rows, or what belongs to them, begin and end elsewhere than at multiples of 16 bytes.
inline bool is_ragged(const RowNorm& n, int itemsize) {
  const RowOptions& o = n.options;
  const int64_t step = o.sample_stride * (o.scale_dtype == DType::f32 ? 4 : 2);
  uintptr_t addresses = 0;
  for (const void* p : {n.x, static_cast<const void*>(n.y), o.residual, static_cast<const void*>(o.sum), o.scale, o.shift}) {
    addresses |= reinterpret_cast<uintptr_t>(p);
  }
  return addresses % 16 != 0 || step % 16 != 0 || n.cols * itemsize % 16 != 0;
}

using RowLaunch = cudaError_t(const RowNorm&, const RowPlan&, cudaStream_t);

// A source for each dtype of x: no other takes longer to compile.
RowLaunch layer_norm_f32, layer_norm_f16, layer_norm_bf16;
RowLaunch rms_norm_f32, rms_norm_f16, rms_norm_bf16;
RowLaunch l1_norm_f32, l1_norm_f16, l1_norm_bf16;
RowLaunch group_norm_f32, group_norm_f16, group_norm_bf16;
RowLaunch group_norm_behind_f32, group_norm_behind_f16, group_norm_behind_bf16;  // with GroupOptions
RowLaunch norm_with_options_f32, norm_with_options_f16, norm_with_options_bf16;

// A vector with one value a channel, in its own dtype; data == nullptr: absent.
struct ChannelVector {
  const void* data;
  DType dtype;
};

// batch x rows x channels contiguous elements, with running statistics (affine: batch = 1) or those of each group of channels
// (group_norm, channels last).
struct ChannelNorm {
  const void* x;
  void* y;
  ChannelVector scale, weight, bias;
  ChannelVector running_mean, running_var;  // affine
  float* mean;                              // group_norm, optional: (batch, groups)
  float* rstd;
  void* workspace;  // column_workspace_bytes(plan)
  int64_t batch, rows, channels, num_groups;
  double eps;
  ActivationArgs activation;  // group_norm
  GroupOptions behind;        // group_norm
  DType dtype;
};

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
// (l1_norm), x / max(sqrt(sum(x^2)), eps) (l2_norm), x rsqrt(mean(x^2) + eps) weight (rms_norm, one weight an index along
// n, optional), (x - mean) rsqrt(var + eps) weight + bias (layer_norm, alike).
struct DimNorm {
  const void* x;
  const void* dy;  // backward only
  ChannelVector weight, bias;
  void* y;           // backward: dx
  float* mean;       // (outer, inner), optional: layer_norm
  float* statistic;  // (outer, inner): mean |x|, the norm, or rstd; optional in forward, read in backward
  void* workspace;   // dim_workspace_bytes; backward of rms_norm with a weight: see dim_weight_rows
  int64_t outer, n, inner;
  double eps, minimum;
  DType dtype;
};

// Longer dimensions have no backward kernel.
constexpr int kMaxDimBackward = 512;

// `values` that a position needs: layer_norm 2, the others 1.
int64_t dim_workspace_bytes(const DimNorm&, int values);
cudaError_t l1_norm_dim(const DimNorm&, cudaStream_t);
cudaError_t l2_norm_dim(const DimNorm&, cudaStream_t);
cudaError_t layer_norm_dim(const DimNorm&, cudaStream_t);
cudaError_t rms_norm_dim(const DimNorm&, cudaStream_t);
cudaError_t l1_norm_dim_backward(const DimNorm&, cudaStream_t);

// The backward of rms_norm_dim leaves one row of n float32 partial gradients of the weight a block in the workspace.
int64_t dim_weight_rows(const DimNorm&);
cudaError_t rms_norm_dim_backward(const DimNorm&, cudaStream_t);

}  // namespace normswap
