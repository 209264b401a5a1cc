// Autograd's nodes of layer_norm, rms_norm and group_norm in C++: the native ops that do all of a call then record a
// gradient by themselves, and no Python runs in their backward. Against the full ABI of one version of torch, which the
// kernels do without; where this is not compiled the autograd Functions of normswap/ops do the same.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using c10::DispatchKeySet;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Optional = std::optional<Tensor>;
using Pair = std::tuple<Optional, Optional>;
using Triple = std::tuple<Optional, Optional, Optional>;
using Quintuple = std::tuple<Optional, Optional, Optional, Optional, Optional>;
using Numbers = std::vector<double>;

const Optional nothing;

template <class Signature>
c10::TypedOperatorHandle<Signature> op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

bool learns(std::initializer_list<const Optional*> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const Optional* t : tensors) {
    if (t->has_value() && (*t)->requires_grad()) return true;
  }
  return false;
}

Optional optional(const Tensor& t) { return t.defined() ? Optional(t) : std::nullopt; }
Tensor tensor(const Optional& t) { return t.has_value() ? *t : Tensor(); }

template <class... Optionals>
bool made_any(const std::tuple<Optionals...>& gradients) {
  return std::apply([](const auto&... one) { return (one.has_value() || ...); }, gradients);
}

// What a call has made, and what its backward has to know besides tensors.
struct Made {
  Optional out, sum, statistics;
  Numbers numbers;
};

// Which gradients are asked for; edges are counted over the tensors that were given.
struct Wanted {
  bool input, weight, bias, residual, scale, shift;

  Wanted(const AutogradContext& ctx, bool with_weight, bool with_bias, bool with_residual, bool with_scale = false) {
    size_t edge = 0;
    input = ctx.needs_input_grad(edge++);
    weight = with_weight && ctx.needs_input_grad(edge++);
    bias = with_bias && ctx.needs_input_grad(edge++);
    residual = with_residual && ctx.needs_input_grad(edge++);
    scale = with_scale && ctx.needs_input_grad(edge++);
    shift = with_scale && ctx.needs_input_grad(edge);
  }
};

Numbers numbers_of(const AutogradContext& ctx) { return ctx.saved_data.at("numbers").toDoubleVector(); }

// --- rows ---------------------------------------------------------------------------------------------------------------

// Of a backward: (kind, dims, eps, weight_offset, cast_before_weight, activation, low, high, whether there is a residual).
enum Number { kKind, kDims, kEps, kOffset, kCast, kActivation, kLow, kHigh, kResidual };
enum Kind { kLayer, kRms };

int64_t columns(const Tensor& input, int64_t dims) {
  int64_t cols = 1;
  for (int64_t d = 1; d <= dims; ++d) cols *= input.size(-d);
  return cols;
}

Triple row_gradients(const Tensor& grad, const Tensor& sum_grad, const variable_list& saved, const Numbers& n,
                     const Wanted& wanted) {
  static const auto layer = op<Triple(const Tensor&, const Tensor&, const Optional&, const Optional&, const Tensor&,
                                      const Optional&, int64_t, int64_t, double, double, bool, bool, bool, int64_t)>(
      "normswap::layer_norm_backward");
  static const auto rms = op<Triple(const Tensor&, const Tensor&, const Optional&, const Tensor&, const Optional&, int64_t,
                                    double, bool, int64_t, double, double, bool, bool, int64_t)>(
      "normswap::rms_norm_backward");
  const Tensor& input = saved[0];
  const int64_t cols = columns(input, static_cast<int64_t>(n[kDims]));
  const auto activation = static_cast<int64_t>(n[kActivation]);
  const bool of_input = wanted.input || wanted.residual;
  if (n[kKind] == kLayer) {
    return layer.call(grad, input, optional(saved[1]), optional(saved[2]), saved[3], optional(sum_grad), cols, activation,
                      n[kLow], n[kHigh], of_input, wanted.weight, wanted.bias, 0);
  }
  return rms.call(grad, input, optional(saved[1]), saved[3], optional(sum_grad), cols, n[kOffset], n[kCast] != 0, activation,
                  n[kLow], n[kHigh], of_input, wanted.weight, 0);
}

