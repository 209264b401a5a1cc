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
  int cluster;       // blocks that share a row and run at once
  bool in_cluster;   // they are a cluster; of team, they may be so or tell each other through memory
  int64_t grid;      // blocks; subwarp, warp: if a lane works on one row at a time
  int slots;         // team: rows of which a block holds slices at once
  int team_rows;     // team, in_cluster: rows it does
  int shared;        // bytes of dynamic shared memory a block
  bool overlap;      // see LaunchShape; of team, only where in_cluster
};

// What a plan needs to know of the GPU.
struct Gpu {
  bool clusters;  // of eight blocks
  bool overlap;   // programmatic dependent launch, also in graphs
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
constexpr int kWarpsTeam = kGroup;   // team: at most; a chunk a warp
constexpr int kMaxSlots = 6;         // team: rows of which a block holds slices at once
constexpr int kTeamWaves = 8;        // team, in_cluster: blocks a multiprocessor, at least, by choice
constexpr int kTeamChunks = 32;      // team, in_cluster: of a row, at least, by choice
constexpr int kTeamRows = 8;         // team, in_cluster: rows it does
constexpr int kToldSets = 4;         // team
constexpr int kMaxGroups = 512;      // team: blocks that share a row; split: groups that registers hold
constexpr int kPiece = 512;          // split: elements of a row that a warp normalises
constexpr int kRowsSplit = 2;        // split: of so many rows
constexpr int kWarpsApply = 8;       // split: of a block that normalises

// subwarp, warp: warps of a block. A row a warp: few, so that no block waits for many; many rows a warp: more, since blocks
// start at a limited rate.
template <int Lanes>
constexpr int kWarpsSmall = Lanes == 32 ? 2 : 8;

// team: blocks of kWarpsTeam warps that a multiprocessor has registers for. Lean: a warp keeps no weights and its rows begin
// and end at vectors.
template <bool Lean, int Itemsize>
constexpr int kTeamBlocks = Lean && Itemsize == 2 ? 2 : 1;

// team: whether clusters are better than blocks with more shared memory that load the weights for every row.
template <int Weights, int Itemsize>
constexpr bool kClusterTeam = Weights == 2 && Itemsize == 4;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A chunk in shared memory: at most 15 bytes of what precedes it come along.
inline int chunk_bytes(int chunk_len, int itemsize) {
  return static_cast<int>(ceil_div(static_cast<int64_t>(chunk_len) * itemsize, 16)) * 16 + 16;
}

// Room for the statistics, besides.
constexpr int kStatisticsBytes = 8192;

// What a plan needs to know of the rows.
struct Rows {
  int64_t rows, cols;
  int itemsize;
  int weights;  // that an element may have of its own: 0, 1 or 2
  bool ragged;  // they begin or end elsewhere than at multiples of 16 bytes
};

// Blocks that work on row after row together. Returns false where they cannot.
inline bool make_team(const Rows& of, const Gpu& gpu, RowPlan* p) {
  const bool wide = of.itemsize == 4, lean = of.weights == 0 && !of.ragged;
  p->in_cluster = of.weights == 2 && wide && kClusterTeam<2, 4> && gpu.clusters && p->chunks <= kMaxCluster * kWarpsTeam;
  // In clusters half as large blocks, so that two on a multiprocessor take turns at waiting.
  const bool small = p->in_cluster && p->chunks <= kMaxCluster * kWarpsTeam / 2;
  p->cluster = static_cast<int>(ceil_div(p->chunks, small ? kWarpsTeam / 2 : kWarpsTeam));
  p->block_chunks = p->warps = p->in_cluster ? static_cast<int>(ceil_div(p->chunks, p->cluster)) : kWarpsTeam;
  const int fit = lean && !wide ? kTeamBlocks<true, 2> : kTeamBlocks<false, 4>;
  const int blocks = kWarpsTeam / p->warps * fit;  // on a multiprocessor
  const int slice = p->block_chunks * chunk_bytes(p->chunk_len, of.itemsize);
  const int slots = (gpu.shared - blocks * kStatisticsBytes) / (blocks * slice);
  p->slots = slots < kMaxSlots ? slots : kMaxSlots;
  p->shared = p->slots * slice;
  p->team_rows = kTeamRows;
  const int64_t at_once = static_cast<int64_t>(gpu.multiprocessors) * blocks / p->cluster;
  const int64_t teams = p->in_cluster ? ceil_div(of.rows, p->team_rows) : of.rows < at_once ? of.rows : at_once;
  p->grid = teams * p->cluster;
  return at_once > 0 && p->slots > 1 && p->cluster > 1 && (p->in_cluster || (gpu.cooperative && p->cluster <= kMaxGroups));
}

// The plan for rows of at least one element; `regime` other than automatic asks for that one. Returns false when the rows
// cannot be done in the regime asked for.
inline bool make_row_plan(const Rows& of, const Gpu& gpu, Regime regime, RowPlan* plan) {
  const auto [rows, cols, itemsize, weights, ragged] = of;
  RowPlan p{};
  p.overlap = gpu.overlap;
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
  RowPlan team = p;
  const bool fits_team = make_team(of, gpu, &team);
  const bool busy = team.grid * 4 >= gpu.multiprocessors * int64_t{3};  // most of the GPU
  const bool preferred = !ragged && p.chunks > kTeamChunks && team.grid >= gpu.multiprocessors * kTeamWaves;
  const bool alone = held || cluster == 1 || !fits_cluster;
  Regime r = regime;
  if (r == Regime::automatic) {
    r = tiny                                         ? Regime::subwarp
        : p.chunks == 1                              ? Regime::warp
        : held                                       ? Regime::block
        : fits_team && team.in_cluster && preferred  ? Regime::team
        : few == 1 && fits_block && alone            ? Regime::block
        : few <= kMaxCluster && fits_cluster         ? Regime::cluster
        : fits_team && busy                          ? Regime::team
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
      p.in_cluster = r == Regime::cluster;
      if (p.in_cluster) p.cluster = static_cast<int>(cluster);
      p.block_chunks = static_cast<int>(ceil_div(p.chunks, p.cluster));
      p.grid = rows * p.cluster;
      break;
    case Regime::team:
      p = team;
      p.regime = r;
      break;
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

inline int64_t row_groups(const RowPlan& plan) { return ceil_div(plan.chunks, kGroup); }

// Bytes of scratch memory. split: a statistic (three floats) and a float a group, two floats a row. team: 16 bytes a
// block, row of a turn and set.
inline int64_t row_workspace_bytes(const RowPlan& plan, int64_t rows) {
  if (plan.regime == Regime::team && !plan.in_cluster) return plan.grid * kToldSets * 16;
  if (plan.regime != Regime::split) return 0;
  return rows * (row_groups(plan) * 4 + 2) * static_cast<int64_t>(sizeof(float));
}

}  // namespace normswap
