// Calls of kernels, launched past the dispatcher and the stable ABI, whose ways of passing so many arguments cost more than
// the launch.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <array>
#include <exception>

#include "abi/calls.h"

namespace normswap {

// What the library of the kernels has for that, for tensors of `device`; null without that library.
struct Launchers {
  decltype(&normswap_row_norm) row_norm;
  decltype(&normswap_group_norm) group_norm;
  decltype(&normswap_row_backward) row_backward;
  decltype(&normswap_group_backward) group_backward;
  decltype(&normswap_convolve) convolve;
  decltype(&normswap_batch_norm) batch_norm;
  decltype(&normswap_batch_norm_train) batch_norm_train;
  decltype(&normswap_batch_norm_backward) batch_norm_backward;
  at::DeviceType device = at::kCUDA;
};

inline Launchers& launchers() {
  static Launchers it{};
  return it;
}

}  // namespace normswap

namespace {

using at::Tensor;
using normswap::launchers;
using normswap::Memory;
using normswap::View;

// The kernels' number; -1: they do not take it.
int32_t code_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? 0 : dtype == at::kHalf ? 1 : dtype == at::kBFloat16 ? 2 : -1;
}

View view_of(const Tensor& t) {
  if (!t.defined()) return {};
  return {t.const_data_ptr(), t.sizes().data(), t.strides().data(), t.dim(), code_of(t.scalar_type())};
}

// Uninitialised, on the device of `like`, which is the current one: of the allocator that its memory is of, without asking the
// dispatcher where that is known.
Tensor unfilled(const Tensor& like, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const at::TensorOptions options = like.options().dtype(dtype);
  c10::Allocator* const allocator = like.storage().allocator();
  if (allocator == nullptr) return at::empty_strided(sizes, strides, options);
  const c10::DispatchKeySet keys(options.computeDispatchKey());
  return Tensor(at::detail::empty_strided_generic(sizes, strides, allocator, keys, dtype));
}

// What kernels fill: tensors on the device of `like`. No exception leaves it by way of the kernels' library.
struct TensorMemory : Memory {
  explicit TensorMemory(const Tensor& like) : Memory{allocate_tensor}, like(like) {}

  static void* allocate_tensor(Memory* self, int32_t part, const View* view) noexcept {
    constexpr std::array<at::ScalarType, 4> dtypes{at::kFloat, at::kHalf, at::kBFloat16, at::kByte};
    TensorMemory& it = *static_cast<TensorMemory*>(self);
    try {
      const at::IntArrayRef sizes(view->sizes, view->dims), strides(view->strides, view->dims);
      it.parts[part] = unfilled(it.like, sizes, strides, dtypes[view->dtype]);
      return it.parts[part].mutable_data_ptr();
    } catch (...) {
      it.failure = std::current_exception();
      return nullptr;
    }
  }

  const Tensor& like;
  std::array<Tensor, kParts> parts;
  std::exception_ptr failure;
};

// Whether `launch` took the call of the op `name`. Where there is no memory PyTorch's error is raised.
template <class Call>
bool launched_in_op(const char* name, int32_t (*launch)(const Call*, Memory*, int32_t), const Call& call, TensorMemory& memory) {
  if (launch == nullptr) return false;
  const c10::DeviceGuard there(memory.like.device());
  const at::AutoDispatchBelowADInplaceOrView below;
  const int32_t error = launch(&call, &memory, static_cast<int32_t>(memory.like.device().index()));
  if (memory.failure != nullptr) std::rethrow_exception(memory.failure);
  if (error == normswap::kDeclined || error == normswap::kTooWide) return false;
  TORCH_CHECK(error == 0, name, ": the kernel could not be launched (CUDA error ", error, ")");
  return true;
}

// The same in place of the op, so that the profiler sees it.
template <class Call>
bool launched(const char* name, int32_t (*launch)(const Call*, Memory*, int32_t), const Call& call, TensorMemory& memory) {
  if (launch == nullptr) return false;
  RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>{});
  return launched_in_op(name, launch, call, memory);
}

// Whether its memory holds its values, for who reads it without asking the dispatcher.
bool is_readable(const Tensor& t) {
  const auto keys = t.key_set();
  return t.has_storage() && !t.is_neg() && !t._is_zerotensor() && !keys.has(c10::DispatchKey::Functionalize) &&
         !keys.has(c10::DispatchKey::Python);
}

// Whether a mode is told of every op.
bool any_dispatch_mode() { return c10::impl::TorchDispatchModeTLS::any_modes_set(); }

template <class... Others>
bool all_readable(const Tensor& input, const Others&... others) {
  return is_readable(input) && ((!others.defined() || (is_readable(others) && others.device() == input.device())) && ...);
}

}  // namespace
