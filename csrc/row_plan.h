// How a row is cut and who works on it: pure host code, called by the launchers and, through normswap_row_plan, by tests.
//
// The reduction tree is a function of the row length and the element size alone. A row of N elements is cut into
// `chunks` pieces of `chunk_len` (the last may be shorter); a chunk belongs to `lanes` lanes of one warp, lane l taking
// the vectors l, l + lanes, ... of `vec` elements; chunk statistics merge in a binary tree by chunk index. The regime
// says only which threads do the work, so that the bits of a row depend on neither the other rows nor the GPU.
#pragma once

#include <cstdint>

namespace normswap {

enum class Regime : int { automatic = 0, subwarp = 1, warp = 2, block = 3, cluster = 4, split = 5 };

struct RowPlan {
  Regime regime;
  int vec;          // elements of one access: the widest of 16 bytes, 4 bytes or one element that divides N
  int lanes;        // lanes of a warp that share a chunk: 8 or 32
  int chunk_len;    // a multiple of lanes * vec unless the row is one chunk
  int64_t chunks;
  int warps;        // warps of a block
  int cluster;      // blocks of a cluster
  int64_t grid;     // blocks
};

constexpr int kWarpsSmall = 8;      // subwarp, warp: several rows a block
constexpr int kWarpsCluster = 16;   // cluster: a power of two, so that a block's chunks are a subtree
constexpr int kWarpsSplit = 8;      // split: likewise
constexpr int kMaxWarpsBlock = 16;
constexpr int kMaxCluster = 8;      // the largest portable cluster

inline int row_vec(int64_t cols, int itemsize) {
  const int full = 16 / itemsize;
  if (cols % full == 0) return full;
  return itemsize == 2 && cols % 2 == 0 ? 2 : 1;
}

// Elements of a full chunk: 32 lanes with 32 registers each, two 16-bit elements to a register where vec allows.
inline int chunk_capacity(int vec, int itemsize) { return itemsize == 2 && vec > 1 ? 2048 : 1024; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The plan for `rows` rows of `cols` >= 1 elements; `regime` other than automatic asks for that one. Returns false when
// the row cannot be done in the regime asked for.
inline bool make_row_plan(int64_t rows, int64_t cols, int itemsize, bool has_clusters, Regime regime, RowPlan* plan) {
  RowPlan p{};
  p.vec = row_vec(cols, itemsize);
  const int capacity = chunk_capacity(p.vec, itemsize);
  const bool tiny = cols <= capacity / 8;
  p.lanes = tiny ? 8 : 32;
  p.chunks = ceil_div(cols, capacity);
  const int64_t even = ceil_div(cols, p.chunks);
  p.chunk_len = static_cast<int>(p.chunks == 1 ? cols : ceil_div(even, 32 * p.vec) * (32 * p.vec));
  p.chunks = ceil_div(cols, p.chunk_len);

  const bool fits_cluster = p.chunks <= kWarpsCluster * kMaxCluster;
  Regime r = regime;
  if (r == Regime::automatic) {
    r = tiny                          ? Regime::subwarp
        : p.chunks == 1               ? Regime::warp
        : p.chunks <= kMaxWarpsBlock  ? Regime::block
        : has_clusters && fits_cluster ? Regime::cluster
                                      : Regime::split;
  }
  const bool possible = tiny                   ? r == Regime::subwarp
                        : r == Regime::warp    ? p.chunks == 1
                        : r == Regime::block   ? p.chunks <= kMaxWarpsBlock
                        : r == Regime::cluster ? has_clusters && fits_cluster
                                               : r == Regime::split;
  if (!possible) return false;
  p.regime = r;
  p.cluster = 1;
  switch (r) {
    case Regime::subwarp:
    case Regime::warp:
      p.warps = kWarpsSmall;
      p.grid = ceil_div(rows, kWarpsSmall * (32 / p.lanes));
      break;
    case Regime::block:
      p.warps = static_cast<int>(p.chunks);
      p.grid = rows;
      break;
    case Regime::cluster:
      p.warps = kWarpsCluster;
      p.cluster = static_cast<int>(ceil_div(p.chunks, kWarpsCluster));
      p.grid = rows * p.cluster;
      break;
    default:
      p.warps = kWarpsSplit;
      p.grid = rows * ceil_div(p.chunks, kWarpsSplit);
  }
  *plan = p;
  return p.grid <= 0x7fffffff;
}

// Bytes of scratch memory: the split regime keeps a statistic a block (three floats) and two floats a row.
inline int64_t row_workspace_bytes(const RowPlan& plan, int64_t rows) {
  if (plan.regime != Regime::split) return 0;
  return plan.grid * 3 * static_cast<int64_t>(sizeof(float)) + rows * 2 * static_cast<int64_t>(sizeof(float));
}

}  // namespace normswap
