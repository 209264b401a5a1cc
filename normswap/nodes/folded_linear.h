// Linear -> scale -> BatchNorm with fixed statistics, of plain modules, as one Linear whose weight is folded anew.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "batch_norm.h"

namespace {

struct Folded {
  Tensor x, weight, bias, scale, mean, var, norm_weight, norm_bias;
  double eps = 0.0;
};

// Whether `module` is a plain one of exactly this class.
bool is_plain_of(PyObject* module, PyObject* cls, Owned& own) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(module)) != cls) return false;
  own = dict_of(module);
  return is_plain(module, own);
}

bool set_linear(PyObject* module, PyObject* cls, Folded& f) {
  const Names& names = known().names;
  Owned own;
  return is_plain_of(module, cls, own) && take_registered(own, names.parameters, names.weight, f.weight) &&
         take_registered(own, names.parameters, names.bias, f.bias) && f.weight.defined();
}

bool set_norm(PyObject* module, PyObject* cls, Folded& f) {
  Owned own;
  return is_plain_of(module, cls, own) && set_fixed(own, f.eps, {&f.mean, &f.var, &f.norm_weight, &f.norm_bias});
}

// Whether shapes, dtypes and devices are such as PyTorch's ops and the fold take, and the fold is worth its while.
bool fits(const Folded& f) {
  const auto dtype = f.x.scalar_type(), kept = f.mean.scalar_type();
  if (dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16) return false;
  if (f.x.dim() != 2 || f.weight.dim() != 2 || f.x.size(1) != f.weight.size(1) || f.x.size(0) <= f.weight.size(1)) return false;
  const int64_t channels = f.weight.size(0);
  if (channels == 0 || !f.weight.is_contiguous() || (kept != dtype && kept != at::kFloat)) return false;
  for (const Tensor* t : {&f.bias, &f.mean, &f.var, &f.norm_weight, &f.norm_bias}) {
    const bool own = t != &f.bias;
    if (!t->defined()) continue;
    if (t->dim() != 1 || t->size(0) != channels || !t->is_contiguous() || t->scalar_type() != (own ? kept : dtype)) return false;
  }
  for (const Tensor* t : {&f.weight, &f.scale}) {
    if (t->defined() && t->scalar_type() != dtype) return false;
  }
  if (!f.scale.defined()) return true;
  const auto shape = f.scale.sizes();
  return shape.empty() || (shape.size() == 1 && (shape[0] == 1 || shape[0] == channels)) ||
         (shape.size() == 2 && shape[0] == 1 && shape[1] == channels);
}

bool all_beside(const Folded& f) {
  for (const Tensor* t : {&f.weight, &f.bias, &f.scale, &f.mean, &f.var, &f.norm_weight, &f.norm_bias}) {
    if (t->defined() && t->device() != f.x.device()) return false;
  }
  return true;
}

bool learns(const Folded& f) {
  const auto learning = {&f.x, &f.weight, &f.bias, &f.scale, &f.norm_weight, &f.norm_bias};
  return at::GradMode::is_enabled() &&
         std::any_of(learning.begin(), learning.end(), [](const Tensor* t) { return t->defined() && t->requires_grad(); });
}

std::pair<Tensor, Tensor> folded(const Folded& f) {
  static const auto fold = c10::Dispatcher::singleton().findSchemaOrThrow("normswap::fold_linear", "");
  const int64_t channels = f.weight.size(0);
  const Tensor weight = at::empty_like(f.weight), bias = at::empty({channels}, f.weight.options());
  Tensor scale;
  if (f.scale.defined()) scale = f.scale.reshape({-1}).expand({channels}).contiguous();
  Stack stack;
  stack.reserve(10);
  torch::jit::push(stack, f.weight, optional(f.bias), optional(scale), f.mean, f.var, optional(f.norm_weight),
                   optional(f.norm_bias), f.eps, weight, bias);
  const at::AutoDispatchBelowADInplaceOrView below;
  fold.callBoxed(stack);
  return {weight, bias};
}

Tensor wide(const Tensor& t) { return t.to(at::kFloat); }

