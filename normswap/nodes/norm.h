// Calls of the norms: modules themselves, or in a region with what stands before and behind them.
#pragma once

#include <torch/csrc/Dtype.h>

#include <limits>

#include "python.h"

namespace {

enum Kind { kLayerNorm, kRmsNorm, kGroupNorm, kBatchNorm };

bool is_of_rows(Kind kind) { return kind < kGroupNorm; }

// The tensors and numbers of one call.
struct Given {
  Tensor x, before, behind, scale, shift, weight, bias;
  std::array<Tensor, 3> statistics;  // running mean and variance, batches tracked
  int64_t size = 0;  // groups, or how many dims are normalised
  double eps = 0.0, momentum = 0.0, offset = 0.0;  // offset: RMSNorm's, of the weight
  bool rounds = false;                             // before the weight
  Activation activation;
  std::optional<at::ScalarType> dtype;  // of the output, where not the input's
};

void call_op(Kind kind, Stack& stack) {
  static const auto op = [](const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); };
  static const std::array<c10::OperatorHandle, 4> ops{
      op("normswap::layer_norm_or_none"), op("normswap::rms_norm_or_none"), op("normswap::group_norm_or_none"),
      op("normswap::batch_norm_or_none")};
  const Released released;
  if (at::GradMode::is_enabled()) return ops[kind].callBoxed(stack);
  const at::AutoDispatchBelowADInplaceOrView below;
  ops[kind].callBoxed(stack);
}

// Output and sum, undefined where there is none.
using Results = std::pair<Tensor, Tensor>;

// Past the dispatcher, with nothing where somebody has a say, or the kernels' library declines.
Results launched(Kind kind, const Given& g) {
  if (kind == kBatchNorm || at::GradMode::is_enabled() || any_dispatch_mode()) return {};
  if (!all_readable(g.x, g.before, g.behind, g.scale, g.shift, g.weight, g.bias)) return {};
  if (is_of_rows(kind) && !g.x.is_contiguous()) return {};  // which the op has another kernel for
  const auto& [code, low, high] = g.activation;
  const View x = view_of(g.x), weight = view_of(g.weight), bias = view_of(g.bias);
  const int32_t activation = static_cast<int32_t>(code), dtype = g.dtype ? code_of(*g.dtype) : x.dtype;
  const float lowest = static_cast<float>(low), highest = static_cast<float>(high);
  TensorMemory memory(g.x);
  bool taken = false;
  if (kind == kGroupNorm) {
    const normswap::GroupNormCall call{x, weight, bias, view_of(g.behind), g.size, g.eps, activation, lowest, highest, dtype, 0};
    taken = released([&] { return launched("normswap::group_norm", launchers().group_norm, call, memory); });
  } else {
    const normswap::RowNormCall call{x, weight, bias, view_of(g.before), view_of(g.scale), view_of(g.shift), g.size, g.eps, g.offset,
                                     kind == kRmsNorm, g.rounds, activation, lowest, highest, dtype, 0};
    const char* name = kind == kRmsNorm ? "normswap::rms_norm" : "normswap::layer_norm";
    taken = released([&] { return launched(name, launchers().row_norm, call, memory); });
  }
  return taken ? Results{memory.parts[Memory::kOut], memory.parts[Memory::kSum]} : Results{};
}

Tensor tensor(IValue& value) { return value.isTensor() ? std::move(value).toTensor() : Tensor(); }

Results computed(Kind kind, const Given& g) {
  if (Results made = launched(kind, g); made.first.defined()) return made;
  const auto& [code, low, high] = g.activation;
  Stack stack;
  stack.reserve(16);
  if (kind == kBatchNorm) {
    torch::jit::push(stack, g.x);
    for (const Tensor& t : g.statistics) stack.emplace_back(optional(t));
    torch::jit::push(stack, optional(g.weight), optional(g.bias), true, g.momentum, g.eps, optional(g.behind), code, low,
                     high, IValue(), IValue());
    call_op(kind, stack);
    return {tensor(stack[0]), Tensor()};
  }
  torch::jit::push(stack, g.x, g.size, optional(g.weight));
  if (kind != kRmsNorm) stack.emplace_back(optional(g.bias));
  stack.emplace_back(g.eps);
  if (kind == kRmsNorm) torch::jit::push(stack, g.offset, g.rounds);
  if (kind == kGroupNorm) torch::jit::push(stack, code, low, high, optional(g.behind), g.dtype.has_value());
  if (is_of_rows(kind)) torch::jit::push(stack, optional(g.before), optional(g.scale), optional(g.shift), code, low, high);
  if (kind == kLayerNorm) stack.emplace_back(g.dtype ? IValue(*g.dtype) : IValue());
  call_op(kind, stack);
  return {tensor(stack[0]), is_of_rows(kind) ? tensor(stack[1]) : Tensor()};
}

