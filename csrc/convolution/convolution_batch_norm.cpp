// 2d convolutions with BatchNorms behind them on CUDA tensors, one or several in a row: by our kernel, or the folds in one
// launch and the convolutions by PyTorch; all in one call, as every call costs the host more than what it does here.
#include <array>
#include <vector>

#include "abi/views.h"
#include "convolution/fold_convolution.h"

// Only libtorch_cuda.so has these: weak.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_cuda_addmm_out(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle,
                                                               AtenTensorHandle, double, double);
__attribute__((weak)) AOTITorchError aoti_torch_cuda__addmm_activation(AtenTensorHandle, AtenTensorHandle,
                                                                       AtenTensorHandle, double, double, int32_t,
                                                                       AtenTensorHandle*);
}

namespace normswap {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::detail::from;

using Pair = std::array<int64_t, 2>;

struct Geometry {
  Pair stride, padding, dilation;
  int64_t groups;
};

// How a convolution and its norm are computed: folded, by cuDNN's convolution that ends in a ReLU or as a matrix product, or
// by convolve.
enum Way : int64_t { kFused, kMatmul, kScaled };

// A convolution, the norm behind it, and how the two are computed.
struct Site {
  OptionalTensor weight, bias, running_mean, running_var, norm_weight, norm_bias;
  double eps;
  Geometry geometry;
  ActivationArgs activation;
  int64_t way;

