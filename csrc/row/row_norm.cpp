// layer_norm, rms_norm, l1_norm and group_norm on CUDA tensors: checks, plan, workspace, launch.
#include <map>
#include <mutex>
#include <tuple>

#include "column/column_launch.h"
#include "row/row_launch.h"

namespace normswap {

constexpr RowLaunches kRmsNorm{rms_norm_f32, rms_norm_f16, rms_norm_bf16};
constexpr RowLaunches kL1Norm{l1_norm_f32, l1_norm_f16, l1_norm_bf16};
constexpr RowLaunches kGroupNorm{group_norm_f32, group_norm_f16, group_norm_bf16};
constexpr RowLaunches kGroupNormBehind{group_norm_behind_f32, group_norm_behind_f16, group_norm_behind_bf16};

// Asked of the driver once a device.
Gpu gpu_of(int device) {
  static std::mutex mutex;
  static std::map<int, Gpu> known;
  const std::lock_guard<std::mutex> guard(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  const auto attribute = [device](cudaDeviceAttr name) {
    int value = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
    return value;
  };
  const int major = attribute(cudaDevAttrComputeCapabilityMajor);
  int driver = 0;
  STD_CUDA_CHECK(cudaDriverGetVersion(&driver));
  Gpu gpu{};
  gpu.clusters = major == 9 || major == 10;
  gpu.overlap = gpu.clusters && driver >= 12030;  // older ones cannot capture it in a graph
  gpu.shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  gpu.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  gpu.cooperative = attribute(cudaDevAttrCooperativeLaunch) != 0;
  return known[device] = gpu;
}

namespace {

// Of `cols` elements.
int64_t rows_of(const Tensor& input, int64_t cols) { return cols > 0 ? input.numel() / cols : 0; }

void check_dense(const char* op, const Tensor& input, const Tensor& out) {
  STD_TORCH_CHECK(input.is_contiguous() && out.is_contiguous(), op, ": input and out must be contiguous");
}

void layer_norm_rows(const Tensor& input, const OptionalTensor& weight_, const OptionalTensor& bias_, int64_t cols,
                     double eps, const Tensor& out, float* mean, float* rstd, int64_t regime) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const OptionalTensor weight = on_boundary(weight_), bias = on_boundary(bias_);
  check_dense("layer_norm", input, out);
  RowNorm n = row_norm_of("layer_norm", input, out, cols, eps);
  set_affine("layer_norm", n, input, weight, bias, cols);
  n.mean = mean;
  n.rstd = rstd;
  run("layer_norm", kLayerNorm, 2, n, input, out, regime);
}

void layer_norm_cuda(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, int64_t cols,
                     double eps, Tensor out, OptionalTensor mean, OptionalTensor rstd, int64_t regime) {
  layer_norm_rows(input, weight, bias, cols, eps, out, floats_or_null("layer_norm", mean, input, rows_of(input, cols)),
                  floats_or_null("layer_norm", rstd, input, rows_of(input, cols)), regime);
}

void rms_norm_rows(const Tensor& input, const OptionalTensor& weight_, int64_t cols, double eps, double weight_offset,
                   bool cast_before_weight, const Tensor& out, float* rstd, int64_t regime) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const OptionalTensor weight = on_boundary(weight_);
  check_dense("rms_norm", input, out);
  RowNorm n = row_norm_of("rms_norm", input, out, cols, eps);
  set_affine("rms_norm", n, input, weight, std::nullopt, cols);
  n.weight_offset = weight.has_value() ? weight_offset : 0.0;
  n.cast_before_weight = cast_before_weight;
  n.rstd = rstd;
  n.kind = NormKind::rms;
  run("rms_norm", kRmsNorm, 1, n, input, out, regime);
}

void rms_norm_cuda(const Tensor& input, const OptionalTensor& weight, int64_t cols, double eps, double weight_offset,
                   bool cast_before_weight, Tensor out, OptionalTensor rstd, int64_t regime) {
  rms_norm_rows(input, weight, cols, eps, weight_offset, cast_before_weight, out,
                floats_or_null("rms_norm", rstd, input, rows_of(input, cols)), regime);
}

void l1_norm_cuda(const Tensor& input, int64_t cols, double eps, double minimum, Tensor out, OptionalTensor mean_abs,
                  int64_t regime) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  STD_TORCH_CHECK(eps >= 0.0 && minimum >= 0.0, "l1_norm: eps and minimum must not be negative, got ", eps, " and ",
                  minimum);
  check_dense("l1_norm", input, out);
  RowNorm n = row_norm_of("l1_norm", input, out, cols, eps);
  n.weight_dtype = n.dtype;
  n.minimum = minimum;
  n.mean = floats_or_null("l1_norm", mean_abs, input, n.rows);
  run("l1_norm", kL1Norm, 0, n, input, out, regime);
}

