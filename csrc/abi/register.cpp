// Every schema in one place. Outputs are allocated by the caller: sizes, strides and out-of-memory errors are PyTorch's.
// Those that end in _or_none or _recorded do all of a call, or nothing. No autograd here: normswap/ops calls these under
// autograd Functions, and so do normswap/nodes where they do not go past the dispatcher.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(normswap, m) {
  // regime: 0 lets the plan choose; 1 to 7 (row_plan.h) force one, for tests.
  m.def(
      "layer_norm(Tensor input, int dims, Tensor? weight, Tensor? bias, float eps, Tensor? residual, "
      "Tensor? scale, Tensor? shift, int activation, float low, float high, Tensor(a!) out, "
      "Tensor(b!)? sum, Tensor(c!)? mean, Tensor(d!)? rstd, int regime) -> ()");
  m.def(
      "rms_norm(Tensor input, int dims, Tensor? weight, float eps, float weight_offset, "
      "bool cast_before_weight, Tensor? residual, Tensor? scale, Tensor? shift, int activation, float low, "
      "float high, Tensor(a!) out, Tensor(b!)? sum, Tensor(c!)? rstd, int regime) -> ()");
  m.def("l2_norm(Tensor input, int cols, float eps, Tensor(a!) out, Tensor(b!)? norm, int regime) -> ()");
  m.def("l2_norm_dim(Tensor input, int dim, float eps, Tensor(a!) out, Tensor(b!)? norm) -> ()");
  m.def(
      "layer_norm_dim(Tensor input, Tensor? weight, Tensor? bias, int dim, float eps, Tensor(a!) out, "
      "Tensor(b!)? mean, Tensor(c!)? rstd) -> ()");
  m.def(
      "l1_norm(Tensor input, int cols, float eps, float minimum, Tensor(a!) out, Tensor(b!)? mean_abs, int regime) "
      "-> ()");
  m.def(
      "l1_norm_dim(Tensor input, int dim, float eps, float minimum, Tensor(a!) out, Tensor(b!)? mean_abs) -> ()");
  m.def(
      "l1_norm_dim_backward(Tensor grad, Tensor input, Tensor mean_abs, int dim, float eps, float minimum, "
      "Tensor(a!) grad_input) -> ()");
  m.def(
      "rms_norm_dim(Tensor input, Tensor? weight, int dim, float eps, Tensor(a!) out, Tensor(b!)? rstd) -> ()");
  m.def(
      "rms_norm_dim_backward(Tensor grad, Tensor input, Tensor? weight, Tensor rstd, int dim, Tensor(a!) grad_input, "
      "Tensor(b!)? grad_weight) -> ()");
  m.def(
      "group_norm(Tensor input, Tensor? weight, Tensor? bias, int num_groups, float eps, bool channels_last, "
      "int activation, float low, float high, Tensor? residual, Tensor(a!) out, Tensor(b!)? mean, Tensor(c!)? rstd, "
      "int regime) -> ()");
  // The output and, with a residual, the sum.
  m.def(
      "layer_norm_or_none(Tensor input, int dims, Tensor? weight, Tensor? bias, float eps, Tensor? residual=None, "
      "Tensor? scale=None, Tensor? shift=None, int activation=0, float low=0., float high=0., "
      "ScalarType? dtype=None) -> (Tensor?, Tensor?)");
  m.def(
      "rms_norm_or_none(Tensor input, int dims, Tensor? weight, float eps, float weight_offset, "
      "bool cast_before_weight, Tensor? residual=None, Tensor? scale=None, Tensor? shift=None, int activation=0, "
      "float low=0., float high=0.) -> (Tensor?, Tensor?)");
  m.def("l2_norm_or_none(Tensor input, int dim, float eps) -> Tensor?");
  m.def("frobenius_norm_or_none(Tensor input) -> Tensor?");
  m.def("layer_norm_dim_or_none(Tensor input, int dim, Tensor? weight, Tensor? bias, float eps) -> Tensor?");
  m.def("l1_norm_or_none(Tensor input, float eps, float minimum) -> Tensor?");
  m.def(
      "group_norm_or_none(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps, int activation, "
      "float low, float high, Tensor? residual, bool wide) -> Tensor?");
  m.def(
      "batch_norm_eval_or_none(Tensor input, Tensor running_mean, Tensor running_var, Tensor? weight, Tensor? bias, "
      "float eps, Tensor? residual, int activation, float low, float high) -> Tensor?");
  // By the statistics of the batch (training: running_mean, running_var and batches, num_batches_tracked, are updated) or
  // by the running ones. Recorded are the output, four float32 coefficients a channel, and signs or nothing. What is
  // normalised may be (input + input_bias) * scale, scale of one value or one a channel, a bias in training.
  m.def(
      "batch_norm_or_none(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? batches, "
      "Tensor? weight, Tensor? bias, bool training, float momentum, float eps, Tensor? residual, int activation, "
      "float low, float high, Tensor? scale=None, Tensor? input_bias=None) -> Tensor?");
  m.def(
      "batch_norm_recorded(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? batches, "
      "Tensor? weight, Tensor? bias, bool training, float momentum, float eps, Tensor? residual, int activation, "
      "float low, float high, Tensor? scale=None, Tensor? input_bias=None) -> (Tensor?, Tensor?, Tensor?)");
  // The gradients asked for, or none at all; that of a scale of one value is left a channel's each, in float32. The running
  // statistics, where these were used with a scale.
  m.def(
      "batch_norm_backward(Tensor grad, Tensor input, Tensor coefficients, Tensor? signs, Tensor? residual, "
      "Tensor? weight, Tensor? bias, bool training, int activation, float low, float high, bool of_input, "
      "bool of_weight, bool of_bias, bool of_residual, Tensor? scale=None, Tensor? input_bias=None, float eps=0., "
      "bool of_scale=False, bool of_input_bias=False, Tensor? running_mean=None, Tensor? running_var=None) "
      "-> (Tensor?, Tensor?, Tensor?, Tensor?, Tensor?, Tensor?)");
  m.def(
      "affine(Tensor input, Tensor? scale, Tensor running_mean, Tensor running_var, Tensor? weight, Tensor? bias, "
      "float eps, Tensor(a!) out) -> ()");
  m.def(
      "fold_linear(Tensor linear_weight, Tensor? linear_bias, Tensor? scale, Tensor running_mean, Tensor running_var, "
      "Tensor? weight, Tensor? bias, float eps, Tensor(a!) out_weight, Tensor(b!) out_bias) -> ()");
  // The folded weight, laid out as the given one, and bias; or neither.
  m.def(
      "fold_convolution_or_none(Tensor weight, Tensor? bias, Tensor running_mean, Tensor running_var, "
      "Tensor? norm_weight, Tensor? norm_bias, float eps) -> (Tensor?, Tensor?)");
  // With the residual and the activation behind it.
  m.def(
      "convolution_batch_norm_eval_or_none(Tensor input, Tensor conv_weight, Tensor? conv_bias, int stride_0, "
      "int stride_1, int padding_0, int padding_1, int dilation_0, int dilation_1, int groups, Tensor? running_mean, "
      "Tensor? running_var, Tensor? weight, Tensor? bias, float eps, Tensor? residual, int activation, "
      "float low, float high) -> Tensor?");
  // regime, of contiguous tensors: 0 lets the plan choose; 3 block, 4 cluster, 5 split (group_backward_plan.h) force one.
  m.def(
      "group_norm_backward(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, Tensor mean, "
      "Tensor rstd, int num_groups, bool channels_last, int activation, float low, float high, "
      "Tensor(a!)? grad_input, Tensor(b!)? grad_weight, Tensor(c!)? grad_bias, Tensor(d!)? grad_residual, int regime) "
      "-> ()");
  // The gradients asked for, or none at all; statistics: all means, then all rstds.
  m.def(
      "group_norm_backward_or_none(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, "
      "Tensor statistics, int num_groups, int activation, float low, float high, bool of_input, bool of_weight, "
      "bool of_bias, bool of_residual) -> (Tensor?, Tensor?, Tensor?, Tensor?)");
  // The output and float32 statistics (all means, then all rstds; rms_norm: rstds), or neither.
  m.def(
      "group_norm_recorded(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps, int activation, "
      "float low, float high, Tensor? residual, bool wide) -> (Tensor?, Tensor?)");
  // And between them the sum, where there is a residual.
  m.def(
      "layer_norm_recorded(Tensor input, int dims, Tensor? weight, Tensor? bias, float eps, Tensor? residual=None, "
      "Tensor? scale=None, Tensor? shift=None, int activation=0, float low=0., float high=0., "
      "ScalarType? dtype=None) -> (Tensor?, Tensor?, Tensor?)");
  m.def(
      "rms_norm_recorded(Tensor input, int dims, Tensor? weight, float eps, float weight_offset, "
      "bool cast_before_weight, Tensor? residual=None, Tensor? scale=None, Tensor? shift=None, int activation=0, "
      "float low=0., float high=0.) -> (Tensor?, Tensor?, Tensor?)");
  m.def("l1_norm_recorded(Tensor input, float eps, float minimum) -> (Tensor?, Tensor?)");
  // The gradients asked for, or none at all where there is no memory for them. passes: 0 lets the plan choose; 1 and 2
  // force them, for tests.
  m.def(
      "layer_norm_backward(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, Tensor statistics, "
      "Tensor? sum_grad, int cols, int activation, float low, float high, bool of_input, bool of_weight, bool of_bias, "
      "int passes) -> (Tensor?, Tensor?, Tensor?)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor input, Tensor? weight, Tensor statistics, Tensor? sum_grad, int cols, "
      "float weight_offset, bool cast_before_weight, int activation, float low, float high, bool of_input, "
      "bool of_weight, int passes) -> (Tensor?, Tensor?, Tensor?)");
  m.def(
      "l1_norm_backward(Tensor grad, Tensor input, Tensor statistics, int cols, float eps, float minimum, int passes) "
      "-> Tensor?");
}
