// What calls from Python ask before they go past it: of objects, modules and tensors.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <limits>

#include "launches.h"

namespace {

using c10::IValue;
using torch::jit::Stack;

// --- Python's objects -------------------------------------------------------------------------------------------------

struct Owned {  // a reference
  Owned(PyObject* object = nullptr) : object(object) {}
  Owned(Owned&& other) noexcept : object(std::exchange(other.object, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept { return std::swap(object, other.object), *this; }
  ~Owned() { Py_XDECREF(object); }
  operator PyObject*() const { return object; }
  PyObject* object;
};

Owned kept(PyObject* object) { return Owned(Py_XNewRef(object)); }

struct PythonError {};  // is set

struct Released {  // the interpreter's lock, as all of PyTorch's ops run
  Released() : state(PyEval_SaveThread()) {}
  ~Released() { PyEval_RestoreThread(state); }
  PyThreadState* state;
};

// What `run` gives without it.
template <class Run>
auto released(Run run) {
  const Released released;
  return run();
}

PyObject* none() { Py_RETURN_NONE; }

PyObject* found(PyObject* dict, PyObject* key) {  // borrowed; null: not there
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred()) throw PythonError();
  return value;
}

Owned made(PyObject* result) {
  if (result == nullptr) throw PythonError();
  return Owned(result);
}

bool is_true(PyObject* object) {
  const int truth = PyObject_IsTrue(object);
  if (truth < 0) throw PythonError();
  return truth == 1;
}

Owned dict_of(PyObject* module) { return made(PyObject_GenericGetDict(module, nullptr)); }

struct Names {
  PyObject* modules = PyUnicode_InternFromString("_modules");
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* buffers = PyUnicode_InternFromString("_buffers");
  PyObject* forward = PyUnicode_InternFromString("forward");
  PyObject* call = PyUnicode_InternFromString("__call__");
  PyObject* call_impl = PyUnicode_InternFromString("_call_impl");
  PyObject* getattr = PyUnicode_InternFromString("__getattr__");
  PyObject* getattribute = PyUnicode_InternFromString("__getattribute__");
  PyObject* iter = PyUnicode_InternFromString("__iter__");
  PyObject* known = PyUnicode_InternFromString("known");
  PyObject* installed = PyUnicode_InternFromString("installed");
  PyObject* is_of = PyUnicode_InternFromString("is_of");
  PyObject* training = PyUnicode_InternFromString("training");
  PyObject* weight = PyUnicode_InternFromString("weight");
  PyObject* bias = PyUnicode_InternFromString("bias");
  PyObject* eps = PyUnicode_InternFromString("eps");
  PyObject* p = PyUnicode_InternFromString("p");
  PyObject* momentum = PyUnicode_InternFromString("momentum");
  PyObject* tracks = PyUnicode_InternFromString("track_running_stats");
  PyObject* level = PyUnicode_InternFromString("_current_level");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* padding = PyUnicode_InternFromString("padding");
  PyObject* dilation = PyUnicode_InternFromString("dilation");
  PyObject* groups = PyUnicode_InternFromString("groups");
  PyObject* padding_mode = PyUnicode_InternFromString("padding_mode");
  std::array<PyObject*, 3> statistics{
      PyUnicode_InternFromString("running_mean"), PyUnicode_InternFromString("running_var"),
      PyUnicode_InternFromString("num_batches_tracked")};
  std::array<PyObject*, 4> hooks{
      PyUnicode_InternFromString("_forward_hooks"), PyUnicode_InternFromString("_forward_pre_hooks"),
      PyUnicode_InternFromString("_backward_hooks"), PyUnicode_InternFromString("_backward_pre_hooks")};
  std::array<PyObject*, 4> global_hooks{
      PyUnicode_InternFromString("_global_forward_hooks"), PyUnicode_InternFromString("_global_forward_pre_hooks"),
      PyUnicode_InternFromString("_global_backward_hooks"), PyUnicode_InternFromString("_global_backward_pre_hooks")};
};

// What `configure` is told: the variables of torch.nn.modules.module, torch.nn.functional and torch.autograd.forward_ad; by
// class whether it is a dropout of those that hand on, the numbers of the activations, and the forwards that were known.
struct Known {
  Names names;
  Owned modules, functional, forward_ad, passing, activations, forwards;
};

Known& known() {
  static Known* it = new Known();  // it outlives the interpreter
  return *it;
}

// --- modules ----------------------------------------------------------------------------------------------------------

bool is_bare(PyObject* own) {
  const Names& names = known().names;
  for (PyObject* name : names.hooks) {
    PyObject* hooks = found(own, name);
    if (hooks == nullptr || is_true(hooks)) return false;
  }
  return found(own, names.forward) == nullptr && found(own, names.call_impl) == nullptr;
}

bool any_global_hook() {
  for (PyObject* name : known().names.global_hooks) {
    PyObject* hooks = found(known().modules, name);
    if (hooks == nullptr || is_true(hooks)) return true;
  }
  return false;
}

// Whether the attribute of a class is the function that it was, with the code that it had (None: not a plain function).
bool is_unchanged(PyObject* cls, PyObject* name, PyObject* function, PyObject* code) {
  const Owned now(PyObject_GetAttr(cls, name));
  if (now == nullptr && PyErr_ExceptionMatches(PyExc_AttributeError)) return PyErr_Clear(), false;
  if (now == nullptr) throw PythonError();
  if (now != function) return false;
  return PyFunction_Check(function) ? PyFunction_GET_CODE(function) == code : code == Py_None;
}

// The same of a forward, (class, name, function, code, functions), and of what it calls of torch.nn.functional.
bool is_as_known(PyObject* forward) {
  const auto item = [&](int i) { return PyTuple_GET_ITEM(forward, i); };
  if (!is_unchanged(item(0), item(1), item(2), item(3))) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(item(4)); ++i) {
    PyObject* called = PyTuple_GET_ITEM(item(4), i);
    if (found(known().functional, PyTuple_GET_ITEM(called, 0)) != PyTuple_GET_ITEM(called, 1)) return false;
  }
  return true;
}

// Whether calling it runs the forward of its class, which was known, and nothing else; hooks of all modules apart.
bool is_plain(PyObject* module, PyObject* own) {
  PyObject* cls = reinterpret_cast<PyObject*>(Py_TYPE(module));
  PyObject* forward = found(known().forwards, cls);
  return forward != nullptr && is_bare(own) && is_as_known(forward);
}

// Whether a class has what comes before an instance's own attribute of that name: a property, say.
bool is_described(PyObject* cls, PyObject* name) {
  PyObject* attribute = _PyType_Lookup(reinterpret_cast<PyTypeObject*>(cls), name);
  return attribute != nullptr && Py_TYPE(attribute)->tp_descr_set != nullptr;
}

bool hands_on(PyObject* module) {
  PyObject* dropout = found(known().passing, reinterpret_cast<PyObject*>(Py_TYPE(module)));
  if (dropout == nullptr) return false;
  const Owned own = dict_of(module);
  if (!is_plain(module, own)) return false;
  PyObject *training = found(own, known().names.training), *p = found(own, known().names.p);
  return dropout == Py_False || (training != nullptr && !is_true(training)) || (p != nullptr && !is_true(p));
}

// Whether calling a module of the class runs what it did: its (forward, __call__).
bool is_called_as(PyObject* cls, PyObject* called) {
  const Names& names = known().names;
  return made(PyObject_GetAttr(cls, names.forward)) == PyTuple_GET_ITEM(called, 0) &&
         made(PyObject_GetAttr(cls, names.call)) == PyTuple_GET_ITEM(called, 1);
}

constexpr int kDeepest = 200;  // of modules in modules; one may hold itself

// Whether the module and all in it are of classes that only compute, and nothing else runs when they are called.
bool computes_only(PyObject* module, PyObject* classes, PyObject* is_known, int depth = 0) {
  if (depth > kDeepest) return false;
  PyObject* cls = reinterpret_cast<PyObject*>(Py_TYPE(module));
  PyObject* called = found(classes, cls);
  const bool listed = called != nullptr && is_called_as(cls, called);
  if (!listed && made(PyObject_CallOneArg(is_known, module)) != Py_True) return false;
  const Owned own = dict_of(module);
  const Owned children = kept(found(own, known().names.modules));
  if (children == nullptr || !is_bare(own)) return false;
  PyObject *name = nullptr, *child = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(children, &at, &name, &child);) {
    const Owned held = kept(child);
    if (!computes_only(held, classes, is_known, depth + 1)) return false;
  }
  return true;
}

