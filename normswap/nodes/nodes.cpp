// Autograd's nodes in C++ for the native ops that do all of a call: they then record a gradient by themselves, and no
// Python runs in their backward. Against the full ABI of one version of torch, which the kernels do without; where this
// is not compiled the autograd Functions of normswap/ops do the same.
//
// An op X_or_none(arguments) -> outputs has a twin X_recorded(arguments) -> outputs and what else its backward needs.
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include "recorded_launches.h"

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::jit::Stack;
using NodePtr = decltype(Edge::function);

// --- the gradients, by the slot they are for --------------------------------------------------------------------------

variable_list of_rows(Kind kind, const variable_list& grads, const variable_list& saved, const Numbers& n,
                      const Wanted& wanted) {
  static const OperatorHandle layer = native("layer_norm_backward"), rms = native("rms_norm_backward");
  if (!grads[0].defined() || saved[kScale].defined()) return {};
  const Tensor sum_grad = grads.size() > 1 ? grads[1] : Tensor();
  if (variable_list made = backward_launched(kind, grads[0], sum_grad, saved, n, wanted); !made.empty()) return made;
  const bool centred = kind == kLayerNorm;
  Stack stack{grads[0], saved[kInput], optional(saved[kWeight])};
  if (centred) stack.emplace_back(optional(saved[kBias]));
  torch::jit::push(stack, saved[kKept], optional(sum_grad), columns_of(saved[kInput], n));
  if (!centred) torch::jit::push(stack, n[kOffset], n[kCast] != 0);
  torch::jit::push(stack, static_cast<int64_t>(n[kActivation]), n[kLow], n[kHigh],
                   wanted[kInput] || wanted[kResidual], wanted[kWeight]);
  if (centred) stack.emplace_back(wanted[kBias]);
  stack.emplace_back(0);  // as many passes as the plan wants
  (centred ? layer : rms).callBoxed(stack);
  const Tensor dx = tensor(stack[0]);  // the sum's, and so its summands'
  return {dx, tensor(stack[1]), tensor(stack[2]), dx, Tensor(), Tensor(), Tensor()};
}

variable_list of_channels(Kind kind, const variable_list& grads, const variable_list& saved, const Numbers& n,
                          const Wanted& wanted) {
  static const OperatorHandle groups = native("group_norm_backward_or_none"), batch = native("batch_norm_backward");
  Tensor grad = grads[0];
  const Tensor& input = saved[kInput];
  if (kind == kBatchNorm && grad.strides() != input.strides()) {
    grad = at::empty_like(input, grad.scalar_type()).copy_(grad);
  }
  if (variable_list made = backward_launched(kind, grad, Tensor(), saved, n, wanted); !made.empty()) return made;
  const IValue bias = optional(saved[keeps_bias(saved, n) ? kBias : kWeight]);
  Stack stack;
  if (kind == kBatchNorm) {
    stack = {grad, input, saved[kKept], optional(saved[kSigns]), optional(saved[kResidual]), optional(saved[kWeight]),
             bias, n[kTraining] != 0};
  } else {
    stack = {grad, input, optional(saved[kWeight]), bias, optional(saved[kResidual]), saved[kKept],
             static_cast<int64_t>(n[kSize])};
  }
  torch::jit::push(stack, static_cast<int64_t>(n[kActivation]), n[kLow], n[kHigh], wanted[kInput], wanted[kWeight],
                   wanted[kBias], wanted[kResidual]);
  if (kind == kBatchNorm) {
    torch::jit::push(stack, optional(saved[kScale]), optional(saved[kInputBias]), n[kEps], wanted[kScale],
                     wanted[kInputBias], optional(saved[kMean]), optional(saved[kVar]));
  }
  (kind == kBatchNorm ? batch : groups).callBoxed(stack);
  variable_list made(kLearning);
  for (int slot = kInput; slot <= kResidual; ++slot) made[slot] = tensor(stack[slot]);
  if (kind == kBatchNorm) {
    if (stack[4].isTensor()) made[kScale] = summed_as(stack[4].toTensor(), saved[kScale]);
    made[kInputBias] = tensor(stack[5]);
  }
  return made;
}