// Of input, weight, bias, scale and shift by the formula, which Python has: it can be differentiated again.
Quintuple row_formula(const Tensor& grad, const Tensor& sum_grad, const variable_list& saved, const Numbers& n) {
  static const auto formula = op<Quintuple(const Optional&, const Optional&, const Tensor&, const Optional&, const Optional&,
                                           const Optional&, const Optional&, at::ArrayRef<double>)>(
      "normswap::row_norm_formula");
  return formula.call(optional(grad), optional(sum_grad), saved[0], optional(saved[1]), optional(saved[2]),
                      optional(saved[4]), optional(saved[5]), n);
}

// What may stand before and behind a norm of rows.
struct Around {
  const Optional &residual, &scale, &shift;
};

struct RowNorm : torch::autograd::Function<RowNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Optional& weight, const Optional& bias,
                               const Optional& residual, const Optional& scale, const Optional& shift,
                               const Made* made) {
    ctx->save_for_backward({residual.has_value() ? *made->sum : input, tensor(weight), tensor(bias), *made->statistics,
                            tensor(scale), tensor(shift)});
    ctx->saved_data["numbers"] = made->numbers;
    ctx->set_materialize_grads(false);
    return residual.has_value() ? variable_list{*made->out, *made->sum} : variable_list{*made->out};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Numbers n = numbers_of(*ctx);
    const bool with_residual = n[kResidual] != 0, with_scale = saved[4].defined();
    const Wanted wanted(*ctx, saved[1].defined(), saved[2].defined(), with_residual, with_scale);
    const Tensor sum_grad = with_residual ? grads[1] : Tensor();
    Tensor dx, dw, db, dscale, dshift;
    Triple found;
    if (grads[0].defined() && !with_scale && !at::GradMode::is_enabled()) {
      found = row_gradients(grads[0], sum_grad, saved, n, wanted);
    }
    if (made_any(found)) {
      dx = tensor(std::get<0>(found)), dw = tensor(std::get<1>(found)), db = tensor(std::get<2>(found));
    } else if (grads[0].defined() || sum_grad.defined()) {
      const Quintuple all = row_formula(grads[0], sum_grad, saved, n);
      dx = tensor(std::get<0>(all)), dw = tensor(std::get<1>(all)), db = tensor(std::get<2>(all));
      dscale = tensor(std::get<3>(all)), dshift = tensor(std::get<4>(all));
    }
    const auto asked = [](bool wanted, const Tensor& t) { return wanted ? t : Tensor(); };
    return {asked(wanted.input, dx),       asked(wanted.weight, dw),    asked(wanted.bias, db),
            asked(wanted.residual, dx),    asked(wanted.scale, dscale), asked(wanted.shift, dshift),
            Tensor()};
  }
};

// The output and, with a residual, the sum.
Pair recorded_row(const Tensor& input, const Optional& weight, const Optional& bias, const Around& around,
                  const Made& made) {
  if (!made.out.has_value()) return {};
  const variable_list found =
      RowNorm::apply(input, weight, bias, around.residual, around.scale, around.shift, &made);
  return {found[0], around.residual.has_value() ? Optional(found[1]) : std::nullopt};
}

Optional layer_norm(DispatchKeySet keys, const Tensor& input, int64_t dims, const Optional& weight, const Optional& bias,
                    double eps) {
  using Arguments = Optional(const Tensor&, int64_t, const Optional&, const Optional&, double);
  static const auto plain = op<Arguments>("normswap::layer_norm_or_none");
  static const auto recorded =
      op<Pair(const Tensor&, int64_t, const Optional&, const Optional&, double)>("normswap::layer_norm_recorded");
  const DispatchKeySet below = keys & c10::after_autograd_keyset;
  const Optional given = input;
  if (!learns({&given, &weight, &bias})) return plain.redispatch(below, input, dims, weight, bias, eps);
  Made made;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(made.out, made.statistics) = recorded.call(input, dims, weight, bias, eps);
  }
  made.numbers = {kLayer, static_cast<double>(dims), eps, 0, 0, 0, 0, 0, 0};
  return std::get<0>(recorded_row(input, weight, bias, {nothing, nothing, nothing}, made));
}