ChannelNorm channels_last_of(const RowNorm& n, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  ChannelNorm c{};
  c.x = n.x;
  c.weight = {n.weight, n.weight_dtype};
  c.bias = {n.bias, n.weight_dtype};
  c.num_groups = n.num_groups;
  c.batch = n.rows / n.num_groups;
  c.rows = n.spatial;
  c.channels = n.num_groups * n.channels_per_group;
  c.mean = n.mean;
  c.rstd = n.rstd;
  c.eps = eps;
  c.activation = n.activation;
  c.behind = n.behind;
  c.dtype = n.dtype;
  return c;
}

GroupOptions behind_of(const Tensor& input, const OptionalTensor& residual, const Tensor& out) {
  const bool wide = out.scalar_type() != input.scalar_type();
  STD_TORCH_CHECK(out.numel() == input.numel() && (!wide || dtype_of(out, "group_norm") == DType::f32),
                  "group_norm: out must have the input's size, and its dtype or float32");
  STD_TORCH_CHECK(!residual.has_value() || (residual->numel() == out.numel() && residual->scalar_type() == out.scalar_type()),
                  "group_norm: residual must have the size and dtype of out");
  return {data_or_null(residual), out.mutable_data_ptr(), wide, wide || residual.has_value()};
}

void group_norm_groups(const Tensor& input_, const OptionalTensor& weight_, const OptionalTensor& bias_,
                       int64_t num_groups, double eps, bool channels_last, int64_t activation, double low, double high,
                       const OptionalTensor& residual, Tensor out, float* mean, float* rstd, int64_t regime) {
  if (input_.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input_.get_device_index());
  STD_TORCH_CHECK(input_.dim() >= 2 && num_groups > 0 && input_.size(1) % num_groups == 0, "group_norm: ", num_groups,
                  " groups do not divide the channels");
  const Tensor input = channels_last ? on_boundary(input_) : input_;
  const OptionalTensor weight = on_boundary(weight_), bias = on_boundary(bias_);
  const int64_t channels = input.size(1), rows = input.size(0) * num_groups;
  RowNorm n = row_norm_of("group_norm", input, input, input.numel() / rows, eps);
  n.behind = behind_of(input, residual, out);
  n.num_groups = num_groups;
  n.channels_per_group = channels / num_groups;
  n.spatial = n.cols / n.channels_per_group;
  for (const int64_t size : {n.spatial, n.channels_per_group}) {
    STD_TORCH_CHECK(size < (int64_t{1} << 31),
                    "group_norm: a group must have fewer than 2^31 channels, of fewer than 2^31 elements each, got ",
                    n.channels_per_group, " channels of ", n.spatial);
  }
  set_affine("group_norm", n, input, weight, bias, channels);
  n.mean = mean;
  n.rstd = rstd;
  n.activation = activation_of("group_norm", activation, low, high);
  if (!channels_last) {
    check_dense("group_norm", input, out);
    return run("group_norm", n.behind.any ? kGroupNormBehind : kGroupNorm, 0, n, input, out, regime);
  }
  ChannelNorm c = channels_last_of(n, weight, bias, eps);
  c.y = out.mutable_data_ptr();
  if (!run_columns("group_norm", group_norm_channels_last, c, input, static_cast<Regime>(regime))) {
    // Groups too wide for a block: by way of the other layout.
    const Tensor contiguous = torch::stable::contiguous(input);
    const OptionalTensor other =
        residual.has_value() ? OptionalTensor(torch::stable::contiguous(*residual)) : std::nullopt;
    Tensor result = torch::stable::empty_like(torch::stable::contiguous(out));
    n.x = contiguous.const_data_ptr();
    n.behind = behind_of(contiguous, other, result);
    run("group_norm", n.behind.any ? kGroupNormBehind : kGroupNorm, 0, n, contiguous, result, 0);
    torch::stable::copy_(out, result);
  }
}

void group_norm_cuda(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, int64_t num_groups,
                     double eps, bool channels_last, int64_t activation, double low, double high,
                     const OptionalTensor& residual, Tensor out, OptionalTensor mean, OptionalTensor rstd, int64_t regime) {
  const int64_t groups = input.dim() > 0 ? input.size(0) * num_groups : 0;
  group_norm_groups(input, weight, bias, num_groups, eps, channels_last, activation, low, high, residual, out,
                    floats_or_null("group_norm", mean, input, groups), floats_or_null("group_norm", rstd, input, groups),
                    regime);
}