// --- a norm -----------------------------------------------------------------------------------------------------------

// What Python gives of a norm, a module itself or in a region, in this order (normswap/ops/at_once.py says what each is).
enum Field {
  kClasses, kStands, kUnless, kNames, kChild, kChildren, kUnpack, kPosition, kLowered, kPasses, kActing, kActivationOf,
  kActivation, kCallees, kCalled, kOffset, kDtypes, kFields
};

struct Norm : Callable {
  Kind kind;
  int region, shared, needs_behind, needs_scale, rounds;

  PyObject* operator[](Field field) const { return fields[field]; }
  bool by_hand() const { return PyTuple_GET_SIZE(fields[kDtypes]) > 0; }
};

// The attributes of the norm; null where calling it may do something else by now.
Owned attributes_of(const Norm& norm, PyObject* module) {
  PyObject* cls = reinterpret_cast<PyObject*>(Py_TYPE(module));
  PyObject* stands = stands_for(norm[kClasses], norm[kStands], module);
  if (stands == nullptr) return {};
  if (norm.region && !is_called_as(cls, PyTuple_GET_ITEM(stands, 5))) return {};
  Owned own = dict_of(module);
  for (Py_ssize_t i = 6; i < PyTuple_GET_SIZE(stands); ++i) {
    const auto of_method = [&](int j) { return PyTuple_GET_ITEM(PyTuple_GET_ITEM(stands, i), j); };
    if (found(own, of_method(0)) != nullptr) return {};
    if (!is_unchanged(PyTuple_GET_ITEM(stands, 0), of_method(0), of_method(1), of_method(2))) return {};
  }
  if (norm[kUnless] != Py_None) {
    PyObject* flag = found(own, norm[kUnless]);
    if (flag == nullptr || is_true(flag)) return {};
  }
  return norm.region && !is_bare(own) ? Owned() : std::move(own);
}

// Borrowed; null: it is kept elsewhere, in a class, say. Of a tuple the first item, unless the second names an attribute.
PyObject* read(PyObject* module, PyObject* own, PyObject* parameters, PyObject* name) {
  PyObject* otherwise = nullptr;
  if (PyTuple_Check(name)) {
    otherwise = PyTuple_GET_ITEM(name, 0);
    if (PyTuple_GET_SIZE(name) == 1) return otherwise;
    name = PyTuple_GET_ITEM(name, 1);
  }
  if (is_described(reinterpret_cast<PyObject*>(Py_TYPE(module)), name)) return nullptr;
  for (PyObject* dict : {own, parameters, found(own, known().names.buffers)}) {
    if (PyObject* value = dict == nullptr ? nullptr : found(dict, name); value != nullptr) return value;
  }
  return otherwise;
}

// How many dims `shape` has, where it is that of the weight or, without one, of the input's last; -1 otherwise.
int64_t dims_of(PyObject* shape, const Given& g) {
  if (PyLong_Check(shape)) {
    const int64_t length = PyLong_AsLongLong(shape);
    const Tensor& t = g.weight.defined() ? g.weight : g.x;
    return (g.weight.defined() ? t.dim() == 1 : t.dim() > 0) && t.size(-1) == length ? 1 : -1;
  }
  if (!PyTuple_Check(shape)) return -1;
  const int64_t dims = PyTuple_GET_SIZE(shape), last = g.weight.defined() ? g.weight.dim() : g.x.dim();
  if (dims > last || dims == 0 || (g.weight.defined() && dims != last)) return -1;
  const auto sizes = (g.weight.defined() ? g.weight : g.x).sizes().slice(last - dims);
  for (int64_t i = 0; i < dims; ++i) {
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i)) != sizes[i]) return -1;
  }
  return dims;
}

// What a BatchNorm that learns from this batch has besides; false for another.
bool set_statistics(PyObject* own, Given& g) {
  const Names& names = known().names;
  if (found(own, names.training) != Py_True) return false;
  PyObject *momentum = found(own, names.momentum), *tracks = found(own, names.tracks);
  if (momentum == nullptr || !PyFloat_Check(momentum)) return false;
  g.momentum = PyFloat_AsDouble(momentum);
  if (tracks != Py_True) return tracks == Py_False;
  PyObject* buffers = found(own, names.buffers);
  for (size_t i = 0; i < g.statistics.size(); ++i) {
    PyObject* value = buffers == nullptr ? nullptr : found(buffers, names.statistics[i]);
    if (value == nullptr || found(own, names.statistics[i]) != nullptr || !take(value, g.statistics[i])) return false;
  }
  return true;
}

