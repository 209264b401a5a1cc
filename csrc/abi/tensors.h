// What the launchers need of a tensor, on the LibTorch stable ABI.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "abi/kernels.h"
#include "plan/plan.h"

// Only libtorch_cuda.so has these. Weak, so that a CPU-only torch loads the library too.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
__attribute__((weak)) AOTITorchError torch_c10_cuda_check_msg(int32_t, const char*, const char*, uint32_t, bool, char**);
__attribute__((weak)) void torch_c10_cuda_free_error_msg(char*);
}

namespace normswap {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDtype = std::optional<torch::headeronly::ScalarType>;

inline DType dtype_of(const Tensor& t, const char* op) {
  switch (t.scalar_type()) {
    case torch::headeronly::ScalarType::Float: return DType::f32;
    case torch::headeronly::ScalarType::Half: return DType::f16;
    case torch::headeronly::ScalarType::BFloat16: return DType::bf16;
    default: STD_TORCH_CHECK(false, op, ": dtype must be float32, float16 or bfloat16");
  }
}

inline int64_t itemsize(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

inline ActivationArgs activation_of(const char* op, int64_t code, double low, double high) {
  STD_TORCH_CHECK(code >= 0 && code <= static_cast<int64_t>(Activation::tanh), op, ": activation must be 0 to 9, got ", code);
  return {static_cast<Activation>(code), static_cast<float>(low), static_cast<float>(high)};
}

// What plans need to know of a CUDA device; asked of the driver once.
Gpu gpu_of(int device);

inline cudaStream_t stream_of(const Tensor& t) {
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream) == AOTI_TORCH_SUCCESS,
                  "no current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

// Kernels read 16 bytes at a time; a tensor that starts elsewhere (buf[1:]) is copied to memory that does not.
inline Tensor on_boundary(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 ? t : torch::stable::clone(t);
}

inline OptionalTensor on_boundary(const OptionalTensor& t) {
  return t.has_value() ? OptionalTensor(on_boundary(*t)) : std::nullopt;
}

inline const void* data_or_null(const OptionalTensor& t) { return t.has_value() ? t->const_data_ptr() : nullptr; }

inline bool is_beside(const Tensor& t, const Tensor& input) {
  return t.is_cuda() && t.get_device_index() == input.get_device_index();
}

inline void check_beside(const char* op, const char* name, const Tensor& t, const Tensor& input) {
  STD_TORCH_CHECK(is_beside(t, input), op, ": ", name,
                  " must be on the input's device, cuda:", input.get_device_index());
}

inline void check_beside(const char* op, const char* name, const OptionalTensor& t, const Tensor& input) {
  if (t.has_value()) check_beside(op, name, *t, input);
}

// What a kernel writes in the place of the input: as many elements of its dtype, on its device, without gaps.
inline void check_out(const char* op, const Tensor& out, const Tensor& input) {
  check_beside(op, "out", out, input);
  STD_TORCH_CHECK(out.scalar_type() == input.scalar_type() && out.numel() == input.numel(), op,
                  ": out must have the input's dtype and size");
}

// Statistics: `count` floats.
inline float* floats_of(const char* op, const Tensor& t, const Tensor& input, int64_t count) {
  check_beside(op, "statistics", t, input);
  STD_TORCH_CHECK(t.scalar_type() == torch::headeronly::ScalarType::Float && t.is_contiguous() && t.numel() == count,
                  op, ": statistics must be contiguous float32 with ", count, " elements, got ", t.numel());
  return static_cast<float*>(t.mutable_data_ptr());
}

inline float* floats_or_null(const char* op, const OptionalTensor& t, const Tensor& input, int64_t count) {
  return t.has_value() ? floats_of(op, *t, input, count) : nullptr;
}

// The runtime keeps a failed launch's error for whoever asks next, which the next good launch does: it is taken away.
inline void check_launch(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  STD_CUDA_CHECK(error);
}

inline int32_t torch_code_of(torch::headeronly::ScalarType dtype) {
  switch (dtype) {
    case torch::headeronly::ScalarType::Half: return aoti_torch_dtype_float16();
    case torch::headeronly::ScalarType::BFloat16: return aoti_torch_dtype_bfloat16();
    case torch::headeronly::ScalarType::Byte: return aoti_torch_dtype_uint8();
    default: return aoti_torch_dtype_float32();
  }
}

// Uninitialised, on the device of `like` and of its dtype, or another that is served, without the dispatcher's way to the
// stable empty_like; nullopt where there is no memory for it.
inline OptionalTensor unfilled(const Tensor& like, int64_t dims, const int64_t* sizes, const int64_t* strides,
                               OptionalDtype other = std::nullopt) {
  int32_t dtype = other.has_value() ? torch_code_of(*other) : 0, device = 0;
  AtenTensorHandle handle = nullptr;
  const bool made = (other.has_value() || aoti_torch_get_dtype(like.get(), &dtype) == AOTI_TORCH_SUCCESS) &&
                    aoti_torch_get_device_type(like.get(), &device) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_empty_strided(dims, sizes, strides, dtype, device, like.get_device_index(), &handle) ==
                        AOTI_TORCH_SUCCESS;
  return made ? OptionalTensor(Tensor(handle)) : std::nullopt;
}

// Of the same sizes and strides.
inline OptionalTensor unfilled_like(const Tensor& t) { return unfilled(t, t.dim(), t.sizes().data(), t.strides().data()); }

// Contiguous.
inline OptionalTensor unfilled_dense(const Tensor& t) {
  std::vector<int64_t> strides(t.dim(), 1);
  for (int64_t i = t.dim() - 1; i > 0; --i) strides[i - 1] = strides[i] * std::max(t.size(i), int64_t{1});
  return unfilled(t, t.dim(), t.sizes().data(), strides.data());
}

// Float32, contiguous.
inline OptionalTensor unfilled_floats(const Tensor& like, int64_t count) {
  const int64_t stride = 1;
  return unfilled(like, 1, &count, &stride, torch::headeronly::ScalarType::Float);
}

// Whether a launch failed because not all blocks of a team, or of a cluster, can run at once.
inline bool cannot_be_resident(cudaError_t error) {
  return error == cudaErrorCooperativeLaunchTooLarge || error == cudaErrorInvalidClusterSize ||
         error == cudaErrorLaunchOutOfResources;
}

}  // namespace normswap