std::vector<double> list_of(const Numbers& numbers, int count = kNumbers) { return {numbers.begin(), numbers.begin() + count}; }

c10::List<std::optional<Tensor>> list_of(const variable_list& tensors) {
  c10::List<std::optional<Tensor>> list;
  for (const Tensor& t : tensors) list.push_back(t.defined() ? std::optional<Tensor>(t) : std::nullopt);
  return list;
}

// By the formula, which Python has: it can be differentiated again. Not by way of the dispatcher, where vmap has no rule for
// it: what it consists of has rules.
variable_list by_formula(Kind kind, const variable_list& grads, const variable_list& saved, const Numbers& n,
                         const Wanted& wanted) {
  static const OperatorHandle formula = native("norm_formula");
  Stack stack{std::string(kKinds[kind]), list_of(grads), list_of(saved), list_of(n, kGiven), std::vector<bool>(wanted.begin(), wanted.end())};
  formula.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  variable_list found;
  for (const IValue& one : stack) found.push_back(tensor(one));
  return found;
}

bool any_defined(const variable_list& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.defined(); });
}

// Under vmap over a backward, the older (is_grads_batched) or functorch's: for the kernels there are no rules.
bool is_transformed(const variable_list& grads) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet wrapped{DispatchKey::Batched, DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper};
  return std::any_of(grads.begin(), grads.end(), [&](const Tensor& t) { return t.defined() && t.key_set().has_any(wrapped); });
}

variable_list gradients(Kind kind, const variable_list& grads, const variable_list& saved, const Numbers& n, Wanted wanted) {
  variable_list found(kLearning);
  if (!any_defined(grads)) return found;
  const bool passed = !is_of_rows(kind) && n[kActivation] == 0 && wanted[kResidual];  // a sum's is its summands'
  if (passed) wanted[kResidual] = false;
  if (std::find(wanted.begin(), wanted.end(), true) != wanted.end()) {
    variable_list made;
    if (!at::GradMode::is_enabled() && !is_transformed(grads)) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      made = (is_of_rows(kind) ? of_rows : of_channels)(kind, grads, saved, n, wanted);
    }
    if (!any_defined(made)) made = by_formula(kind, grads, saved, n, wanted);
    for (int slot = 0; slot < kLearning; ++slot) {
      if (wanted[slot]) found[slot] = std::move(made[slot]);
    }
  }
  if (passed) found[kResidual] = grads[0];
  return found;
}

// --- the node ---------------------------------------------------------------------------------------------------------

// Whether nothing learns but what is added behind a norm of channels.
bool residual_alone_learns(const Norm& norm, c10::ArrayRef<IValue> given) {
  if (is_of_rows(norm.kind)) return false;
  for (int slot = 0; slot < kLearning; ++slot) {
    const int place = norm.tensors[slot];
    if (slot != kResidual && place >= 0 && given[place].isTensor() && given[place].toTensor().requires_grad()) return false;
  }
  return true;
}

struct Recorded final : Node {
  explicit Recorded(const Norm& norm) : norm(norm) {}

  std::string name() const override { return kNodes[norm.kind]; }

  // What a call is given.
  void take(c10::ArrayRef<IValue> given) {
    for (int i = 0; i < kGiven; ++i) {
      if (norm.numbers[i] >= 0) numbers[i] = number_of(given[norm.numbers[i]]);
    }
    passes = numbers[kActivation] == 0 && residual_alone_learns(norm, given);  // the gradient goes on as it comes
    torch::autograd::edge_list edges(kLearning);
    saved.reserve(kSlots);
    for (int slot = 0; slot < kKept; ++slot) {
      const int place = norm.tensors[slot];
      if (place < 0 || !given[place].isTensor()) continue;
      const Tensor& t = given[place].toTensor();
      if (slot < kLearning) edges[slot] = torch::autograd::impl::gradient_edge(t);
      if (needs(slot, given)) save(slot, t);
    }
    if (is_of_rows(norm.kind) && given_at(given, kResidual)) {
      const auto dtype_at = [&](int slot) { return given[norm.tensors[slot]].toTensor().scalar_type(); };
      if (dtype_at(kInput) == at::kFloat) numbers[kApart] = code_of(dtype_at(kResidual));
    }
    if (!passes && given_at(given, kInputBias)) input_bias = given[norm.tensors[kInputBias]].toTensor();
    ends_in_relu = numbers[kActivation] == kRelu && given_at(given, kResidual);
    if (norm.kind == kBatchNorm && ends_in_relu) strides = given[norm.tensors[kInput]].toTensor().strides().vec();
    set_next_edges(std::move(edges));
  }

