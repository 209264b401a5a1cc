// A convolution's weight and bias with the BatchNorm behind it in them.
#pragma once

#include <array>
#include <tuple>

#include "abi/tensors.h"
#include "convolution/fold.h"

namespace normswap {

// Uninitialised, of the dtype and on the device of `like`; nullopt where there is no memory for it.
template <size_t N>
OptionalTensor unfilled(const Tensor& like, const std::array<int64_t, N>& sizes, const std::array<int64_t, N>& strides) {
  int32_t dtype = 0, device = 0;
  AtenTensorHandle handle = nullptr;
  const bool made = aoti_torch_get_dtype(like.get(), &dtype) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_get_device_type(like.get(), &device) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_empty_strided(N, sizes.data(), strides.data(), dtype, device, like.get_device_index(),
                                             &handle) == AOTI_TORCH_SUCCESS;
  return made ? OptionalTensor(Tensor(handle)) : std::nullopt;
}

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