Optional rms_norm(DispatchKeySet keys, const Tensor& input, int64_t dims, const Optional& weight, double eps, double offset,
                  bool cast) {
  using Arguments = Optional(const Tensor&, int64_t, const Optional&, double, double, bool);
  static const auto plain = op<Arguments>("normswap::rms_norm_or_none");
  static const auto recorded =
      op<Pair(const Tensor&, int64_t, const Optional&, double, double, bool)>("normswap::rms_norm_recorded");
  const DispatchKeySet below = keys & c10::after_autograd_keyset;
  const Optional given = input;
  if (!learns({&given, &weight})) return plain.redispatch(below, input, dims, weight, eps, offset, cast);
  Made made;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(made.out, made.statistics) = recorded.call(input, dims, weight, eps, offset, cast);
  }
  made.numbers = {kRms, static_cast<double>(dims), eps, offset, static_cast<double>(cast), 0, 0, 0, 0};
  return std::get<0>(recorded_row(input, weight, nothing, {nothing, nothing, nothing}, made));
}

Pair layer_norm_with_options(DispatchKeySet keys, const Tensor& input, int64_t dims, const Optional& weight,
                             const Optional& bias, double eps, const Optional& residual, const Optional& scale,
                             const Optional& shift, int64_t activation, double low, double high, bool wide) {
  static const auto plain =
      op<Pair(const Tensor&, int64_t, const Optional&, const Optional&, double, const Optional&, const Optional&,
              const Optional&, int64_t, double, double, bool)>("normswap::layer_norm_with_options_or_none");
  static const auto recorded =
      op<Triple(const Tensor&, int64_t, const Optional&, const Optional&, double, const Optional&, const Optional&,
                const Optional&, int64_t, double, double, bool)>("normswap::layer_norm_with_options_recorded");
  const DispatchKeySet below = keys & c10::after_autograd_keyset;
  const Optional given = input;
  if (!learns({&given, &weight, &bias, &residual, &scale, &shift})) {
    return plain.redispatch(below, input, dims, weight, bias, eps, residual, scale, shift, activation, low, high, wide);
  }
  Made made;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(made.out, made.sum, made.statistics) =
        recorded.call(input, dims, weight, bias, eps, residual, scale, shift, activation, low, high, wide);
  }
  made.numbers = {kLayer, static_cast<double>(dims), eps, 0, 0, static_cast<double>(activation), low, high,
                  static_cast<double>(residual.has_value())};
  return recorded_row(input, weight, bias, {residual, scale, shift}, made);
}

Pair rms_norm_with_options(DispatchKeySet keys, const Tensor& input, int64_t dims, const Optional& weight, double eps,
                           double offset, bool cast, const Optional& residual, const Optional& scale, const Optional& shift,
                           int64_t activation, double low, double high) {
  static const auto plain =
      op<Pair(const Tensor&, int64_t, const Optional&, double, double, bool, const Optional&, const Optional&,
              const Optional&, int64_t, double, double)>("normswap::rms_norm_with_options_or_none");
  static const auto recorded =
      op<Triple(const Tensor&, int64_t, const Optional&, double, double, bool, const Optional&, const Optional&,
                const Optional&, int64_t, double, double)>("normswap::rms_norm_with_options_recorded");
  const DispatchKeySet below = keys & c10::after_autograd_keyset;
  const Optional given = input;
  if (!learns({&given, &weight, &residual, &scale, &shift})) {
    return plain.redispatch(below, input, dims, weight, eps, offset, cast, residual, scale, shift, activation, low, high);
  }
  Made made;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(made.out, made.sum, made.statistics) =
        recorded.call(input, dims, weight, eps, offset, cast, residual, scale, shift, activation, low, high);
  }
  made.numbers = {kRms, static_cast<double>(dims), eps, offset, static_cast<double>(cast), static_cast<double>(activation),
                  low, high, static_cast<double>(residual.has_value())};
  return recorded_row(input, weight, nothing, {residual, scale, shift}, made);
}

// --- groups -------------------------------------------------------------------------------------------------------------

// Of a backward: (groups, eps, activation, low, high, whether there is a residual).
enum GroupNumber { kGroups, kGroupEps, kGroupActivation, kGroupLow, kGroupHigh, kGroupResidual };

using Quadruple = std::tuple<Optional, Optional, Optional, Optional>;