// --- calls that record no gradient ---------------------------------------------------------------------------------
// Checks, allocation and launch in one call. They decline (nullopt) what is not plain enough for that, or too large for
// the memory: the caller then goes the general way, which copies, converts or raises.

OptionalTensor layer_norm_or_none(const Tensor& input, int64_t dims, const OptionalTensor& weight,
                                  const OptionalTensor& bias, double eps) {
  if (!is_plain(input, input.dim() - dims, dims, weight, bias)) return std::nullopt;
  if (!input.is_contiguous()) return dims == 1 ? layer_norm_of_permuted(input, weight, bias, eps, nullptr) : std::nullopt;
  const OptionalTensor out = unfilled_like(input);
  if (!out.has_value()) return std::nullopt;
  layer_norm_cuda(input, weight, bias, trailing_elements(input, dims), eps, *out, std::nullopt, std::nullopt, 0);
  return out;
}

OptionalTensor rms_norm_or_none(const Tensor& input, int64_t dims, const OptionalTensor& weight, double eps,
                                double weight_offset, bool cast_before_weight) {
  if (!input.is_contiguous() || !is_plain(input, input.dim() - dims, dims, weight, std::nullopt)) return std::nullopt;
  const OptionalTensor out = unfilled_like(input);
  if (!out.has_value()) return std::nullopt;
  rms_norm_cuda(input, weight, trailing_elements(input, dims), eps, weight_offset, cast_before_weight, *out,
                std::nullopt, 0);
  return out;
}

OptionalTensor l1_norm_or_none(const Tensor& input, double eps, double minimum) {
  if (!input.is_contiguous() || !is_plain(input, input.dim() - 1, 1, std::nullopt, std::nullopt)) return std::nullopt;
  const OptionalTensor out = unfilled_like(input);
  if (!out.has_value()) return std::nullopt;
  l1_norm_cuda(input, trailing_elements(input, 1), eps, minimum, *out, std::nullopt, 0);
  return out;
}

// --- calls that record a gradient ----------------------------------------------------------------------------------
// The output, and what the backward needs to know of every row, or neither.

using Recorded = std::tuple<OptionalTensor, OptionalTensor>;

// Uninitialised, with so many floats a row, where rows have the last `dims` dimensions.
Recorded unfilled(const Tensor& input, int64_t dims, int64_t floats) {
  const OptionalTensor out = unfilled_like(input);
  const OptionalTensor statistics = unfilled_floats(input, floats * (input.numel() / trailing_elements(input, dims)));
  return out.has_value() && statistics.has_value() ? Recorded{out, statistics} : Recorded{};
}

float* floats_of(const OptionalTensor& t) { return static_cast<float*>(t->mutable_data_ptr()); }

Recorded layer_norm_recorded(const Tensor& input, int64_t dims, const OptionalTensor& weight,
                             const OptionalTensor& bias, double eps) {
  if (!is_plain(input, input.dim() - dims, dims, weight, bias) || (!input.is_contiguous() && dims != 1)) return {};
  if (!input.is_contiguous()) {
    const OptionalTensor statistics = unfilled_floats(input, 2 * (input.numel() / input.size(-1)));
    if (!statistics.has_value()) return {};
    const OptionalTensor out = layer_norm_of_permuted(input, weight, bias, eps, floats_of(statistics));
    return out.has_value() ? Recorded{out, statistics} : Recorded{};
  }
  const Recorded made = unfilled(input, dims, 2);
  const auto& [out, statistics] = made;
  if (!out.has_value()) return {};
  float* mean = floats_of(statistics);
  layer_norm_rows(input, weight, bias, trailing_elements(input, dims), eps, *out, mean, mean + statistics->numel() / 2, 0);
  return made;
}

Recorded rms_norm_recorded(const Tensor& input, int64_t dims, const OptionalTensor& weight, double eps,
                           double weight_offset, bool cast_before_weight) {
  if (!input.is_contiguous() || !is_plain(input, input.dim() - dims, dims, weight, std::nullopt)) return {};
  const Recorded made = unfilled(input, dims, 1);
  const auto& [out, statistics] = made;
  if (!out.has_value()) return {};
  rms_norm_rows(input, weight, trailing_elements(input, dims), eps, weight_offset, cast_before_weight, *out,
                floats_of(statistics), 0);
  return made;
}

Recorded l1_norm_recorded(const Tensor& input, double eps, double minimum) {
  if (!input.is_contiguous() || !is_plain(input, input.dim() - 1, 1, std::nullopt, std::nullopt)) return {};
  const Recorded made = unfilled(input, 1, 1);
  const auto& [out, statistics] = made;
  if (out.has_value()) l1_norm_cuda(input, trailing_elements(input, 1), eps, minimum, *out, statistics, 0);
  return made;
}

