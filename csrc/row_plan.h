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
  int vec;           // elements of 16 bytes
  int lanes;         // lanes of a warp that share a chunk: 8, 16 or 32
  int chunk_len;     // kChunk unless the row is shorter
  int64_t chunks;
  int warps;         // warps of a block
  bool held;         // block: the row is in registers
  int block_chunks;  // chunks a block holds
  int cluster;       // blocks that share a row and run at once: of a cluster or a team
  int64_t grid;      // blocks; subwarp, warp: if a lane works on one row at a time
  int slots;         // team: rows of which a block holds slices at once
  int shared;        // bytes of dynamic shared memory a block
  bool overlap;      // all but team: see LaunchShape
};

// What a plan needs to know of the GPU.
struct Gpu {
  bool clusters;  // of eight blocks; then also programmatic dependent launch
  int shared;     // bytes of shared memory a block can have
  int multiprocessors;
  bool cooperative;  // launches can be
};

constexpr int kChunk = 1024;         // elements of a full chunk: 32 a lane
constexpr int kGroup = 16;           // chunks whose statistics are united first
constexpr int kWarpsHeld = 16;       // block, rows of as many chunks of 16-bit elements: a chunk a warp, in registers
constexpr int kWarpsBlock = 8;       // block, cluster: at most
constexpr int kWarpsSplit = kGroup;  // split: a chunk a warp
constexpr int kMaxCluster = 8;       // the largest portable cluster
constexpr int kSliceBytes = 65536;   // what a block holds of a row by choice: three such fit in a multiprocessor
constexpr int kBlocksAMultiprocessor = 3;
constexpr int kMaxChunks = 512;      // block, cluster: chunks of a row
constexpr int kWarpsTeam = 16;       // one block a multiprocessor
constexpr int kMaxSlots = 3;         // team: rows of which a block holds slices at once
constexpr int kToldSets = 4;         // team
constexpr int kMaxGroups = 512;      // team: groups of a row
constexpr int kPiece = 512;          // split: elements of a row that a warp normalises
constexpr int kRowsSplit = 2;        // split: of so many rows
constexpr int kWarpsApply = 8;       // split: of a block that normalises
constexpr int kTeamParameters = 8 << 20;  // team: bytes of parameters that the L2 keeps for the next row

// subwarp, warp: warps of a block. A row a warp: few, so that no block waits for many; many rows a warp: more, since blocks
// start at a limited rate.
template <int Lanes>
constexpr int kWarpsSmall = Lanes == 32 ? 2 : 8;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A chunk in shared memory: at most 15 bytes of what precedes it come along.
inline int chunk_bytes(int chunk_len, int itemsize) {
  return static_cast<int>(ceil_div(static_cast<int64_t>(chunk_len) * itemsize, 16)) * 16 + 16;
}

// Room for the statistics, besides.
constexpr int kStatisticsBytes = 8192;

