// What the launchers of BatchNorm ask of their tensors.
#pragma once

#include "abi/views.h"

namespace normswap {

// One value a channel of input, beside it.
inline bool fits(const OptionalTensor& t, const Tensor& input) {
  return !t.has_value() || (t->numel() == input.size(1) && t->is_contiguous() && is_beside(*t, input));
}

inline ChannelVector channels_of(const OptionalTensor& t, const char* op) {
  if (!t.has_value()) return {nullptr, DType::f32};
  return {t->const_data_ptr(), dtype_of(*t, op)};
}

// Whether the other is as the input, beside it.
inline bool is_alike(const Tensor& other, const Tensor& input) {
  const View one = view_of(other), two = view_of(input);
  return one.dtype == two.dtype && same_layout(one, two) && is_beside(other, input);
}

// Elements between one of a channel and the next: of a dense (N, C, *) that is contiguous or channels last; 0 of others.
inline int64_t inner_of(const Tensor& t) {
  const View view = view_of(t);
  return is_contiguous(view) ? t.numel() / (t.size(0) * t.size(1)) : is_channels_last(view) ? 1 : 0;
}

}  // namespace normswap
