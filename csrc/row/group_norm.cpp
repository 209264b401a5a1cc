// group_norm of rows and, channels last, of columns, and calls that do all of it: checks, memory, launch. Those decline as
// the calls of row_norm.cpp do.
#include <tuple>

#include "column/column_launch.h"
#include "row/row_launch.h"

namespace normswap {
namespace {

constexpr RowLaunches kGroupNorm{group_norm_f32, group_norm_f16, group_norm_bf16};
constexpr RowLaunches kGroupNormBehind{group_norm_behind_f32, group_norm_behind_f16, group_norm_behind_bf16};

// Groups of rows, but for what they are read from and written to; false of larger ones than the kernels count in.
bool set_groups(RowNorm& n, int64_t channels, int64_t num_groups) {
  n.num_groups = num_groups;
  n.channels_per_group = channels / num_groups;
  n.spatial = n.cols / n.channels_per_group;
  return n.spatial < (int64_t{1} << 31) && n.channels_per_group < (int64_t{1} << 31);
}

void set_out(RowNorm& n, void* out, DType dtype, const void* residual) {
  n.y = out;
  n.behind = {residual, out, dtype != n.dtype, dtype != n.dtype || residual != nullptr};
}

ChannelNorm channels_last_of(const RowNorm& n) {
  ChannelNorm c{};
  c.x = n.x;
  c.y = n.y;
  c.weight = {n.weight, n.weight_dtype};
  c.bias = {n.bias, n.weight_dtype};
  c.num_groups = n.num_groups;
  c.batch = n.rows / n.num_groups;
  c.rows = n.spatial;
  c.channels = n.num_groups * n.channels_per_group;
  c.mean = n.mean;
  c.rstd = n.rstd;
  c.eps = n.eps;
  c.activation = n.activation;
  c.behind = n.behind;
  c.dtype = n.dtype;
  return c;
}

int32_t launched(const RowNorm& n, bool channels_last, Memory& memory, int32_t device, Regime regime) {
  if (!channels_last) return launched(n.behind.any ? kGroupNormBehind : kGroupNorm, 0, n, memory, device, regime);
  const int32_t error = launched(group_norm_channels_last, channels_last_of(n), memory, device, regime);
  return error == kDeclined && regime == Regime::automatic ? kTooWide : error;
}

// Images whose memory is that of (batch, ..., channels).
bool has_channels_last(const View& t) { return (t.dims == 4 || t.dims == 5) && is_channels_last(t); }

// What the kernels are given but for what they write; false where they do not take it.
bool set_group_norm(const GroupNormCall& call, RowNorm& n, bool& channels_last) {
  const View &input = call.input, &residual = call.residual;
  const int64_t groups = call.num_groups, count = numel(input);
  if (input.dims < 2 || input.dtype < 0 || count == 0 || groups < 1 || input.sizes[1] % groups != 0) return false;
  if (count == groups) return false;  // one value a group: PyTorch raises
  channels_last = !is_contiguous(input);
  const bool images = has_channels_last(input) && starts_at_vector(input);
  if ((channels_last && !images) || !is_activation(call.activation)) return false;
  if (call.dtype != input.dtype && call.dtype != static_cast<int32_t>(DType::f32)) return false;
  if (!is_absent(residual) && (residual.dtype != call.dtype || !same_layout(residual, input))) return false;
  const int64_t rows = input.sizes[0] * groups;
  n = rows_of(rows, count / rows, static_cast<DType>(input.dtype), call.eps);
  n.x = input.data;
  n.activation = {static_cast<Activation>(call.activation), call.low, call.high};
  return set_groups(n, input.sizes[1], groups) && set_parameters(n, input, 1, 1, call.weight, call.bias);
}

// --- native ops -------------------------------------------------------------------------------------------------------

constexpr const char* op = "group_norm";

// Fill in dtypes and affine parameters of `n`; `parameters` is the length they must have.
void set_affine(RowNorm& n, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                int64_t parameters) {
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

void fill(const Tensor& input_, const OptionalTensor& weight_, const OptionalTensor& bias_, int64_t num_groups, double eps,
          bool channels_last, int64_t activation, double low, double high, const OptionalTensor& residual, Tensor out,
          float* mean, float* rstd, int64_t regime) {
  if (input_.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input_.get_device_index());
  STD_TORCH_CHECK(input_.dim() >= 2 && num_groups > 0 && input_.size(1) % num_groups == 0, op, ": ", num_groups,
                  " groups do not divide the channels");
  const Tensor input = channels_last ? on_boundary(input_) : input_;
  const OptionalTensor weight = on_boundary(weight_), bias = on_boundary(bias_);
  const int64_t channels = input.size(1), rows = input.size(0) * num_groups;
  RowNorm n = rows_of(op, input, input.numel() / rows, eps);
  STD_TORCH_CHECK(set_groups(n, channels, num_groups), op,
                  ": a group must have fewer than 2^31 channels, of fewer than 2^31 elements each, got ",
                  n.channels_per_group, " channels of ", n.spatial);
  const DType dtype = dtype_of(out, op);
  STD_TORCH_CHECK(out.numel() == input.numel() && (dtype == n.dtype || dtype == DType::f32), op,
                  ": out must have the input's size, and its dtype or float32");
  STD_TORCH_CHECK(!residual.has_value() || (residual->numel() == out.numel() && residual->scalar_type() == out.scalar_type()),
                  op, ": residual must have the size and dtype of out");
  set_affine(n, input, weight, bias, channels);
  n.mean = mean;
  n.rstd = rstd;
  n.activation = activation_of(op, activation, low, high);
  set_out(n, out.mutable_data_ptr(), dtype, data_or_null(residual));
  STD_TORCH_CHECK(channels_last || (input.is_contiguous() && out.is_contiguous()), op,
                  ": input and out must be contiguous");
  TensorMemory memory(input);
  const int32_t device = input.get_device_index();
  const int32_t error = launched(n, channels_last, memory, device, static_cast<Regime>(regime));
  if (error != kTooWide) return check_rows(op, n, regime, error);
  // By way of the other layout.
  const Tensor contiguous = torch::stable::contiguous(input);
  const OptionalTensor other =
      residual.has_value() ? OptionalTensor(torch::stable::contiguous(*residual)) : std::nullopt;
  Tensor result = torch::stable::empty_like(torch::stable::contiguous(out));
  n.x = contiguous.const_data_ptr();
  set_out(n, result.mutable_data_ptr(), dtype, data_or_null(other));
  check_rows(op, n, regime, launched(n, false, memory, device, Regime::automatic));
  torch::stable::copy_(out, result);
}

void group_norm_cuda(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, int64_t num_groups,
                     double eps, bool channels_last, int64_t activation, double low, double high,
                     const OptionalTensor& residual, Tensor out, OptionalTensor mean, OptionalTensor rstd, int64_t regime) {
  const int64_t groups = input.dim() > 0 ? input.size(0) * num_groups : 0;
  fill(input, weight, bias, num_groups, eps, channels_last, activation, low, high, residual, out,
       floats_or_null(op, mean, input, groups), floats_or_null(op, rstd, input, groups), regime);
}

using Recorded = std::tuple<OptionalTensor, OptionalTensor>;  // output and statistics: all means, then all rstds

Recorded group_norm_of(const Tensor& input_, int64_t num_groups, const OptionalTensor& weight_, const OptionalTensor& bias_,
                       double eps, int64_t activation, double low, double high, const OptionalTensor& residual, bool wide,
                       bool statistics) {
  if (!input_.is_contiguous() && !has_channels_last(view_of(input_))) return {};
  if (!all_beside(input_, {&weight_, &bias_, &residual})) return {};
  const Tensor input = input_.is_contiguous() ? input_ : on_boundary(input_);
  const OptionalTensor weight = on_boundary(weight_), bias = on_boundary(bias_);
  const auto acts = activation_of(op, activation, low, high);
  const View x = view_of(input);
  const int32_t dtype = wide ? static_cast<int32_t>(DType::f32) : x.dtype;
  const GroupNormCall call{x, view_of(weight), view_of(bias), view_of(residual), num_groups, eps,
                           static_cast<int32_t>(acts.code), acts.low, acts.high, dtype, statistics};
  TensorMemory memory(input);
  const auto& out = memory.parts[Memory::kOut];
  const auto& kept = memory.parts[Memory::kStatistics];
  if (!is_launched(normswap_group_norm, call, input, memory)) {
    if (!memory.too_wide) return {};
    float* mean = statistics ? static_cast<float*>(kept->mutable_data_ptr()) : nullptr;
    fill(input, weight, bias, num_groups, eps, true, activation, low, high, residual, *out, mean,
         statistics ? mean + kept->numel() / 2 : nullptr, 0);
  }
  return {out, kept};
}

OptionalTensor group_norm_or_none(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                                  const OptionalTensor& bias, double eps, int64_t activation, double low, double high,
                                  const OptionalTensor& residual, bool wide) {
  return std::get<0>(group_norm_of(input, num_groups, weight, bias, eps, activation, low, high, residual, wide, false));
}

Recorded group_norm_recorded(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                             const OptionalTensor& bias, double eps, int64_t activation, double low, double high,
                             const OptionalTensor& residual, bool wide) {
  return group_norm_of(input, num_groups, weight, bias, eps, activation, low, high, residual, wide, true);
}

}  // namespace
}  // namespace normswap

extern "C" NORMSWAP_EXPORT int32_t normswap_group_norm(const normswap::GroupNormCall* call, normswap::Memory* memory,
                                                       int32_t device) {
  using namespace normswap;
  RowNorm n{};
  bool channels_last = false;
  if (!set_group_norm(*call, n, channels_last)) return kDeclined;
  void* out = (channels_last ? room_like : dense_room)(*memory, Memory::kOut, call->input, call->dtype);
  if (out == nullptr) return kDeclined;
  set_out(n, out, static_cast<DType>(call->dtype), call->residual.data);
  if (call->statistics) {
    n.mean = room_for_floats(*memory, Memory::kStatistics, 2 * n.rows);
    if (n.mean == nullptr) return kDeclined;
    n.rstd = n.mean + n.rows;
  }
  return launched(n, channels_last, *memory, device, Regime::automatic);
}

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("group_norm", TORCH_BOX(&normswap::group_norm_cuda));
  m.impl("group_norm_or_none", TORCH_BOX(&normswap::group_norm_or_none));
  m.impl("group_norm_recorded", TORCH_BOX(&normswap::group_norm_recorded));
}
