// Kernels with fixed statistics, launched past the dispatcher and the stable ABI, whose ways of passing so many arguments
// cost more than the launch.
#pragma once

#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

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

template <class... Others>
bool all_beside(const Tensor& input, const Others&... others) {
  return ((!others.defined() || others.device() == input.device()) && ...);
}

// batch_norm_eval(x, running_mean, running_var, weight, bias, eps, residual, activation, low, high): the result, or None.
PyObject* batch_norm_eval(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 10) return PyErr_Format(PyExc_TypeError, "batch_norm_eval takes 10 arguments");
  Tensor x, mean, var, weight, bias, residual;
  const bool taken = take(given[0], x) && take(given[1], mean) && take(given[2], var) && take(given[3], weight) &&
                     take(given[4], bias) && take(given[6], residual) && x.defined();
  if (!taken || launchers().batch_norm == nullptr || !all_beside(x, mean, var, weight, bias, residual)) return none();
  normswap::BatchNormCall call{view_of(x), view_of(residual), view_of(mean), view_of(var), view_of(weight), view_of(bias)};
  call.eps = PyFloat_AsDouble(given[5]);
  call.activation = static_cast<int32_t>(PyLong_AsLong(given[7]));
  call.low = static_cast<float>(PyFloat_AsDouble(given[8]));
  call.high = static_cast<float>(PyFloat_AsDouble(given[9]));
  if (PyErr_Occurred()) return nullptr;
  if (!launchers().batch_norm_takes(&call)) return none();
  const auto launch = [&](void* out, int32_t device) { return launchers().batch_norm(&call, out, device); };
  return THPVariable_Wrap(filled("normswap::batch_norm_eval", x.sizes(), x.strides(), x, launch));
  END_HANDLE_TH_ERRORS
}

}  // namespace
