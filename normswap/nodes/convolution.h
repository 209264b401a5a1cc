// A Conv2d with a BatchNorm2d behind it in eval, without gradients: what Python would ask of the children and their tensors,
// then our kernel, or the fold and cuDNN's convolution that ends in a ReLU.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/cudnn_convolution_add_relu.h>
#include <ATen/ops/cudnn_convolution_relu.h>

#include <algorithm>

#include "batch_norm.h"

namespace {

using normswap::ConvolutionCall;

// What Python gives, in this order (normswap/ops/at_once.py says what each is).
enum ConvolutionField {
  kOf, kBehind, kHides, kNorms, kIsNorm, kHandsOn, kEnds, kEndsOf, kNumbers, kFunctions, kRead, kPlace, kClass, kInner,
  kFuses, kConvolutionFields
};

struct Convolution : Callable {
  int place;   // of the input in a sum's (input, residual); -1: there is none
  bool fuses;  // by cuDNN

  PyObject* operator[](ConvolutionField field) const { return fields[field]; }
};

struct Tensors {
  Tensor input, weight, residual;
  std::array<Tensor, 5> of_channels;  // as ConvolutionCall has them
};

// Whether C++ holds the numbers that were read.
bool is_held() {
  if (PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();
  return false;
}

bool set_pair(PyObject* own, PyObject* name, int64_t (&pair)[2]) {
  PyObject* given = found(own, name);
  if (given == nullptr || !PyTuple_CheckExact(given) || PyTuple_GET_SIZE(given) != 2) return false;
  for (int d = 0; d < 2; ++d) {
    PyObject* number = PyTuple_GET_ITEM(given, d);
    if (!PyLong_CheckExact(number)) return false;
    pair[d] = PyLong_AsLongLong(number);
  }
  return is_held();
}

bool set_convolution(const Convolution& c, PyObject* module, Tensors& t, ConvolutionCall& call) {
  if (module == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(module)) != c[kClass]) return false;
  const Names& names = known().names;
  const Owned own = dict_of(module);
  PyObject* inner = c[kInner];  // the method that its forward calls
  if (!is_plain(module, own) || found(own, PyTuple_GET_ITEM(inner, 1)) != nullptr || !is_as_known(inner)) return false;
  PyObject *mode = found(own, names.padding_mode), *groups = found(own, names.groups), *parameters = names.parameters;
  if (mode == nullptr || !PyUnicode_Check(mode) || PyUnicode_CompareWithASCIIString(mode, "zeros") != 0) return false;
  if (groups == nullptr || !PyLong_CheckExact(groups)) return false;
  call.groups = PyLong_AsLongLong(groups);
  return is_held() && set_pair(own, names.stride, call.stride) && set_pair(own, names.padding, call.padding) &&
         set_pair(own, names.dilation, call.dilation) && take_registered(own, parameters, names.weight, t.weight) &&
         take_registered(own, parameters, names.bias, t.of_channels[4]) && t.weight.defined();
}

// The norm; what it calls behind is asked for by path.
bool set_norm(const Convolution& c, PyObject* module, Tensors& t, ConvolutionCall& call) {
  if (module == nullptr) return false;
  PyObject* stands = stands_for(c[kNorms], c[kIsNorm], module);
  if (stands == nullptr || !is_called_as(reinterpret_cast<PyObject*>(Py_TYPE(module)), PyTuple_GET_ITEM(stands, 5))) return false;
  const Owned own = dict_of(module);
  auto& [var, mean, weight, bias, _] = t.of_channels;
  return is_bare(own) && set_fixed(own, call.eps, {&mean, &var, &weight, &bias});
}

// The child of a module, or the child of a child; null: there is none, or something hides it.
Owned child_at(PyObject* children, PyObject* path) {
  Owned child = kept(found(children, PyTuple_GET_ITEM(path, 0)));
  if (child == nullptr || PyTuple_GET_SIZE(path) == 1) return child;
  const Owned own = dict_of(child);
  PyObject *name = PyTuple_GET_ITEM(path, 1), *inner = found(own, known().names.modules);
  return inner == nullptr || found(own, name) != nullptr ? Owned() : kept(found(inner, name));
}

// Whether PyTorch's ops take these together: of 16 bits, a norm's tensors of one dtype, that of all the others or float32.
bool fit(const Tensors& t, int64_t channels) {
  const auto dtype = t.input.scalar_type(), kept = t.of_channels[0].scalar_type();
  if ((dtype != at::kHalf && dtype != at::kBFloat16) || t.weight.scalar_type() != dtype) return false;
  if (kept != dtype && kept != at::kFloat) return false;
  for (size_t i = 0; i < t.of_channels.size(); ++i) {
    const Tensor& values = t.of_channels[i];
    if (!values.defined()) continue;
    if (values.dim() != 1 || values.size(0) != channels || values.scalar_type() != (i < 4 ? kept : dtype)) return false;
  }
  return !t.residual.defined() || t.residual.scalar_type() == dtype;
}

// Whether the convolution takes an image of these sizes, which become those of what it gives.
bool takes(const Tensors& t, const ConvolutionCall& call, std::array<int64_t, 4>& sizes) {
  constexpr int64_t most = 1 << 30;
  const int64_t channels = t.weight.size(0);
  if (call.groups < 1 || sizes[1] != t.weight.size(1) * call.groups || channels % call.groups != 0) return false;
  sizes[1] = channels;
  for (int d = 0; d < 2; ++d) {
    const int64_t stride = call.stride[d], padding = call.padding[d], dilation = call.dilation[d];
    if (stride < 1 || padding < 0 || dilation < 1 || std::max({stride, padding, dilation}) > most) return false;
    const int64_t room = sizes[2 + d] + 2 * padding - dilation * (t.weight.size(2 + d) - 1) - 1;
    if (room < 0) return false;
    sizes[2 + d] = room / stride + 1;
  }
  return true;
}

// By cuDNN's convolution, with the norm folded into weight and bias; undefined where Python is to find out.
Tensor fused(const Tensors& t, const ConvolutionCall& call) {
  static const auto fold = c10::Dispatcher::singleton().findSchemaOrThrow("normswap::fold_convolution_or_none", "");
  const auto& context = at::globalContext();
  constexpr int32_t kRelu = 1;
  if (call.activation != kRelu || !context.userEnabledCuDNN() || context.deterministicCuDNN()) return {};
  if (t.input.dim() != 4 || t.input.numel() == 0 || t.weight.dim() != 4 || t.weight.numel() == 0) return {};
  std::array<int64_t, 4> sizes;
  std::copy_n(t.input.sizes().begin(), 4, sizes.begin());
  if (!takes(t, call, sizes) || !fit(t, sizes[1])) return {};
  if (t.residual.defined()) {
    const bool dense = t.residual.is_contiguous() || t.residual.is_contiguous(at::MemoryFormat::ChannelsLast);
    if (t.residual.sizes() != at::IntArrayRef(sizes) || (call.residual_first && !dense)) return {};
  }
  const Released released;
  const c10::DeviceGuard there(t.input.device());
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& [var, mean, weight, bias, own_bias] = t.of_channels;
  Stack stack{t.weight, optional(own_bias), mean, var, optional(weight), optional(bias), call.eps};
  fold.callBoxed(stack);
  if (!stack[0].isTensor()) return {};
  const Tensor folded = stack[0].toTensor(), shift = stack[1].toTensor();
  const at::IntArrayRef stride(call.stride), padding(call.padding), dilation(call.dilation);
  if (!t.residual.defined()) return at::cudnn_convolution_relu(t.input, folded, shift, stride, padding, dilation, call.groups);
  const Tensor out =
      at::cudnn_convolution_add_relu(t.input, folded, t.residual, 1, shift, stride, padding, dilation, call.groups);
  const bool alike = !call.residual_first || out.strides() == t.residual.strides();
  return alike ? out : at::empty_like(t.residual).copy_(out);  // a sum is laid out after its first operand
}

// The result, None where Python is to find out what it is.
PyObject* convolved(const Convolution& c, PyObject* owner, PyObject* packed) {
  const Names& names = known().names;
  const bool otherwise = at::autocast::is_autocast_enabled(at::kCUDA) || at::globalContext().deterministicAlgorithms();
  if (any_say() || otherwise || any_global_hook()) return none();
  const Owned owners = dict_of(owner);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(c[kHides]); ++i) {
    if (found(owners, PyTuple_GET_ITEM(c[kHides], i)) != nullptr) return none();
  }
  const Owned children = kept(found(owners, names.modules));
  if (children == nullptr || !gives_still(c[kFunctions], c[kRead])) return none();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(c[kHandsOn]); ++i) {
    const Owned child = child_at(children, PyTuple_GET_ITEM(c[kHandsOn], i));
    if (child == nullptr || !hands_on(child)) return none();
  }
  const Owned acting = c[kEnds] == Py_None ? Owned() : child_at(children, c[kEnds]);
  if (c[kEnds] != Py_None && acting == nullptr) return none();
  Activation activation;
  Tensors t;
  ConvolutionCall call{};
  if (!set_activation(acting, c[kNumbers], c[kEndsOf], activation)) return none();
  const Owned convolution = kept(found(children, c[kOf])), norm = kept(found(children, c[kBehind]));
  if (!set_convolution(c, convolution, t, call) || !set_norm(c, norm, t, call)) return none();
  call.activation = static_cast<int32_t>(activation.code);
  call.low = static_cast<float>(activation.low), call.high = static_cast<float>(activation.high);
  PyObject* x = packed;
  if (c.place >= 0) {
    if (!PyTuple_Check(packed) || PyTuple_GET_SIZE(packed) != 2) return none();
    x = PyTuple_GET_ITEM(packed, c.place);
    PyObject* residual = PyTuple_GET_ITEM(packed, 1 - c.place);
    if (residual == Py_None || !take(residual, t.residual)) return none();
  }
  const auto& [var, mean, weight, bias, own_bias] = t.of_channels;
  if (!take(x, t.input) || !t.input.defined()) return none();
  if (!all_readable(t.input, t.weight, t.residual, var, mean, weight, bias, own_bias)) return none();
  call.residual_first = c.place == 1;
  if (c.fuses) return wrapped(fused(t, call));
  call.input = view_of(t.input), call.weight = view_of(t.weight), call.residual = view_of(t.residual);
  for (size_t i = 0; i < t.of_channels.size(); ++i) call.of_channels[i] = view_of(t.of_channels[i]);
  TensorMemory memory(t.input);
  const auto launch = [&] { return launched("normswap::convolution_batch_norm_eval", launchers().convolve, call, memory); };
  if (!released(launch)) return none();
  return wrapped(memory.parts[Memory::kOut]);
}

// --- for Python -------------------------------------------------------------------------------------------------------

PyObject* convolution_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject* fields = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!", &PyTuple_Type, &fields)) return nullptr;
  PyObject* self = made_of(type, fields, kConvolutionFields, answered<Convolution, convolved>);
  if (self == nullptr) return nullptr;
  Convolution& c = *reinterpret_cast<Convolution*>(self);
  c.place = static_cast<int>(PyLong_AsLong(c[kPlace]));
  c.fuses = c[kFuses] == Py_True;
  return self;
}

}  // namespace
