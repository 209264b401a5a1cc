// Whole calls of swapped norms: what Python would ask of the module and its tensors, then the native op, in one step
// from Python, past its frames and the dispatcher's reading of arguments. Where anything is not as it mostly is the
// answer is None, and Python finds out what is to be done. Not part of the library where there is no Python.h.
#if __has_include(<Python.h>)

#include "batch_norm.h"
#include "convolution.h"
#include "folded_linear.h"
#include "guarded.h"
#include "norm.h"

namespace {

PyTypeObject norm_type = {PyVarObject_HEAD_INIT(nullptr, 0) "normswap.nodes.Norm", sizeof(Norm)};
PyTypeObject norm_act_type = {PyVarObject_HEAD_INIT(nullptr, 0) "normswap.nodes.NormAct", sizeof(NormAct)};
PyTypeObject convolution_type = {PyVarObject_HEAD_INIT(nullptr, 0) "normswap.nodes.Convolution", sizeof(Convolution)};
PyTypeObject guarded_type = {PyVarObject_HEAD_INIT(nullptr, 0) "normswap.nodes.Guarded", sizeof(Guarded)};

// Sets the launchers by their addresses, in the order of Launchers; without any all are null.
bool set_launchers(PyObject* addresses, at::DeviceType device) {
  constexpr Py_ssize_t count = 8;
  void* found[count]{};
  const Py_ssize_t given = PyTuple_GET_SIZE(addresses);
  if (given != 0 && given != count) {
    PyErr_Format(PyExc_ValueError, "there are %zd launchers, got %zd addresses", count, given);
    return false;
  }
  for (Py_ssize_t i = 0; i < given; ++i) {
    found[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i));
  }
  normswap::Launchers& it = launchers();
  void** next = found;
  const auto set = [&](auto& launcher) {
    launcher = reinterpret_cast<std::remove_reference_t<decltype(launcher)>>(*next++);
  };
  set(it.row_norm), set(it.group_norm), set(it.row_backward), set(it.group_backward), set(it.convolve), set(it.batch_norm);
  set(it.batch_norm_train), set(it.batch_norm_backward);
  it.device = device;
  return PyErr_Occurred() == nullptr;
}

// configure(variables of torch.nn.modules.module, of torch.nn.functional, of forward_ad, {class that hands on: it is a
// dropout}, {activation: numbers}, {class: its forward as it was}, device, addresses of the launchers)
PyObject* configure(PyObject*, PyObject* arguments) {
  PyObject *modules = nullptr, *functional = nullptr, *forward_ad = nullptr, *passing = nullptr, *activations = nullptr, *forwards = nullptr;
  PyObject* addresses = nullptr;
  const char* device = nullptr;
  HANDLE_TH_ERRORS
  if (!PyArg_ParseTuple(arguments, "OOOOOOsO!", &modules, &functional, &forward_ad, &passing, &activations, &forwards, &device,
                        &PyTuple_Type, &addresses) ||
      !set_launchers(addresses, c10::Device(device).type())) {
    return nullptr;
  }
  Known& it = known();
  it.modules = kept(modules), it.functional = kept(functional), it.forward_ad = kept(forward_ad), it.passing = kept(passing);
  it.activations = kept(activations), it.forwards = kept(forwards);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// only_compute(children, names, known classes, is_known): see normswap/regions/children.py.
PyObject* ask_only_compute(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 4) return PyErr_Format(PyExc_TypeError, "only_compute takes 4 arguments");
  try {
    return PyBool_FromLong(!any_global_hook() && only_compute(arguments[0], arguments[1], arguments[2], arguments[3]));
  } catch (const PythonError&) {
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {{"configure", configure, METH_VARARGS, nullptr},
                         {"batch_norm_eval", reinterpret_cast<PyCFunction>(batch_norm_eval), METH_FASTCALL, nullptr},
                         {"only_compute", reinterpret_cast<PyCFunction>(ask_only_compute), METH_FASTCALL, nullptr},
                         {"folded_linear", reinterpret_cast<PyCFunction>(folded_linear), METH_FASTCALL, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_normswap_calls", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__normswap_calls() {
  PyObject* module = PyModule_Create(&module_def);
  if (module == nullptr) return nullptr;
  const bool added = add_callable(module, norm_type, "Norm", norm_new) &&
                     add_callable(module, norm_act_type, "NormAct", norm_act_new) &&
                     add_callable(module, convolution_type, "Convolution", convolution_new) &&
                     add_callable(module, guarded_type, "Guarded", guarded_new);
  if (!added) Py_CLEAR(module);
  return module;
}

#endif
