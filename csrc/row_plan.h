// How a row is cut and who works on it: pure host code, called by the launchers and, through normswap_row_plan, by tests.
//
// The reduction tree is a function of the row length and the element size alone. A row of N elements is cut into
// `chunks` pieces of `chunk_len` (the last may be shorter); a chunk belongs to `lanes` lanes of one warp, lane l taking
// the 16-byte vectors l, l + lanes, ... counted from the row's start, wherever in memory that is; chunk statistics merge
// in a binary tree by chunk index. The regime says only which threads do the work, so that the bits of a row depend on
// neither the other rows, nor its address, nor the GPU.
#pragma once

#include <cstdint>

namespace normswap {

enum class Regime : int { automatic = 0, subwarp = 1, warp = 2, block = 3, cluster = 4, split = 5, team = 6 };

struct RowPlan {
  Regime regime;
  int vec;          // elements of 16 bytes
  int lanes;        // lanes of a warp that share a chunk: 8 or 32
  int chunk_len;    // a multiple of lanes * vec unless the row is one chunk
  int64_t chunks;
  int warps;        // warps of a block
  int cluster;      // blocks of a cluster; team: blocks that share a row
  int64_t grid;     // blocks; subwarp, warp: if a lane works on one row at a time
};

// What a plan needs to know of the GPU.
struct Gpu {
  bool clusters;  // of eight blocks
  int resident;   // blocks of kWarpsTeam warps that run at once
};

constexpr int kChunk = 1024;        // elements of a full chunk: 32 a lane
constexpr int kWarpsSmall = 8;      // subwarp, warp: several rows a block
constexpr int kMaxWarpsBlock = 16;  // block, cluster
constexpr int kMaxCluster = 8;      // the largest portable cluster
constexpr int kWarpsTeam = 16;      // team, split: a power of two, so that a block's chunks are a subtree
constexpr int kTeamBlocksAMultiprocessor = 2;
constexpr int kWarpsSplit = 8;
constexpr int kMaxTeam = 512;       // blocks of a team: their statistics meet in shared memory

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The plan for `rows` rows of `cols` >= 1 elements; `regime` other than automatic asks for that one. Returns false when
// the row cannot be done in the regime asked for.
inline bool make_row_plan(int64_t rows, int64_t cols, int itemsize, Gpu gpu, Regime regime, RowPlan* plan) {
  RowPlan p{};
  p.vec = 16 / itemsize;
  const bool tiny = cols <= kChunk / 8;
  p.lanes = tiny ? 8 : 32;
  p.chunks = ceil_div(cols, kChunk);
  p.chunk_len = static_cast<int>(p.chunks == 1 ? cols : ceil_div(ceil_div(cols, p.chunks), 32 * p.vec) * (32 * p.vec));
  p.chunks = ceil_div(cols, p.chunk_len);

  const bool fits_cluster = gpu.clusters && p.chunks <= kMaxWarpsBlock * kMaxCluster;
  const int64_t team = ceil_div(p.chunks, kWarpsTeam);
  const bool fits_team = team <= gpu.resident && team <= kMaxTeam;
  Regime r = regime;
  if (r == Regime::automatic) {
    r = tiny                         ? Regime::subwarp
        : p.chunks == 1              ? Regime::warp
        : p.chunks <= kMaxWarpsBlock ? Regime::block
        : fits_cluster               ? Regime::cluster
        : fits_team                  ? Regime::team
                                     : Regime::split;
  }
  const bool possible = tiny                   ? r == Regime::subwarp
                        : r == Regime::warp    ? p.chunks == 1
                        : r == Regime::block   ? p.chunks <= kMaxWarpsBlock
                        : r == Regime::cluster ? fits_cluster
                        : r == Regime::team    ? fits_team
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
      p.cluster = static_cast<int>(ceil_div(p.chunks, kMaxWarpsBlock));
      p.warps = static_cast<int>(ceil_div(p.chunks, p.cluster));
      p.grid = rows * p.cluster;
      break;
    case Regime::team: {
      p.warps = kWarpsTeam;
      p.cluster = static_cast<int>(team);
      const int64_t teams = gpu.resident / team;
      p.grid = (rows < teams ? rows : teams) * team;
      break;
    }
    default:
      p.warps = kWarpsSplit;
      p.grid = rows * ceil_div(p.chunks, kWarpsSplit);
  }
  *plan = p;
  return p.grid <= 0x7fffffff;
}

// Bytes of scratch memory. split: a statistic a block (three floats) and two floats a row. team: a 128-byte line with
// the barrier's count a team, then two statistics a block, of alternating rows.
inline int64_t team_barrier_bytes(const RowPlan& plan) { return plan.grid / plan.cluster * 128; }

inline int64_t row_workspace_bytes(const RowPlan& plan, int64_t rows) {
  constexpr int64_t statistic = 3 * static_cast<int64_t>(sizeof(float));
  if (plan.regime == Regime::team) return team_barrier_bytes(plan) + 2 * plan.grid * statistic;
  if (plan.regime != Regime::split) return 0;
  return plan.grid * statistic + rows * 2 * static_cast<int64_t>(sizeof(float));
}

}  // namespace normswap