// The same of the children of these names.
bool only_compute(PyObject* children, PyObject* names, PyObject* classes, PyObject* is_known) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* child = found(children, PyTuple_GET_ITEM(names, i));
    if (child == nullptr || !computes_only(child, classes, is_known)) return false;
  }
  return true;
}

// The forward that a module stands for, of its class the verdict of `stands`, which is kept in `classes`; null where that is
// another one by now.
PyObject* stands_for(PyObject* classes, PyObject* stands, PyObject* module) {
  PyObject* cls = reinterpret_cast<PyObject*>(Py_TYPE(module));
  PyObject* kept = found(classes, cls);
  if (kept == nullptr) {
    const Owned verdict = made(PyObject_CallOneArg(stands, module));
    if (PyDict_SetItem(classes, cls, verdict) != 0) throw PythonError();
    kept = found(classes, cls);
  }
  return kept != Py_None && is_as_known(kept) ? kept : nullptr;
}

bool contains(PyObject* numbers, int64_t number) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); ++i) {
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, i)) == number) return true;
  }
  return false;
}

// Whether `ask()` gives what it gave.
bool gives_still(PyObject* ask, PyObject* given) {
  if (ask == Py_None) return true;
  const Owned now = made(PyObject_CallNoArgs(ask));
  const int same = PyObject_RichCompareBool(now, given, Py_EQ);
  if (same < 0) throw PythonError();
  return same == 1;
}

