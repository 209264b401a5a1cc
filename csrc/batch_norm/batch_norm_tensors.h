// What the launchers of BatchNorm ask of their tensors.
#pragma once

#include "abi/tensors.h"

namespace normswap {

// One value a channel of input, beside it.
inline bool fits(const OptionalTensor& t, const Tensor& input) {
  return !t.has_value() || (t->numel() == input.size(1) && t->is_contiguous() && t->is_cuda() &&
                            t->get_device_index() == input.get_device_index());
}

inline ChannelVector channels_of(const OptionalTensor& t, const char* op) {
  if (!t.has_value()) return {nullptr, DType::f32};
  return {t->const_data_ptr(), dtype_of(*t, op)};
}

inline bool same_layout(const Tensor& one, const Tensor& other) {
  if (one.dim() != other.dim() || one.scalar_type() != other.scalar_type()) return false;
  for (int64_t d = 0; d < one.dim(); ++d) {
    if (one.size(d) != other.size(d) || (one.size(d) > 1 && one.stride(d) != other.stride(d))) return false;
  }
  return one.get_device_index() == other.get_device_index();
}

// Elements between one of a channel and the next: of a dense (N, C, *) that is contiguous or channels last; 0 of others.
inline int64_t inner_of(const Tensor& t) {
  int64_t inner = 1;
  for (int64_t d = 2; d < t.dim(); ++d) inner *= t.size(d);
  if (t.is_contiguous()) return inner;
  int64_t expected = t.size(1);
  for (int64_t d = t.dim() - 1; d >= 2; --d) {
    if (t.size(d) > 1 && t.stride(d) != expected) return 0;
    expected *= t.size(d);
  }
  const bool outside = t.size(0) == 1 || t.stride(0) == expected;
  return outside && (t.size(1) == 1 || t.stride(1) == 1) ? 1 : 0;
}

}  // namespace normswap