  // What the op makes, past the dispatcher; nothing where that is not possible.
  std::vector<IValue> launched(c10::ArrayRef<IValue> given) const { return forward_launched(norm, given, numbers); }

  // What it has made: outputs, then what is kept.
  void keep(const NodePtr& self, c10::ArrayRef<IValue> made) {
    for (size_t i = 0; i < norm.outputs; ++i) {
      if (made[i].isTensor()) torch::autograd::set_history(made[i].toTensor(), self);
    }
    if (norm.outputs > 1 && made[1].isTensor()) saved.emplace_back(kInput, SavedVariable(made[1].toTensor(), true));
    if (norm.kind == kGroupNorm && ends_in_relu) saved.emplace_back(kResidual, SavedVariable(made[0].toTensor(), true));
    for (size_t i = 0; i < norm.kept && !passes; ++i) {
      if (made[norm.outputs + i].isTensor()) save(kKept + i, made[norm.outputs + i].toTensor());
    }
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return gradients(norm.kind, grads, unpacked(), numbers, wanted());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [_, one] : saved) one.reset_data();
    input_bias.reset();
  }

  // For torch's compiled autograd, in whose graph it stands as one call.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(static_cast<int>(norm.kind));  // one class of nodes, but graphs of their own
    args.collect(list_of(numbers));
    for (const auto& [slot, one] : saved) {
      args.collect(slot);
      args.collect(one, true);
    }
    args.collect(input_bias);
    args.collect(strides);
  }

  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swapped) override {
    using namespace torch::dynamo::autograd;
    for (auto& [_, one] : saved) swapped.before(one);
    swapped.before(input_bias);
    PackedArgs packed;
    packed.pack(static_cast<int64_t>(norm.kind));
    packed.pack(unpacked());
    packed.pack(list_of(numbers));
    packed.pack(wanted());
    const std::vector<at::TypePtr> schema{
        IValuePacker<int64_t>::packed_type(), IValuePacker<variable_list>::packed_type(),
        IValuePacker<std::vector<double>>::packed_type(), IValuePacker<Wanted>::packed_type()};
    const auto call = [](const variable_list& grads, const std::vector<IValue>& given) {
      PackedArgs packed(given);
      const auto kind = static_cast<Kind>(packed.unpack<int64_t>());
      const auto saved = packed.unpack<variable_list>();
      const auto list = packed.unpack<std::vector<double>>();
      Numbers numbers;
      std::copy(list.begin(), list.end(), numbers.begin());
      return gradients(kind, grads, saved, numbers, packed.unpack<Wanted>());
    };
    const auto& python = getPyCompilerInterface();
    const std::string bound = python->bind_function(swapped.get_py_compiler(), name(), call, schema, true, false);
    const IValue like = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        get_input_metadata(next_edges()));
    variable_list found =
        python->call_function(swapped.get_py_compiler(), "apply_functional", bound, grads, packed.vec(), like);
    for (auto& [_, one] : saved) swapped.after(one);
    swapped.after(input_bias);
    return found;
  }

 private:
  // PyTorch keeps what these have been added to: they may be inference tensors, which no node may keep.
  void save(int slot, const Tensor& t) {
    const bool beside = slot == kResidual || slot == kScale || slot == kShift;
    saved.emplace_back(slot, SavedVariable(beside && t.is_inference() ? t.clone() : t, false));
  }

  bool given_at(c10::ArrayRef<IValue> given, int slot) const {
    return norm.tensors[slot] >= 0 && given[norm.tensors[slot]].isTensor();
  }

  // The sum takes the input's place; what a ReLU gave or the signs that it keeps, or no activation, that of what was added. A
  // bias says no more than the weight of what its gradient is like; on the value of the input's no gradient depends: it may
  // change.
  bool needs(int slot, c10::ArrayRef<IValue> given) const {
    if (passes) return false;
    if (slot >= kLearning) return numbers[kTraining] == 0;
    if (slot == kInput) return norm.outputs == 1 || !given_at(given, kResidual);
    if (slot == kInputBias) return false;
    if (slot == kBias) return is_of_rows(norm.kind) || numbers[kActivation] != 0 || !given_at(given, kWeight);
    if (slot != kResidual) return true;
    return !is_of_rows(norm.kind) && numbers[kActivation] > kRelu;
  }

  variable_list unpacked() {
    variable_list tensors(kSlots);
    const NodePtr self = getptr();
    for (const auto& [slot, one] : saved) tensors[slot] = one.unpack(self);
    tensors[kInputBias] = input_bias;
    if (Tensor& input = tensors[kInput]; !strides.empty() && input.strides() != strides) {
      input = at::empty_strided(input.sizes(), strides, input.options()).copy_(input);
    }
    return tensors;
  }

  Wanted wanted() const {
    Wanted found;
    for (int slot = 0; slot < kLearning; ++slot) found[slot] = task_should_compute_output(slot);
    return found;
  }

  const Norm& norm;
  std::vector<std::pair<int, SavedVariable>> saved;
  Tensor input_bias;
  Numbers numbers{};
  bool passes = false;           // nothing is saved
  bool ends_in_relu = false;     // behind a residual
  std::vector<int64_t> strides;  // of the input, in whose memory signs lie: hooks may save it in another layout
};

