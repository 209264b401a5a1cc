// Norms of rows on CUDA tensors: checks, plan, workspace, launch.
#pragma once

#include <algorithm>
#include <functional>
#include <numeric>

#include "abi/tensors.h"
#include "plan/make_row_plan.h"

namespace normswap {

struct RowLaunches {
  RowLaunch *f32, *f16, *bf16;
  RowLaunch* of(DType dtype) const { return dtype == DType::f32 ? f32 : dtype == DType::f16 ? f16 : bf16; }
};

constexpr RowLaunches kLayerNorm{layer_norm_f32, layer_norm_f16, layer_norm_bf16};

// Fill in dtypes and affine parameters of `n`; `parameters` is the length they must have.
inline void set_affine(const char* op, RowNorm& n, const Tensor& input, const OptionalTensor& weight,
                       const OptionalTensor& bias, int64_t parameters) {
  n.weight_dtype = n.dtype;
  for (const OptionalTensor* p : {&weight, &bias}) {
    if (!p->has_value()) continue;
    check_beside(op, "weight and bias", **p, input);
    n.weight_dtype = dtype_of(**p, op);
    STD_TORCH_CHECK((*p)->numel() == parameters && (*p)->is_contiguous(), op,
                    ": weight and bias must be contiguous with ", parameters, " elements");
    STD_TORCH_CHECK(n.weight_dtype == n.dtype || n.weight_dtype == DType::f32, op,
                    ": weight and bias must have the input's dtype or float32");
  }
  STD_TORCH_CHECK(!weight.has_value() || !bias.has_value() || weight->scalar_type() == bias->scalar_type(), op,
                  ": weight and bias must have one dtype");
  n.weight = data_or_null(weight);
  n.bias = data_or_null(bias);
}

inline cudaError_t launched(RowLaunch* launch, RowNorm n, const RowPlan& plan, const Tensor& input) {
  const int64_t room = row_workspace_bytes(plan, n.rows);
  const OptionalTensor workspace = room > 0 ? OptionalTensor(scratch(input, room)) : std::nullopt;
  n.workspace = room > 0 ? workspace->mutable_data_ptr() : nullptr;
  return launch(n, plan, stream_of(input));
}

// `weights`: that an element may have of its own. `options`: `launches` are norm_with_options. Where the plan's blocks, which
// must all run at once, cannot do so here (few multiprocessors, in a green context or under MPS), the split kernels do the
// rows: to the same bits.
inline void run(const char* op, const RowLaunches& launches, int weights, RowNorm n, const Tensor& input, const Tensor& out,
                int64_t regime, bool options = false) {
  RowPlan plan;
  n.y = out.mutable_data_ptr();
  const int bytes = static_cast<int>(itemsize(n.dtype));
  const Rows rows{n.rows, n.cols, bytes, weights, is_ragged(n, bytes), options};
  const Gpu gpu = gpu_of(input.get_device_index());
  STD_TORCH_CHECK(make_row_plan(rows, gpu, static_cast<Regime>(regime), &plan), op, ": rows of ", n.cols,
                  " elements cannot be done in regime ", regime);
  RowLaunch* const launch = launches.of(n.dtype);
  cudaError_t error = launched(launch, n, plan, input);
  if (cannot_be_resident(error) && regime == 0 && make_row_plan(rows, gpu, Regime::split, &plan)) {
    cudaGetLastError();  // or the next launch would be told of it
    error = launched(launch, n, plan, input);
  }
  check_launch(error);
}

// But for `out`.
inline RowNorm rows_of(const char* op, const Tensor& input, int64_t cols, double eps) {
  STD_TORCH_CHECK(cols > 0 && input.numel() % cols == 0, op, ": rows of ", cols, " elements do not divide ",
                  input.numel());
  RowNorm n{};
  n.x = input.const_data_ptr();
  n.rows = input.numel() / cols;
  n.cols = cols;
  n.eps = eps;
  n.num_groups = n.channels_per_group = n.spatial = n.options.rows_per_sample = 1;
  n.dtype = n.out_dtype = dtype_of(input, op);
  return n;
}

inline RowNorm row_norm_of(const char* op, const Tensor& input, const Tensor& out, int64_t cols, double eps) {
  check_out(op, out, input);
  return rows_of(op, input, cols, eps);
}

// layer_norm over the last dimension of what is contiguous but for that dimension, which lies elsewhere in memory: an image
// as permuted. `statistics`, optional: of all rows the mean, then the rstd. nullopt where it declines.
OptionalTensor layer_norm_of_permuted(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                      double eps, float* statistics);

// l2_norm of rows of `cols` elements of the input's memory.
void l2_norm_rows(const Tensor& input, int64_t cols, double eps, const Tensor& out);

// --- what calls that record no gradient ask first --------------------------------------------------------------------

inline bool has_served_dtype(const Tensor& t) {
  const auto dtype = t.scalar_type();
  return dtype == torch::headeronly::ScalarType::Float || dtype == torch::headeronly::ScalarType::Half ||
         dtype == torch::headeronly::ScalarType::BFloat16;
}

inline bool fits(const OptionalTensor& parameter, const Tensor& input, const int64_t* sizes, int64_t dims) {
  if (!parameter.has_value()) return true;
  const Tensor& p = *parameter;
  return p.dim() == dims && std::equal(sizes, sizes + dims, p.sizes().data()) && p.is_cuda() &&
         p.get_device_index() == input.get_device_index() && p.is_contiguous() &&
         (p.scalar_type() == input.scalar_type() || p.scalar_type() == torch::headeronly::ScalarType::Float);
}

// Whether the kernels can take these, if the input's layout allows; weight and bias have `dims` sizes of the input's, from
// `first` on.
inline bool is_plain(const Tensor& input, int64_t first, int64_t dims, const OptionalTensor& weight,
                     const OptionalTensor& bias) {
  if (first < 0 || dims < 1 || first + dims > input.dim()) return false;
  if (!has_served_dtype(input) || input.numel() == 0) return false;
  const int64_t* sizes = input.sizes().data() + first;
  return fits(weight, input, sizes, dims) && fits(bias, input, sizes, dims) &&
         (!weight.has_value() || !bias.has_value() || weight->scalar_type() == bias->scalar_type());
}

inline int64_t trailing_elements(const Tensor& input, int64_t dims) {
  const auto sizes = input.sizes();
  return std::accumulate(sizes.end() - dims, sizes.end(), int64_t{1}, std::multiplies<int64_t>());
}

}  // namespace normswap