// What group_norm is called with, but for the input.
struct Groups {
  int64_t num_groups;
  const OptionalTensor &weight, &bias;
  double eps;
  int64_t activation;
  double low, high;
  const OptionalTensor& residual;
  bool wide;  // of 16 bits a float32 output
};

// The output; with `statistics`, what the backward needs too: all means, then all rstds. Neither where it declines.
Recorded group_norm_of(const Tensor& input, const Groups& g, bool statistics) {
  const bool channels_last = !input.is_contiguous() && is_channels_last(input);
  if (!(channels_last || input.is_contiguous()) || !is_plain(input, 1, 1, g.weight, g.bias)) return {};
  if (g.num_groups < 1 || input.size(1) % g.num_groups != 0 || input.numel() == g.num_groups) return {};
  const auto dtype = g.wide ? torch::headeronly::ScalarType::Float : input.scalar_type();
  if (g.residual.has_value() && !(lie_alike(*g.residual, input) && g.residual->scalar_type() == dtype)) return {};
  const int64_t groups = input.size(0) * g.num_groups;
  const OptionalTensor out = unfilled_like(input, dtype);
  const OptionalTensor kept = statistics ? unfilled_floats(input, 2 * groups) : std::nullopt;
  if (!out.has_value() || kept.has_value() != statistics) return {};
  float* mean = statistics ? floats_of(kept) : nullptr;
  group_norm_groups(input, g.weight, g.bias, g.num_groups, g.eps, channels_last, g.activation, g.low, g.high, g.residual, *out,
                    mean, statistics ? mean + groups : nullptr, 0);
  return {out, kept};
}

OptionalTensor group_norm_or_none(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                                  const OptionalTensor& bias, double eps, int64_t activation, double low, double high,
                                  const OptionalTensor& residual, bool wide) {
  return std::get<0>(group_norm_of(input, {num_groups, weight, bias, eps, activation, low, high, residual, wide}, false));
}

Recorded group_norm_recorded(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                             const OptionalTensor& bias, double eps, int64_t activation, double low, double high,
                             const OptionalTensor& residual, bool wide) {
  return group_norm_of(input, {num_groups, weight, bias, eps, activation, low, high, residual, wide}, true);
}

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("layer_norm", TORCH_BOX(&normswap::layer_norm_cuda));
  m.impl("rms_norm", TORCH_BOX(&normswap::rms_norm_cuda));
  m.impl("l1_norm", TORCH_BOX(&normswap::l1_norm_cuda));
  m.impl("group_norm", TORCH_BOX(&normswap::group_norm_cuda));
  m.impl("layer_norm_or_none", TORCH_BOX(&normswap::layer_norm_or_none));
  m.impl("rms_norm_or_none", TORCH_BOX(&normswap::rms_norm_or_none));
  m.impl("l1_norm_or_none", TORCH_BOX(&normswap::l1_norm_or_none));
  m.impl("group_norm_recorded", TORCH_BOX(&normswap::group_norm_recorded));
  m.impl("layer_norm_recorded", TORCH_BOX(&normswap::layer_norm_recorded));
  m.impl("rms_norm_recorded", TORCH_BOX(&normswap::rms_norm_recorded));
  m.impl("l1_norm_recorded", TORCH_BOX(&normswap::l1_norm_recorded));
  m.impl("group_norm_or_none", TORCH_BOX(&normswap::group_norm_or_none));
}

// The launch plan, for tests that have no GPU, of the GPU described: (regime, vec, lanes, chunk_len, chunks, warps, held,
// block_chunks, blocks_a_row, slots, grid, shared) into out. Returns 0 when the row cannot be done in that regime.
extern "C" __attribute__((visibility("default"))) int normswap_row_plan(
    int64_t rows, int64_t cols, int itemsize, int weights, int ragged, int options, int clusters, int shared,
    int multiprocessors, int regime, int64_t* out) {
  const normswap::Gpu gpu{clusters != 0, clusters != 0, shared, multiprocessors, multiprocessors > 0};
  const normswap::Rows of{rows, cols, itemsize, weights, ragged != 0, options != 0};
  normswap::RowPlan p;
  if (!normswap::make_row_plan(of, gpu, static_cast<normswap::Regime>(regime), &p)) return 0;
  const int64_t values[] = {static_cast<int64_t>(p.regime), p.vec, p.lanes, p.chunk_len, p.chunks, p.warps,
                            static_cast<int64_t>(p.held), p.block_chunks, p.blocks_a_row, p.slots, p.grid, p.shared};
  for (const int64_t value : values) *out++ = value;
  return 1;
}
