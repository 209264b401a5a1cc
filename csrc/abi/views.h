// What launchers ask of tensors given as plain data, and how native ops make such calls.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "abi/calls.h"
#include "abi/kernels.h"
#include "abi/tensors.h"

#define NORMSWAP_EXPORT __attribute__((visibility("default")))

namespace normswap {

// DType's number; -1: another.
inline int32_t code_of(torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  return dtype == ScalarType::Float ? 0 : dtype == ScalarType::Half ? 1 : dtype == ScalarType::BFloat16 ? 2 : -1;
}

inline View view_of(const OptionalTensor& t) {
  if (!t.has_value()) return {};
  const auto sizes = t->sizes(), strides = t->strides();
  return {t->const_data_ptr(), sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()), code_of(t->scalar_type())};
}

inline bool is_absent(const View& t) { return t.sizes == nullptr; }

inline int64_t numel(const View& t) {
  int64_t count = 1;
  for (int64_t d = 0; d < t.dims; ++d) count *= t.sizes[d];
  return count;
}

inline bool starts_at_vector(const View& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

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

// Of (batch, channels, ...): whether the memory is that of (batch, ..., channels), which contiguous memory may be too.
inline bool is_channels_last(const View& t) {
  int64_t expected = 1;
  if (t.dims < 2 || !follows(t, 1, expected)) return false;
  for (int64_t d = t.dims - 1; d >= 2; --d) {
    if (!follows(t, d, expected)) return false;
  }
  return follows(t, 0, expected);
}

inline bool same_sizes(const View& one, const View& other) {
  return one.dims == other.dims && std::equal(one.sizes, one.sizes + one.dims, other.sizes);
}

// Whether elements of the same index are at the same place in memory; of another dtype they may be.
inline bool same_layout(const View& one, const View& other) {
  if (!same_sizes(one, other)) return false;
  for (int64_t d = 0; d < one.dims; ++d) {
    if (one.sizes[d] > 1 && one.strides[d] != other.strides[d]) return false;
  }
  return true;
}

// Whether both are of the input's dtype, or both of float32, those that there are.
inline bool affine_dtypes_fit(const View& input, const View& weight, const View& bias) {
  const auto fits = [&](const View& t) {
    return is_absent(t) || t.dtype == input.dtype || t.dtype == static_cast<int32_t>(DType::f32);
  };
  const bool alike = is_absent(weight) || is_absent(bias) || weight.dtype == bias.dtype;
  return fits(weight) && fits(bias) && alike;
}

// One value a channel, of this dtype; it may be absent.
inline bool is_vector(const View& t, int64_t channels, int32_t dtype) {
  return is_absent(t) || (t.dtype == dtype && numel(t) == channels && is_contiguous(t));
}

inline bool is_statistics(const View& t, int64_t count) {
  return !is_absent(t) && is_vector(t, count, static_cast<int32_t>(DType::f32));
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

// --- memory -----------------------------------------------------------------------------------------------------------

// Laid out as `like`, of this dtype.
inline void* room_like(Memory& memory, Memory::Part part, View like, int32_t dtype) {
  like.dtype = dtype;
  return memory.allocate(&memory, part, &like);
}

// Contiguous, of the sizes of `like`.
inline void* dense_room(Memory& memory, Memory::Part part, View like, int32_t dtype) {
  constexpr int most = 64;  // as many dims as PyTorch has
  int64_t strides[most], stride = 1;
  if (like.dims > most) return nullptr;
  for (int64_t d = like.dims - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= like.sizes[d];
  }
  like.strides = strides;
  return room_like(memory, part, like, dtype);
}

// Laid out as `like`, of its dtype; null where it is not wanted. False where there is no such memory.
inline bool set_room(Memory& memory, bool wanted, Memory::Part part, const View& like, void*& room) {
  room = wanted && !is_absent(like) ? room_like(memory, part, like, like.dtype) : nullptr;
  return !wanted || room != nullptr;
}

inline float* room_for_floats(Memory& memory, Memory::Part part, int64_t count) {
  const int64_t stride = 1;
  const View like{nullptr, &count, &stride, 1, static_cast<int32_t>(DType::f32)};
  return static_cast<float*>(memory.allocate(&memory, part, &like));
}

inline unsigned char* room_for_bytes(Memory& memory, Memory::Part part, int64_t count) {
  const int64_t stride = 1;
  const View like{nullptr, &count, &stride, 1, kBytes};
  return static_cast<unsigned char*>(memory.allocate(&memory, part, &like));
}

// Sets the workspace of so many bytes; false where there is no memory for it.
inline bool set_workspace(Memory& memory, int64_t bytes, void*& workspace) {
  workspace = bytes > 0 ? room_for_floats(memory, Memory::kWorkspace, (bytes + 3) / 4) : nullptr;
  return bytes <= 0 || workspace != nullptr;
}

// Of tensors, on the device of `like`.
struct TensorMemory : Memory {
  explicit TensorMemory(const Tensor& like) : Memory{allocate_tensor}, like(like) {}

  static void* allocate_tensor(Memory* self, int32_t part, const View* view) {
    using torch::headeronly::ScalarType;
    constexpr ScalarType types[] = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Byte};
    TensorMemory& it = *static_cast<TensorMemory*>(self);
    OptionalTensor& made = it.parts[part];
    made = unfilled(it.like, view->dims, view->sizes, view->strides, types[view->dtype]);
    return made.has_value() ? made->mutable_data_ptr() : nullptr;
  }

  const Tensor& like;
  OptionalTensor parts[kParts];
  bool too_wide = false;  // what the call said: kTooWide
};

// Whether the call was launched, for tensors beside `input`.
template <class Call>
bool is_launched(int32_t (*launch)(const Call*, Memory*, int32_t), const Call& call, const Tensor& input, TensorMemory& memory) {
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const int32_t error = launch(&call, &memory, input.get_device_index());
  memory.too_wide = error == kTooWide;
  if (error == kDeclined || error == kTooWide) return false;
  check_launch(static_cast<cudaError_t>(error));
  return true;
}

inline bool all_beside(const Tensor& input, std::initializer_list<const OptionalTensor*> others) {
  return std::all_of(others.begin(), others.end(), [&](auto* t) { return !t->has_value() || is_beside(**t, input); });
}

}  // namespace normswap
