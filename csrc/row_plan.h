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

enum class Regime : int { automatic = 0, subwarp = 1, warp = 2, block = 3, cluster = 4, split = 5, team = 6, both = 7 };

// Who shares a row that is held in registers, a chunk a warp: the warps of a block, where rows are so few that it has a
// multiprocessor alone, or not; of a cluster, its blocks so small that several on a multiprocessor take turns at waiting;
// of a cluster of large blocks, each of which unites its chunks.
enum class Held : int { no, alone, in_block, in_cluster, in_groups };

// Warps of such a block, and so chunks, at most.
template <Held How, int Itemsize>
constexpr int kWarpsHeld = How == Held::in_groups || (How != Held::in_cluster && Itemsize == 2) ? 16 : 8;

// And such blocks on a multiprocessor that there are to be registers for: 64 a lane, or 80 of a block or cluster of 32-bit
// elements.
template <Held How, int Itemsize>
constexpr int kBlocksHeld = How == Held::alone                        ? 1
                            : How != Held::in_groups && Itemsize == 4 ? 3
                                                                      : 32 / kWarpsHeld<How, Itemsize>;

struct RowPlan {
  Regime regime;
  int vec;           // elements of 16 bytes
  int lanes;         // lanes of a warp that share a chunk: 8, 16 or 32
  int chunk_len;     // kChunk unless the row is shorter
  int64_t chunks;
  int warps;         // warps of a block
  Held held;         // block, cluster: in registers; other rows are in shared memory
  int block_chunks;  // chunks a block holds
  int blocks_a_row;  // that share a row; all but split: and run at once
  int64_t grid;      // blocks; subwarp, warp: if a lane works on one row at a time; both: that take partial statistics
  int slots;         // team, both: rows of which a block holds slices at once
  int shared;        // bytes of dynamic shared memory a block; subwarp: unused, but so that no more blocks fit in
  bool overlap;      // see LaunchShape; not of team
};

// What a plan needs to know of the GPU.
struct Gpu {
  bool clusters;  // of eight blocks
  bool overlap;   // programmatic dependent launch, also in graphs
  int shared;     // bytes of shared memory a block can have
  int multiprocessors;
  bool cooperative;  // launches can be
};

constexpr int kChunk = 1024;    // elements of a full chunk: 32 a lane
constexpr int kGroup = 16;      // chunks whose statistics are united first
constexpr int kMaxCluster = 8;  // the largest portable cluster

// block, cluster: chunks of a row that a cluster of small blocks holds, of one that any can; of one in shared memory, warps
// of a block at most, and what it holds by choice, so that as many fit in a multiprocessor.
constexpr int kMaxInCluster = kMaxCluster * kWarpsHeld<Held::in_cluster, 4>;
constexpr int kMaxHeld = kMaxCluster * kWarpsHeld<Held::in_groups, 4>;
constexpr int kMaxChunks = 512;
constexpr int kWarpsBlock = 8;
constexpr int kSliceBytes = 65536;
constexpr int kBlocksAMultiprocessor = 3;

// team, and the team's part of both: a warp has a chunk; slices of rows that a block holds at once, at most; sets of
// messages; blocks of which a warp hears at once, and of which the team of both is one at most.
constexpr int kWarpsTeam = kGroup;
constexpr int kMaxSlots = 6;
constexpr int kToldSets = 4;
constexpr int kToldAtOnce = 128;

// team: blocks that share a row; split: groups that registers hold. both: groups of a row at most, of which the team has
// half or more, and rows at least, by choice; 32-bit elements only, since with 16 bits it gains nothing.
constexpr int kMaxGroups = 512;
constexpr int kGroupsBoth = 2 * kToldAtOnce;
constexpr int kRowsBoth = 6;

// split, and the rest of both: a warp has a chunk when statistics are taken; later so many elements of so many rows, in
// blocks of so many warps.
constexpr int kWarpsSplit = kGroup;
constexpr int kPiece = 512;
constexpr int kRowsSplit = 2;
constexpr int kWarpsApply = 8;

// subwarp, warp: warps of a block. A row a warp: few, so that no block waits for many; many rows a warp: more, since blocks
// start at a limited rate.
template <int Lanes>
constexpr int kWarpsSmall = Lanes == 32 ? 2 : 8;

// subwarp: rows a lane works on at once; blocks that a multiprocessor is to work on where elements have weights: what they
// load at once keeps the memory busy, and with more it is up to 2% slower. (GroupNorm takes more instructions, which more
// blocks hide.)
constexpr int kRowsSubwarp = 4;
inline int blocks_subwarp(int itemsize) { return itemsize == 4 ? 3 : 4; }