// Sets what is a number, and none of a class of its own.
bool set_number(PyObject* given, double& number) {
  if (given == nullptr || !(PyFloat_CheckExact(given) || PyLong_CheckExact(given))) return false;
  number = PyFloat_AsDouble(given);
  return number != -1.0 || !PyErr_Occurred() || (PyErr_Clear(), false);  // one that C++ holds
}

// Whether the kernels add what is before the norm, as far as dtypes go: the input's, or 16 bits to float32.
bool can_add(const Given& g) {
  if (!g.before.defined()) return true;
  const auto dtype = g.before.scalar_type(), to = g.x.scalar_type();
  return dtype == to || (to == at::kFloat && code_of(dtype) > 0);
}

// Whether rows of float32 begin at vectors and are short enough for one block: see adds_mixed of the kernels.
bool fits_block(const Given& g) {
  if (g.size > g.x.dim()) return false;
  const int64_t cols = c10::multiply_integers(g.x.sizes().slice(g.x.dim() - g.size));
  return cols % 4 == 0 && cols <= 8192;
}

// Of an RMSNorm by hand: whether the kernels do the same with such tensors, along the last dim.
bool set_by_hand(const Norm& norm, PyObject* offset, PyObject* eps, Given& g) {
  const auto is = [](PyObject* dtype, const Tensor& t) {
    return t.defined() ? THPDtype_Check(dtype) && reinterpret_cast<THPDtype*>(dtype)->scalar_type == t.scalar_type()
                       : dtype == Py_None;
  };
  bool known = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(norm[kDtypes]) && !known; ++i) {
    PyObject* pair = PyTuple_GET_ITEM(norm[kDtypes], i);
    known = is(PyTuple_GET_ITEM(pair, 0), g.x) && is(PyTuple_GET_ITEM(pair, 1), g.weight);
  }
  const bool dense = g.x.is_contiguous() && (!g.before.defined() || g.before.is_contiguous());
  if (!known || !dense || !can_add(g) || g.x.dim() == 0) return false;
  if (g.weight.defined() && (g.weight.dim() != 1 || g.weight.size(0) != g.x.size(-1))) return false;
  g.size = 1;
  g.rounds = norm.rounds && g.x.scalar_type() != at::kFloat;
  return set_number(offset, g.offset) && set_number(eps, g.eps);
}

bool set_arguments(const Norm& norm, PyObject* size, PyObject* weight, PyObject* bias, PyObject* eps, Given& g) {
  if (size == nullptr || weight == nullptr || bias == nullptr || eps == nullptr) return false;
  if (!take(weight, g.weight) || !take(bias, g.bias)) return false;
  if (norm.kind == kGroupNorm) {
    if (!PyLong_Check(size) || PyBool_Check(size)) return false;
    g.size = PyLong_AsLongLong(size);
  } else if (norm.kind == kBatchNorm) {  // the ranks that it takes
    g.size = contains(size, g.x.dim());
  } else {
    g.size = size == Py_None && g.weight.defined() ? g.weight.dim() : dims_of(size, g);
  }
  if (PyErr_Occurred()) return PyErr_Clear(), false;  // no size, or one that C++ does not hold
  const bool whole = PyLong_Check(eps) && !PyBool_Check(eps);
  if (eps == Py_None && norm.kind == kRmsNorm) {
    g.eps = std::numeric_limits<float>::epsilon();
  } else if (PyFloat_Check(eps) || whole) {
    g.eps = PyFloat_AsDouble(eps);
  } else {
    return false;
  }
  if (PyErr_Occurred()) return PyErr_Clear(), false;  // a number that C++ does not hold
  return g.size > 0 && (norm.kind != kBatchNorm || g.eps > 0.0);
}

// Sets x and what belongs to it from what a region is handed; gives the arguments of the norm, null without any.
struct Packed {
  Owned all;  // what unpack has made
  PyObject *x = nullptr, *arguments = nullptr;
};

