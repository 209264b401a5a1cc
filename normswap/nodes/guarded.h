// A forward with regions: whether all is as it was read, which Python asks in normswap/regions/install.py.
#pragma once

#include "python.h"

namespace {

// What Python gives, in this order (normswap/ops/at_once.py says what each is).
enum GuardedField {
  kRewritten, kOtherwise, kReplaced, kOwn, kConditions, kGlobals, kReads, kInARow, kTorchs, kReached, kBesides, kBesideKnown,
  kIsBeside, kGuardedFields
};

struct Guarded : Callable {
  PyObject* operator[](GuardedField field) const { return fields[field]; }
};

// Whether a function that was read has the code and the defaults that it had: `read` is (it, code, defaults, named ones).
bool is_function_as_read(PyObject* read) {
  PyObject *function = PyTuple_GET_ITEM(read, 0), *defaults = PyTuple_GET_ITEM(read, 2), *named = PyTuple_GET_ITEM(read, 3);
  if (!PyFunction_Check(function) || PyFunction_GET_CODE(function) != PyTuple_GET_ITEM(read, 1)) return false;
  PyObject *now = PyFunction_GET_DEFAULTS(function), *named_now = PyFunction_GET_KW_DEFAULTS(function);
  if ((now == nullptr ? Py_None : now) != defaults) return false;
  const Py_ssize_t count = named_now == nullptr ? 0 : PyDict_Size(named_now);
  if (PyDict_Size(named) != count) return false;
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; count > 0 && PyDict_Next(named, &at, &name, &value);) {
    if (found(named_now, name) != value) return false;
  }
  return true;
}

PyObject* looked_up(PyTypeObject* cls, PyObject* name) { return _PyType_Lookup(cls, name); }

// Whether what modules are called by, and read children by, is torch.nn's: `torchs` is (nn.Module, its __call__, its
// _call_impl, as they were).
bool is_torchs(PyTypeObject* cls, PyObject* torchs) {
  const Names& names = known().names;
  auto* module = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(torchs, 0));
  return looked_up(module, names.call) == PyTuple_GET_ITEM(torchs, 1) &&
         looked_up(module, names.call_impl) == PyTuple_GET_ITEM(torchs, 2) &&
         looked_up(cls, names.getattr) == looked_up(module, names.getattr) &&
         looked_up(cls, names.getattribute) == looked_up(module, names.getattribute);
}

// Whether the rewritten forward does on this module what the original's would.
bool is_as_read(const Guarded& f, PyObject* module) {
  const Names& names = known().names;
  if (at::tracer::impl::is_dispatch_enabled()) return false;
  const Owned original = made(PyObject_GetAttr(f[kReplaced], names.known));
  if (!is_as_known(original)) return false;
  const Owned installed = made(PyObject_GetAttr(f[kReplaced], names.installed));
  if (installed != reinterpret_cast<PyObject*>(Py_TYPE(module)) &&  // one put over it may hide what it has
      !is_true(made(PyObject_CallMethodOneArg(f[kReplaced], names.is_of, module)))) {
    return false;
  }
  if (!is_torchs(Py_TYPE(module), f[kTorchs]) || !is_function_as_read(f[kOwn])) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(f[kConditions]); ++i) {
    PyObject* condition = PyTuple_GET_ITEM(f[kConditions], i);
    const Owned answer(PyObject_CallOneArg(PyTuple_GET_ITEM(condition, 0), module));
    if (answer == nullptr && PyErr_ExceptionMatches(PyExc_AttributeError)) return PyErr_Clear(), false;
    if (answer == nullptr) throw PythonError();
    if (is_true(answer) != (PyTuple_GET_ITEM(condition, 1) == Py_True)) return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(f[kReads]); ++i) {
    PyObject* read = PyTuple_GET_ITEM(f[kReads], i);  // the name, then what was read
    PyObject* now = found(f[kGlobals], PyTuple_GET_ITEM(read, 0));
    if (now != PyTuple_GET_ITEM(PyTuple_GET_ITEM(read, 1), 0) || !is_function_as_read(PyTuple_GET_ITEM(read, 1))) return false;
  }
  PyTypeObject* cls = Py_TYPE(module);  // which a condition may have changed
  if (f[kInARow] != Py_None && looked_up(cls, names.iter) != f[kInARow]) return false;
  const Owned own = dict_of(module);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(f[kReached]); ++i) {
    PyObject* name = PyTuple_GET_ITEM(f[kReached], i);
    if (looked_up(cls, name) != nullptr || found(own, name) != nullptr) return false;  // it hides the child
  }
  if (PyTuple_GET_SIZE(f[kBesides]) == 0) return true;
  const Owned children = kept(found(own, names.modules));
  return children != nullptr && !any_global_hook() &&
         only_compute(children, f[kBesides], f[kBesideKnown], f[kIsBeside]);
}

// Runs the rewritten forward, or what Python does otherwise, on the arguments as they are.
PyObject* guarded(PyObject* self, PyObject* const* arguments, size_t count, PyObject* keywords) {
  const Guarded& f = *reinterpret_cast<const Guarded*>(self);
  PyObject* chosen = nullptr;
  try {
    chosen = PyVectorcall_NARGS(count) > 0 && is_as_read(f, arguments[0]) ? f[kRewritten] : f[kOtherwise];
  } catch (const PythonError&) {
    return nullptr;
  }
  return PyObject_Vectorcall(chosen, arguments, count, keywords);
}

PyObject* guarded_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject* fields = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!", &PyTuple_Type, &fields)) return nullptr;
  return made_of(type, fields, kGuardedFields, guarded);
}

}  // namespace