// team: blocks that a multiprocessor has registers for. Lean: a warp keeps no weights and its rows begin and end at vectors.
template <bool Lean, int Itemsize>
constexpr int kTeamBlocks = Lean && Itemsize == 2 ? 2 : 1;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A chunk in shared memory: at most 15 bytes of what precedes it come along.
inline int chunk_bytes(int chunk_len, int itemsize) {
  return static_cast<int>(ceil_div(static_cast<int64_t>(chunk_len) * itemsize, 16)) * 16 + 16;
}

// Room for the statistics, and what else warps know, besides.
constexpr int kStatisticsBytes = 8192;

// What a plan needs to know of the rows.
struct Rows {
  int64_t rows, cols;
  int itemsize;
  int weights;  // that an element may have of its own: 0, 1 or 2
  bool ragged;  // they begin or end elsewhere than at multiples of 16 bytes
  // norm_with_options: rows that no registers hold are split, and none has a multiprocessor alone.
  bool options;
};

// Bytes of shared memory that `blocks` blocks of a multiprocessor can each have, but no more blocks: it hands out 128 bytes
// at a time and keeps a kilobyte a block.
inline int shared_for(int blocks, const Gpu& gpu) { return (gpu.shared + 1024) / blocks / 128 * 128 - 1024; }

inline int64_t row_groups(const RowPlan& plan) { return ceil_div(plan.chunks, kGroup); }

// How a block, or a cluster of blocks, holds rows of so many chunks.
inline Held held_by(Regime regime, int64_t chunks, int itemsize) {
  if (regime != Regime::block) {
    return chunks <= kMaxInCluster ? Held::in_cluster : chunks <= kMaxHeld ? Held::in_groups : Held::no;
  }
  const int most = itemsize == 2 ? kWarpsHeld<Held::in_block, 2> : kWarpsHeld<Held::in_block, 4>;
  return chunks <= most ? Held::in_block : Held::no;
}

// in_cluster: blocks for so many chunks; each has equally many, if that takes no more than twice as many blocks.
inline int even_blocks(int64_t chunks) {
  const int64_t few = ceil_div(chunks, kWarpsHeld<Held::in_cluster, 4>), least = few == 1 ? 2 : few;
  for (int64_t blocks = least; blocks <= kMaxCluster && blocks < 2 * least; ++blocks) {
    if (chunks % blocks == 0) return static_cast<int>(blocks);
  }
  return static_cast<int>(least);
}

// Blocks that work on row after row together, each on a group of chunks. Returns false where they cannot. Where more groups
// than blocks run at once, they have the first of them.
inline bool make_team(const Rows& of, const Gpu& gpu, RowPlan* p) {
  const bool lean = of.weights == 0 && !of.ragged;
  const int blocks = lean && of.itemsize == 2 ? kTeamBlocks<true, 2> : kTeamBlocks<false, 4>;  // on a multiprocessor
  const int slice = kWarpsTeam * chunk_bytes(p->chunk_len, of.itemsize);
  const int slots = (gpu.shared - blocks * kStatisticsBytes) / (blocks * slice);
  const int64_t groups = row_groups(*p), at_once = static_cast<int64_t>(gpu.multiprocessors) * blocks;
  const int64_t most = at_once < kToldAtOnce ? at_once : kToldAtOnce;
  if (!gpu.cooperative || at_once == 0 || slots < 2) return false;
  p->overlap = false;
  p->blocks_a_row = static_cast<int>(groups <= at_once ? groups : most);
  p->block_chunks = p->warps = kWarpsTeam;
  p->slots = slots < kMaxSlots ? slots : kMaxSlots;
  p->shared = p->slots * slice;
  const int64_t teams = at_once / p->blocks_a_row;
  p->grid = (of.rows < teams ? of.rows : teams) * p->blocks_a_row;
  return groups > 1 && groups <= kMaxGroups;
}

