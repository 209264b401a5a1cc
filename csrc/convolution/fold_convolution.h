// A convolution's weight and bias with the BatchNorm behind it in them.
#pragma once

#include <array>
#include <tuple>

#include "abi/tensors.h"
#include "convolution/fold.h"

namespace normswap {

// Where the folded weight, laid out as the given one, and bias will be, both of the weight's dtype, and what makes them.
struct ConvolutionFold {
  Tensor weight, bias;
  FoldLinear arguments;
};

// Whether it has a value of a dtype that is known for every output channel of `weight`, if there is one; and then the values.
bool fits(const OptionalTensor& t, const Tensor& weight);
ChannelVector vector_of(const OptionalTensor& t);

// Nothing where the kernel does not take these tensors, or there is no memory.
std::optional<ConvolutionFold> fold_of(const Tensor& weight, const OptionalTensor& bias, const Tensor& running_mean,
                                       const Tensor& running_var, const OptionalTensor& norm_weight,
                                       const OptionalTensor& norm_bias, double eps);

}  // namespace normswap