template <class T>
NodePtr owned(const Norm& norm) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {  // before torch 2.12
    return NodePtr(new T(norm), [](auto* node) { deleteNode(node); });
  } else {
    return NodePtr(c10::make_intrusive<T>(norm));
  }
}

bool learns(const Norm& norm, c10::ArrayRef<IValue> given) {
  if (!at::GradMode::is_enabled()) return false;
  for (int slot = 0; slot < kLearning; ++slot) {
    const int place = norm.tensors[slot];
    if (place >= 0 && given[place].isTensor() && given[place].toTensor().requires_grad()) return true;
  }
  return false;
}

template <Kind kind>
void record(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  static const Norm norm(kind);
  const auto below = keys & c10::after_autograd_keyset;
  const auto given = torch::jit::last(*stack, norm.arguments);
  if (!learns(norm, given)) return op.redispatchBoxed(below, stack);
  if (number_of(given[norm.numbers[kActivation]]) != 0 && residual_alone_learns(norm, given)) {
    torch::jit::drop(*stack, norm.arguments);  // PyTorch's ops keep the sum or the activation alone, no input of the norm
    return (void)stack->insert(stack->end(), norm.outputs, IValue());
  }
  const NodePtr node = owned<Recorded>(norm);
  Recorded& call = static_cast<Recorded&>(*node);
  call.take(given);
  if (const std::vector<IValue> made = call.launched(given); !made.empty()) {
    call.keep(node, made);
    torch::jit::drop(*stack, norm.arguments);
    return (void)stack->insert(stack->end(), made.begin(), made.begin() + norm.outputs);
  }
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    norm.recorded.redispatchBoxed(below, stack);
  }
  const auto made = torch::jit::last(*stack, norm.outputs + norm.kept);
  if (made[0].isTensor()) call.keep(node, made);
  torch::jit::drop(*stack, norm.kept);
}

template <Kind kind>
void records(torch::Library& m) {
  m.impl((kKinds[kind] + std::string("_or_none")).c_str(), torch::CppFunction::makeFromBoxedFunction<&record<kind>>());
}

}  // namespace

TORCH_LIBRARY_IMPL(normswap, Autograd, m) {
  records<kLayerNorm>(m);
  records<kRmsNorm>(m);
  records<kGroupNorm>(m);
  records<kBatchNorm>(m);
}
