// What the host needs to know of the derivatives of activations.
#pragma once

#include "abi/kernels.h"

namespace normswap {

// Whether the derivative is 0 or 1 everywhere, so that its product with dy is of dy's dtype.
constexpr bool passes_or_stops(Activation a) { return a == Activation::relu || a == Activation::clamp; }

}  // namespace normswap
