// layer_norm, rms_norm and l1_norm on CUDA tensors: checks, plan, workspace, launch.
#include <map>
#include <mutex>
#include <tuple>

#include "row/row_launch.h"

namespace normswap {

constexpr RowLaunches kL1Norm{l1_norm_f32, l1_norm_f16, l1_norm_bf16};

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

void layer_norm_cuda(const Tensor& input, const OptionalTensor& weight_, const OptionalTensor& bias_, int64_t cols,
                     double eps, Tensor out, OptionalTensor mean, OptionalTensor rstd, int64_t regime) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const OptionalTensor weight = on_boundary(weight_), bias = on_boundary(bias_);
  check_dense("layer_norm", input, out);
  RowNorm n = row_norm_of("layer_norm", input, out, cols, eps);
  set_affine("layer_norm", n, input, weight, bias, cols);
  n.mean = floats_or_null("layer_norm", mean, input, n.rows);
  n.rstd = floats_or_null("layer_norm", rstd, input, n.rows);
  run("layer_norm", kLayerNorm, 2, n, input, out, regime);
}

void rms_norm_cuda(const Tensor& input, const OptionalTensor& weight_, int64_t cols, double eps, double weight_offset,
                   bool cast_before_weight, Tensor out, OptionalTensor rstd, int64_t regime) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const OptionalTensor weight = on_boundary(weight_);
  check_dense("rms_norm", input, out);
  RowNorm n = row_norm_of("rms_norm", input, out, cols, eps);
  set_affine("rms_norm", n, input, weight, std::nullopt, cols);
  n.weight_offset = weight.has_value() ? weight_offset : 0.0;
  n.cast_before_weight = cast_before_weight;
  n.rstd = floats_or_null("rms_norm", rstd, input, n.rows);
  n.kind = NormKind::rms;
  run("rms_norm", kRmsNorm, 1, n, input, out, regime);
}

void l1_norm_cuda(const Tensor& input, int64_t cols, double eps, double minimum, Tensor out, OptionalTensor mean_abs,
                  int64_t regime) {
  if (input.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  STD_TORCH_CHECK(eps >= 0.0 && minimum >= 0.0, "l1_norm: eps and minimum must not be negative, got ", eps, " and ",
                  minimum);
  check_dense("l1_norm", input, out);
  RowNorm n = row_norm_of("l1_norm", input, out, cols, eps);
  n.minimum = minimum;
  n.mean = floats_or_null("l1_norm", mean_abs, input, n.rows);
  run("l1_norm", kL1Norm, 0, n, input, out, regime);
}

// Output and statistics; neither where it declines, as the calls of row_call.cpp do.
using Recorded = std::tuple<OptionalTensor, OptionalTensor>;

Recorded l1_norm_of(const Tensor& input, double eps, double minimum, bool statistics) {
  if (!input.is_contiguous() || !is_plain(input, input.dim() - 1, 1, std::nullopt, std::nullopt)) return {};
  const int64_t cols = input.size(-1);
  const OptionalTensor out = unfilled_like(input);
  const OptionalTensor kept = statistics ? unfilled_floats(input, rows_of(input, cols)) : std::nullopt;
  if (!out.has_value() || kept.has_value() != statistics) return {};
  l1_norm_cuda(input, cols, eps, minimum, *out, kept, 0);
  return {out, kept};
}

OptionalTensor l1_norm_or_none(const Tensor& input, double eps, double minimum) {
  return std::get<0>(l1_norm_of(input, eps, minimum, false));
}

Recorded l1_norm_recorded(const Tensor& input, double eps, double minimum) { return l1_norm_of(input, eps, minimum, true); }

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("layer_norm", TORCH_BOX(&normswap::layer_norm_cuda));
  m.impl("rms_norm", TORCH_BOX(&normswap::rms_norm_cuda));
  m.impl("l1_norm", TORCH_BOX(&normswap::l1_norm_cuda));
  m.impl("l1_norm_or_none", TORCH_BOX(&normswap::l1_norm_or_none));
  m.impl("l1_norm_recorded", TORCH_BOX(&normswap::l1_norm_recorded));
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
