// BatchNorm by running statistics, with what stands behind it.
#pragma once

#include "python.h"

namespace {

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

// Undefined where the kernel does not take it; eps and activation are the call's.
Tensor batch_norm(normswap::BatchNormCall& call, const Tensor& x, const Tensor& residual, const Tensor& mean, const Tensor& var,
                  const Tensor& weight, const Tensor& bias) {
  if (!all_readable(x, mean, var, weight, bias, residual)) return {};
  call.input = view_of(x), call.residual = view_of(residual), call.running_mean = view_of(mean);
  call.running_var = view_of(var), call.weight = view_of(weight), call.bias = view_of(bias);
  TensorMemory memory(x);
  const bool taken =
      released([&] { return launched("normswap::batch_norm_eval", launchers().batch_norm, call, memory); });
  return taken ? memory.parts[Memory::kOut] : Tensor();
}

// batch_norm_eval(x, running_mean, running_var, weight, bias, eps, residual, activation, low, high): the result, or None.
PyObject* batch_norm_eval(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 10) return PyErr_Format(PyExc_TypeError, "batch_norm_eval takes 10 arguments");
  Tensor x, mean, var, weight, bias, residual;
  const bool taken = take(given[0], x) && take(given[1], mean) && take(given[2], var) && take(given[3], weight) &&
                     take(given[4], bias) && take(given[6], residual) && x.defined();
  if (!taken) return none();
  normswap::BatchNormCall call{};
  call.eps = PyFloat_AsDouble(given[5]);
  call.activation = static_cast<int32_t>(PyLong_AsLong(given[7]));
  call.low = static_cast<float>(PyFloat_AsDouble(given[8]));
  call.high = static_cast<float>(PyFloat_AsDouble(given[9]));
  if (PyErr_Occurred()) return nullptr;
  return wrapped(batch_norm(call, x, residual, mean, var, weight, bias));
  END_HANDLE_TH_ERRORS
}

// --- a norm that calls children behind it ---------------------------------------------------------------------------

// What Python gives, in this order (normswap/ops/at_once.py says what each is).
enum NormActField { kPassing, kLast, kLastOf, kFunctionsBehind, kReadBehind, kRanks, kNormActFields };

struct NormAct : Callable {
  PyObject* operator[](NormActField field) const { return fields[field]; }
};

// What the norm gives for x in eval, None where Python is to find out what it is.
PyObject* norm_act(const NormAct& e, PyObject* norm, PyObject* given) {
  if (any_say() || any_global_hook() || !gives_still(e[kFunctionsBehind], e[kReadBehind])) return none();
  const Owned own = dict_of(norm);
  const Owned children = kept(found(own, known().names.modules));
  if (children == nullptr) return none();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(e[kPassing]); ++i) {
    PyObject* name = PyTuple_GET_ITEM(e[kPassing], i);
    const Owned child = kept(found(own, name) == nullptr ? found(children, name) : nullptr);
    if (child == nullptr || !hands_on(child)) return none();
  }
  Owned last;
  if (e[kLast] != Py_None) {
    last = kept(found(own, e[kLast]) == nullptr ? found(children, e[kLast]) : nullptr);
    if (last == nullptr) return none();
  }
  Activation activation;
  normswap::BatchNormCall call{};
  Tensor x, mean, var, weight, bias;
  if (e[kLast] != Py_None && !set_activation(last, Py_None, e[kLastOf], activation)) return none();
  if (!set_fixed(own, call.eps, {&mean, &var, &weight, &bias})) return none();
  if (!take(given, x) || !x.defined() || !contains(e[kRanks], x.dim())) return none();
  call.activation = static_cast<int32_t>(activation.code);
  call.low = static_cast<float>(activation.low), call.high = static_cast<float>(activation.high);
  return wrapped(batch_norm(call, x, Tensor(), mean, var, weight, bias));
}

PyObject* norm_act_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject* fields = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!", &PyTuple_Type, &fields)) return nullptr;
  return made_of(type, fields, kNormActFields, answered<NormAct, norm_act>);
}

}  // namespace