bool unpack(const Norm& norm, PyObject* packed, Packed& p, Given& g) {
  p.x = packed;
  PyObject* before = nullptr;
  const long position = PyLong_AsLong(norm[kPosition]);
  if (norm[kUnpack] != Py_None) {
    p.all = made(PyObject_CallOneArg(norm[kUnpack], packed));
    PyObject** parts = PySequence_Fast_ITEMS(p.all.object);
    p.x = parts[0], before = parts[1], p.arguments = parts[5];
    const bool lacks = (norm.needs_behind && parts[2] == Py_None) || (norm.needs_scale && parts[3] == Py_None);
    if (lacks || !take(parts[2], g.behind) || !take(parts[3], g.scale) || !take(parts[4], g.shift)) return false;
  } else if (position >= 0) {
    if (!PyTuple_Check(packed) || PyTuple_GET_SIZE(packed) != 2) return false;
    p.x = PyTuple_GET_ITEM(packed, position), before = PyTuple_GET_ITEM(packed, 1 - position);
  }
  if (position >= 0 && before == Py_None) return false;
  if (!take(p.x, g.x) || !take(before, g.before) || !g.x.defined()) return false;
  if (g.before.defined() && g.before.scalar_type() == at::kFloat && code_of(g.x.scalar_type()) > 0) {
    const bool both = g.x.is_contiguous() && g.before.is_contiguous();
    if (both && g.x.sizes() == g.before.sizes()) std::swap(g.x, g.before);  // the sum is the same
  }
  for (const Tensor* t : {&g.scale, &g.shift}) {
    if (t->defined() && t->scalar_type() != g.x.scalar_type()) return false;
  }
  return true;
}

// The activations that have the same bits of a rounded input as their rounded output has: none, ReLU and clamp.
constexpr std::array<bool, 10> kRoundedFirst{true, true, false, false, false, false, true};

// What autocast has to say: whether the kernels serve it, and what the result is cast to behind them.
struct Cast {
  bool served = true;
  std::optional<at::ScalarType> lowered;
};

// Whether the kernels store 16 bits of this LayerNorm of float32.
bool is_rounded_at_once(const Given& g) {
  const bool bare = !g.scale.defined() && g.activation.code == 0, scaled = g.weight.defined() || g.bias.defined();
  if (!bare || (g.before.defined() && !scaled) || !g.x.is_contiguous() || g.size > g.x.dim()) return false;
  return c10::multiply_integers(g.x.sizes().slice(g.x.dim() - g.size)) % 8 == 0;
}

Cast under_autocast(const Norm& norm, PyObject* children, PyObject* x, Given& g) {
  if (norm.kind == kBatchNorm || !at::autocast::is_autocast_enabled(at::kCUDA)) return {};
  Cast cast;
  const auto dtype = g.x.scalar_type();
  if (norm.kind == kRmsNorm) return {false, {}};  // some versions widen it
  if (norm[kLowered] != Py_None) {
    const Owned found = made(PyObject_CallFunctionObjArgs(norm[kLowered], children, x, nullptr));
    if (THPDtype_Check(found)) cast.lowered = reinterpret_cast<THPDtype*>(found.object)->scalar_type;
  }
  if (dtype != at::kFloat && !cast.lowered) g.dtype = at::kFloat;
  if (dtype == at::kFloat && cast.lowered && norm.kind == kLayerNorm && is_rounded_at_once(g)) g.dtype = cast.lowered;
  const bool rounded_first = !g.scale.defined() && kRoundedFirst[g.activation.code];
  const bool wide = dtype == at::kFloat || !cast.lowered;  // the result, before any cast
  const bool added = !g.behind.defined() || (wide && g.behind.scalar_type() == at::kFloat);
  cast.served = added && (wide || (dtype == cast.lowered && rounded_first));
  return cast;
}

// Rows that the kernels take, where they do not add what is before the norm, for its dtype or size, or it is not dense: with
// gradients, which are to be added before they are rounded, Python has a way. Gives the sum where it is made here.
Tensor settled(Kind kind, Given& g) {
  if (!is_of_rows(kind)) return {};
  const bool dense = g.x.is_contiguous() && (!g.before.defined() || g.before.is_contiguous());
  const bool alike = !g.before.defined() || g.before.scalar_type() == g.x.scalar_type();
  const bool added = alike || (dense && can_add(g) && g.before.sizes() == g.x.sizes() && fits_block(g));
  if (added && (dense || at::GradMode::is_enabled())) return {};
  const Released released;
  Tensor total;
  if (g.before.defined()) total = g.x = g.x + std::exchange(g.before, Tensor());
  if (!at::GradMode::is_enabled()) g.x = g.x.contiguous();
  return total;
}

