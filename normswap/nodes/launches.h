// Kernels with fixed statistics, launched past the dispatcher and the stable ABI, whose ways of passing so many arguments
// cost more than the launch.
#pragma once

#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "abi/calls.h"
#include "python.h"

namespace {

using normswap::View;

// What the library of the kernels has for that, by `configure`; null without that library.
struct Launchers {
  decltype(&normswap_convolution_sizes) convolution_sizes;
  decltype(&normswap_convolve) convolve;
  decltype(&normswap_batch_norm_takes) batch_norm_takes;
  decltype(&normswap_batch_norm) batch_norm;
};

Launchers& launchers() {
  static Launchers it{};
  return it;
}

// `addresses`: of these functions, in their order.
bool set_launchers(PyObject* addresses) {
  void* found[4]{};
  for (Py_ssize_t i = 0; i < 4; ++i) {
    found[i] = PyTuple_GET_SIZE(addresses) == 4 ? PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i)) : nullptr;
  }
  Launchers& it = launchers();
  it.convolution_sizes = reinterpret_cast<decltype(it.convolution_sizes)>(found[0]);
  it.convolve = reinterpret_cast<decltype(it.convolve)>(found[1]);
  it.batch_norm_takes = reinterpret_cast<decltype(it.batch_norm_takes)>(found[2]);
  it.batch_norm = reinterpret_cast<decltype(it.batch_norm)>(found[3]);
  return PyErr_Occurred() == nullptr;
}

View view_of(const Tensor& t) {
  if (!t.defined()) return {};
  const auto dtype = t.scalar_type();
  const int32_t code = dtype == at::kFloat ? 0 : dtype == at::kHalf ? 1 : dtype == at::kBFloat16 ? 2 : -1;
  return {t.const_data_ptr(), t.sizes().data(), t.strides().data(), t.dim(), code};
}

// What `launch(out, device)` fills, which gives CUDA's error; the profiler sees it as `name`.
template <class Launch>
Tensor filled(const char* name, at::IntArrayRef sizes, at::IntArrayRef strides, const Tensor& like, Launch launch) {
  const Released released;
  RECORD_FUNCTION(name, c10::ArrayRef<const IValue>{});
  const c10::DeviceGuard there(like.device());
  const at::AutoDispatchBelowADInplaceOrView below;
  Tensor out = at::empty_strided(sizes, strides, like.options());
  const int32_t error = launch(out.mutable_data_ptr(), static_cast<int32_t>(like.device().index()));
  TORCH_CHECK(error == 0, name, ": the kernel could not be launched (CUDA error ", error, ")");
  return out;
}

// Whether its memory holds its values, for who reads it without asking the dispatcher.
bool is_readable(const Tensor& t) {
  const auto keys = t.key_set();
  return t.has_storage() && !t.is_neg() && !t._is_zerotensor() && !keys.has(c10::DispatchKey::Functionalize) &&
         !keys.has(c10::DispatchKey::Python);
}

template <class... Others>
bool all_readable(const Tensor& input, const Others&... others) {
  return is_readable(input) && ((!others.defined() || (is_readable(others) && others.device() == input.device())) && ...);
}

// Whether a mode has a say in what an op does, or somebody wants gradients.
bool any_say() {
  return at::GradMode::is_enabled() || any_mode() || c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// Of a BatchNorm in eval: eps, and of `tensors` running mean and variance, weight and bias; false for another.
bool set_fixed(PyObject* own, double& eps, const std::array<Tensor*, 4>& tensors) {
  const Names& names = known().names;
  PyObject *training = found(own, names.training), *number = found(own, names.eps);
  if (training != Py_False || number == nullptr || !PyFloat_Check(number)) return false;
  eps = PyFloat_AS_DOUBLE(number);
  const auto& [mean, var, weight, bias] = tensors;
  return eps > 0 && take_registered(own, names.buffers, names.statistics[0], *mean) &&
         take_registered(own, names.buffers, names.statistics[1], *var) &&
         take_registered(own, names.parameters, names.weight, *weight) &&
         take_registered(own, names.parameters, names.bias, *bias) && mean->defined() && var->defined();
}

}  // namespace