// The plan for `rows` rows of `cols` >= 1 elements; `regime` other than automatic asks for that one. Returns false when
// the row cannot be done in the regime asked for. `parameters`: bytes of weights a row reads.
inline bool make_row_plan(int64_t rows, int64_t cols, int itemsize, int64_t parameters, Gpu gpu, Regime regime,
                          RowPlan* plan) {
  RowPlan p{};
  p.overlap = gpu.clusters;
  p.vec = 16 / itemsize;
  p.lanes = cols <= 8 * p.vec ? 8 : cols <= 16 * p.vec ? 16 : 32;  // a vector a lane, where the row is that short
  const bool tiny = p.lanes < 32;
  p.chunk_len = static_cast<int>(cols < kChunk ? cols : kChunk);
  p.chunks = ceil_div(cols, p.chunk_len);

  const int bytes = chunk_bytes(p.chunk_len, itemsize);
  const int most = (gpu.shared - kStatisticsBytes) / bytes;  // chunks a block can hold
  const int slice = kSliceBytes / (kChunk * itemsize);       // by choice: a multiple of kGroup
  const int64_t few = ceil_div(p.chunks, slice);             // blocks a row by choice
  const bool fits_block = p.chunks <= most && p.chunks <= kMaxChunks;
  const bool held = itemsize == 2 && p.chunks <= kWarpsHeld;
  // Few rows go to more blocks each, so that no warp has many chunks.
  const int64_t room = gpu.multiprocessors * kBlocksAMultiprocessor / rows, wanted = ceil_div(p.chunks, kWarpsBlock);
  const int64_t spread = wanted < room ? wanted : room, least = few > spread ? few : spread;
  const int64_t cluster = least < kMaxCluster ? least : kMaxCluster;
  const bool fits_cluster = gpu.clusters && p.chunks <= cluster * most && p.chunks <= kMaxChunks;
  const int slots = most / slice < kMaxSlots ? most / slice : kMaxSlots;
  const bool fits_team = gpu.cooperative && slots > 1 && few <= gpu.multiprocessors && few * (slice / kGroup) <= kMaxGroups;
  const bool busy = fits_team && gpu.multiprocessors / few * few * 4 >= gpu.multiprocessors * 3;  // most of the GPU
  const bool alone = held || cluster == 1 || !fits_cluster;
  Regime r = regime;
  if (r == Regime::automatic) {
    r = tiny                                         ? Regime::subwarp
        : p.chunks == 1                              ? Regime::warp
        : few == 1 && fits_block && alone            ? Regime::block
        : few <= kMaxCluster && fits_cluster         ? Regime::cluster
        : busy && parameters <= kTeamParameters      ? Regime::team
                                                     : Regime::split;
  }
  const bool possible = tiny                   ? r == Regime::subwarp
                        : r == Regime::warp    ? p.chunks == 1
                        : r == Regime::block   ? fits_block
                        : r == Regime::cluster ? fits_cluster
                        : r == Regime::team    ? fits_team
                                               : r == Regime::split;
  if (!possible) return false;
  p.regime = r;
  p.cluster = p.block_chunks = 1;
  switch (r) {
    case Regime::subwarp:
    case Regime::warp:
      p.warps = p.lanes == 32 ? kWarpsSmall<32> : kWarpsSmall<8>;
      p.grid = ceil_div(rows, p.warps * (32 / p.lanes));
      break;
    case Regime::block:
    case Regime::cluster:
      p.held = r == Regime::block && held;
      if (r == Regime::cluster) p.cluster = static_cast<int>(cluster);
      p.block_chunks = static_cast<int>(ceil_div(p.chunks, p.cluster));
      p.grid = rows * p.cluster;
      break;
    case Regime::team: {
      p.warps = kWarpsTeam;
      p.slots = slots;
      p.shared = slots * slice * bytes;
      p.block_chunks = slice;
      p.cluster = static_cast<int>(few);
      const int64_t teams = gpu.multiprocessors / few;
      p.grid = (rows < teams ? rows : teams) * few;
      break;
    }
    default:
      p.warps = kWarpsSplit;
      p.block_chunks = kGroup;
      p.grid = rows * ceil_div(p.chunks, kGroup);
  }
  if (p.held) {
    p.warps = p.block_chunks;
  } else if (p.warps == 0) {
    p.warps = p.block_chunks < kWarpsBlock ? p.block_chunks : kWarpsBlock;
    p.shared = p.block_chunks * bytes;
  }
  *plan = p;
  return p.grid <= 0x7fffffff;
}

inline int64_t row_groups(const RowPlan& plan) {
  return plan.regime == Regime::team ? plan.cluster * static_cast<int64_t>(plan.block_chunks / kGroup)
                                     : ceil_div(plan.chunks, kGroup);
}

// Bytes of scratch memory. split: a statistic (three floats) and a float a group, two floats a row. team: 16 bytes a
// group, team and set.
inline int64_t row_workspace_bytes(const RowPlan& plan, int64_t rows) {
  if (plan.regime == Regime::team) return plan.grid / plan.cluster * kToldSets * row_groups(plan) * 16;
  if (plan.regime != Regime::split) return 0;
  return rows * (row_groups(plan) * 4 + 2) * static_cast<int64_t>(sizeof(float));
}

}  // namespace normswap