struct GroupNorm : torch::autograd::Function<GroupNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Optional& weight, const Optional& bias,
                        const Optional& residual, const Made* made) {
    const bool kept = made->numbers[kGroupActivation] != 0;  // what is behind a sum alone needs no summand
    ctx->save_for_backward({input, tensor(weight), tensor(bias), kept ? tensor(residual) : Tensor(), *made->statistics});
    ctx->saved_data["numbers"] = made->numbers;
    return *made->out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    static const auto kernels =
        op<Quadruple(const Tensor&, const Tensor&, const Optional&, const Optional&, const Optional&, const Tensor&, int64_t,
                     int64_t, double, double, bool, bool, bool, bool)>("normswap::group_norm_backward_or_none");
    static const auto formula =
        op<Quadruple(const Tensor&, const Tensor&, const Optional&, const Optional&, const Optional&, const Tensor&,
                     at::ArrayRef<double>, at::ArrayRef<bool>)>("normswap::group_norm_formula");
    const variable_list saved = ctx->get_saved_variables();
    const Numbers n = numbers_of(*ctx);
    const Wanted wanted(*ctx, saved[1].defined(), saved[2].defined(), n[kGroupResidual] != 0);
    const auto activation = static_cast<int64_t>(n[kGroupActivation]);
    const bool passed = wanted.residual && activation == 0;  // the sum's gradient is its summands'
    const bool of_residual = wanted.residual && !passed;
    const Optional weight = optional(saved[1]), bias = optional(saved[2]), residual = optional(saved[3]);
    Quadruple found;
    if (!at::GradMode::is_enabled()) {
      found = kernels.call(grads[0], saved[0], weight, bias, residual, saved[4], static_cast<int64_t>(n[kGroups]), activation,
                           n[kGroupLow], n[kGroupHigh], wanted.input, wanted.weight, wanted.bias, of_residual);
    }
    if (!made_any(found) && (wanted.input || wanted.weight || wanted.bias || of_residual)) {
      const bool asked[] = {wanted.input, wanted.weight, wanted.bias, of_residual};
      found = formula.call(grads[0], saved[0], weight, bias, residual, saved[4], n, asked);
    }
    const auto& [dx, dw, db, dr] = found;
    return {wanted.input ? tensor(dx) : Tensor(), wanted.weight ? tensor(dw) : Tensor(), wanted.bias ? tensor(db) : Tensor(),
            passed ? grads[0] : of_residual ? tensor(dr) : Tensor(), Tensor()};
  }
};

Optional group_norm(DispatchKeySet keys, const Tensor& input, int64_t groups, const Optional& weight, const Optional& bias,
                    double eps, int64_t activation, double low, double high, const Optional& residual, bool wide) {
  static const auto plain =
      op<Optional(const Tensor&, int64_t, const Optional&, const Optional&, double, int64_t, double, double, const Optional&,
                  bool)>("normswap::group_norm_or_none");
  static const auto recorded =
      op<Pair(const Tensor&, int64_t, const Optional&, const Optional&, double, int64_t, double, double, const Optional&,
              bool)>("normswap::group_norm_recorded");
  const DispatchKeySet below = keys & c10::after_autograd_keyset;
  const Optional given = input;
  if (!learns({&given, &weight, &bias, &residual})) {
    return plain.redispatch(below, input, groups, weight, bias, eps, activation, low, high, residual, wide);
  }
  Made made;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(made.out, made.statistics) =
        recorded.call(input, groups, weight, bias, eps, activation, low, high, residual, wide);
  }
  if (!made.out.has_value()) return std::nullopt;
  made.numbers = {static_cast<double>(groups), eps, static_cast<double>(activation), low, high,
                  static_cast<double>(residual.has_value())};
  return GroupNorm::apply(input, weight, bias, residual, static_cast<const Made*>(&made));
}

}  // namespace

TORCH_LIBRARY_IMPL(normswap, Autograd, m) {
  m.impl("layer_norm_or_none", layer_norm);
  m.impl("rms_norm_or_none", rms_norm);
  m.impl("layer_norm_with_options_or_none", layer_norm_with_options);
  m.impl("rms_norm_with_options_or_none", rms_norm_with_options);
  m.impl("group_norm_or_none", group_norm);
}
