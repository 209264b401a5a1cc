// What our convolution takes, and its launch.
#include <algorithm>
#include <array>
#include <limits>

#include "abi/views.h"
#include "convolution/convolve.h"

namespace normswap {
namespace {

using Sizes = std::array<int64_t, 4>;

constexpr int64_t kLongest = 1 << 15;  // stride, padding, dilation and kernel, so that their products are ints

// Whether the kernel can read it: (batch, height, width, channels) from a multiple of 16 bytes on.
bool is_image(const View& t) {
  return t.dims == 4 && starts_at_vector(t) && is_channels_last(t);
}

// As PyTorch's ops take them together: a norm's tensors of one dtype, the convolution's or float32.
bool fit(const ConvolutionCall& call, int64_t channels) {
  const int32_t dtype = call.input.dtype, kept = call.of_channels[0].dtype;
  if (kept != dtype && kept != static_cast<int32_t>(DType::f32)) return false;
  for (int i = 0; i < 4; ++i) {
    if (!is_vector(call.of_channels[i], channels, kept)) return false;
  }
  const View& bias = call.of_channels[4];
  return !is_absent(call.of_channels[0]) && !is_absent(call.of_channels[1]) && is_vector(bias, channels, dtype) &&
         (is_absent(bias) || bias.dims == 1);
}

bool set_geometry(const ConvolutionCall& call, Convolve& c, Sizes& sizes) {
  const auto narrow = [](int64_t n) { return static_cast<int>(n); };
  const View &input = call.input, &weight = call.weight;
  const int64_t in = input.sizes[1], out = weight.sizes[0], groups = call.groups;
  if (in == 0 || out == 0 || in % 8 != 0 || out % 8 != 0 || groups < 1 || in != weight.sizes[1] * groups) return false;
  constexpr int64_t most = std::numeric_limits<int>::max() / 2;
  sizes = {input.sizes[0], out, 0, 0};
  for (int d = 0; d < 2; ++d) {
    const int64_t taps = weight.sizes[2 + d], step = call.stride[d], pad = call.padding[d], apart = call.dilation[d];
    if (pad < 0 || apart < 1 || std::max({step, pad, apart, taps}) > kLongest) return false;
    const int64_t room = input.sizes[2 + d] + 2 * call.padding[d] - call.dilation[d] * (taps - 1) - 1;
    if (call.stride[d] < 1 || taps < 1 || room < 0) return false;
    sizes[2 + d] = room / call.stride[d] + 1;
    c.kernel[d] = narrow(taps);
    c.stride[d] = narrow(call.stride[d]);
    c.padding[d] = narrow(call.padding[d]);
    c.dilation[d] = narrow(call.dilation[d]);
  }
  c.batch = narrow(sizes[0]);
  c.height = narrow(input.sizes[2]);
  c.width = narrow(input.sizes[3]);
  c.channels = narrow(in);
  c.out_height = narrow(sizes[2]);
  c.out_width = narrow(sizes[3]);
  c.out_channels = narrow(out);
  c.groups = narrow(groups);
  const int64_t pixels = sizes[0] * input.sizes[2] * input.sizes[3], weights = out * weight.sizes[1] * c.kernel[0] * c.kernel[1];
  if (pixels == 0 || pixels > most || sizes[0] * sizes[2] * sizes[3] > most || weights > most) return false;
  const bool by_eights = in / groups % 8 == 0 && out / groups % 8 == 0;
  return out % groups == 0 && (by_eights || is_depthwise(c));
}

// What the kernel is given but for the output; false where it does not take it.
bool convolve_of(const ConvolutionCall& call, Convolve& c, Sizes& sizes) {
  const View &input = call.input, &residual = call.residual;
  const int32_t dtype = input.dtype;
  if (dtype != static_cast<int32_t>(DType::f16) && dtype != static_cast<int32_t>(DType::bf16)) return false;
  if (call.weight.dtype != dtype || !is_image(input) || !is_image(call.weight)) return false;
  if (!set_geometry(call, c, sizes) || !fit(call, sizes[1])) return false;
  if (!is_absent(residual)) {
    const bool alike = residual.dtype == dtype && is_image(residual);
    if (!alike || !std::equal(sizes.begin(), sizes.end(), residual.sizes)) return false;
  }
  if (!is_activation(call.activation)) return false;
  c.input = input.data;
  c.conv_weight = call.weight.data;
  c.residual = residual.data;
  for (int i = 0; i < 5; ++i) c.of_channels[i] = vector_of(call.of_channels[i]);
  c.eps = call.eps;
  c.activation = {static_cast<Activation>(call.activation), call.low, call.high};
  c.dtype = static_cast<DType>(dtype);
  return true;
}

}  // namespace
}  // namespace normswap

extern "C" NORMSWAP_EXPORT int32_t normswap_convolve(const normswap::ConvolutionCall* call, normswap::Memory* memory,
                                                     int32_t device) {
  using namespace normswap;
  Convolve c{};
  Sizes sizes{};
  cudaStream_t stream{};
  if (!convolve_of(*call, c, sizes) || !set_stream(device, stream)) return kDeclined;
  const Sizes strides{sizes[1] * sizes[2] * sizes[3], 1, sizes[1] * sizes[3], sizes[1]};
  if (call->residual_first && !std::equal(strides.begin(), strides.end(), call->residual.strides)) return kDeclined;
  c.out = room_like(*memory, Memory::kOut, {nullptr, sizes.data(), strides.data(), 4, 0}, call->input.dtype);
  if (c.out == nullptr) return kDeclined;
  const auto launch = is_depthwise(c) ? convolve_depthwise : c.dtype == DType::f16 ? convolve_f16 : convolve_bf16;
  return told(launch(c, gpu_of(device), stream));
}