// With t = norm_weight rstd, a = t scale, W' = a W and b' = a b + norm_bias - t mean: dx = dy W', dW = a dW' and
// da = sum(dW' W) + b db', where dW' = dy^T x and db' = sum(dy); then dscale = t da and dt = scale da - mean db'. Vectors are
// float32. It can be differentiated again.
struct FoldedLinear : torch::autograd::Function<FoldedLinear> {
  using Optional = std::optional<Tensor>;

  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor&, const Optional&,
                        const Optional&, const Optional&, const Optional&, const Folded& f) {
    const auto [product, shift] = folded(f);
    context->save_for_backward({x, f.weight, f.bias, f.scale, f.norm_weight, f.mean, f.var, x.requires_grad() ? product : Tensor()});
    context->saved_data["eps"] = f.eps;
    context->saved_data["bias_dtype"] = f.norm_bias.defined() ? static_cast<int64_t>(f.norm_bias.scalar_type()) : kNone;
    return at::linear(x, product, shift);
  }

  static Optional given(const Tensor& t) { return t.defined() ? Optional(t) : std::nullopt; }

  static Tensor of(const Folded& f) {
    return apply(f.x, f.weight, given(f.bias), given(f.scale), given(f.norm_weight), given(f.norm_bias), f);
  }

  static constexpr int64_t kNone = -1;

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &scale = saved[3], &gamma = saved[4], &grad = grads[0];
    const int64_t bias_dtype = context->saved_data["bias_dtype"].toInt();
    const std::array<bool, 6> present{true, true, bias.defined(), scale.defined(), gamma.defined(), bias_dtype != kNone};
    const auto needs = [&](int place) {  // autograd counts those that there are
      return present[place] && context->needs_input_grad(std::count(present.begin(), present.begin() + place, true));
    };
    torch::autograd::variable_list found(7);
    const Tensor rstd = (wide(saved[6]) + context->saved_data["eps"].toDouble()).rsqrt();
    const Tensor gain = gamma.defined() ? rstd * wide(gamma) : rstd;
    const Tensor factor = scale.defined() ? wide(scale).reshape({-1}).expand_as(rstd) : Tensor();
    const Tensor both = scale.defined() ? gain * factor : gain;
    const Tensor shift = grad.sum(at::IntArrayRef{0}, false, at::kFloat);
    if (needs(0)) {
      const bool again = at::GradMode::is_enabled();
      found[0] = grad.mm(again ? (wide(weight) * both.unsqueeze(1)).to(weight.scalar_type()) : saved[7]);
    }
    const Tensor product = needs(1) || needs(3) || needs(4) ? wide(grad.t().mm(x)) : Tensor();
    if (needs(1)) found[1] = (product * both.unsqueeze(1)).to(weight.scalar_type());
    if (needs(2)) found[2] = (both * shift).to(bias.scalar_type());
    if (needs(3) || needs(4)) {
      Tensor column = (product * wide(weight)).sum(at::IntArrayRef{1});
      if (bias.defined()) column = column + wide(bias) * shift;
      if (needs(3)) {
        const Tensor each = gain * column;
        found[3] = (scale.numel() == each.numel() ? each : each.sum()).reshape(scale.sizes()).to(scale.scalar_type());
      }
      const Tensor scaled = scale.defined() ? factor * column : column;
      if (needs(4)) found[4] = (rstd * (scaled - wide(saved[5]) * shift)).to(gamma.scalar_type());
    }
    if (needs(5)) found[5] = shift.to(static_cast<at::ScalarType>(bias_dtype));
    return found;
  }
};

Tensor computed(const Folded& f) {
  const Released released;
  if (learns(f)) return FoldedLinear::of(f);
  const auto [weight, bias] = folded(f);
  return at::linear(f.x, weight, bias);
}

// folded_linear(x, linear, scale, batch_norm, nn.Linear, nn.BatchNorm1d): the result, or None.
PyObject* folded_linear(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 6) return PyErr_Format(PyExc_TypeError, "folded_linear takes 6 arguments");
  try {
    Folded f;
    if (any_mode() || any_global_hook() || at::autocast::is_autocast_enabled(at::kCUDA)) return none();
    if (!take(arguments[0], f.x) || !f.x.defined() || !set_linear(arguments[1], arguments[4], f) ||
        !take(arguments[2], f.scale) || !set_norm(arguments[3], arguments[5], f)) {
      return none();
    }
    // dy^T x, of which all gradients are made, may leave float16's range where PyTorch's do not.
    const bool lost = f.x.scalar_type() == at::kHalf && learns(f);
    return fits(f) && all_beside(f) && !lost ? THPVariable_Wrap(computed(f)) : none();
  } catch (const PythonError&) {
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

}  // namespace