  bool relu() const { return activation.code == Activation::relu; }
  bool plain() const { return activation.code == Activation::none; }
};

// Whether PyTorch's ops would take these together: a norm's tensors of one dtype, the convolution's or float32.
bool dtypes_fit(const Site& s, ScalarType dtype) {
  const auto is = [](const OptionalTensor& t, ScalarType wanted) { return !t.has_value() || t->scalar_type() == wanted; };
  const ScalarType kept = s.running_mean->scalar_type();
  return (kept == dtype || kept == ScalarType::Float) && is(s.weight, dtype) && is(s.bias, dtype) &&
         is(s.running_var, kept) && is(s.norm_weight, kept) && is(s.norm_bias, kept);
}

// Whether the convolution takes an image of these sizes, which become those of what it gives.
bool takes(const Site& s, const Tensor& input, std::array<int64_t, 4>& sizes) {
  if (!s.weight.has_value() || !s.running_mean.has_value() || !s.running_var.has_value()) return false;
  const Geometry& g = s.geometry;
  if (s.weight->dim() != 4 || !is_beside(*s.weight, input) || !dtypes_fit(s, input.scalar_type())) return false;
  if (s.weight->numel() == 0 || sizes[1] != s.weight->size(1) * g.groups) return false;
  if (s.way < kFused || s.way > kScaled) return false;
  if (s.way != kScaled && !(s.relu() || (s.way == kMatmul && s.plain()))) return false;
  sizes[1] = s.weight->size(0);
  for (int d = 0; d < 2; ++d) {
    const int64_t room = sizes[2 + d] + 2 * g.padding[d] - g.dilation[d] * (s.weight->size(2 + d) - 1) - 1;
    if (g.stride[d] < 1 || room < 0) return false;
    sizes[2 + d] = room / g.stride[d] + 1;
  }
  return true;
}

StableIValue list_of(const Pair& pair) {
  return from(torch::headeronly::HeaderOnlyArrayRef<int64_t>(pair.data(), pair.size()));
}

// By cuDNN's convolution that adds the residual and ends in a ReLU; nothing where PyTorch raises.
OptionalTensor fused(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& residual,
                     const Geometry& g) {
  const bool adds = residual.has_value();
  std::array<StableIValue, 9> stack;
  size_t count = 0;
  const auto push = [&](StableIValue value) { stack[count++] = value; };
  push(from(input));
  push(from(weight));
  if (adds) push(from(*residual));
  if (adds) push(from(std::nullopt));  // times 1
  push(from(bias));
  push(list_of(g.stride));
  push(list_of(g.padding));
  push(list_of(g.dilation));
  push(from(g.groups));
  const char* op = adds ? "aten::cudnn_convolution_add_relu" : "aten::cudnn_convolution_relu";
  if (torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) return std::nullopt;
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The memory of `t` as a tensor of other sizes; nothing where PyTorch raises.
template <size_t N>
OptionalTensor seen_as(const Tensor& t, const std::array<int64_t, N>& sizes, const std::array<int64_t, N>& strides) {
  AtenTensorHandle handle = nullptr;
  const auto error = aoti_torch__reinterpret_tensor(t.get(), N, sizes.data(), strides.data(), 0, &handle);
  return error == AOTI_TORCH_SUCCESS ? OptionalTensor(Tensor(handle)) : std::nullopt;
}

// A 1 x 1 convolution of channels_last memory by one matrix product; nothing where it is none, or PyTorch raises.
OptionalTensor matmul(const Tensor& input, const Tensor& weight, const Tensor& bias, bool relu, const Geometry& g) {
  constexpr Pair ones{1, 1}, zeros{0, 0};
  const bool alone = g.stride == ones && g.padding == zeros && g.groups == 1;
  const int64_t in = input.size(1), out = weight.size(0), rows = input.numel() / in;
  if (!alone || weight.numel() != out * in || weight.stride(0) != in || !is_channels_last(view_of(input))) return std::nullopt;
  if (aoti_torch_cuda_addmm_out == nullptr || aoti_torch_cuda__addmm_activation == nullptr) return std::nullopt;
  const OptionalTensor pixels = seen_as<2>(input, {rows, in}, {in, 1}), across = seen_as<2>(weight, {in, out}, {1, in});
  if (!pixels.has_value() || !across.has_value()) return std::nullopt;
  const int64_t height = input.size(2), width = input.size(3);
  const std::array<int64_t, 4> sizes{input.size(0), out, height, width}, strides{height * width * out, 1, width * out, out};
  AtenTensorHandle handle = nullptr;
  if (relu) {
    if (aoti_torch_cuda__addmm_activation(bias.get(), pixels->get(), across->get(), 1, 1, 0, &handle) != AOTI_TORCH_SUCCESS) {
      return std::nullopt;
    }
    return seen_as<4>(Tensor(handle), sizes, strides);
  }
  const OptionalTensor made = unfilled(input, 4, sizes.data(), strides.data());
  const OptionalTensor product = made.has_value() ? seen_as<2>(*made, {rows, out}, {out, 1}) : std::nullopt;
  if (!product.has_value()) return std::nullopt;
  const auto error = aoti_torch_cuda_addmm_out(product->get(), bias.get(), pixels->get(), across->get(), 1, 1);
  return error == AOTI_TORCH_SUCCESS ? made : std::nullopt;
}

// By our kernel, without a folded weight; nothing where it does not take these tensors.
OptionalTensor scaled(const Tensor& input, const Site& s, const OptionalTensor& residual) {
  const auto& [stride, padding, dilation, groups] = s.geometry;
  if (!all_beside(input, {&s.bias, &s.running_mean, &s.running_var, &s.norm_weight, &s.norm_bias})) return std::nullopt;
  const ConvolutionCall call{
      view_of(input), view_of(s.weight), view_of(residual),
      {view_of(s.running_var), view_of(s.running_mean), view_of(s.norm_weight), view_of(s.norm_bias), view_of(s.bias)},
      s.eps, {stride[0], stride[1]}, {padding[0], padding[1]}, {dilation[0], dilation[1]}, groups,
      static_cast<int32_t>(s.activation.code), s.activation.low, s.activation.high, false};
  TensorMemory memory(input);
  return is_launched(normswap_convolve, call, input, memory) ? memory.parts[Memory::kOut] : std::nullopt;
}

// What the sites that fold have folded, in one launch; false where one cannot be.
bool fold(const Tensor& input, const Site* sites, int count, std::array<std::optional<ConvolutionFold>, kMaxFolds>& folds) {
  std::array<FoldLinear, kMaxFolds> arguments;
  int found = 0;
  for (int i = 0; i < count; ++i) {
    const Site& s = sites[i];
    if (s.way == kScaled) continue;
    folds[i] = fold_of(*s.weight, s.bias, *s.running_mean, *s.running_var, s.norm_weight, s.norm_bias, s.eps);
    if (!folds[i].has_value()) return false;
    arguments[found++] = folds[i]->arguments;
  }
  if (found > 0) check_launch(fold_linears(arguments.data(), found, stream_of(input)));
  return true;
}

OptionalTensor computed(const Tensor& x, const Site& s, const std::optional<ConvolutionFold>& folded,
                        const OptionalTensor& residual) {
  if (s.way == kScaled) return scaled(x, s, residual);
  if (s.way == kMatmul) return matmul(x, folded->weight, folded->bias, s.relu(), s.geometry);
  return fused(x, folded->weight, folded->bias, residual, s.geometry);
}

// `count` of them one behind the other, at most kMaxFolds, the residual before the last ReLU.
OptionalTensor run(const Tensor& input, const Site* sites, int count, const OptionalTensor& residual) {
  const ScalarType dtype = input.scalar_type();
  if (aoti_torch_grad_mode_is_enabled() || (dtype != ScalarType::Half && dtype != ScalarType::BFloat16)) return std::nullopt;
  if (input.dim() != 4 || input.numel() == 0) return std::nullopt;
  std::array<int64_t, 4> sizes{input.size(0), input.size(1), input.size(2), input.size(3)};
  for (int i = 0; i < count; ++i) {
    if (!takes(sites[i], input, sizes)) return std::nullopt;
  }
  if (residual.has_value()) {
    const bool alike = residual->dim() == 4 && std::equal(sizes.begin(), sizes.end(), residual->sizes().begin());
    if (!alike || residual->scalar_type() != dtype || !is_beside(*residual, input)) return std::nullopt;
    if (sites[count - 1].way == kMatmul) return std::nullopt;
  }
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  std::array<std::optional<ConvolutionFold>, kMaxFolds> folds;
  if (!fold(input, sites, count, folds)) return std::nullopt;
  OptionalTensor x = input;
  for (int i = 0; i < count && x.has_value(); ++i) {
    x = computed(*x, sites[i], folds[i], i == count - 1 ? residual : std::nullopt);
  }
  return x;
}

ActivationArgs behind(int64_t code, double low, double high) {
  return activation_of("convolution_batch_norm_eval", code, low, high);
}

OptionalTensor convolution_batch_norm_eval_or_none(
    const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias, int64_t stride_0, int64_t stride_1,
    int64_t padding_0, int64_t padding_1, int64_t dilation_0, int64_t dilation_1, int64_t groups,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, const OptionalTensor& residual, int64_t activation, double low, double high,
    int64_t way) {
  const Geometry g{{stride_0, stride_1}, {padding_0, padding_1}, {dilation_0, dilation_1}, groups};
  const ActivationArgs acts = behind(activation, low, high);
  const Site site{conv_weight, conv_bias, running_mean, running_var, weight, bias, eps, g, acts, way};
  return run(input, &site, 1, residual);
}

// Of each the convolution's weight and bias, the running mean and variance, the norm's weight and bias; stride, padding and
// dilation, groups, activation and way; eps and the activation's parameters.
OptionalTensor convolutions_batch_norm_eval_or_none(const Tensor& input, std::vector<OptionalTensor> tensors,
                                                    std::vector<int64_t> numbers, std::vector<double> floats,
                                                    const OptionalTensor& residual) {
  const size_t count = floats.size() / 3;
  if (floats.size() != 3 * count || tensors.size() != 6 * count || numbers.size() != 9 * count) return std::nullopt;
  if (count < 1 || count > kMaxFolds) return std::nullopt;
  std::array<Site, kMaxFolds> sites;
  for (size_t i = 0; i < count; ++i) {
    const OptionalTensor* t = &tensors[6 * i];
    const int64_t* n = &numbers[9 * i];
    const Geometry g{{n[0], n[1]}, {n[2], n[3]}, {n[4], n[5]}, n[6]};
    const double* f = &floats[3 * i];
    sites[i] = Site{t[0], t[1], t[2], t[3], t[4], t[5], f[0], g, behind(n[7], f[1], f[2]), n[8]};
  }
  return run(input, sites.data(), static_cast<int>(count), residual);
}

// Under autocast a convolution casts what it is given.
OptionalTensor none_under_autocast(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, int64_t, int64_t, int64_t,
                                   int64_t, int64_t, int64_t, const OptionalTensor&, const OptionalTensor&,
                                   const OptionalTensor&, const OptionalTensor&, double, const OptionalTensor&, int64_t,
                                   double, double, int64_t) {
  return std::nullopt;
}

OptionalTensor none_of_several(const Tensor&, std::vector<OptionalTensor>, std::vector<int64_t>, std::vector<double>,
                               const OptionalTensor&) {
  return std::nullopt;
}

}  // namespace
}  // namespace normswap

STABLE_TORCH_LIBRARY_IMPL(normswap, CUDA, m) {
  m.impl("convolution_batch_norm_eval_or_none", TORCH_BOX(&normswap::convolution_batch_norm_eval_or_none));
  m.impl("convolutions_batch_norm_eval_or_none", TORCH_BOX(&normswap::convolutions_batch_norm_eval_or_none));
}

// No gradient is recorded, and the dispatcher's own way past this key costs more than the call.
STABLE_TORCH_LIBRARY_IMPL(normswap, AutogradCUDA, m) {
  m.impl("convolution_batch_norm_eval_or_none", TORCH_BOX(&normswap::convolution_batch_norm_eval_or_none));
  m.impl("convolutions_batch_norm_eval_or_none", TORCH_BOX(&normswap::convolutions_batch_norm_eval_or_none));
}

STABLE_TORCH_LIBRARY_IMPL(normswap, AutocastCUDA, m) {
  m.impl("convolution_batch_norm_eval_or_none", TORCH_BOX(&normswap::none_under_autocast));
  m.impl("convolutions_batch_norm_eval_or_none", TORCH_BOX(&normswap::none_of_several));
}
