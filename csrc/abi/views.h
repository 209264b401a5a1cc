// What launchers ask of tensors given as plain data.
#pragma once

#include <cuda_runtime_api.h>

#include "abi/calls.h"
#include "abi/kernels.h"
#include "abi/tensors.h"

#define NORMSWAP_EXPORT __attribute__((visibility("default")))

namespace normswap {

inline View view_of(const OptionalTensor& t) {
  if (!t.has_value()) return {};
  const auto sizes = t->sizes(), strides = t->strides();
  const auto dtype = t->scalar_type();
  using torch::headeronly::ScalarType;
  const DType known = dtype == ScalarType::Half ? DType::f16 : dtype == ScalarType::BFloat16 ? DType::bf16 : DType::f32;
  const bool other = known == DType::f32 && dtype != ScalarType::Float;
  return {t->const_data_ptr(), sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()),
          other ? -1 : static_cast<int32_t>(known)};
}

inline bool is_absent(const View& t) { return t.sizes == nullptr; }

inline int64_t numel(const View& t) {
  int64_t count = 1;
  for (int64_t d = 0; d < t.dims; ++d) count *= t.sizes[d];
  return count;
}

// Whether a dim lies outside of those that were asked about before, of `expected` elements.
inline bool follows(const View& t, int64_t dim, int64_t& expected) {
  const bool right = t.sizes[dim] == 1 || t.strides[dim] == expected;
  expected *= t.sizes[dim];
  return right;
}

inline bool is_contiguous(const View& t) {
  int64_t expected = 1;
  for (int64_t d = t.dims - 1; d >= 0; --d) {
    if (!follows(t, d, expected)) return false;
  }
  return true;
}

// Of (batch, channels, ...): whether the memory is that of (batch, ..., channels).
inline bool is_channels_last(const View& t) {
  int64_t expected = 1;
  if (t.dims < 2 || !follows(t, 1, expected)) return false;
  for (int64_t d = t.dims - 1; d >= 2; --d) {
    if (!follows(t, d, expected)) return false;
  }
  return follows(t, 0, expected);
}

// One value a channel, of this dtype; it may be absent.
inline bool is_vector(const View& t, int64_t channels, int32_t dtype) {
  return is_absent(t) || (t.dtype == dtype && numel(t) == channels && is_contiguous(t));
}

inline ChannelVector vector_of(const View& t) {
  return {t.data, is_absent(t) ? DType::f32 : static_cast<DType>(t.dtype)};
}

inline bool is_activation(int32_t code) { return code >= 0 && code <= static_cast<int32_t>(Activation::tanh); }

// The device's current stream; false where there is none.
inline bool set_stream(int32_t device, cudaStream_t& stream) {
  void* found = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr) return false;
  const bool is_there = aoti_torch_get_current_cuda_stream(device, &found) == AOTI_TORCH_SUCCESS;
  stream = static_cast<cudaStream_t>(found);
  return is_there;
}

// The error of a launch, which the runtime keeps for whoever asks next: it is taken away.
inline int32_t told(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace normswap
