// A Conv2d with a BatchNorm2d behind it in eval, without gradients: what Python would ask of the children and their tensors,
// then our kernel.
#pragma once

#include <ATen/Context.h>

#include "launches.h"

namespace {

using normswap::ConvolutionCall;

// What Python gives, in this order (normswap/ops/at_once.py says what each is).
enum ConvolutionField {
  kOf, kBehind, kHides, kNorms, kIsNorm, kHandsOn, kEnds, kEndsOf, kNumbers, kFunctions, kRead, kPlace, kClass, kInner,
  kConvolutionFields
};

struct Convolution : Callable {
  int place;  // of the input in a sum's (input, residual); -1: there is none

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
  PyObject* inner = c[kInner];  // the method that its forward calls: its name, the function and its code
  if (!is_plain(module, own) || found(own, PyTuple_GET_ITEM(inner, 0)) != nullptr ||
      !is_unchanged(c[kClass], PyTuple_GET_ITEM(inner, 0), PyTuple_GET_ITEM(inner, 1), PyTuple_GET_ITEM(inner, 2))) {
    return false;
  }
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
  if (stands == nullptr || !is_called_as(reinterpret_cast<PyObject*>(Py_TYPE(module)), PyTuple_GET_ITEM(stands, 4))) return false;
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
  call.input = view_of(t.input), call.weight = view_of(t.weight), call.residual = view_of(t.residual);
  for (size_t i = 0; i < t.of_channels.size(); ++i) call.of_channels[i] = view_of(t.of_channels[i]);
  call.residual_first = c.place == 1;
  TensorMemory memory(t.input);
  if (!launched("normswap::convolution_batch_norm_eval", launchers().convolve, call, memory)) return none();
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
  return self;
}

}  // namespace