struct Activation {
  int64_t code = 0;
  double low = 0.0, high = 0.0;
};

// That of a child, which `ask` is asked about where its class has no numbers of its own; without one that of `numbers`.
bool set_activation(PyObject* child, PyObject* numbers, PyObject* ask, Activation& activation) {
  Owned answer;
  if (child != nullptr) {
    numbers = found(known().activations, reinterpret_cast<PyObject*>(Py_TYPE(child)));
    if (numbers == nullptr) {
      numbers = answer = made(PyObject_CallOneArg(ask, child));
    } else if (!is_plain(child, dict_of(child))) {
      return false;
    }
  }
  if (numbers == Py_None) return false;
  activation = {PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, 0)), PyFloat_AsDouble(PyTuple_GET_ITEM(numbers, 1)),
                PyFloat_AsDouble(PyTuple_GET_ITEM(numbers, 2))};
  if (PyErr_Occurred()) throw PythonError();
  return true;
}

// --- what Python calls ------------------------------------------------------------------------------------------------

constexpr size_t kMostFields = 17;

struct Callable {  // with (owner, packed)
  PyObject_HEAD
  vectorcallfunc call;
  std::array<PyObject*, kMostFields> fields;  // those behind the last are null
};

// Runs `answer(self, owner, packed)`.
template <class Self, PyObject* (*answer)(const Self&, PyObject*, PyObject*)>
PyObject* answered(PyObject* self, PyObject* const* arguments, size_t count, PyObject* keywords) {
  HANDLE_TH_ERRORS
  if (PyVectorcall_NARGS(count) != 2 || keywords != nullptr) return none();
  try {
    return answer(*reinterpret_cast<const Self*>(self), arguments[0], arguments[1]);
  } catch (const PythonError&) {
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

PyObject* made_of(PyTypeObject* type, PyObject* fields, Py_ssize_t count, vectorcallfunc call) {
  if (PyTuple_GET_SIZE(fields) != count) return PyErr_Format(PyExc_ValueError, "%s: wants %zd fields", type->tp_name, count);
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  Callable& made = *reinterpret_cast<Callable*>(self);
  made.call = call;
  for (Py_ssize_t i = 0; i < count; ++i) made.fields[i] = Py_NewRef(PyTuple_GET_ITEM(fields, i));
  return self;
}

int callable_traverse(PyObject* self, visitproc visit, void* arg) {
  for (PyObject* field : reinterpret_cast<Callable*>(self)->fields) Py_VISIT(field);
  return 0;
}

int callable_clear(PyObject* self) {
  for (PyObject*& field : reinterpret_cast<Callable*>(self)->fields) Py_CLEAR(field);
  return 0;
}

void callable_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  callable_clear(self);
  Py_TYPE(self)->tp_free(self);
}

// Adds a type of callables to the module; false where Python has an error.
bool add_callable(PyObject* module, PyTypeObject& type, const char* name, newfunc make) {
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_new = make;
  type.tp_call = PyVectorcall_Call;
  type.tp_vectorcall_offset = offsetof(Callable, call);
  type.tp_traverse = callable_traverse;
  type.tp_clear = callable_clear;
  type.tp_dealloc = callable_dealloc;
  return PyType_Ready(&type) == 0 && PyModule_AddObjectRef(module, name, reinterpret_cast<PyObject*>(&type)) == 0;
}

// --- tensors ----------------------------------------------------------------------------------------------------------

bool is_tensor(PyObject* object) {
  PyObject* cls = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return cls == THPVariableClass || cls == ParameterClass;
}

// The tensor or, of None, an undefined one; false for all else, on other devices and of other layouts.
bool take(PyObject* object, Tensor& tensor) {
  if (object == nullptr || object == Py_None) return true;
  if (!is_tensor(object)) return false;
  tensor = THPVariable_Unpack(object);
  return tensor.device().type() == launchers().device && tensor.layout() == at::kStrided && !tensor.is_nested();
}

// A tensor that is registered, undefined for None; false where it is kept elsewhere.
bool take_registered(PyObject* own, PyObject* kind, PyObject* name, Tensor& tensor) {
  PyObject* kept = found(own, kind);
  PyObject* value = kept == nullptr || found(own, name) != nullptr ? nullptr : found(kept, name);
  return value != nullptr && take(value, tensor);
}

// Whether a mode has a say in what an op does, other than autocast.
bool any_mode() {
  PyObject* level = found(known().forward_ad, known().names.level);
  return level == nullptr || PyLong_AsLong(level) >= 0 || at::tracer::impl::is_dispatch_enabled() ||
         at::impl::torch_function_mode_enabled() ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// Whether a mode has a say in what an op does, or somebody wants gradients.
bool any_say() {
  return at::GradMode::is_enabled() || any_mode() || any_dispatch_mode();
}

IValue optional(const Tensor& t) { return t.defined() ? IValue(t) : IValue(); }

PyObject* wrapped(const Tensor& t) { return t.defined() ? THPVariable_Wrap(t) : none(); }

}  // namespace
