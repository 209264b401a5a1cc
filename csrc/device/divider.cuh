// Quotients by numbers that the host knows.
#pragma once

#include <cstdint>

namespace normswap {
namespace {

// Of numbers below 2^31.
struct Divider {
  unsigned factor;
  int shift;
  static Divider by(int64_t n) {
    int log = 0;
    while ((int64_t{1} << log) < n) ++log;
    return {static_cast<unsigned>(((uint64_t{1} << (31 + log)) + n - 1) / n), 31 + log};
  }
  __device__ int quotient(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<unsigned>(n)) * factor >> shift);
  }
};

}  // namespace
}  // namespace normswap