// The plan for rows of at least one element; `regime` other than automatic asks for that one. Returns false when the rows
// cannot be done in the regime asked for.
inline bool make_row_plan(const Rows& of, const Gpu& gpu, Regime regime, RowPlan* plan) {
  const auto [rows, cols, itemsize, weights, ragged, options] = of;
  RowPlan p{};
  p.overlap = gpu.overlap;
  p.vec = 16 / itemsize;
  p.lanes = cols <= 8 * p.vec ? 8 : cols <= 16 * p.vec ? 16 : 32;  // a vector a lane, where the row is that short
  const bool tiny = p.lanes < 32;
  p.chunk_len = static_cast<int>(cols < kChunk ? cols : kChunk);
  p.chunks = ceil_div(cols, p.chunk_len);

  const int bytes = chunk_bytes(p.chunk_len, itemsize);
  const int most = (gpu.shared - kStatisticsBytes) / bytes;  // chunks that fit in a block's shared memory
  const int by_choice = kSliceBytes / (kChunk * itemsize);
  const bool held = held_by(Regime::block, p.chunks, itemsize) != Held::no;
  const bool held_in_cluster = held_by(Regime::cluster, p.chunks, itemsize) != Held::no;
  const bool staged = !options;  // rows may lie in shared memory
  const bool fits_block = held || (staged && p.chunks <= most && p.chunks <= kMaxChunks);
  const bool fits_cluster =
      gpu.clusters && (held_in_cluster || (staged && p.chunks <= kMaxCluster * most && p.chunks <= kMaxChunks));
  RowPlan team = p;
  const bool has_team = make_team(of, gpu, &team), has_all = team.blocks_a_row == row_groups(p);
  const bool fits_team = staged && has_team && has_all;
  const bool fits_both = staged && has_team && !has_all && row_groups(p) <= 2 * team.blocks_a_row && itemsize == 4 && !ragged;
  const bool busy = team.grid * 4 >= gpu.multiprocessors * int64_t{3};  // most of the GPU
  Regime r = regime;
  if (r == Regime::automatic) {
    r = tiny                                                                      ? Regime::subwarp
        : p.chunks == 1                                                           ? Regime::warp
        : held                                                                    ? Regime::block
        : fits_cluster && (held_in_cluster || p.chunks <= by_choice * kMaxCluster) ? Regime::cluster
        : fits_block && p.chunks <= by_choice                                     ? Regime::block
        : fits_team && busy                                                       ? Regime::team
        : fits_both && rows >= kRowsBoth                                          ? Regime::both
                                                                                  : Regime::split;
  }
  const bool possible = tiny                   ? r == Regime::subwarp
                        : r == Regime::warp    ? p.chunks == 1
                        : r == Regime::block   ? fits_block
                        : r == Regime::cluster ? fits_cluster
                        : r == Regime::team    ? fits_team
                        : r == Regime::both    ? fits_both
                                               : r == Regime::split;
  if (!possible) return false;
  p.regime = r;
  p.blocks_a_row = p.block_chunks = 1;
  switch (r) {
    case Regime::subwarp:
    case Regime::warp:
      p.warps = p.lanes == 32 ? kWarpsSmall<32> : kWarpsSmall<8>;
      p.grid = ceil_div(rows, p.warps * (32 / p.lanes));
      if (tiny && weights > 0 && !ragged) {
        const int blocks = blocks_subwarp(itemsize);
        if (p.grid > 2 * kRowsSubwarp * blocks * gpu.multiprocessors) p.shared = shared_for(blocks, gpu);
      }
      break;
    case Regime::block:
    case Regime::cluster:
      p.held = held_by(r, p.chunks, itemsize);
      if (p.held == Held::in_block && rows <= gpu.multiprocessors && !options) p.held = Held::alone;
      p.blocks_a_row = r == Regime::block          ? 1
                       : p.held == Held::in_groups ? static_cast<int>(ceil_div(p.chunks, kGroup))
                       : p.held == Held::no        ? kMaxCluster
                                                   : even_blocks(p.chunks);
      p.block_chunks = p.held == Held::in_groups ? kGroup : static_cast<int>(ceil_div(p.chunks, p.blocks_a_row));
      p.warps = p.held != Held::no || p.block_chunks < kWarpsBlock ? p.block_chunks : kWarpsBlock;
      p.shared = p.held != Held::no ? 0 : p.block_chunks * bytes;
      p.grid = rows * p.blocks_a_row;
      break;
    case Regime::team:
      p = team;
      p.regime = r;
      break;
    case Regime::both:
      p = team;
      p.regime = r;
      p.overlap = gpu.overlap;
      p.grid = rows * (row_groups(p) - p.blocks_a_row);
      break;
    default:
      p.warps = kWarpsSplit;
      p.block_chunks = kGroup;
      p.blocks_a_row = static_cast<int>(row_groups(p));
      p.grid = rows * row_groups(p);
  }
  *plan = p;
  return p.grid <= 0x7fffffff;
}

// Groups of a row that a team holds: team: all; both: the first.
inline int held_groups(const RowPlan& plan) {
  return plan.regime == Regime::team || plan.regime == Regime::both ? plan.blocks_a_row : 0;
}

// Bytes of scratch memory. team, both: 16 bytes a block, row of a turn and set. split, both: a statistic (three floats) and
// a float a group, two floats a row.
inline int64_t row_workspace_bytes(const RowPlan& plan, int64_t rows) {
  if (plan.regime == Regime::team) return plan.grid * kToldSets * 16;
  if (plan.regime != Regime::split && plan.regime != Regime::both) return 0;
  const int64_t room = rows * (row_groups(plan) * 4 + 2) * static_cast<int64_t>(sizeof(float));
  return held_groups(plan) * kToldSets * 16 + room;
}

}  // namespace normswap