// The result, None where Python is to find out what it is.
PyObject* called(const Norm& norm, PyObject* owner, PyObject* packed) {
  const Names& names = known().names;
  Owned own, children, child;
  PyObject* parameters = nullptr;
  Given g;
  if (norm.region) {
    const Owned owners = dict_of(owner);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(norm[kChildren]); ++i) {
      if (found(owners, PyTuple_GET_ITEM(norm[kChildren], i)) != nullptr) return none();  // it hides the child
    }
    children = kept(found(owners, names.modules));
    if (children == nullptr || any_global_hook() || !gives_still(norm[kCallees], norm[kCalled])) return none();
    child = kept(norm[kChild] == Py_None ? nullptr : found(children, norm[kChild]));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(norm[kPasses]); ++i) {
      PyObject* pass = found(children, PyTuple_GET_ITEM(norm[kPasses], i));
      if (pass == nullptr || !hands_on(pass)) return none();
    }
    PyObject* acting = norm[kActing] == Py_None ? nullptr : found(children, norm[kActing]);
    if (norm[kActing] != Py_None && acting == nullptr) return none();
    if (!set_activation(acting, norm[kActivation], norm[kActivationOf], g.activation)) return none();
  } else {
    child = kept(owner);
  }
  if (any_mode()) return none();
  if (child != nullptr) {
    own = attributes_of(norm, child);
    parameters = own == nullptr ? nullptr : found(own, names.parameters);
    if (parameters == nullptr) return none();
  } else if (norm[kChild] != Py_None) {
    return none();
  }
  Packed p;
  if (!unpack(norm, packed, p, g)) return none();
  if (norm.kind == kBatchNorm && (own == nullptr || !set_statistics(own, g))) return none();
  std::array<PyObject*, 4> arguments{Py_None, Py_None, Py_None, Py_None};
  PyObject* offset = nullptr;
  if (parameters != nullptr) {
    for (int i = 0; i < 4; ++i) arguments[i] = read(child, own, parameters, PyTuple_GET_ITEM(norm[kNames], i));
    offset = read(child, own, parameters, norm[kOffset]);
  } else {
    const bool biased = norm.kind != kRmsNorm;
    if (p.arguments == nullptr || PyTuple_GET_SIZE(p.arguments) != 3 + biased) return none();
    for (int i = 0; i < 2 + biased; ++i) arguments[i] = PyTuple_GET_ITEM(p.arguments, i);
    arguments[3] = PyTuple_GET_ITEM(p.arguments, 2 + biased);
  }
  if (norm.by_hand()) {
    if (arguments[1] == nullptr || !take(arguments[1], g.weight) || !set_by_hand(norm, offset, arguments[3], g)) return none();
  } else if (!set_arguments(norm, arguments[0], arguments[1], arguments[2], arguments[3], g)) {
    return none();
  }
  if (is_of_rows(norm.kind) && g.before.defined() && !g.weight.defined() && g.before.sizes() != g.x.sizes()) {
    return none();  // the sum is of other sizes, which are to be asked whether they fit
  }
  const Tensor total = settled(norm.kind, g);
  const Cast cast = under_autocast(norm, children, p.x, g);
  if (!cast.served) return none();
  auto [out, sum] = computed(norm.kind, g);
  if (!out.defined()) return none();
  if (total.defined()) sum = total;
  if (cast.lowered && out.scalar_type() != cast.lowered) out = out.to(*cast.lowered);
  if (!norm.shared) return wrapped(out);
  Owned both = made(PyTuple_New(2));
  PyTuple_SET_ITEM(both.object, 0, wrapped(sum));
  PyTuple_SET_ITEM(both.object, 1, wrapped(out));
  return std::exchange(both.object, nullptr);
}

PyObject* norm_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  int kind = 0, region = 0, shared = 0, needs_behind = 0, needs_scale = 0, rounds = 0;
  PyObject* fields = nullptr;
  if (!PyArg_ParseTuple(arguments, "ipppppO!", &kind, &region, &shared, &needs_behind, &needs_scale, &rounds, &PyTuple_Type,
                        &fields)) {
    return nullptr;
  }
  PyObject* self = made_of(type, fields, kFields, answered<Norm, called>);
  if (self == nullptr) return nullptr;
  Norm& norm = *reinterpret_cast<Norm*>(self);
  norm.kind = static_cast<Kind>(kind);
  norm.region = region, norm.shared = shared, norm.needs_behind = needs_behind, norm.needs_scale = needs_scale;
  norm.rounds = rounds;
  return self;
}

}  // namespace
