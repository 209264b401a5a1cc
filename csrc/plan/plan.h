// What the plans have in common: they say how the work of a kernel is cut, and who does it, of sizes and the GPU alone.
#pragma once

#include <cstdint>

namespace normswap {

// The ways to work that can be asked for, of which a plan takes one by itself.
enum class Regime : int { automatic = 0, subwarp = 1, warp = 2, block = 3, cluster = 4, split = 5, team = 6, both = 7 };

// What a plan needs to know of the GPU.
struct Gpu {
  bool clusters;  // of eight blocks
  bool overlap;   // programmatic dependent launch, also in graphs
  int shared;     // bytes of shared memory a block can have
  int multiprocessors;
  bool cooperative;  // launches can be
};

constexpr int kChunk = 1024;    // elements of a full chunk of a row: 32 a lane
constexpr int kGroup = 16;      // chunks whose statistics are united first
constexpr int kMaxCluster = 8;  // the largest portable cluster

// A block's shared memory for statistics, and what else warps know, beside what a plan says.
constexpr int kStatisticsBytes = 8192;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace normswap
